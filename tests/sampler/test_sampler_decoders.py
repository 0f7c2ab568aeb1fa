"""Test the decoders: the fast and the HF decoder give the logits of the model, versions are
independent, and adapters stay unmerged.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    VOCAB,
    add_lora,
    check_logprobs,
    make_request,
    one_thread,
    paged_engine,
    random_prompts,
    run_requests,
    tiny_model,
)
from torch import nn

from rl.errors import UserError
from rl.models import add_value_head, load_model
from rl.sampler import (
    Decoder,
    Engine,
    contiguous_state,
    cpu_kernels,
    expert_layers,
    make_decoder,
    prefix_attention,
    score_sequences,
)
from rl.sampler.decode_state import BatchSize, Prompt, compact_slots
from rl.sampler.decoder import batch_prompts
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.layer_specs import LAYER_SPECS


def make_rope(kind: str, factor: float = 2.0, **more) -> dict:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": factor, **more}


class NamedParameter(nn.Parameter):
    """A parameter that knows more than its numbers, as quantized ones do."""


def test_the_generic_decoder_keeps_the_types_of_parameters():
    model = tiny_model("qwen3")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = NamedParameter(layer.weight.detach())
    weight = HFDecoder(model, torch.bfloat16).model.model.layers[0].mlp.up_proj.weight
    assert type(weight) is NamedParameter and weight.dtype == torch.bfloat16
    assert torch.equal(weight, layer.weight.bfloat16())


LLAMA3_ROPE = make_rope(
    "llama3", 4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
GEMMA2_UNCAPPED = {
    "query_pre_attn_scalar": 20, "attn_logit_softcapping": None, "final_logit_softcapping": None
}  # fmt: skip
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
FAMILY = {
    "qwen3": ("qwen3", {}),
    "qwen3, untied, no grouped heads": (
        "qwen3",
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
    "qwen3, one key head": ("qwen3", {"num_key_value_heads": 1, "attention_bias": True}),
    "qwen2 (bias on q, k, v)": ("qwen2", {}),
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2, yarn": (
        "qwen2",
        {"rope_parameters": make_rope("yarn", original_max_position_embeddings=32)},
    ),
    "llama, linear rope": ("llama", {"rope_parameters": make_rope("linear")}),
    "mistral": ("mistral", {}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": True}),
    "hyperclovax": ("hyperclovax", {}),
    "hyperclovax without norms of outputs": ("hyperclovax", {"use_post_norm": False}),
    "olmo2": ("olmo2", {}),
    "olmo2, one key head, biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "smollm3, no rotation at all": ("smollm3", {"no_rope_layers": [0, 0]}),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "qwen2, window": ("qwen2", {**QWEN_WINDOW, "max_window_layers": 1}),
    "phi3, window": ("phi3", {"sliding_window": 5}),
    "gemma2": ("gemma2", {}),
    "gemma2, other scale, no caps": ("gemma2", GEMMA2_UNCAPPED),
    "gemma3": ("gemma3_text", {}),
    "gemma3, window of one position": ("gemma3_text", {"sliding_window": 1}),
    "vaultgemma": ("vaultgemma", {}),
    "olmo3": ("olmo3", {}),
    "exaone4": ("exaone4", {}),
    "cwm": ("cwm", {}),
    "ministral": ("ministral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3_moe, every second layer, window": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, **QWEN_WINDOW},
    ),
    "qwen3_moe, all experts": ("qwen3_moe", {"num_experts_per_tok": 6}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, a dense layer, window": (
        "qwen2_moe",
        {"mlp_only_layers": [0], "norm_topk_prob": True, **QWEN_WINDOW, "max_window_layers": 1},
    ),
    "mixtral": ("mixtral", {"sliding_window": 8}),
    "olmoe": ("olmoe", {}),
    "olmoe, normalized, one key head": (
        "olmoe",
        {"norm_topk_prob": True, "num_key_value_heads": 1},
    ),
    "granitemoe": ("granitemoe", {}),
    "flex_olmo": ("flex_olmo", {}),
}


@torch.inference_mode()
def teacher_forced(
    decoder: Decoder, prompts: list[list[int]], responses: list[list[list[int]]]
) -> list[torch.Tensor]:
    """Return the logits of every token of every response, through prefill and cached decoding. A
    row is removed when its response ends.

    `responses` is indexed [prompt][sample]. The result has the same order, each item [tokens, V].
    """
    state = decoder.new_state(10_000)
    flat = [response for group in responses for response in group]
    owner = np.repeat(np.arange(len(prompts)), [len(group) for group in responses])
    state.reserve(BatchSize(len(prompts), max(map(len, prompts)), len(flat), max(map(len, flat))))
    first = state.prefill([Prompt(prompt) for prompt in prompts])
    state.add_rows(owner)
    logits = [[first[prompt]] for prompt in owner]
    rows, step = np.arange(len(flat)), 0
    while True:
        keep = np.array([len(flat[i]) > step + 1 for i in rows])
        source = compact_slots(keep)
        used = np.zeros(len(state.prompt_lengths), bool)
        used[state.prompt_of_row[source]] = True
        state.retain(source, compact_slots(used))
        rows = rows[source]
        if not len(rows):
            return [torch.stack(row) for row in logits]
        for i, row in zip(rows, state.decode(np.array([flat[i][step] for i in rows])), strict=True):
            logits[i].append(row)
        step += 1


def plain_logits(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]


def check_responses(decoder: Decoder, model, prompts, responses, tolerance: float) -> None:
    """Compare the logits of each response with a plain forward."""
    got = iter(teacher_forced(decoder, prompts, responses))
    for prompt, group in zip(prompts, responses, strict=True):
        for response in group:
            expected = plain_logits(model, prompt, response)
            assert expected.abs().max() > 0.5  # the logits are not all small
            bound = tolerance * max(1.0, expected.abs().max().item())
            assert (next(got) - expected).abs().max() < bound


def check_against_model(decoder: Decoder, model, tolerance: float = 1e-5) -> None:
    """Check ragged prompts, groups of unequal size and responses of unequal length."""
    generator = torch.Generator().manual_seed(4)
    responses = [
        [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
        for lengths in ([5, 1, 8, 2], [6], [3, 12], [12, 1, 4])
    ]
    check_responses(decoder, model, random_prompts([9, 3, 30, 3]), responses, tolerance)


@pytest.fixture
def torch_path(monkeypatch):
    """Use the fast decoder as on a GPU, or on a CPU without a compiler."""
    monkeypatch.setattr(cpu_kernels, "load_cpu_kernels", lambda: None)


def test_every_family_has_a_case():
    cases = {type(tiny_model(kind, **changes)).__name__ for kind, changes in FAMILY.values()}
    assert not set(LAYER_SPECS) - cases, "add them to tests/sampler_models.py and to FAMILY"


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", FAMILY)
def test_fast_decoder_equals_the_model(name, kernels, monkeypatch):
    if not kernels:  # as on a GPU, or on a CPU without a compiler
        monkeypatch.setattr(cpu_kernels, "load_cpu_kernels", lambda: None)
    kind, changes = FAMILY[name]
    model = tiny_model(kind, **changes)
    decoder = make_decoder(model)
    assert isinstance(decoder, FastDecoder) and (decoder.cpu_kernels is not None) == kernels
    check_against_model(decoder, model)


@pytest.mark.parametrize("head_dim", [10, 32, 64, 128])
def test_head_widths_that_the_cpu_kernels_know_and_one_they_do_not(head_dim):
    model = tiny_model("qwen3", head_dim=head_dim)
    check_against_model(make_decoder(model), model, tolerance=2e-5)


def test_one_sample_each_reads_prompt_and_response_in_one_go(torch_path):
    """A single row per prompt uses the joint layout. Covers equal and unequal prompt lengths,
    before and after rows are removed.
    """
    model = tiny_model("qwen3")
    responses = [random_prompts([n], seed=n) for n in (9, 2, 5)]
    for lengths in ([6, 6, 6], [4, 11, 7]):
        check_responses(make_decoder(model), model, random_prompts(lengths), responses, 2e-5)


@pytest.mark.parametrize("slack", [0, 40])
def test_prompts_cut_into_bands_equal_the_model(torch_path, monkeypatch, slack):
    """Lengths and group sizes differ widely: without slack the prompts fall into several bands."""
    monkeypatch.setattr(prefix_attention, "_MAX_WASTED_PAIRS", slack)
    made = []
    monkeypatch.setattr(
        contiguous_state,
        "make_bands",
        lambda *args: made.append(prefix_attention.make_bands(*args)) or made[-1],
    )
    model = tiny_model("qwen3")
    check_against_model(make_decoder(model), model)
    prompts, groups = random_prompts([3, 60, 4, 5, 50]), [1, 9, 1, 2, 1]
    responses = [
        [random_prompts([1 + (i + j) % 6], seed=i)[0] for j in range(n)]
        for i, n in enumerate(groups)
    ]
    check_responses(make_decoder(model), model, prompts, responses, 2e-5)
    assert max(map(len, made)) >= 3


def test_bands_hold_every_row_once_in_grids_that_are_not_much_too_large():
    generator = np.random.default_rng(1)
    slack, most = prefix_attention._MAX_WASTED_PAIRS, prefix_attention._MAX_BANDS
    for _ in range(30):
        prompts = int(generator.integers(1, 40))
        lengths = np.sort(generator.integers(1, 3000, prompts))
        owner = np.repeat(np.arange(prompts), generator.choice([0, 1, 2, 8, 200], prompts))
        owner = generator.permutation(np.append(owner, 0))
        bands = prefix_attention.make_bands(owner, lengths, torch.device("cpu"))
        every = torch.arange(len(owner))
        rows = torch.cat([every if band.rows_n is None else band.rows_n for band in bands])
        assert sorted(rows.tolist()) == every.tolist()
        assert len(bands) <= most
        cells = sum(band.prompts * band.width * band.length for band in bands)
        assert cells <= prompts * np.bincount(owner).max() * lengths.max()  # one grid
        if len(bands) < most // 2:  # the slack was not raised
            assert cells <= 2 * lengths[owner].sum() + slack * len(bands)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gpt2", {}, "GPT2LMHeadModel"),
        ("llama", {"sliding_window": 8}, "sliding-window"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("qwen3", {"logits_scaling": 2.0}, "logits_scaling"),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("olmoe", {"clip_qkv": 3.0}, "clip_qkv"),
        ("llama", {"rope_parameters": make_rope("dynamic")}, "dynamic"),
    ],
)
def test_auto_falls_back_to_the_models_own_forward_and_fast_says_why(kind, changes, reason):
    model = tiny_model(kind, **changes)
    assert isinstance(make_decoder(model), HFDecoder)
    with pytest.raises(UserError, match=f"{reason}.*: set sampler to auto or hf"):
        make_decoder(model, kind="fast")


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "olmoe", "granitemoe"])
def test_half_precision_may_change_the_choice_of_experts_but_not_the_router(kind, monkeypatch):
    model = tiny_model(kind)
    decoder = make_decoder(model, dtype=torch.bfloat16, kind="fast")
    assert isinstance(decoder, FastDecoder)
    real = expert_layers.ExpertLayer.route

    def wrong(layer, x_NE):  # planted fault: the experts of another token
        return real(layer, x_NE.roll(1, 0) * -1)

    monkeypatch.setattr(expert_layers.ExpertLayer, "route", wrong)
    with pytest.raises(ValueError, match="does not reproduce the logits"):
        make_decoder(model, dtype=torch.bfloat16, kind="fast")


def test_adapters_on_experts_take_the_models_own_forward():
    model = tiny_model("qwen3_moe")
    targets = {"target_parameters": ["mlp.experts.gate_up_proj"], "lora_dropout": 0.0}
    adapted = add_lora(model, ["q_proj"], **targets)
    assert any("experts" in name and "lora" in name for name, _ in adapted.named_parameters())
    decoder = make_decoder(adapted)
    assert isinstance(decoder, HFDecoder)
    check_against_model(decoder, adapted)
    with pytest.raises(ValueError, match="experts of type ParamWrapper"):
        make_decoder(adapted, kind="fast")


@pytest.mark.parametrize("shared", [False, True])
def test_adapters_around_experts_stay_with_the_fast_decoder(shared):
    targets = ["q_proj", "v_proj", "o_proj"]
    targets += ["gate_proj", "down_proj", "shared_expert_gate"] if shared else []
    model = add_lora(tiny_model("qwen2_moe" if shared else "qwen3_moe"), targets)
    decoder = make_decoder(model)
    assert isinstance(decoder, FastDecoder)
    check_against_model(decoder, model, 2e-5)


def test_a_value_head_leaves_a_model_to_the_fast_decoder():
    loaded = dataclasses.replace(load_model("tiny:addition"), model=tiny_model("qwen3"))
    model = add_value_head(loaded).model
    decoder = make_decoder(model)
    assert isinstance(decoder, FastDecoder)
    check_against_model(decoder, model)


# ----------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_training_the_model_does_not_change_the_decoder_and_load_does(kind):
    model = tiny_model("qwen3")
    prompts = random_prompts([12])
    decoder = make_decoder(model, kind=kind)
    before = score_sequences(decoder, prompts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert score_sequences(decoder, prompts) == before
    old = decoder.fork()
    decoder.load_((name, parameter) for name, parameter in model.named_parameters())
    assert score_sequences(old, prompts) == before != score_sequences(decoder, prompts)
    check_against_model(decoder, model)


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_load_takes_any_dtype_and_names_what_is_wrong(kind):
    model = tiny_model("qwen2")
    decoder = make_decoder(model, kind=kind)
    half = {
        name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()
    }
    decoder.load_(half.items())
    rounded = tiny_model("qwen2")
    rounded.load_state_dict(half, strict=False)
    check_against_model(decoder, rounded)
    with pytest.raises(ValueError, match=r"layers\.9"):
        decoder.load_([("model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=r"norm\.weight.*\(32,\).*\(31,\)"):
        decoder.load_([("model.norm.weight", torch.zeros(31))])


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_a_shell_takes_its_weights_before_it_is_tried_out(kind):
    """The parameters of the model are placeholders (sharded over ranks); all weights come from the
    `weights` argument.
    """
    model = tiny_model("qwen3")
    shell = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in shell.parameters():
            parameter.fill_(float("nan"))
    decoder = make_decoder(
        shell, kind=kind, weights=((name, p.detach()) for name, p in model.named_parameters())
    )
    check_against_model(decoder, model)


# ----------------------------------------------------------------------------------------- adapters

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("kind", ["fast", "hf"])
@pytest.mark.parametrize(
    ("targets", "tied", "changes"),
    [
        (["q_proj", "v_proj"], False, {}),
        (LINEAR, False, {"use_rslora": True}),
        ([*LINEAR, "lm_head"], False, {}),
        (["embed_tokens", "v_proj", "gate_proj"], False, {}),
        (["q_proj", "lm_head"], True, {}),
    ],
)
def test_adapters_equal_the_peft_models_own_forward(kind, targets, tied, changes):
    model = add_lora(tiny_model("qwen3", tie_word_embeddings=tied), targets, **changes)
    check_against_model(make_decoder(model, kind=kind), model, tolerance=2e-5)


def test_adapters_are_not_merged_into_low_precision_weights():
    """The effect of an adapter early in training is far below bf16's resolution of the base
    weights. Unmerged, it is preserved.
    """
    model = add_lora(tiny_model("qwen3"), LINEAR)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-3)
    decoder = make_decoder(model, dtype=torch.bfloat16, kind="fast")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert decoder.weights.view(name).dtype == torch.float32
            assert torch.equal(decoder.weights.view(name), parameter)
        elif name.endswith("base_layer.weight"):
            assert torch.equal(decoder.weights.view(name), parameter.bfloat16())


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_fork_shares_frozen_weights_and_copies_adapters(kind):
    model = add_lora(tiny_model("qwen3"), LINEAR)
    prompts = random_prompts([12])
    first = make_decoder(model, kind=kind)
    before = score_sequences(first, prompts)
    second = first.fork()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    # includes frozen weights, unchanged
    second.load_((name, parameter) for name, parameter in model.named_parameters())
    assert score_sequences(first, prompts) == before
    check_against_model(second, model, tolerance=2e-5)
    if kind == "fast":
        mine, other = first.weights.buffers, second.weights.buffers
        assert {k for k in mine if mine[k] is other[k]} == {k for k in mine if "lora" not in k}
    name = "base_model.model.model.layers.0.mlp.down_proj.base_layer.weight"
    frozen = dict(model.named_parameters())[name].detach()
    with pytest.raises(ValueError, match="frozen and shared"):
        second.load_([(name, frozen + 1)])
    assert score_sequences(first, prompts) == before


def test_a_fork_loads_a_tied_matrix_under_both_of_its_names():
    model = tiny_model("gpt2").requires_grad_(False)
    model.transformer.wte.weight.requires_grad_(True)
    fork = make_decoder(model).fork()
    for name in ("transformer.wte.weight", "lm_head.weight"):
        with torch.no_grad():
            model.transformer.wte.weight.mul_(0.5)
        fork.load_([(name, model.transformer.wte.weight)])
        check_against_model(fork, model)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_that_the_fast_decoder_does_not_know_run_in_peft(changes):
    model = add_lora(tiny_model("qwen3", tie_word_embeddings=False), ["q_proj"], **changes)
    decoder = make_decoder(model)
    assert isinstance(decoder, HFDecoder)
    check_against_model(decoder, model, tolerance=2e-5)


# -------------------------------------------------------------------------------------- bookkeeping


def test_compaction_moves_the_fewest_rows():
    generator = np.random.default_rng(0)
    for _ in range(50):
        keep = generator.random(generator.integers(1, 12)) < 0.6
        source = compact_slots(keep)
        assert sorted(source) == np.flatnonzero(keep).tolist()
        stay = [i for i in range(keep.sum()) if keep[i]]
        assert all(source[i] == i for i in stay)


def test_prompt_batches_hold_every_prompt_once_within_the_bound():
    lengths = [1, 500, 480, 30, 29, 7, 500, 3, 120]
    batches = batch_prompts(lengths, 1000)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert longest * len(batch) <= 1000
        assert all(lengths[i] * 4 >= longest * 3 or lengths[i] >= longest - 16 for i in batch)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_last_layer_goes_on_with_last_positions_alone_where_nobody_reads_the_others(adapters):
    model = tiny_model("qwen3")
    model = add_lora(model, ["q_proj", "o_proj", "down_proj"]) if adapters else model
    decoder, prompts = make_decoder(model), random_prompts([9, 3, 9])
    seen, last, shown = list[int](), decoder.layers[-1], list[torch.Tensor]()
    results, plain = [], type(last.down)._product

    def product(first, x):
        if first is last.down:
            seen.append(x.shape[:-1].numel())
        return plain(first, x)

    for reader in (None, lambda start, logits: shown.append(logits)):
        state = decoder.new_state(1000)
        state.reserve(BatchSize(3, 9, 3, 2))
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(type(last.down), "_product", product)
            readers = [None, reader, None]
            logits = state.prefill(list(map(Prompt, prompts, readers)))
        results.append((logits, state.prompt_kv[-1].clone()))
    assert seen == [3, 27] and len(shown) == 1 and shown[0].shape == (3, VOCAB)
    for alone, all_positions in zip(*results, strict=True):
        torch.testing.assert_close(alone, all_positions, rtol=1e-5, atol=1e-5)
    for logits, prompt in zip(results[0][0], prompts, strict=True):
        expected = plain_logits(model, prompt[:-1], [prompt[-1], 0])[-1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


def test_room_for_keys_and_values_is_zero_and_aligned():
    for shape, dtype in (
        ((2, 3, 4, 5, 6), torch.float32),
        ((2, 0, 4, 0, 6), torch.float32),
        ((7, 3), torch.bfloat16),
    ):
        room = contiguous_state.lazy_zeros(shape, dtype)
        assert room.shape == shape
        assert room.dtype == dtype
        assert not room.any()
        assert not room.numel() or room.data_ptr() % 64 == 0
        room.fill_(1)


@pytest.mark.parametrize("name", ["qwen3", "mistral, window", "gemma2", "gemma3", "olmo3"])
@pytest.mark.parametrize("path", ["kernels", "torch", "pages"])
def test_a_conversation_that_goes_on_equals_the_model(name, path, monkeypatch):
    """Turns of several lengths are read after cached positions, with windows that begin in the
    cached turns, in the new turn, or in neither. All full chunks before the last token of an answer
    are reused.
    """
    attended, attend = [], prefix_attention.SuffixBatch.attend
    monkeypatch.setattr(
        prefix_attention.SuffixBatch, "attend", lambda *args: attended.append(args) or attend(*args)
    )
    kind, changes = FAMILY[name]
    model = tiny_model(kind, **changes)
    decoder = make_decoder(model, kind="fast")
    if path == "torch":
        decoder.cpu_kernels = None
    engine = paged_engine(decoder, page=4) if path == "pages" else Engine(decoder)
    texts, cached = random_prompts([3, 20, 9]), 0
    for turn in range(3):
        requests = [
            make_request(text, max_tokens=6, problem=i, seed=turn, conversation=f"{i}")
            for i, text in enumerate(texts)
        ]
        for i, response in enumerate(run_requests(engine, requests)):
            (sequence,) = response.sequences
            check_logprobs(model, texts[i], sequence, atol=2e-5)
            chunk, fed = engine._state.chunk_size, len(texts[i]) + len(sequence.tokens) - 1
            cached += fed // chunk * chunk if turn < 2 else 0
            added = random_prompts([1 + 4 * turn], seed=turn)[0]
            texts[i] = [*texts[i], *sequence.tokens, *added]
    assert len(attended) == 2 * len(decoder.layers)  # all turns but the first
    assert engine.counters.prefix_cached_tokens == cached > 0
