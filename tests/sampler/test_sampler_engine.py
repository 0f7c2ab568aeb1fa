"""Test the engine: counters, sampling distribution, stops, and that a sample does not depend on its
batch.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    VOCAB,
    check_logprobs,
    make_request,
    one_thread,
    random_prompts,
    reference_logprobs,
    run_requests,
    tiny_model,
)

from rl import ServiceClient
from rl.runtime import SamplerSettings, WorkerSettings
from rl.sampler import Engine, make_decoder, score_sequences
from rl.types import ModelInput, SampledSequence, SamplingParams, find_length_limit


def sample(
    decoder, prompts, samples=1, *, eos=(), seed=0, engine=None, **params
) -> list[list[SampledSequence]]:
    """Return the sequences [prompt][sample] of an engine run. `engine`: settings of the engine."""
    params = SamplingParams(**{"max_tokens": 8, **params})
    requests = [
        make_request(prompt, samples, params=params, seed=seed, problem=problem)
        for problem, prompt in enumerate(prompts)
    ]
    made = Engine(decoder, eos_token_ids=eos, **(engine or {}))
    return [response.sequences for response in run_requests(made, requests)]


def tokens_of(groups: list[list[SampledSequence]]) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in group] for group in groups]


# ----------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_a_prompt_is_read_once_for_its_group_and_no_row_is_decoded_in_vain(kind):
    model = tiny_model("qwen3", max_position_embeddings=600)
    engine = Engine(make_decoder(model, kind=kind), eos_token_ids=(1, 2, 3), max_rows=16)
    engine.add(make_request(random_prompts([512])[0], 16, max_tokens=24))
    fed = []  # tokens that reach the model, counted at its inputs
    state = engine._state
    prefill, decode = state.prefill, state.decode
    state.prefill = lambda batch: fed.append(sum(len(p.tokens) for p in batch)) or prefill(batch)  # type: ignore[func-returns-value]
    state.decode = lambda tokens: fed.append(len(tokens)) or decode(tokens)  # type: ignore[func-returns-value]
    sequences = engine.run()[0].sequences
    emitted = sum(len(sequence.tokens) for sequence in sequences)
    counters = engine.counters
    # the rows did end at different times
    assert len({len(sequence.tokens) for sequence in sequences}) > 3
    assert counters.prefill_tokens == fed[0] == 512
    assert counters.decoded_rows == counters.emitted_tokens == emitted
    # Every token but the last of each sample is fed once, a single token per step: the cost of a
    # token does not grow with the length.
    assert counters.fed_tokens == sum(fed[1:]) == emitted - 16
    assert counters.steps == len(fed) == max(len(sequence.tokens) for sequence in sequences)


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_a_prompt_stays_while_samples_of_its_group_wait(kind):
    """Three rows at a time for groups of four: all running rows of a group end together while its
    last sample waits.
    """
    engine = Engine(make_decoder(tiny_model("qwen3"), kind=kind), max_rows=3)
    for problem, prompt in enumerate(random_prompts([9, 12, 5])):
        engine.add(make_request(prompt, 4, max_tokens=3, problem=problem))
    engine.run()
    assert engine.counters.prefill_tokens == 9 + 12 + 5
    assert engine.counters.emitted_tokens == 3 * 4 * 3


def test_identical_prompts_waiting_together_are_read_once():
    decoder, (prompt,) = make_decoder(tiny_model("qwen3")), random_prompts([20])
    engine = Engine(decoder)
    requests = [make_request(prompt, 4, max_tokens=3, first_index=first) for first in (0, 4)]
    halves = [s.tokens for response in run_requests(engine, requests) for s in response.sequences]
    assert engine.counters.prefill_tokens == 20
    assert [halves] == tokens_of(sample(decoder, [prompt], 8, max_tokens=3))


# --------------------------------------------------------------------------- distribution, logprobs


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_samples_follow_the_enumerated_distribution(kind):
    """Vocabulary 8, length 2, 20,000 samples at T = 0.7: chi-square test over the 64 sequences, and
    every logprob is checked.
    """
    model = tiny_model("qwen3", vocab_size=8)
    draws, prompt, temperature = 20_000, [1, 5, 2], 0.7
    with torch.no_grad():
        ids = torch.tensor([[*prompt, first] for first in range(8)])
        logprobs = (model(input_ids=ids).logits.double() / temperature).log_softmax(-1).numpy()
    first, second = logprobs[0, 2], logprobs[:, 3]
    decoder = make_decoder(model, kind=kind)
    (group,) = sample(
        decoder, [prompt], draws, engine={"max_rows": draws}, max_tokens=2, temperature=temperature
    )
    a, b = np.array([sequence.tokens for sequence in group]).T
    actual = np.array([sequence.logprobs for sequence in group])
    np.testing.assert_allclose(actual, np.stack([first[a], second[a, b]], 1), rtol=0, atol=1e-5)
    counts = np.bincount(8 * a + b, minlength=64)
    expected = np.exp(first[:, None] + second).ravel() * draws
    order = np.argsort(expected)
    # merge cells too rare for chi-square
    rare = order[np.cumsum(expected[order]) < 8]
    bins = [(counts[i], expected[i]) for i in order if i not in rare]
    bins.append((counts[rare].sum(), expected[rare].sum()))
    chi2 = sum((n - e) ** 2 / e for n, e in bins if e > 0)
    freedom = len(bins) - 1
    assert freedom > 20
    # Wilson-Hilferty: (chi2 / k)^(1/3) is approximately normal; the bound is 4 standard deviations.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 4, (chi2, freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("model_kind", "kind"),
    [("qwen3", "fast"), ("qwen3", "hf"), ("qwen2", "fast"), ("llama", "fast"), ("gpt2", "hf")],
)
def test_every_logprob_equals_a_plain_forward(model_kind, kind, temperature):
    """Few rows and several EOS tokens: rows end at different lengths and waiting rows take their
    places.
    """
    model = tiny_model(model_kind)
    prompts, eos = random_prompts([5, 17, 2, 30, 9]), range(3, 11)
    decoder, more = make_decoder(model, kind=kind), {"max_rows": 5}
    groups = sample(
        decoder, prompts, 3, eos=eos, engine=more, max_tokens=20, temperature=temperature
    )
    for prompt, group in zip(prompts, groups, strict=True):
        for sequence in group:
            check_logprobs(model, prompt, sequence, temperature)
            assert not set(eos) & set(sequence.tokens[:-1])
            assert (sequence.stop_reason == "stop") == (sequence.tokens[-1] in eos)
    assert len({len(sequence.tokens) for group in groups for sequence in group}) > 4


# ------------------------------------------------------------------------ independence of the batch


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_a_sample_does_not_depend_on_the_batch_around_it(kind):
    decoder = make_decoder(tiny_model("qwen3"), kind=kind)
    prompts = random_prompts([5, 17, 2, 30, 9, 9])

    def run(seed=9, **engine):
        return tokens_of(
            sample(
                decoder, prompts, 4, eos=(3,), seed=seed, engine=engine, max_tokens=16,
                temperature=1.1,
            )
        )  # fmt: skip

    together, params = run(), SamplingParams(max_tokens=16, temperature=1.1)
    assert together == run(max_rows=3) == run(kv_cache_tokens=150)
    for problem, group in enumerate(together):
        for index, tokens in enumerate(group):
            alone = make_request(
                prompts[problem], params=params, seed=9, problem=problem, first_index=index
            )
            (response,) = run_requests(Engine(decoder, eos_token_ids=(3,)), [alone])
            assert response.sequences[0].tokens == tokens
    # a seed does not make the samples of a group equal
    assert all(len({tuple(tokens) for tokens in group}) > 1 for group in together)
    assert together != run(seed=10)


# ------------------------------------------------------------------------------- greedy, real model


@pytest.mark.parametrize(
    ("model_kind", "kind"), [("qwen3", "fast"), ("qwen3", "hf"), ("gpt2", "hf"), ("llama", "fast")]
)
def test_greedy_equals_generate(model_kind, kind):
    model, prompts = tiny_model(model_kind), random_prompts([6, 14, 3])
    groups = sample(make_decoder(model, kind=kind), prompts, max_tokens=15, temperature=0)
    for prompt, (sequence,) in zip(prompts, groups, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=15, pad_token_id=0
        )[0, len(prompt) :]
        assert sequence.tokens == expected.tolist()
        check_logprobs(model, prompt, sequence)


def test_a_trained_model_sorts_all_its_inputs(shared_data):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(shared_data / "models" / "gpt_nano_sort_hf")
    inputs = [list(letters) for letters in itertools.product(range(3), repeat=6)]
    groups = sample(make_decoder(model), inputs, max_tokens=6, temperature=0, stop=[])
    assert [group[0].tokens for group in groups] == [sorted(letters) for letters in inputs]


# -------------------------------------------------------------------------------------------- stops


def test_stops_cut_the_same_stream_at_their_token():
    decoder, prompts = make_decoder(tiny_model("qwen3")), random_prompts([8])

    def run(stop):
        return sample(decoder, prompts, 6, eos=(3, 5), max_tokens=30, stop=stop)[0]

    endless = [sequence.tokens for sequence in run([])]
    assert all(len(tokens) == 30 for tokens in endless)
    assert any({3, 5} & set(tokens) for tokens in endless)  # [] disabled the EOS tokens
    for stop, ids in ((None, {3, 5}), ([7, 11], {3, 5, 7, 11})):
        for tokens, sequence in zip(endless, run(stop), strict=True):
            cut = next((i + 1 for i, token in enumerate(tokens) if token in ids), 30)
            assert sequence.tokens == tokens[:cut]
            assert sequence.stop_reason == ("stop" if tokens[cut - 1] in ids else "length")


def test_stop_strings_end_a_response_at_the_token_that_completes_them(shared_data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "minimind_6400")
    decoder = make_decoder(tiny_model("qwen3", vocab_size=len(tokenizer)))
    prompts = random_prompts([8, 3], vocab=len(tokenizer))
    stops, more = ["e", "th", "00"], {"tokenizer": tokenizer}
    endless = sample(decoder, prompts, 6, max_tokens=30, stop=[])
    stopped = sample(decoder, prompts, 6, engine=more, max_tokens=30, stop=stops)
    for full, cut in zip(sum(endless, []), sum(stopped, []), strict=True):
        texts = [
            tokenizer.decode(full.tokens[:n], clean_up_tokenization_spaces=False)
            for n in range(1, 31)
        ]
        ends = [n + 1 for n, text in enumerate(texts) if any(stop in text for stop in stops)]
        assert cut.tokens == full.tokens[: ends[0] if ends else 30]
    assert "stop" in {cut.stop_reason for cut in sum(stopped, [])}
    with pytest.raises(ValueError, match="need a tokenizer"):
        Engine(decoder).add(make_request([1], max_tokens=3, stop="e"))


# ------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_the_budget_holds_and_rows_wait_for_it(kind):
    decoder = make_decoder(tiny_model("qwen3"), kind=kind)
    engine = Engine(decoder, kv_cache_tokens=120, max_rows=100)
    for problem, prompt in enumerate(random_prompts([5, 30, 12, 7, 30])):
        engine.add(make_request(prompt, 8, max_tokens=4 + problem, problem=problem))
    order, per_token = [], 2 * 2 * 16  # layers, key heads, head width
    while len(order) < 5:
        order.extend(done.request_id for done in engine.step())
        if kind == "fast":
            blocks = [*engine._state.prompt_kv, *engine._state.row_kv]
            assert sum(block[0].numel() for block in blocks) <= 120 * per_token
    assert engine.counters.peak_cache_tokens <= 120
    assert engine.counters.peak_rows < 40  # some rows did wait
    assert order == sorted(order)  # first come, first served
    assert engine.counters.emitted_tokens == 8 * sum(4 + problem for problem in range(5))


@pytest.mark.parametrize(
    ("length", "max_tokens", "settings", "says"),
    [
        (30, 20, {"kv_cache_tokens": 40}, "max_tokens=20 takes 49 tokens.*kv_cache_tokens is 40"),
        (90, 8, {}, "90 tokens and max_tokens=8 exceed the context of 96"),
        (0, 8, {}, "empty"),
    ],
)
def test_what_can_never_fit_is_an_error_with_numbers(length, max_tokens, settings, says):
    engine = Engine(make_decoder(tiny_model("qwen3")), **settings)
    with pytest.raises(ValueError, match=says):
        engine.add(make_request([1] * length, max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("kind", "model"), [("fast", "qwen3"), ("hf", "qwen3"), ("auto", "qwen3"), ("auto", "gpt2")]
)
def test_the_length_limit_is_what_the_cache_holds(tmp_path, kind, model):
    """The generic decoder, which samples gpt2, copies the prompt for each row. A paged cache takes
    whole blocks, in test_sampler_over_pages.py of 4 positions.
    """
    tiny_model(model, vocab_size=300).save_pretrained(tmp_path / "model")
    settings = WorkerSettings(sampler=SamplerSettings(kind=kind, kv_cache_tokens=40))
    with ServiceClient(output_dir=tmp_path, settings=settings) as service:
        client = service.create_full_training_client(str(tmp_path / "model"))
        sampler = client.save_weights_and_get_sampling_client()
        limit, name = find_length_limit(sampler.info, 15)
        prompt, most = ModelInput.from_ints([3] * 15), limit + 1 - 15  # the last token is not fed
        sampler.sample(prompt, 1, SamplingParams(max_tokens=most)).result()
        with pytest.raises(ValueError, match="takes (41|44) tokens of KV cache"):
            sampler.sample(prompt, 1, SamplingParams(max_tokens=most + 1)).result()
    assert "KV cache" in name


def run_bounded(engine: Engine, steps: int) -> list:
    """Step at most `steps` times. Return the finished requests of an engine that became idle."""
    finished = []
    for _ in range(steps):
        finished += engine.step()
        if not engine.busy:
            return finished
    raise AssertionError(f"the engine is still busy after {steps} steps")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, VOCAB]},
        {"next_token": VOCAB, "include_prompt_logprobs": True},
        {"target_prompt_tokens": np.array([[3], [VOCAB]])},
    ],
)
def test_tokens_that_do_not_exist_are_an_error_of_their_request(fields):
    engine, (prompt,) = Engine(make_decoder(tiny_model("qwen3"))), random_prompts([3])
    engine.add(make_request(prompt, max_tokens=2, stop=[]))
    with pytest.raises(ValueError, match=f"got .*{VOCAB}"):
        engine.add(make_request(**{"prompt": prompt, **fields}, max_tokens=2, stop=[]))
    assert len(engine.run()) == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 3}, "has 3 tokens, the last is 12: this sample is complete"),
        ({"max_tokens": 2}, "has 3 tokens, .* with max_tokens=2"),
        ({"max_tokens": 9, "stop": [12]}, r"complete with max_tokens=9 and the stop ids \[12\]"),
    ],
)
def test_a_partial_sample_that_is_complete_is_refused(fields, says):
    partial = SampledSequence([10, 11, 12], [-1.0] * 3, "length")
    engine = Engine(make_decoder(tiny_model("qwen3")))
    with pytest.raises(ValueError, match=says):
        engine.add(make_request([1, 2], resume_from=partial, **fields))


def test_odd_requests_are_sampled():
    engine = Engine(make_decoder(tiny_model("qwen3")))
    # the last token is no stop id; ids outside the vocabulary stop nothing
    stops = [*range(VOCAB - 1), VOCAB + 5]
    engine.add(make_request([1], max_tokens=3, stop=stops, min_tokens=2, ignore_eos=True))
    engine.add(make_request(np.array([1, 2, 3]), max_tokens=2, stop=[]))
    first, second = (done.sequences[0].tokens for done in engine.run())
    assert first[:2] == [VOCAB - 1] * 2 and len(second) == 2


def test_a_request_that_fits_is_admitted_again_with_its_partial_sample():
    """The generic decoder's cost of a resumed row counts its 20 sampled tokens twice."""
    decoder = make_decoder(tiny_model("qwen3", max_position_embeddings=160), kind="hf")
    (prompt,) = random_prompts([100])
    ((whole,),) = sample(decoder, [prompt], max_tokens=50)
    first, second = (Engine(decoder, kv_cache_tokens=255) for _ in range(2))
    first.add(make_request(prompt, max_tokens=50))
    for _ in range(20):
        first.step()
    ((_, request),) = first.unfinished_requests()
    assert request.resume_from is not None and len(request.resume_from.tokens) == 20
    second.add(request)
    (done,) = run_bounded(second, 30)
    assert done.result().sequences[0].tokens == whole.tokens


