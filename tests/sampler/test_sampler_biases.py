"""Test min_p, logit_bias, penalties, min_tokens and ignore_eos: every engine against a plain
forward, and the refusal in training.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ADAM
from sampler_models import (  # noqa: F401
    VOCAB,
    check_same,
    make_request,
    multistep_engine,
    one_thread,
    random_prompts,
    run_requests,
    tiny_model,
)

from rl import ServiceClient
from rl.sampler import Engine, make_decoder
from rl.sampler.paged_state import PagedState
from rl.types import Datum, ModelInput, SamplingParams

EOS = (1, 2, 3, 5, 8)
BIAS = {4: 3.5, 1: 2.0, 9: -100.0, 11: 1.25}
PENALTIES = {"presence_penalty": -0.6, "frequency_penalty": 1.2, "repetition_penalty": 0.8}
KINDS = {"fast": Engine, "hf": Engine, "stepped": multistep_engine}
PROMPTS = random_prompts([5, 9, 7])


@cache
def decoder_of(kind):
    return make_decoder(tiny_model("qwen3"), kind="hf" if kind == "hf" else "fast")


def sampled(kind, params, samples=4, others=()):
    """Return the sequences of each of three prompts. `others`: params of further requests in the
    same batch.
    """
    engine = KINDS[kind](decoder_of(kind), eos_token_ids=EOS, max_rows=64)
    requests = [
        make_request(prompt, samples, params=params, seed=3, problem=problem)
        for problem, prompt in enumerate(PROMPTS)
    ]
    requests += [
        make_request(PROMPTS[0], 2, params=other, seed=4, problem=number)
        for number, other in enumerate(others)
    ]
    return [response.sequences for response in run_requests(engine, requests)[:3]]


def expected_logprobs(model, prompt, tokens, params):
    """Return (logprobs under the sampling distribution, logprobs under the model) of the tokens,
    both at the temperature, in float64.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double()[len(prompt) - 1 : -1]
    temperature, at = params.temperature or 1.0, torch.tensor(tokens)[:, None]
    biased = logits.clone()
    for entry, value in (params.logit_bias or {}).items():
        biased[:, entry] += value
    for i in range(len(tokens)):
        counts, row = (
            torch.tensor(tokens[:i], dtype=torch.long).bincount(minlength=VOCAB),
            biased[i],
        )
        seen = (counts > 0).index_fill(0, torch.tensor(prompt), True)
        r = params.repetition_penalty
        row[seen] = torch.where(row > 0, row / r, row * r)[seen]
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if i < params.min_tokens:
            row[[] if params.ignore_eos else list(EOS)] = -math.inf
    drawn = (biased / temperature).softmax(-1)
    if params.temperature:
        drawn[drawn < params.min_p * drawn.amax(-1, keepdim=True)] = 0.0
    drawn = (drawn / drawn.sum(-1, keepdim=True)).log()
    whole = (logits / temperature).log_softmax(-1)
    return drawn.gather(1, at)[:, 0], whole.gather(1, at)[:, 0]


OPTIONS = [
    {"min_p": 0.4},
    {"logit_bias": BIAS},
    {"min_tokens": 6},
    {"min_p": 0.1, "logit_bias": BIAS, "min_tokens": 3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.9},
    {"repetition_penalty": 1.7},
    {**PENALTIES, "logit_bias": BIAS, "min_p": 0.1, "min_tokens": 3},
    {"ignore_eos": True},
]


@cache
def fast_tokens(option: int, temperature: float) -> list[list[list[int]]]:
    params = SamplingParams(max_tokens=10, temperature=temperature, **OPTIONS[option])
    return [[s.tokens for s in group] for group in sampled("fast", params)]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", range(len(OPTIONS)), ids=lambda i: "+".join(OPTIONS[i]))
def test_logprobs_are_of_what_was_drawn_from(kind, option, temperature, monkeypatch):
    """Every engine draws the same tokens. With `untruncated_logprobs` the tokens are equal and the
    logprobs are the model's. The host decodes no row if the device makes steps.
    """
    model, options = tiny_model("qwen3"), OPTIONS[option]
    params = SamplingParams(max_tokens=10, temperature=temperature, **options)
    whole = replace(params, untruncated_logprobs=True)
    if kind == "stepped":
        monkeypatch.setattr(PagedState, "decode", None)
    groups = sampled(kind, params, others=(SamplingParams(max_tokens=9), whole))
    again = sampled(kind, whole)
    assert [[s.tokens for s in group] for group in groups] == fast_tokens(option, temperature)
    for prompt, sequences, untruncated in zip(PROMPTS, groups, again, strict=True):
        for sequence, other in zip(sequences, untruncated, strict=True):
            assert sequence.tokens == other.tokens
            drawn, plain = expected_logprobs(model, prompt, sequence.tokens, params)
            np.testing.assert_allclose(sequence.logprobs, drawn, atol=2e-5)
            np.testing.assert_allclose(other.logprobs, plain, atol=2e-5)
            assert len(sequence.tokens) >= options.get("min_tokens", 1)
            if temperature:
                assert not options.get("logit_bias") or 9 not in sequence.tokens


