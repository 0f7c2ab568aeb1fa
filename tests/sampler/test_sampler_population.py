"""Test the generic decoder on many architectures: every logprob equals that of a separate forward
over the finished sequence, or the model is refused by name.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    add_lora,
    check_logprobs,
    make_request,
    one_thread,
    random_prompts,
    reference_logprobs,
    run_requests,
    tiny_model,
)
from sampler_population import POPULATION, VOCAB, build
from torch.utils._python_dispatch import TorchDispatchMode

from rl.errors import UserError
from rl.layers import find_layer_list
from rl.sampler import (
    Engine,
    decoder_factory,
    enable_expert_recording,
    forward_hf,
    make_decoder,
    score_sequences,
    verify_decoder,
)
from rl.sampler.decode_state import BatchSize, Prompt
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.forward_hf import BatchingPlan
from rl.sampler.precision import linear_fp32

QUICK = ("gpt2", "lfm2")


def decoder_of(model, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*decoding with a cache.*")
        return make_decoder(model, kind="hf", **options)


def check_sampled(decoder, model, bound: float = 1e-4) -> None:
    """Check ragged prompts in groups against a plain forward. Few rows run at once, so that rows
    enter late and leave early.
    """
    engine = Engine(decoder, eos_token_ids=(1,), max_rows=5)
    prompts = random_prompts([9, 3, 21, 9], VOCAB)
    requests = [
        make_request(prompt, samples, max_tokens=5 + 3 * i, problem=i)
        for i, (prompt, samples) in enumerate(zip(prompts, (2, 3, 2, 1), strict=True))
    ]
    for prompt, response in zip(prompts, run_requests(engine, requests), strict=True):
        for sequence in response.sequences:
            check_logprobs(model, prompt, sequence, atol=bound)
    assert engine.counters.peak_rows == 5


def check_scored(decoder, model, bound: float = 1e-4) -> None:
    prompts = random_prompts([4, 17, 16, 2, 30], VOCAB)
    for prompt, result in zip(prompts, score_sequences(decoder, prompts), strict=True):
        assert result[0] is None
        expected = reference_logprobs(model, prompt[:1], prompt[1:])
        np.testing.assert_allclose(result[1:], expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "kind",
    [
        k if k in QUICK else pytest.param(k, marks=pytest.mark.slow)
        for k in POPULATION
        if "longrope" not in k
    ],
)
def test_sampled_and_scored_logprobs_are_those_of_the_sequence_alone(kind):
    model = build(kind)
    decoder = decoder_of(model)
    assert decoder.plan.rows == POPULATION[kind][0]
    check_sampled(decoder, model)
    check_scored(decoder, model)


@pytest.mark.parametrize("kind", QUICK)
def test_rows_that_leave_one_by_one_leave_the_others_as_they_were(kind):
    """Many samples of a prompt end at random steps; the last rows move to the freed slots."""
    model, (prompt,) = build(kind), random_prompts([6], VOCAB)
    engine = Engine(decoder_of(model), eos_token_ids=range(1, 8))
    (response,) = run_requests(engine, [make_request(prompt, 14, max_tokens=12)])
    assert len({len(sequence.tokens) for sequence in response.sequences}) >= 4
    for sequence in response.sequences:
        check_logprobs(model, prompt, sequence)


# -------------------------------------------------------------------- models without exact decoding


@pytest.mark.parametrize("kind", ["xlnet", "bert"])
def test_a_model_that_looks_ahead_is_refused_by_name(kind):
    with pytest.raises(UserError, match=r"LMHeadModel cannot be sampled from.*causal"):
        decoder_of(build(kind))


def test_recomputing_is_said_and_a_cache_is_not():
    with pytest.warns(UserWarning, match=r"RwkvForCausalLM.*recomputes the whole sequence"):
        make_decoder(build("rwkv"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_decoder(build("gpt2"))


class LeakyModule(torch.nn.Module):
    """Add a trace of the batch mean to every row, like a layer that mixes rows."""

    def __init__(self, inner: torch.nn.Module, size: float):
        super().__init__()
        self.inner, self.size = inner, size

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return out + self.size * out.mean(0, keepdim=True) if len(out) > 1 else out


@pytest.mark.parametrize("size", [1e-2, 1.0])
def test_rows_that_feel_each_other_are_run_one_at_a_time(size):
    model = build("gpt2")
    model.transformer.h[0].mlp = LeakyModule(model.transformer.h[0].mlp, size)
    decoder = decoder_of(model)
    assert decoder.plan.rows == "recompute" and not decoder.plan.together
    check_sampled(decoder, model)
    check_scored(decoder, model)


def test_a_fast_decoder_that_is_not_the_model_is_not_used(monkeypatch):
    """The code of this Llama differs from the Llama that the fast decoder implements."""
    model = tiny_model("llama")
    model.model.layers[1].mlp.forward = lambda x, mlp=model.model.layers[1].mlp: (
        1.5 * type(mlp).forward(mlp, x)
    )
    compared, alive = [], []

    def matches_model(decoder, model):
        compared.append(weakref.ref(decoder))
        return verify_decoder.matches_model(decoder, model)

    def make_generic(*inputs):
        alive.append(compared[-1]() is not None)
        return HFDecoder(*inputs)

    monkeypatch.setattr(decoder_factory, "matches_model", matches_model)
    monkeypatch.setattr(decoder_factory, "HFDecoder", make_generic)
    with pytest.warns(
        UserWarning, match="fast decoder does not reproduce the logits of this LlamaForCausalLM"
    ):
        decoder = make_decoder(model)
    assert isinstance(decoder, HFDecoder)
    assert alive == [False]  # its memory is free before the generic decoder copies the model
    with pytest.raises(UserError, match="set sampler to auto or hf"):
        make_decoder(model, kind="fast")


def test_the_trial_leaves_model_and_generator_alone():
    model = build("gpt_oss")
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, window = torch.get_rng_state(), model.config.sliding_window
    decoder_of(model)
    assert model.training and model.config.sliding_window == window
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("rows", ["padded", "recompute"])
def test_a_model_that_computes_all_logits_reads_fewer_prompts_at_a_time(rows, monkeypatch):
    """Some models have no `logits_to_keep`: the logits of 8,192 positions would take gigabytes."""
    decoder, sizes = decoder_of(build("gpt2")), []
    decoder.plan = BatchingPlan(rows=rows)
    decoder._takes_logits_to_keep = False
    monkeypatch.setattr(forward_hf, "MAX_LOGITS_PER_SLICE", 20 * VOCAB)
    decoder.model.register_forward_hook(lambda *call: sizes.append(call[-1].logits.shape[:2]))
    requests = [make_request(prompt, max_tokens=2) for prompt in random_prompts([9] * 5, VOCAB)]
    run_requests(Engine(decoder), requests)
    assert max(batch * positions for batch, positions in sizes) in (18, 20)


@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text", "lfm2", "qwen3_moe", "opt"])
@pytest.mark.parametrize("rows", [None, "recompute"])
def test_logits_of_a_long_prompt_are_read_in_slices(kind, rows, monkeypatch):
    """The slices are those of the whole forward. The layers run once. OPT's forward bypasses its
    base model, so its logits are not sliced.
    """
    model = build(kind)
    decoder, prompts = decoder_of(model), random_prompts([30, 5, 5], VOCAB)
    decoder.plan = decoder.plan if rows is None else BatchingPlan(rows=rows)
    if decoder.layers.experts and rows is None:
        enable_expert_recording(decoder)
    expected, passes, sizes = score_sequences(decoder, prompts), [], []
    monkeypatch.setattr(forward_hf, "MAX_LOGITS_PER_SLICE", 12 * VOCAB)
    decoder.model.register_forward_hook(lambda *call: sizes.append(call[-1].logits.shape[:2]))
    first = find_layer_list(decoder.model)[1][0]
    first.register_forward_hook(lambda *call: passes.append(1))
    for mine, other in zip(score_sequences(decoder, prompts), expected, strict=True):
        np.testing.assert_allclose(mine[1:], other[1:], rtol=0, atol=1e-5)
    # the first is a trial; the last token of a sequence is not read
    slices = [(1, 29)] if kind == "opt" else [(1, 5), (1, 12), (1, 12)]
    assert sizes[0] == (1, 1) and sorted(sizes[1:]) == [*slices, (2, 4)] and len(passes) == 3
    request = make_request(prompts[0], max_tokens=3, include_prompt_logprobs=True)
    response = run_requests(Engine(decoder, eos_token_ids=()), [request])[0]
    np.testing.assert_allclose(response.prompt_logprobs[1:], expected[0][1:], rtol=0, atol=1e-5)
    check_logprobs(model, prompts[0], response.sequences[0])
    assert max(positions for _, positions in sizes) == (30 if kind == "opt" else 12)
    assert not vars(decoder.model.base_model).get("forward")


# ------------------------------------------------------------ frequencies that depend on the length


def check_fed(model, tokens: list[int], first: int, logprobs: list[float]) -> None:
    """Compare the logprobs of the tokens from `first` on with a forward without the last token, as
    in the learner.
    """
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0].double()
    targets = torch.tensor(tokens[first:])[:, None]
    expected = logits[first - 1 :].log_softmax(-1).gather(1, targets).squeeze(1)
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)


def test_longrope_on_both_sides_of_the_original_length():
    """A short and a long prompt in a batch, and sequences around the switch scored together, all
    equal to separate forwards.
    """
    model = build("phi3 longrope")
    decoder, prompts = make_decoder(model), random_prompts([5, 40, 20, 33], VOCAB)
    requests = [make_request(p, 2, max_tokens=12, problem=i) for i, p in enumerate(prompts)]
    responses = run_requests(Engine(decoder), requests)
    for prompt, response in zip(prompts, responses, strict=True):
        for sequence in response.sequences:
            check_fed(model, [*prompt, *sequence.tokens], len(prompt), sequence.logprobs)
    around = random_prompts([31, 32, 33, 34, 60], VOCAB)
    for tokens, result in zip(around, score_sequences(decoder, around), strict=True):
        check_fed(model, tokens, 1, result[1:])


def test_a_sample_that_would_cross_the_switch_is_refused_by_name_and_none_means_up_to_it():
    engine = Engine(make_decoder(build("phi3 longrope")))
    engine.add(make_request([3] * 30, max_tokens=3))  # 30 + 3 - 1 positions are fed
    with pytest.raises(ValueError, match=r"longrope.*exceeds 32 tokens.*max_tokens to 3 or less"):
        engine.add(make_request([3] * 30, max_tokens=4))
    engine.add(make_request([3] * 30, max_tokens=None))
    assert [len(response.sequences[0].tokens) for response in engine.run()] == [3, 3]


def test_what_may_be_sampled_is_what_the_model_reads_with_one_set_of_frequencies():
    """Covers every length of prompt and answer around the switch, against the frequencies that the
    model uses.
    """
    model = build("phi3 longrope")
    engine, sets = Engine(make_decoder(model)), {}
    for length in range(29, 41):
        with torch.no_grad():
            model(input_ids=torch.full((1, length), 3), use_cache=False)
        sets[length] = tuple(model.model.rotary_emb.inv_freq.tolist())
    assert len(set(sets.values())) == 2
    for prompt, max_tokens in itertools.product(range(29, 36), range(1, 6)):
        one_set = sets[prompt] == sets[prompt + max_tokens - 1]  # the last token is not fed
        with contextlib.nullcontext() if one_set else pytest.raises(ValueError, match="longrope"):
            engine.add(make_request([3] * prompt, max_tokens=max_tokens))


def test_dynamic_frequencies_are_refused_beyond_the_original_length():
    model = tiny_model(
        "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    decoder = make_decoder(model)
    check_sampled(decoder, model)
    decoder.max_positions = 200
    with pytest.raises(ValueError, match=r"dynamic.*stay within 96"):
        Engine(decoder).add(make_request([3] * 90, max_tokens=8))
    with pytest.raises(ValueError, match=r"dynamic.*stay within 96"):
        score_sequences(decoder, [[3] * 98])


# ----------------------------------------------------------------------------------- half precision


def autocast_logprobs(model, tokens: list[int], low: bool) -> torch.Tensor:
    """Return the logprobs of tokens 1, 2, ... by the model's plain forward, in float32 or under
    autocast as in the learner.
    """
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def decoded_logprobs(decoder, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Return the logprobs of a response through prefill and the cache."""
    with torch.inference_mode():
        state = decoder.new_state(10_000)
        state.reserve(BatchSize(1, len(prompt), 1, len(response)))
        logits = [state.prefill([Prompt(prompt)])[0]]
        state.add_rows(np.array([0]))
        logits += [state.decode(np.array([token]))[0] for token in response[:-1]]
    assert all(item.dtype == torch.float32 for item in logits)
    return torch.stack(logits).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)