def test_a_prompt_that_equals_a_prompt_with_its_partial_sample_has_its_own_logprobs():
    """Both requests feed the same tokens, but the first scores only its prompt."""
    decoder, (prompt,) = make_decoder(tiny_model("qwen3")), random_prompts([9])
    settings: dict[str, Any] = dict(max_tokens=6, stop=[])
    whole = sample(decoder, [prompt], **settings)[0][0]
    partial = SampledSequence(whole.tokens[:3], whole.logprobs[:3])
    settings["include_prompt_logprobs"] = True
    requests = [
        make_request(prompt, resume_from=partial, **settings),
        make_request([*prompt, *partial.tokens], problem=1, **settings),
    ]
    responses = run_requests(Engine(decoder), requests)
    short, long = (response.prompt_logprobs for response in responses)
    assert (len(short), len(long)) == (9, 12)
    np.testing.assert_allclose(long[1:9], short[1:], atol=1e-5)
    np.testing.assert_allclose(long[9:], partial.logprobs, atol=1e-5)


def test_weights_change_between_two_samples_of_a_group_that_do_not_fit_together():
    """The prompt in the cache has no row when the weights change. It must not take the room that
    the waiting samples need.
    """
    decoder = make_decoder(tiny_model("llama", max_position_embeddings=160), kind="fast")
    engine = Engine(decoder, kv_cache_tokens=160)
    engine.add(make_request(random_prompts([100])[0], 3, max_tokens=50))
    while not engine.counters.finished_samples:
        assert engine.step() == []
    assert not len(engine._rows)
    engine.change_weights(decoder, 1)
    (done,) = run_bounded(engine, 100)
    assert [sequence.version for sequence in done.result().sequences] == [0, 1, 1]
    assert engine.counters.prefill_prompts == 2