@pytest.mark.parametrize("kind", list(KINDS))
def test_stops_before_min_tokens_and_eos_that_ends_nothing(kind):
    def run(**options):
        groups = sampled(kind, SamplingParams(max_tokens=12, **options), samples=12)
        return [sequence for group in groups for sequence in group]

    usual, late, on = run(), run(min_tokens=8, stop=[7]), run(ignore_eos=True)
    assert min(len(s.tokens) for s in usual) < 4  # EOS does come early
    assert all(len(s.tokens) > 8 or s.stop_reason == "length" for s in late)
    assert any(s.stop_reason == "stop" for s in late)
    assert not any(token in (*EOS, 7) for s in late for token in s.tokens[:8])
    assert all(len(s.tokens) == 12 and s.stop_reason == "length" for s in on)
    assert any(set(EOS) & set(s.tokens[:-1]) for s in on)
    for whole, cut in zip(on, usual, strict=True):  # the same stream, continued past EOS
        assert whole.tokens[: len(cut.tokens)] == cut.tokens
    stopped = run(ignore_eos=True, stop=[1])
    assert {s.tokens[-1] for s in stopped if s.stop_reason == "stop"} == {1}


def test_a_request_that_has_begun_counts_what_it_drew():
    """min_tokens counts the tokens before an interruption, and biases and penalties still apply: an
    interrupted request gets the same tokens.
    """
    params = SamplingParams(max_tokens=12, min_tokens=7, logit_bias=BIAS, **PENALTIES)
    decoder = make_decoder(tiny_model("qwen3"))
    request = make_request(random_prompts([6])[0], params=params, seed=1)
    whole, first, second = (Engine(decoder, eos_token_ids=EOS) for _ in range(3))
    first.add(request)
    for _ in range(4):
        first.step()
    ((_, begun),) = first.unfinished_requests()
    check_same(run_requests(second, [begun]), run_requests(whole, [request]))


@pytest.fixture
def client(tmp_path):
    with ServiceClient(output_dir=tmp_path) as service:
        yield service.create_full_training_client("tiny:addition")


def train_on_sample(client, params):
    """Train on a sample with these parameters."""
    sampler = client.save_weights_and_get_sampling_client()
    sequence = sampler.sample(ModelInput.from_ints([3, 4]), 1, params).result().sequences[0]
    tokens = [3, 4, *sequence.tokens]
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0, *sequence.logprobs],
        "advantages": [0.0] + [1.0] * len(sequence.tokens),
    }
    datum = Datum(ModelInput.from_ints(tokens[:-1]), inputs)
    client.forward_backward([datum], "importance_sampling").result()


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1},
        {"top_k": 2},
        {"frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_training_on_such_samples_is_refused(client, options):
    with pytest.raises(ValueError, match="min_p, logit_bias, min_tokens, presence_penalty"):
        train_on_sample(client, SamplingParams(max_tokens=3, **options))


def test_training_on_samples_that_ignore_eos_is_not_refused(client):
    """`ignore_eos` changes no probability."""
    train_on_sample(client, SamplingParams(max_tokens=3, ignore_eos=True))
    client.optim_step(ADAM).result()


def test_a_parameter_is_named_in_three_files():
    """Its field, its use, and its name for HTTP: the rest follows from the field."""
    package = Path(__file__).parents[2] / "rl"
    files = [p for p in package.glob("**/*.py") if re.search(r"\bmin_p\b", p.read_text())]
    assert sorted(str(path.relative_to(package)) for path in files) == [
        "sampler/token_sampling.py",
        "serve/openai_schemas.py",
        "types/sampling_params.py",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty is a number from -2 to 2, got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is a number from -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is a number from 0.01 to 100"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
        ({"min_tokens": 2, "stop": ["x"]}, "with the stop texts"),
        ({"logit_bias": {3: 101.0}}, "from -100 to 100"),
        ({"logit_bias": {-1: 1.0}}, "at least 0"),
        ({"logit_bias": {3: float("nan")}}, "from -100 to 100"),
        ({"logit_bias": [3]}, "maps token ids"),
    ],
)
def test_values_out_of_range_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**options)


def test_a_bias_for_a_token_that_the_model_has_not_is_an_error():
    engine = Engine(make_decoder(tiny_model("qwen3")))
    with pytest.raises(
        ValueError, match=f"names the token {VOCAB}, and the model's ids are 0 to {VOCAB - 1}"
    ):
        engine.add(make_request([1], max_tokens=2, logit_bias={VOCAB: 1.0}))
