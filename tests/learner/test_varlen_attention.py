"""Test attention over sequences of a row (rl.learner.varlen_attention) against masks, brute force in
float64, and separate sequences. The kernel itself needs a GPU: its twin is `attend_by_loop`, and
its graph runs on tensors without values.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_worker, random_datums
from test_architectures import make_fake_accelerator
from test_probe import model_of
from torch._subclasses.fake_tensor import FakeTensorMode

from rl.learner import Learner, LearnerSettings
from rl.learner.layout_probe import find_layout_faults
from rl.learner.packing import KEYS_PER_POSITION, collate, make_units
from rl.learner.varlen_attention import (
    HeadShape,
    VarlenAttention,
    attend_by_kernel,
    attend_by_loop,
    gather_keys,
    lay_out_row,
    make_varlen_attention,
)
from rl.losses import get_loss
from rl.models import LoadedModel, skip_packing_search
from rl.types import Datum, ModelInput


def draw_units(rng: np.random.Generator) -> list[tuple[int, list[np.ndarray]]]:
    """Return units of random sizes; some answers have no token after the shared prompt."""
    units = []
    for _ in range(rng.integers(1, 4)):
        answers = int(rng.integers(1, 4))
        prompt = rng.integers(0, 50, rng.integers(1, 6)) if answers > 1 else np.zeros(0, int)
        sizes = rng.integers(0 if answers > 1 else 1, 6, answers)
        units.append(
            (len(prompt), [np.concatenate([prompt, rng.integers(0, 50, n)]) for n in sizes])
        )
    return units


def test_a_row_by_hand():
    units = [(2, [np.array(t) for t in ([5, 6, 7], [5, 6, 8, 9], [5, 6])]), (0, [np.array([4])])]
    row = lay_out_row(units)
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert row.position_ids.tolist() == [[0, 1, 2, 2, 3, 0]]
    assert row.token_index.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5]
    bounds = row.make_bounds(torch.from_numpy)
    assert bounds.query_lengths == [2, 1, 2, 1] and bounds.key_lengths == [2, 3, 4, 1]
    assert bounds.cu_queries.tolist() == [0, 2, 3, 5, 6]
    assert bounds.cu_keys.tolist() == [0, 2, 5, 9, 10]
    assert bounds.key_index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_attends_as_in_its_own_sequence(seed, window):
    """The reference computes each sequence's softmax in float64, a query at a time."""
    rng = np.random.default_rng(seed)
    units = draw_units(rng)
    row = lay_out_row(units)
    bounds = row.make_bounds(torch.from_numpy)
    size, heads, key_heads, width = row.input_ids.size, 4, 2, 3
    query, key, value = (
        torch.from_numpy(rng.standard_normal((size, n, width))).requires_grad_()
        for n in (heads, key_heads, key_heads)
    )
    keys, values = gather_keys(key, bounds), gather_keys(value, bounds)
    out = attend_by_loop(query, keys, values, bounds, 0.7, window)
    # positions in the row of each whole sequence, from the datums' tokens
    order = torch.arange(size) if row.token_index is None else torch.from_numpy(row.token_index)
    expected = torch.zeros_like(out)
    done = set()
    for positions in order.split([len(s) for _, sequences in units for s in sequences]):
        for i, position in enumerate(positions.tolist()):
            seen = positions[max(0, i + 1 - (window or size)) : i + 1]
            if position in done:  # a shared prompt
                continue
            done.add(position)
            for head in range(heads):
                scores = key[seen, head // 2] @ query[position, head] * 0.7
                expected[position, head] = scores.softmax(0) @ value[seen, head // 2]
    assert len(done) == size
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.from_numpy(rng.standard_normal(out.shape))
    gradients = torch.autograd.grad((out * weights).sum(), (query, key, value))
    references = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-12)


def grouped_datums(groups: int = 4, size: int = 3) -> list[Datum]:
    """Return groups of answers to the same prompt, with a datum of another prompt after each."""
    rng = np.random.default_rng(1)
    datums: list[Datum] = []
    for g in range(groups):
        prompt = rng.integers(0, VOCABULARY, 4 + g).tolist()
        for _ in range(size):
            n = int(rng.integers(1, 6))
            tokens = prompt + rng.integers(0, VOCABULARY, n - 1).tolist()
            mask = np.array([0.0] * (len(prompt) - 1) + [1.0] * n, np.float32)
            fields = {
                "target_tokens": rng.integers(0, VOCABULARY, len(tokens)),
                "logprobs": mask * -2.5,
                "advantages": mask * rng.standard_normal(len(tokens)),
                "mask": mask,
            }
            datums.append(Datum(ModelInput.from_ints(tokens), fields))
        datums += random_datums(1, seed=g)
    return datums


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_a_learner_gives_the_numbers_of_padded_rows(layout, checkpointing):
    datums = grouped_datums()
    results = []
    for varlen, name in ((False, "padded"), (True, layout)):
        worker = make_worker(
            layout=name, varlen=varlen, token_budget=40, gradient_checkpointing=checkpointing
        )
        learner = worker.learners[0]
        assert (learner.varlen is not None) is varlen
        outputs, metrics = learner.run(
            datums, get_loss("ppo"), {}, temperature=0.9, divisor=3.0, backward=True
        )
        gradient = torch.cat([p.grad.flatten() for p in learner.trainable.values()])
        results.append((outputs, metrics, gradient, learner.num_micro_batches))
    (expected, sums, gradient, padded_count), (outputs, found, other, count) = results
    for i in range(len(datums)):
        np.testing.assert_allclose(
            outputs[i]["logprobs"], expected[i]["logprobs"], rtol=2e-5, atol=2e-6
        )
    assert found["loss:sum"] == pytest.approx(sums["loss:sum"], rel=1e-5, abs=1e-6)
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()
    assert count < padded_count  # no padding, and a group's prompt once


def test_a_row_needs_no_mask_and_holds_no_position_twice():
    datums = grouped_datums()
    units = make_units(datums, "shared", 10**6)
    batch = collate(datums, units, "shared", varlen=True)
    assert batch.attention_mask is None
    prompts = sum(3 * (4 + g) for g in range(4)) - sum(4 + g for g in range(4))
    assert batch.input_ids.shape == (1, sum(d.model_input.length for d in datums) - prompts)


FAMILIES = (
    "llama",
    "jetmoe",
    "deepseek_v3",
    "gpt2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral",
    "qwen3_moe",
    "phi",
    "gpt_neox",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layouts_of_a_family_are_exact(name):
    """What a mask makes exact is exact without one, windows too."""
    model = model_of(name)
    if model.config._attn_implementation != "sdpa":
        pytest.skip("its attention is never replaced")
    layouts = ("padded", "packed", "shared")
    varlen = VarlenAttention()
    masked, faults = (find_layout_faults(model, layouts, varlen=x) for x in (None, varlen))
    assert faults.keys() <= masked.keys() and varlen.shapes


def test_attention_that_cannot_be_replaced_keeps_its_mask(monkeypatch):
    """The probe sees that sequences of a row attend to each other, and the learner uses masks."""
    unchanged = lambda *arguments: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(VarlenAttention, "use", unchanged)
    learner = make_worker(varlen=True).learners[0]
    assert learner.varlen is None and learner.layouts == {"padded", "shared"}


def test_other_models_keep_their_attention():
    """A reward may run a model in a thread while the learner computes a micro-batch."""
    model, other = model_of(), model_of("qwen3")
    batch = collate(grouped_datums(), [[0, 1, 2]], "shared", varlen=True)
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = {"input_ids": torch.arange(10).view(2, 5), "use_cache": False}
    calls = ({**ids, "attention_mask": padding}, ids)  # the second searches for sequences
    with torch.no_grad():
        expected = [other(**inputs).logits for inputs in calls]
        with VarlenAttention().use(model, batch.bounds):
            with skip_packing_search(torch.zeros(1, batch.input_ids.shape[1], dtype=torch.int64)):
                logits = [other(**inputs).logits for inputs in calls]
    assert all(map(torch.equal, logits, expected))


def test_keys_are_bounded_by_the_token_budget():
    """64 short answers to a long prompt: a row of 1,128 positions would gather 65,128 keys."""
    tokens = [1] * 1000
    fields = {"target_tokens": [1] * 1002, "mask": [0.0] * 999 + [1.0] * 3}
    datums = [Datum(ModelInput.from_ints([*tokens, 1, 1]), fields) for _ in range(64)]
    units = make_units(datums, "shared", 2000, varlen=True)
    assert [len(unit) for unit in units] == [6] * 10 + [4]
    batch = collate(datums, units[:1], "shared", varlen=True)
    assert len(batch.bounds.key_index) == 1000 + 6 * 1002 <= KEYS_PER_POSITION * 2000


def test_the_kernel_is_called_as_torch_declares_it():
    """The operators run on tensors without values, forward and backward."""
    rng = np.random.default_rng(0)
    with FakeTensorMode():
        row = lay_out_row(draw_units(rng))
        bounds = row.make_bounds(lambda array: torch.empty(array.shape, dtype=torch.int32))
        query = torch.empty(row.input_ids.size, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        key, value = (
            torch.empty(sum(bounds.key_lengths), 2, 16, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        for window in (None, 4):
            out = attend_by_kernel(query, key, value, bounds, 0.5, window)
            assert out.shape == query.shape
            gradients = torch.autograd.grad(out.sum(), (query, key, value))
            assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]


@pytest.mark.parametrize("value_width", [16, 8])
def test_the_trial_compares_outputs_and_gradients(value_width):
    (loop,) = HeadShape(4, 16, 2, value_width)(False, torch.device("cpu"), torch.float32)
    positions = 200 + 1 + 72 + 130  # a prompt of 5 once, and one answer that adds nothing
    assert loop.numel() == positions * (4 * value_width + 4 * 16 + 2 * 16 + 2 * value_width)
    assert loop.isfinite().all()


def test_the_gradient_of_a_shared_prompt_is_rounded_once():
    """64 answers share a prompt: bfloat16 sums would lose a percent."""
    rng = np.random.default_rng(0)
    bounds = lay_out_row([(3, [np.arange(4)] * 64)]).make_bounds(torch.from_numpy)
    x = torch.zeros(3 + 64, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.from_numpy(rng.standard_normal((sum(bounds.key_lengths), 2, 8)))
    keys = gather_keys(x, bounds)
    (gradient,) = torch.autograd.grad(keys, x, weights.to(keys))
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for row, position in enumerate(bounds.key_index.tolist()):
        expected[position] += weights.to(keys)[row].double()
    torch.testing.assert_close(gradient.double(), expected, rtol=2**-8, atol=1e-6)


def test_a_cpu_uses_masks():
    learner = make_worker().learners[0]
    assert learner.varlen is None and learner.layouts == {"padded", "shared"}


@pytest.mark.parametrize(
    ("precision", "attention", "requested", "takes_lengths"),
    [
        ("bf16", "sdpa", None, True),
        ("fp16", "sdpa", None, True),
        ("no", "sdpa", None, False),  # the model's float32
        ("bf16", "eager", None, False),
        ("bf16", "sdpa", False, False),
    ],
)
def test_a_gpu_takes_lengths_in_half_precision(precision, attention, requested, takes_lengths):
    device = torch.device("cuda", 0)
    accelerator = SimpleNamespace(device=device, mixed_precision=precision)
    model = model_of("llama")
    model.set_attn_implementation(attention)
    varlen = make_varlen_attention(model, accelerator, requested)
    assert (varlen is not None) is takes_lengths
    if varlen is not None:  # without a function of its own: a trial chooses the kernel
        assert (varlen.attend, varlen.device) == (None, device)


def test_fp32_takes_no_flash_attention():
    model = model_of("llama")
    model.config._attn_implementation = "flash_attention_2"  # as if loaded beside flash_attn
    accelerator = make_fake_accelerator()
    accelerator.mixed_precision = "no"
    learner = Learner(LoadedModel(model, None, "tiny", ()), accelerator, LearnerSettings())
    assert learner.model.config._attn_implementation == "sdpa"
    assert learner.layouts == {"padded", "shared"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_the_kernel_agrees_with_the_loop_on_a_gpu(name):
    varlen = VarlenAttention(attend_by_loop, torch.device("cuda"))
    find_layout_faults(model_of(name), ["shared"], varlen=varlen)
    assert varlen.shapes and varlen.kernel_agrees()