def test_an_engine_that_can_admit_nothing_raises_an_error(monkeypatch):
    engine = Engine(make_decoder(tiny_model("qwen3")))
    engine.add(make_request([1, 2], max_tokens=2))
    monkeypatch.setattr(engine, "_count_admissible", lambda group, size: 0)
    with pytest.raises(RuntimeError, match="no request runs and none of the 1 waiting"):
        engine.step()


def test_max_tokens_none_goes_up_to_the_context():
    decoder = make_decoder(tiny_model("qwen3"))
    for limit, more in ((96, {}), (50, {"max_context": 50})):
        ((sequence,),) = sample(
            decoder, random_prompts([11]), engine=more, max_tokens=None, stop=[]
        )
        assert 11 + len(sequence.tokens) - 1 == limit  # the last token is never fed


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_a_sample_that_fills_the_context_can_be_scored(kind):
    """Its last token is not fed: the sequence has a token more than the context, and no more."""
    decoder, (prompt,) = make_decoder(tiny_model("qwen3"), kind=kind), random_prompts([11])
    ((sequence,),) = sample(decoder, [prompt], max_tokens=None, stop=[])
    whole = [*prompt, *sequence.tokens]
    assert len(whole) == decoder.max_positions + 1
    scores = score_sequences(decoder, [whole])[0]
    np.testing.assert_allclose(scores[len(prompt) :], sequence.logprobs, atol=1e-4)
    with pytest.raises(ValueError, match="98 tokens exceeds the context of 96"):
        score_sequences(decoder, [[*whole, 1]])


