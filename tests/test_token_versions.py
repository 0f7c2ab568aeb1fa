"""Every sampled token names the weights that drew it: its logprob is computed again under those,
whatever happened on the way.

Weights change between two steps, rows are preempted, dropped and moved to another engine, and
buffers are used again. The versions differ only in what follows the keys and values of the last
layer, so the logprob of a token depends on the version that drew it alone, not on the versions that
read the tokens before it.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers import ADAM, call, make_worker, random_datums
from sampler_models import VOCAB, one_thread, random_prompts, reference_logprobs, tiny_model  # noqa: F401

from rl.clients.landing import Hangar
from rl.clients.settings import SamplerSettings, WorkerSettings
from rl.clients.slices import Asked
from rl.sampler import Engine, PagedEngine, Request, make_decoder, score
from rl.types import SampledSequence, SamplingParams

VERSIONS = 5


@pytest.fixture(scope="module")
def models() -> list[torch.nn.Module]:
    """One model and four others that read alike and draw otherwise."""
    first = tiny_model("llama")
    made = [first]
    for version in range(1, VERSIONS):
        other, generator = copy.deepcopy(first), torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if name.startswith(
                    (
                        "lm_head",
                        "model.norm",
                        "model.layers.1.mlp",
                        "model.layers.1.self_attn.o_proj",
                    )
                ):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        made.append(other)
    return made


@pytest.fixture(scope="module")
def decoders(models):
    return [make_decoder(model, kind="fast") for model in models]


@dataclass
class Events:
    """How often each kind of event happened in a population."""

    preempted: int = 0  # rows that waited while the weights changed
    moved: int = 0
    dropped: int = 0
    mixed: int = 0  # sequences of several versions


def requests_of(rng: np.random.Generator) -> list[Request]:
    lengths = rng.integers(1, 9, 8).tolist()
    return [
        Request(
            prompt=prompt,
            num_samples=int(rng.choice([1, 1, 3])),
            seed=int(rng.integers(99)),
            problem=i,
            params=SamplingParams(
                max_tokens=int(rng.integers(2, 14)), temperature=float(rng.choice([0.8, 1.0]))
            ),
        )
        for i, prompt in enumerate(random_prompts(lengths, seed=int(rng.integers(1 << 20))))
    ]


def play(decoders, seed: int, events: Events) -> list[tuple[Request, SampledSequence]]:
    """A random schedule over one stream of requests; every sequence that finished, with its
    request.
    """
    rng = np.random.default_rng(seed)
    page, paged, version = int(rng.choice([2, 4])), rng.random() < 0.7, 0
    waiting, finished, tickets = requests_of(rng), [], {}

    def new_engine():
        if paged:
            pages = 12 if page == 2 else 7
            return PagedEngine(
                decoders[version],
                kv_cache_tokens=page * pages,
                max_rows=6,
                page=page,
                version=version,
            )
        return Engine(decoders[version], kv_cache_tokens=4000, max_rows=6, version=version)

    engine = new_engine()
    while waiting or engine.busy:
        what = rng.random()
        if waiting and what < 0.3:
            request = waiting.pop()
            tickets[engine.add(request)] = request
        elif what < 0.4 and version < VERSIONS - 1:
            version += 1
            events.preempted += len(engine._parked) if paged else 0
            engine.change_weights(decoders[version], version)
        elif what < 0.44 and tickets:
            number = int(rng.choice(list(tickets)))
            engine.drop(number)
            del tickets[number]
            events.dropped += 1
        elif what < 0.48:
            under_way = engine.unfinished()
            owners, tickets = tickets, {}
            engine = new_engine()
            for number, request in under_way:
                if request.begun is not None:
                    begun = SampledSequence.from_json(
                        json.loads(json.dumps(request.begun.as_json()))
                    )
                    request = replace(request, begun=begun)
                    events.moved += 1
                tickets[engine.add(request)] = owners[number]
        else:
            for done in engine.step():
                finished += [
                    (tickets[done.request_id], sequence) for sequence in done.response.sequences
                ]
                del tickets[done.request_id]
    return finished


def check(models, request: Request, sequence: SampledSequence) -> int:
    """Compare every logprob with one plain forward of the model of its version; the number of
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


def population(models, decoders, seeds: range) -> Events:
    events = Events()
    for seed in seeds:
        for request, sequence in play(decoders, seed, events):
            events.mixed += check(models, request, sequence) > 1
    return events


def test_versions_tell_themselves_apart(models):
    """The comparison below can fail: a token's logprob differs between any two versions."""
    (prompt,), (response,) = random_prompts([5]), random_prompts([12], seed=1)
    each = torch.stack([reference_logprobs(model, prompt, response) for model in models])
    for one in range(VERSIONS):
        for other in range(one):
            assert (each[one] - each[other]).abs().min() > 2e-4 and (
                each[one] - each[other]
            ).abs().median() > 0.1


def test_every_logprob_is_that_of_the_version_it_names(models, decoders):
    events = population(models, decoders, range(60))
    assert min(events.preempted, events.moved, events.dropped, events.mixed) > 20, events


@pytest.mark.campaign
def test_every_logprob_is_that_of_the_version_it_names_in_many_schedules(models, decoders):
    events = population(models, decoders, range(1000, 2500))
    assert min(events.preempted, events.moved, events.dropped, events.mixed) > 500, events


def test_weights_never_land_in_a_decoder_that_a_stream_draws_from():
    """The client of the stream's weights may be released before the slice that switches the stream
    to newer ones.
    """
    learner, hangar = make_worker(), Hangar(WorkerSettings(sampler=SamplerSettings()))
    asked = Request(prompt=[3, 4, 12], params=SamplingParams(max_tokens=12, stop=[]), seed=1)

    def land(version: int) -> None:
        sent = learner.stage(0, version == 0)
        hangar.begin_landing(version, sent.manifest())
        for piece in sent.pieces():
            hangar.land(version, piece)

    land(0)
    hangar.end_landing(0)
    hangar.sample_slice(5, 0, Asked(4, [(0, 0, asked)]))
    ((_, half),) = hangar.unfinished(5).items()
    drawn_from = hangar.streams[5].engine.decoder
    before = score(drawn_from, [[3, 4, 12, 5, 1]])
    hangar.forget_version(0)
    call(
        learner,
        "forward_backward",
        0,
        random_datums(4),
        "importance_sampling",
        {"temperature": 1.0},
        1.0,
        True,
    )
    learner.optim_step(0, ADAM)
    land(1)
    assert score(drawn_from, [[3, 4, 12, 5, 1]]) == before, (
        "a decoder was filled that a stream draws from"
    )
    hangar.end_landing(1)
    done = hangar.sample_slice(5, 1, Asked(99)).finished[0].sequences[0]
    assert len(half.begun.tokens) == 4 and done.versions == [0] * 4 + [1] * 8
    hangar.forget_all()
