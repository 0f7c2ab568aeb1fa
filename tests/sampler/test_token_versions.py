"""Test that every sampled token names the weights that sampled it: its logprob is recomputed with
those weights after any sequence of events.

Weights change between two steps, rows are preempted, dropped and moved to another engine, and
buffers are reused. The versions differ only in modules after the keys and values of the last layer,
so the logprob of a token depends only on the version that sampled it, not on the versions that read
the tokens before it.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers import ADAM, call, make_worker, random_datums
from sampler_models import (  # noqa: F401
    VOCAB,
    crowded_engines,
    make_request,
    one_thread,
    paged_engine,
    random_prompts,
    reference_logprobs,
    tiny_model,
)

from rl.runtime import SamplerSettings, StepRequest, WorkerSettings
from rl.runtime.weight_sync import SamplerWorker
from rl.sampler import Engine, SamplingRequest, make_decoder, score_sequences
from rl.types import SampledSequence

VERSIONS = 5
# Modules after the keys and values of the last layer.
AFTER_THE_CACHE = ("lm_head", "model.norm", "model.layers.1.mlp", "model.layers.1.self_attn.o_proj")


@pytest.fixture(scope="module")
def models() -> list[torch.nn.Module]:
    """Return a model and four others with the same keys and values but different logits."""
    first = tiny_model("llama")
    made = [first]
    for version in range(1, VERSIONS):
        other, generator = copy.deepcopy(first), torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if name.startswith(AFTER_THE_CACHE):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        made.append(other)
    return made


@pytest.fixture(scope="module")
def decoders(models):
    return [make_decoder(model, kind="fast") for model in models]


@dataclass
class Events:
    """Number of events of each kind in a population."""

    preempted: int = 0  # rows that waited while the weights changed
    moved: int = 0
    dropped: int = 0
    mixed: int = 0  # sequences of several versions


def requests_of(rng: np.random.Generator) -> list[SamplingRequest]:
    lengths = rng.integers(1, 9, 8).tolist()
    return [
        make_request(
            prompt,
            int(rng.choice([1, 1, 3])),
            max_tokens=int(rng.integers(2, 14)),
            temperature=float(rng.choice([0.8, 1.0])),
            seed=int(rng.integers(99)),
            problem=i,
        )
        for i, prompt in enumerate(random_prompts(lengths, seed=int(rng.integers(1 << 20))))
    ]


def as_saved(sequence: SampledSequence) -> SampledSequence:
    return SampledSequence.from_json(json.loads(json.dumps(sequence.as_json())))


def play(decoders, seed: int, events: Events) -> list[tuple[SamplingRequest, SampledSequence]]:
    """Run a random schedule over a stream of requests. Return each finished sequence with its
    request.
    """
    rng = np.random.default_rng(seed)
    page, paged, version = int(rng.choice([2, 4])), rng.random() < 0.7, 0
    waiting, finished, tickets = requests_of(rng), [], {}

    def new_engine():
        settings = {"max_rows": 6, "version": version}
        if paged:
            room = page * (12 if page == 2 else 7)
            return paged_engine(decoders[version], kv_cache_tokens=room, page=page, **settings)
        return Engine(decoders[version], kv_cache_tokens=4000, **settings)

    engine = new_engine()
    while waiting or engine.busy:
        what = rng.random()
        if waiting and what < 0.3:
            request = waiting.pop()
            tickets[engine.add(request)] = request
        elif what < 0.4 and version < VERSIONS - 1:
            version += 1
            events.preempted += len(engine._preempted) if paged else 0
            engine.change_weights(decoders[version], version)
        elif what < 0.44 and tickets:
            number = int(rng.choice(list(tickets)))
            engine.cancel(number)
            del tickets[number]
            events.dropped += 1
        elif what < 0.48:
            under_way = engine.unfinished_requests()
            owners, tickets = tickets, {}
            engine = new_engine()
            for number, request in under_way:
                if request.resume_from is not None:
                    request = replace(request, resume_from=as_saved(request.resume_from))
                    events.moved += 1
                tickets[engine.add(request)] = owners[number]
        else:
            for done in engine.step():
                finished += [
                    (tickets[done.request_id], sequence) for sequence in done.response.sequences
                ]
                del tickets[done.request_id]
    return finished


def check(models, request: SamplingRequest, sequence: SampledSequence) -> int:
    """Compare every logprob with a plain forward of the model of its version. Return the number of
    versions of the sequence.
    """
    count = len(sequence.tokens)
    versions = sequence.versions or [sequence.version] * count
    assert len(versions) == count == len(sequence.logprobs) and sequence.version == min(versions)
    assert versions == sorted(versions), "weights only ever become newer"
    expected = {
        version: reference_logprobs(
            models[version], list(request.prompt), sequence.tokens, request.params.temperature
        ).numpy()
        for version in set(versions)
    }
    drawn = [expected[version][i] for i, version in enumerate(versions)]
    np.testing.assert_allclose(sequence.logprobs, drawn, atol=2e-5)
    return len(expected)


def check_population(models, decoders, seeds: range) -> Events:
    events = Events()
    for seed in seeds:
        for request, sequence in play(decoders, seed, events):
            events.mixed += check(models, request, sequence) > 1
    return events


def test_versions_tell_themselves_apart(models):
    """Control for the comparison below: the logprob of a token differs between any two versions."""
    (prompt,), (response,) = random_prompts([5]), random_prompts([12], seed=1)
    each = torch.stack([reference_logprobs(model, prompt, response) for model in models])
    for item in range(VERSIONS):
        for other in range(item):
            assert (each[item] - each[other]).abs().min() > 2e-4
            assert (each[item] - each[other]).abs().median() > 0.1


def test_every_logprob_is_that_of_the_version_it_names(models, decoders):
    events = check_population(models, decoders, range(60))
    assert min(events.preempted, events.moved, events.dropped, events.mixed) > 20, events


@pytest.mark.campaign
def test_every_logprob_is_that_of_the_version_it_names_in_many_schedules(models, decoders):
    events = check_population(models, decoders, range(1000, 2500))
    assert min(events.preempted, events.moved, events.dropped, events.mixed) > 500, events


def test_weights_never_land_in_a_decoder_that_a_stream_draws_from():
    """The weights of a stream may be released before the slice that switches the stream to newer
    weights.
    """
    learner, hangar = make_worker(), SamplerWorker(WorkerSettings(sampler=SamplerSettings()))
    request = make_request([3, 4, 12], max_tokens=12, stop=[], seed=1)

    def land(version: int) -> None:
        sent = learner.take_snapshot(0, version == 0)
        hangar.begin_transfer(version, sent.make_manifest())
        for piece in sent.iter_chunks():
            hangar.receive_chunk(version, piece)

    land(0)
    hangar.end_transfer(0)
    hangar.run_steps(5, 0, StepRequest(4, [(0, 0, request)]))
    ((_, half),) = hangar.unfinished(5).items()
    drawn_from = hangar.streams[5].engine.decoder
    before = score_sequences(drawn_from, [[3, 4, 12, 5, 1]])
    hangar.free_version(0)
    loss = ("importance_sampling", {"temperature": 1.0})
    call(learner, "forward_backward", 0, random_datums(4), *loss, 1.0, True)
    learner.optim_step(0, ADAM)
    land(1)
    assert score_sequences(drawn_from, [[3, 4, 12, 5, 1]]) == before, (
        "a decoder was filled that a stream draws from"
    )
    hangar.end_transfer(1)
    done = hangar.run_steps(5, 1, StepRequest(99)).finished[0].sequences[0]
    assert len(half.resume_from.tokens) == 4 and done.versions == [0] * 4 + [1] * 8
    hangar.free_all()