@pytest.mark.parametrize("vocab", [VOCAB, 1500])
def test_logits_that_are_not_numbers_are_an_error(vocab):
    decoder = make_decoder(tiny_model("qwen3", vocab_size=vocab))
    decoder.load_([("model.norm.weight", torch.full((32,), torch.nan))])
    with pytest.raises(FloatingPointError, match="diverged"):
        sample(decoder, random_prompts([4]))


# -------------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_same_distribution_is_sampled(dtype):
    """Equivalent test on a CPU: `test_every_logprob_equals_a_plain_forward`. In bf16 only the mean
    difference to float32 is bounded.
    """
    model = tiny_model("qwen3")
    decoder = make_decoder(model, device="cuda", dtype=dtype)
    prompts, more = random_prompts([5, 17, 2, 30, 9]), {"max_rows": 5}
    for samples in (1, 3):  # a single row per prompt, and shared prompts
        differences = []
        groups = sample(decoder, prompts, samples, eos=range(3, 11), engine=more, max_tokens=20)
        for prompt, group in zip(prompts, groups, strict=True):
            for sequence in group:
                exact = reference_logprobs(model, prompt, sequence.tokens)
                differences.append((torch.tensor(sequence.logprobs) - exact).abs())
        joined = torch.cat(differences)
        assert joined.max() < 1e-3 if dtype == torch.float32 else joined.mean() < 0.05