LONG = ("llama", "gemma2", "gpt2", "gptj", "codegen", "phi", "gpt_neox", "opt", "gpt_oss")
LONG += ("qwen3_moe", "deepseek_v3", "lfm2", "mamba2")


CASES = [(name, "hf", adapter) for name in LONG for adapter in (False, True)] + [
    ("llama", "fast", False),
    ("llama", "fast", True),
]


@pytest.mark.parametrize(
    ("name", "kind", "adapter"),
    [c if c == ("llama", "hf", False) else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_bfloat16_at_positions_beyond_five_hundred(name, kind, adapter):
    """The rounding error of the sampler is bounded by that of the learner (autocast against
    float32).

    Two rounding errors of the same size differ by at most their sum, and the largest of some
    hundred tokens in a run may be twice that of another run: the bound is four times the learner's
    error. Medians are steadier: the bound is twice. In models with a router, rounding may change
    the choice of experts, which moves single tokens by any amount, so only the median is compared.
    Frequencies rounded to bfloat16 are wrong by more than a nat at these positions.
    """
    model = build(name)
    if adapter:
        skipped = {"lm_head", "embed_out", "in_proj", "out_proj", "gate", "router"}
        skipped |= {"x_proj", "dt_proj"}
        layers = [
            n
            for n, m in model.named_modules()
            if isinstance(m, torch.nn.Linear) and n.split(".")[-1] not in skipped
        ]
        model = add_lora(model, layers or ["c_attn", "in_proj"][: 1 if name == "gpt2" else 2])
    tokens = random_prompts([760], VOCAB)[0]
    exact, learner = (autocast_logprobs(model, tokens, low=low) for low in (False, True))
    noise = float((learner - exact).abs().max())
    middle = float((learner - exact)[500:].abs().median())
    assert 1e-3 < noise and middle < 0.05
    most = 4 * noise if name not in ("gpt_oss", "qwen3_moe", "deepseek_v3") else float("inf")
    decoder = make_decoder(model, dtype=torch.bfloat16, kind=kind)
    scored = torch.tensor(score_sequences(decoder, [tokens])[0][1:])
    decoded = decoded_logprobs(decoder, tokens[:740], tokens[740:])
    for expected in (learner, exact):
        assert float((scored - expected).abs().max()) < most
        assert float((scored - expected)[500:].abs().median()) < 2 * middle
        assert float((decoded - expected[739:]).abs().max()) < most
        assert float((decoded - expected[739:]).abs().median()) < 4 * middle  # of twenty


def test_only_matrices_are_cast():
    """Frequencies, norms, biases, the parameters of a recurrence and adapters stay in float32;
    linear layers and experts are cast.
    """
    model = add_lora(
        build("granitemoehybrid", num_local_experts=4, num_experts_per_tok=2), ["q_proj"]
    )
    decay = torch.nn.Parameter(torch.ones(1, 1, 4, 1))  # as in Kimi Linear
    model.get_base_model().model.layers[0].register_parameter("A_log_of_heads", decay)
    decoder = decoder_of(model, dtype=torch.bfloat16)
    assert all(buffer.dtype != torch.bfloat16 for buffer in decoder.model.buffers())
    parameters = dict(decoder.model.named_parameters())
    for dtype, parts in (
        (torch.float32, ("lora_A", "lora_B", "layernorm", "A_log", "dt_bias")),
        (torch.bfloat16, ("q_proj.base_layer", "o_proj", "embed_tokens")),
    ):
        for part in parts:
            assert {p.dtype for name, p in parameters.items() if part in name} == {dtype}, part
    experts = [n for n, p in model.named_parameters() if p.dim() == 3 and "conv" not in n]
    assert {parameters[name].dtype for name in experts} == {torch.bfloat16}
    twin = decoder.fork()
    assert twin.plan == decoder.plan
    assert score_sequences(twin, [[3, 4, 5, 6]]) == score_sequences(decoder, [[3, 4, 5, 6]])


class Float32Sizes(TorchDispatchMode):
    """Add up the sizes in bytes of the float32 tensors that operations allocate."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.before = {p.data_ptr() for p in model.parameters()}
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.total += out.nbytes if out.data_ptr() not in self.before else 0
        return out


def test_a_model_is_cast_while_it_is_copied():
    """A whole copy in float32 needs twice the memory of the decoder that results."""
    model = build("gpt2", tie_word_embeddings=True)
    with Float32Sizes(model) as sizes:
        decoder = HFDecoder(model, torch.bfloat16)
    matrices = [p for p in decoder.model.parameters() if p.dtype == torch.bfloat16]
    assert sizes.total < sum(p.nbytes for p in matrices) / 4
    assert decoder.model.lm_head.weight is decoder.model.transformer.wte.weight
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_matrices_that_a_model_wants_in_float32_stay_so(tmp_path, monkeypatch):
    """The same matrices that transformers keeps in float32 when it loads the model in bfloat16."""
    model = build("llama")
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", {"up_proj"})
    monkeypatch.setattr(model, "_keep_in_fp32_modules_strict", {"up_proj"}, raising=False)
    model.save_pretrained(str(tmp_path))
    loaded = type(model).from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    wide = {name for name, p in loaded.named_parameters() if p.dtype == torch.float32}
    cast = decoder_of(model, dtype=torch.bfloat16).model
    dtypes = {name: p.dtype for name, p in cast.named_parameters()}
    assert len(wide) == model.config.num_hidden_layers
    assert {dtypes[name] for name in wide} == {torch.float32}
    assert dtypes["model.layers.0.mlp.down_proj.weight"] == torch.bfloat16


@pytest.mark.parametrize("kind", ["fast", "padded", "equal", "recompute"])
def test_logits_of_a_bfloat16_decoder_are_not_rounded_to_bfloat16(kind):
    """Compare the head's products of the same bfloat16 numbers with float64."""
    model = tiny_model("llama", tie_word_embeddings=True)
    decoder = make_decoder(model, dtype=torch.bfloat16, kind="fast" if kind == "fast" else "hf")
    if kind != "fast":
        decoder.plan = BatchingPlan(rows=kind)
    state = decoder.new_state(100)
    state.reserve(BatchSize(1, 4, 1, 4))
    with torch.inference_mode():
        state.prefill([Prompt([3, 4, 5])])
        state.add_rows(np.array([0]))
        logits = state.decode(np.array([6]))[0]
    assert logits.dtype == torch.float32
    assert float((logits - logits.bfloat16().float()).abs().max()) > 1e-4 * float(
        logits.abs().max()
    )


def test_linear_fp32_is_the_float64_product_over_more_columns_than_one_block():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 64).bfloat16(), torch.randn(5000, 64).bfloat16()
    bias = torch.randn(5000)
    expected = x.double() @ weight.double().t() + bias.double()
    # products of bfloat16 are exact in float32; 64 sums and a bias round by 2^-24 of the
    # accumulated magnitude
    magnitude = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    error = (linear_fp32(x, weight, bias).double() - expected).abs()
    assert bool((error <= 66 * 2.0**-24 * magnitude).all())


def test_a_step_of_the_trial_feels_windows_that_are_longer_than_it():
    """The trial shortens the windows in its copy of the model, so that a few tokens cross them."""
    trial, whole = (
        HFDecoder.sharing_weights_of(build("mistral", sliding_window=512)) for _ in range(2)
    )
    verify_decoder._shorten_windows(trial.model)
    rows = verify_decoder._probe_rows(trial)
    near, far = (verify_decoder._reference_logits(decoder, rows) for decoder in (trial, whole))
    assert float((near[1] - far[1]).abs().max()) > 1e-2
