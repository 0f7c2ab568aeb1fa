"""Test min_p, logit_bias, penalties, min_tokens and ignore_eos: every engine against a plain
forward, and the refusal in training.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import ADAM
from sampler_models import (  # noqa: F401
    VOCAB,
    make_request,
    multistep_engine,
    one_thread,
    random_prompts,
    row_settings,
    tiny_model,
)

from rl import ServiceClient
from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.sampler.token_sampling import sample_tokens
from rl.types import Datum, ModelInput, SamplingParams

EOS = (1, 2, 3, 5, 8)
BIAS = {4: 3.5, 1: 2.0, 9: -100.0, 11: 1.25}
PENALTIES = {"presence_penalty": -0.6, "frequency_penalty": 1.2, "repetition_penalty": 0.8}
KINDS = {"fast": Engine, "hf": Engine, "stepped": multistep_engine}


def sampled(kind, params, samples=12, others=(), decoder=None):
    """Return the sequences of each of three prompts. `others`: params of further requests in the
    same batch.
    """
    decoder = decoder or make_decoder(tiny_model("qwen3"), kind="hf" if kind == "hf" else "fast")
    engine = KINDS[kind](decoder, eos_token_ids=EOS, max_rows=64)
    prompts = random_prompts([5, 9, 7])
    for problem, prompt in enumerate(prompts):
        engine.add(make_request(prompt, samples, params=params, seed=3, problem=problem))
    for number, other in enumerate(others):
        engine.add(
            SamplingRequest(prompt=prompts[0], num_samples=2, params=other, seed=4, problem=number)
        )
    return prompts, [response.sequences for response in engine.run()]


def expected_logprobs(model, prompt, tokens, params):
    """Return (logprob under the sampling distribution, logprob under the model) of each token, both
    at the temperature, in float64.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double()[len(prompt) - 1 : -1]
    temperature, results = params.temperature or 1.0, []
    for i, token in enumerate(tokens):
        whole = (logits[i] / temperature).log_softmax(-1)
        biased = logits[i].clone()
        for entry, value in (params.logit_bias or {}).items():
            biased[entry] += value
        for entry in range(VOCAB):
            count = tokens[:i].count(entry)
            if count or entry in prompt:
                r = params.repetition_penalty
                biased[entry] = biased[entry] / r if biased[entry] > 0 else biased[entry] * r
            biased[entry] -= params.frequency_penalty * count + params.presence_penalty * bool(
                count
            )
        if i < params.min_tokens:
            biased[[] if params.ignore_eos else list(EOS)] = -math.inf
        drawn = (biased / temperature).softmax(-1)
        drawn = (
            torch.where(drawn < params.min_p * drawn.max(), 0.0, drawn)
            if params.temperature
            else drawn
        )
        results.append(((drawn[token] / drawn.sum()).log().item(), whole[token].item()))
    return results


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.4},
        {"logit_bias": BIAS},
        {"min_tokens": 6},
        {"min_p": 0.1, "logit_bias": BIAS, "min_tokens": 3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.9},
        {"repetition_penalty": 1.7},
        {**PENALTIES, "logit_bias": BIAS, "min_p": 0.1, "min_tokens": 3},
    ],
    ids=lambda options: "+".join(options),
)
def test_logprobs_are_of_what_was_drawn_from(kind, options, temperature):
    """With `untruncated_logprobs` the tokens are equal and the logprobs are the model's."""
    model = tiny_model("qwen3")
    params = SamplingParams(max_tokens=10, temperature=temperature, **options)
    whole = SamplingParams(
        max_tokens=10, temperature=temperature, untruncated_logprobs=True, **options
    )
    prompts, groups = sampled(kind, params, others=(SamplingParams(max_tokens=9), whole))
    again = sampled(kind, whole)[1]
    for prompt, sequences, untruncated in zip(prompts, groups, again, strict=False):
        for sequence, other in zip(sequences, untruncated, strict=True):
            assert sequence.tokens == other.tokens
            pairs = expected_logprobs(model, prompt, sequence.tokens, params)
            np.testing.assert_allclose(sequence.logprobs, [drawn for drawn, _ in pairs], atol=2e-5)
            np.testing.assert_allclose(
                other.logprobs, [reference for _, reference in pairs], atol=2e-5
            )
            assert len(sequence.tokens) >= options.get("min_tokens", 1)
            if temperature:
                assert not options.get("logit_bias") or 9 not in sequence.tokens


def test_every_engine_draws_the_same_tokens():
    hows = [{"min_p": 0.3}, {"logit_bias": BIAS}, {"min_tokens": 5}, {"ignore_eos": True}]
    for options in [*hows, PENALTIES]:
        drawn = [
            [
                [s.tokens for s in group]
                for group in sampled(kind, SamplingParams(max_tokens=9, **options))[1]
            ]
            for kind in KINDS
        ]
        assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("kind", list(KINDS))