# ---------------------------------------------------------------------------------- prompt logprobs


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_prompt_logprobs_and_score(kind):
    model = tiny_model("qwen3")
    decoder, prompts = make_decoder(model, kind=kind), random_prompts([9, 40, 1, 22])
    scoring = dict(max_tokens=2, include_prompt_logprobs=True, topk_prompt_logprobs=3)
    requests = [make_request(prompt, 2, **scoring) for prompt in prompts]
    requests.append(make_request(prompts[0], max_tokens=2))
    *responses, bare = run_requests(Engine(decoder), requests)
    assert bare.prompt_logprobs is None and bare.topk_prompt_logprobs is None
    scores = score_sequences(decoder, prompts, temperature=0.7)
    for prompt, response, scored in zip(prompts, responses, scores, strict=True):
        results = (response.prompt_logprobs, response.topk_prompt_logprobs, scored)
        assert all(len(result) == len(prompt) and result[0] is None for result in results)
        if len(prompt) == 1:
            continue
        for result, temperature in ((response.prompt_logprobs, 1.0), (scored, 0.7)):
            expected = reference_logprobs(model, prompt[:1], prompt[1:], temperature)
            np.testing.assert_allclose(result[1:], expected, rtol=0, atol=1e-4)
        with torch.no_grad():
            every = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        for position, pairs in enumerate(response.topk_prompt_logprobs[1:]):
            values, ids = every[position].topk(3)
            assert [token for token, _ in pairs] == ids.tolist()
            assert np.allclose([logprob for _, logprob in pairs], values.numpy(), atol=1e-4)


def test_long_prompts_are_shown_to_the_reader_in_slices(monkeypatch):
    from rl.sampler import forward_fast

    decoder = make_decoder(tiny_model("qwen3"))
    prompts = random_prompts([40])
    whole = score_sequences(decoder, prompts)
    monkeypatch.setattr(forward_fast, "MAX_LOGITS_PER_SLICE", 7 * VOCAB)
    assert np.allclose(score_sequences(decoder, prompts)[0][1:], whole[0][1:], atol=1e-5)


def test_the_generic_decoder_bounds_the_logits_of_prompts_read_together():
    """Each of 10 prompts has 20 x 2^18 logits. A forward may return 2^25: those of 6 prompts."""
    model = tiny_model("qwen3", vocab_size=1 << 18)
    decoder, sizes = make_decoder(model, kind="hf"), []
    decoder.model.register_forward_hook(
        lambda module, args, output: sizes.append(output.logits.numel())
    )
    prompts = random_prompts([20] * 10, vocab=1 << 18)
    scored = score_sequences(decoder, prompts)
    requests = [make_request(p, max_tokens=1, include_prompt_logprobs=True) for p in prompts]
    response = run_requests(Engine(decoder), requests)[3]
    assert max(sizes) <= 1 << 25
    expected = reference_logprobs(model, prompts[3][:1], prompts[3][1:]).numpy()
    for logprobs in (scored[3], response.prompt_logprobs):
        np.testing.assert_allclose(logprobs[1:], expected, atol=1e-4)