def test_stops_before_min_tokens_and_eos_that_ends_nothing(kind):
    usual = [s for group in sampled(kind, SamplingParams(max_tokens=12))[1] for s in group]
    assert min(len(s.tokens) for s in usual) < 4  # EOS does come early
    late = [
        s
        for group in sampled(kind, SamplingParams(max_tokens=12, min_tokens=8, stop=[7]))[1]
        for s in group
    ]
    assert all(len(s.tokens) > 8 or s.stop_reason == "length" for s in late)
    assert any(s.stop_reason == "stop" for s in late)
    assert not any(token in (*EOS, 7) for s in late for token in s.tokens[:8])
    on = [
        s
        for group in sampled(kind, SamplingParams(max_tokens=12, ignore_eos=True))[1]
        for s in group
    ]
    assert all(len(s.tokens) == 12 and s.stop_reason == "length" for s in on)
    assert any(set(EOS) & set(s.tokens[:-1]) for s in on)
    for whole, cut in zip(on, usual, strict=True):  # the same stream, continued past EOS
        assert whole.tokens[: len(cut.tokens)] == cut.tokens
    reference = [
        s
        for group in sampled(kind, SamplingParams(max_tokens=12, ignore_eos=True, stop=[1]))[1]
        for s in group
    ]
    assert {s.tokens[-1] for s in reference if s.stop_reason == "stop"} == {1}


def test_a_request_that_has_begun_counts_what_it_drew():
    """min_tokens counts the tokens before an interruption, and biases and penalties still apply: an
    interrupted request gets the same tokens.
    """
    params = SamplingParams(max_tokens=12, min_tokens=7, logit_bias=BIAS, **PENALTIES)
    decoder, prompt = make_decoder(tiny_model("qwen3")), random_prompts([6])[0]
    request = SamplingRequest(prompt=prompt, params=params, seed=1)
    engines = [Engine(decoder, eos_token_ids=EOS) for _ in range(3)]
    engines[0].add(request)
    engines[1].add(request)
    for _ in range(4):
        engines[1].step()
    ((_, begun),) = engines[1].unfinished_requests()
    engines[2].add(begun)
    (whole,), (rest,) = (engine.run()[0].sequences for engine in (engines[0], engines[2]))
    assert whole.tokens == rest.tokens and whole.logprobs == pytest.approx(rest.logprobs, abs=1e-5)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (4, 1.0), (-1, 0.6)])
def test_min_p_against_plain_python(min_p, top_k, top_p):
    torch.manual_seed(1)
    logits, uniform = torch.randn(30, 12) * 2, torch.rand(30, dtype=torch.float64)
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, logprobs = sample_tokens(logits, uniform, row_settings([params] * 30, 12))
    for row in range(30):
        weights = [math.exp(x / 0.9) for x in logits[row].tolist()]
        ranked = [
            i
            for i in sorted(range(12), key=lambda i: -weights[i])
            if weights[i] >= min_p * max(weights)
        ]
        ranked = ranked[: top_k if top_k > 0 else None]
        total, kept, before = sum(weights[i] for i in ranked), [], 0.0
        for i in ranked:
            if not kept or before < top_p:
                kept.append(i)
                before += weights[i] / total
        cumulative = np.cumsum([weights[i] if i in kept else 0.0 for i in range(12)])
        assert tokens[row] == int(
            np.searchsorted(cumulative, uniform[row].item() * cumulative[-1], side="right")
        )
        assert logprobs[row] == pytest.approx(
            math.log(weights[tokens[row]] / cumulative[-1]), abs=1e-5
        )


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
def test_training_on_such_samples_is_refused(options, tmp_path):
    """Samples with these parameters are refused, like those with top_k and top_p. `ignore_eos`
    changes no probability, so its samples are accepted.
    """
    with ServiceClient(output_dir=tmp_path) as service:
        client = service.create_full_training_client("tiny:addition")
        for params, refused in (
            (SamplingParams(max_tokens=3, ignore_eos=True), False),
            (SamplingParams(max_tokens=3, **options), True),
        ):
            sampler = client.save_weights_and_get_sampling_client()
            sequence = sampler.sample(ModelInput.from_ints([3, 4]), 1, params).result().sequences[0]
            tokens = [3, 4, *sequence.tokens]
            advantages = [0.0] + [1.0] * len(sequence.tokens)
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": [0.0, *sequence.logprobs],
                "advantages": advantages,
            }
            datum = Datum(ModelInput.from_ints(tokens[:-1]), inputs)
            if refused:
                with pytest.raises(
                    ValueError, match="min_p, logit_bias, min_tokens, presence_penalty"
                ):
                    client.forward_backward([datum], "importance_sampling").result()
            else:
                client.forward_backward([datum], "importance_sampling").result()
                client.optim_step(ADAM).result()


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
