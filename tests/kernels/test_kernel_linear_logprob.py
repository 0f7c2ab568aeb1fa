"""Test linear_logprob off CUDA: against float64, plus a test for each defect known from other
implementations.
"""

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_references import linear_logprob_reference

from kernels import linear_logprob
from kernels.common import check_same_device
from kernels.linear_logprob import backward_op, forward_op

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
RECOMPUTE, SAVED = 0, 1 << 30


def make_problem(T, D, V, seed=0, bias=False, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g, dtype=torch.float64)
    w = torch.randn(V, D, generator=g, dtype=torch.float64) * scale / D**0.5
    y = torch.randint(0, V, (T,), generator=g)
    y[0] = V - 1
    upstream = torch.randn(3, T, generator=g, dtype=torch.float64)
    upstream[:, torch.rand(T, generator=g) < 0.3] = 0.0  # signed and sparse
    return x, w, y, torch.randn(V, generator=g, dtype=torch.float64) if bias else None, upstream


def run(function, dtype, x, w, y, bias, upstream, used=(0, 1, 2), frozen=False, **settings):
    """Return outputs and gradients of `function`, all in float64."""
    x, w, bias = (None if t is None else t.detach().to(dtype, copy=True) for t in (x, w, bias))
    for tensor, learns in ((x, True), (w, not frozen), (bias, not frozen)):
        if tensor is not None:
            tensor.requires_grad_(learns)
    outputs = function(x, w, y, bias, **settings)
    total = sum((outputs[i].double() * upstream[i]).sum() for i in used)
    total.backward()
    leaves = [t for t in (x, w, bias) if t is not None and t.requires_grad]
    return [t.detach().double() for t in (*outputs, *(leaf.grad for leaf in leaves))]


def fused(*problem, **settings):
    return run(linear_logprob, torch.float32, *problem, **settings)


def reference(*problem, **settings):
    return run(linear_logprob_reference, torch.float64, *problem, **settings)


def assert_close_to_float64(ours, plain, exact):
    """Check the error rule: at most twice the error of plain torch in the same precision, plus 1e-4
    of the value's size.
    """
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        bound = 2 * (theirs - truth).abs().max() + 1e-4 * max(1.0, float(truth.abs().max()))
        assert (mine - truth).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("T", "D", "V"), [(1, 8, 3), (33, 20, 5003), (70, 100, 1000), (3, 16, 50257)]
)
def test_error_rule(dtype, T, D, V):
    problem = [
        t.to(dtype).double() if t.is_floating_point() else t
        for t in make_problem(T, D, V, bias=True)
    ]
    settings = {"temperature": 0.7, "softcap": 5.0}
    exact = reference(*problem, **settings)
    plain = run(linear_logprob_reference, dtype, *problem, **settings)
    for saved in (RECOMPUTE, SAVED):
        ours = run(linear_logprob, dtype, *problem, saved_bytes=saved, **settings)
        assert_close_to_float64(ours, plain, exact)


@pytest.mark.parametrize("frozen", [False, True])
def test_every_setting_equals_the_definition(frozen):
    outputs = ((0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2))
    choices = itertools.product((1.0, 0.6), (None, 3.0), (False, True), (RECOMPUTE, SAVED), outputs)
    for temperature, softcap, bias, saved, used in choices:
        x, w, y, b, upstream = make_problem(13, 8, 300, bias=bias)
        y[::4] = -100
        settings = {"temperature": temperature, "softcap": softcap}
        exact = reference(x, w, y, b, upstream, used, frozen, **settings)
        ours = fused(x, w, y, b, upstream, used, frozen, saved_bytes=saved, **settings)
        for mine, truth in zip(ours, exact, strict=True):
            torch.testing.assert_close(mine, truth, atol=2e-5, rtol=1e-5)


def test_many_blocks_equal_one(monkeypatch):
    """Blocks of 64 rows and 7 columns give the results of a single block, also for the frozen
    head's running expectation.
    """
    path = sys.modules["kernels.linear_logprob_torch"]
    x, w, y, bias, upstream = problem = make_problem(150, 8, 100, bias=True)

    def both_heads():
        return [
            value
            for frozen in (False, True)
            for value in fused(*problem, frozen=frozen, saved_bytes=0, softcap=2.0)
        ]

    whole = both_heads()
    monkeypatch.setattr(path, "COLUMNS", 7)
    monkeypatch.setattr(path, "BLOCK", 64 * 7)
    for a, b in zip(whole, both_heads(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    # Without an entropy, E_p[W] is used.
    frozen = fused(x, 9 * w, y, bias, upstream, (0,), frozen=True, saved_bytes=0)
    exact = reference(x, 9 * w, y, bias, upstream, (0,), frozen=True)
    torch.testing.assert_close(frozen[3], exact[3], atol=1e-3, rtol=1e-4)  # gradients are up to 20


# --------------------------------------------------------- defects known from other implementations


@pytest.mark.parametrize("saved", [RECOMPUTE, SAVED])
def test_defect_1_no_phantom_columns(saved):
    """V is a block plus 1, and all true logits are far below 0: a phantom column of 0 would
    take all the probability.
    """
    x, w, y, bias, _ = make_problem(4, 8, 2049, bias=True)
    logp, entropy, _ = linear_logprob(
        x.float(), w.float(), y, bias.float() - 500.0, saved_bytes=saved
    )
    expected = linear_logprob_reference(x, w, y, bias)
    assert (logp <= 0).all()
    torch.testing.assert_close(logp.double(), expected[0], atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("offset", [-200.0, 200.0, -5000.0])
def test_defect_2_all_logits_far_from_zero(offset):
    x, w, y, bias, upstream = make_problem(6, 8, 300, bias=True)
    problem = (x, w, y, bias + offset, upstream)
    exact, plain = reference(*problem), run(linear_logprob_reference, torch.float32, *problem)
    for saved in (RECOMPUTE, SAVED):
        assert_close_to_float64(fused(*problem, saved_bytes=saved), plain, exact)


def test_defect_3_inputs_stay_as_they_are_and_nothing_is_autotuned():
    x, w, y, bias, _ = make_problem(9, 8, 300, bias=True)
    x, w, bias = (t.float().requires_grad_() for t in (x, w, bias))
    tensors = (x, w, y, bias)
    before = [t.detach().clone() for t in tensors]
    for saved in (RECOMPUTE, SAVED):
        sum(o.sum() for o in linear_logprob(*tensors, saved_bytes=saved)).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert not [path for path in KERNELS.glob("*.py") if "triton.autotune" in path.read_text()]


@pytest.mark.parametrize("bad", [7, -1, 10**12])
def test_defect_4_a_target_out_of_range_is_named(bad):
    x, w, y, _, _ = make_problem(5, 4, 7)
    y[3] = bad
    for saved in (RECOMPUTE, SAVED):
        with pytest.raises(ValueError, match=rf"target\[3\] is {bad}, outside \[0, 7\)"):
            linear_logprob(x.float(), w.float(), y, saved_bytes=saved)


def test_defect_5_every_upstream_gradient_counts_once():
    """Doubling one token's upstream gradient changes dW by exactly that token's contribution."""
    x, w, y, _, _ = make_problem(6, 8, 50)

    def dw(upstream):
        weight = w.float().requires_grad_()
        linear_logprob(x.float(), weight, y, saved_bytes=0)[0].backward(upstream)
        return weight.grad

    ones, single = torch.ones(6), torch.zeros(6)
    single[2] = 1.0
    assert dw(single).abs().max() > 1e-3
    torch.testing.assert_close(dw(ones + single), dw(ones) + dw(single), atol=1e-6, rtol=1e-5)


def test_defect_6_low_precision_dw_does_not_accumulate_in_low_precision(monkeypatch):
    """64 blocks of rows: a bfloat16 accumulator would be wrong by per cents, a float32 accumulator
    is rounded once.
    """
    monkeypatch.setattr(sys.modules["kernels.linear_logprob_torch"], "BLOCK", 1)
    x, w, y, _, _ = make_problem(4096, 8, 16)
    upstream = torch.ones(3, 4096, dtype=torch.float64)
    x, w = x.bfloat16().double(), w.bfloat16().double()
    exact = reference(x, w, y, None, upstream, (0,))[-1]
    ours = run(linear_logprob, torch.bfloat16, x, w, y, None, upstream, (0,), saved_bytes=0)[-1]
    assert (ours - exact).abs().max() / exact.abs().max() < 2**-8


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("saved", [RECOMPUTE, SAVED])
def test_defect_7_under_torch_compile(frozen, saved):
    problem = make_problem(9, 8, 300, bias=True)
    problem[2][2] = -100
    settings = {"temperature": 0.7, "saved_bytes": saved, "frozen": frozen}
    compiled = torch.compile(linear_logprob, fullgraph=True, backend="aot_eager")
    results = run(compiled, torch.float32, *problem, **settings)
    torch.testing.assert_close(results, fused(*problem, **settings), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_defect_7_under_inductor():
    problem = make_problem(9, 8, 300, bias=True)
    compiled = torch.compile(linear_logprob, fullgraph=True)
    results = run(compiled, torch.float32, *problem, temperature=0.7)
    torch.testing.assert_close(results, fused(*problem, temperature=0.7), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("plan", ["none", "recompute", "saved", "expected"])
def test_opcheck(plan):
    x, w, y, bias, _ = make_problem(5, 4, 40, bias=True)
    grad = plan != "none"
    x = x.float().requires_grad_(grad)
    w = w.float().requires_grad_(grad and plan != "expected")
    bias = bias.float()
    torch.library.opcheck(forward_op, (x, w, y, bias, 0.7, 3.0, -100, True, plan))
    with torch.no_grad():
        outputs = forward_op(x, w, y, bias, 0.7, 3.0, -100, True, plan)
        need = [True, plan not in ("expected", "none"), False]
        upstream = torch.randn(3, 5)
        arguments = (*upstream, x, w, y, bias, *outputs, 0.7, 3.0, -100, plan, need)
        torch.library.opcheck(backward_op, arguments)
        torch.library.opcheck(backward_op, (*arguments, 0, torch.tensor([1, 3])))


def test_defect_8_a_changed_input_is_noticed():
    """Hidden states that were overwritten between forward and backward raise an error instead of
    giving a wrong gradient.
    """
    x, w, y, _, _ = make_problem(5, 4, 40)
    hidden = x.float().requires_grad_() * 1.0
    logp, _, _ = linear_logprob(hidden, w.float(), y, saved_bytes=0)
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_defect_10_zero3_and_fsdp_weights_are_refused():
    class DTensor(torch.Tensor):
        pass

    x, w, y, _, _ = make_problem(5, 4, 40)
    with pytest.raises(ValueError, match="ZeRO-3"):
        linear_logprob(x.float(), torch.empty(0), y)
    with pytest.raises(TypeError, match="full_tensor"):
        linear_logprob(x.float(), w.float().as_subclass(DTensor), y)


def test_defect_11_mixed_dtypes_and_autocast():
    x, w, y, _, upstream = make_problem(5, 4, 40)
    with pytest.raises(TypeError, match="hidden is torch.bfloat16, weight torch.float32"):
        linear_logprob(x.bfloat16(), w.float(), y)
    weight = w.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, entropy, _ = linear_logprob(x.bfloat16(), weight, y)
    logp.backward(upstream[0].float())
    assert logp.dtype == entropy.dtype == weight.grad.dtype == torch.float32
    same = linear_logprob(x.bfloat16(), w.bfloat16(), y)[0]
    torch.testing.assert_close(logp, same)


def test_defect_12_targets_of_any_alignment_and_integer_type():
    x, w, y, _, _ = make_problem(9, 4, 40)
    expected = linear_logprob_reference(x[1:], w, y[1:])[0].float()
    pairs = torch.stack((y, torch.zeros_like(y)), dim=1)
    for target in (y[1:], y.int()[1:], y.to(torch.uint8)[1:], pairs[1:, 0]):
        for saved in (RECOMPUTE, SAVED):
            torch.testing.assert_close(
                linear_logprob(x[1:].float(), w.float(), target, saved_bytes=saved)[0], expected
            )


@pytest.mark.parametrize("saved", [RECOMPUTE, SAVED])
def test_defect_13_nan_where_ignored_changes_nothing(saved):
    x, w, y, _, upstream = make_problem(12, 8, 100)
    y[::3] = -100
    upstream[:, ::3] = 5.0  # an arbitrary upstream gradient
    clean = fused(x, w, y, None, upstream, saved_bytes=saved)
    x[::3] = float("nan")
    for a, b in zip(clean, fused(x, w, y, None, upstream, saved_bytes=saved), strict=True):
        assert torch.equal(a, b)


def test_rows_without_upstream_gradient_are_left_out_exactly():
    """Rows with NaN and zero upstream gradient are NaN in the forward; the gradients are as if
    these rows were absent.
    """

    def finite(*args, **settings):
        return [output.nan_to_num() for output in linear_logprob(*args, **settings)]

    x, w, y, _, upstream = make_problem(12, 8, 100)
    upstream[:, 1::2] = 0.0
    half = fused(x[::2], w, y[::2], None, upstream[:, ::2], saved_bytes=0)
    x[1::2] = float("nan")
    full = run(finite, torch.float32, x, w, y, None, upstream, saved_bytes=0)
    torch.testing.assert_close(full[4], half[4], atol=1e-6, rtol=1e-5)
    assert (full[3][1::2] == 0).all()


def test_banned_tokens_have_probability_zero():
    x, w, y, bias, upstream = make_problem(5, 8, 60, bias=True)
    y[:] = 3
    bias[10:] = float("-inf")
    for saved in (RECOMPUTE, SAVED):
        ours = fused(x, w, y, bias, upstream, saved_bytes=saved)
        kept = reference(x, w[:10], y, bias[:10], upstream)
        assert (ours[4][10:] == 0).all()
        for mine, truth in zip((*ours[:4], ours[4][:10]), kept[:5], strict=True):
            torch.testing.assert_close(mine, truth, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("saved", [RECOMPUTE, SAVED])
def test_empty_and_all_ignored_batches_have_zero_gradients_on_the_graph(saved):
    _, w, _, _, _ = make_problem(1, 4, 30)
    for T in (0, 3):
        x, weight = torch.randn(T, 4, requires_grad=True), w.float().requires_grad_()
        outputs = linear_logprob(x, weight, torch.full((T,), -100), saved_bytes=saved)
        sum(o.sum() for o in outputs).backward()
        assert all((o == 0).all() for o in outputs)
        assert (weight.grad == 0).all() and (x.grad == 0).all()


def test_peaked_softmax():
    """Weight rows are the scaled hidden rows: every target has probability 1 up to rounding."""
    g = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(40, 16, generator=g, dtype=torch.float64), dim=1)
    upstream = torch.randn(3, 40, generator=g, dtype=torch.float64)
    args = (x * 30, x * 30, torch.arange(40), None, upstream)
    exact = reference(*args)
    for saved in (RECOMPUTE, SAVED):
        plain = run(linear_logprob_reference, torch.float32, *args)
        assert_close_to_float64(fused(*args, saved_bytes=saved), plain, exact)


def test_leading_dimensions_and_strides():
    x, w, y, _, _ = make_problem(24, 8, 60)
    x, w = x.float(), w.float()
    flat = linear_logprob(x, w, y)
    shaped = linear_logprob(x.view(2, 3, 4, 8), w, y.view(2, 3, 4))
    assert all(output.shape == (2, 3, 4) for output in shaped)
    by_column = [t.t().contiguous().t() for t in (x, w)]
    every_other = torch.stack((x, x), dim=1)[:, 0]
    strided = [linear_logprob(*args, y, saved_bytes=0) for args in (by_column, (every_other, w))]
    torch.testing.assert_close(list(flat), [output.flatten() for output in shaped])
    for other in strided:
        torch.testing.assert_close(list(flat), list(other), atol=1e-5, rtol=1e-5)


def test_five_runs_have_the_same_bits():
    x, w, y, _, upstream = make_problem(50, 16, 3000)
    runs = [fused(x, w, y, None, upstream, saved_bytes=0) for _ in range(5)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def test_entropy_can_be_left_out():
    x, w, y, _, _ = make_problem(5, 4, 40)
    for saved in (RECOMPUTE, SAVED):
        logp, entropy, _ = linear_logprob(
            x.float().requires_grad_(), w.float(), y, entropy=False, saved_bytes=saved
        )
        assert entropy is None
        torch.testing.assert_close(logp.detach(), linear_logprob_reference(x, w, y)[0].float())


@pytest.mark.parametrize("saved", [None, SAVED, RECOMPUTE])
def test_no_checked_target_is_ignored(saved):
    problem = make_problem(9, 8, 30)
    ignored = int(problem[2][1])
    settings = {"saved_bytes": saved, "checked": True}
    expected = fused(*problem, **settings)
    assert bool(expected[3][1].any())  # the gradient of a token with this target
    for mine, other in zip(
        fused(*problem, ignore_index=ignored, **settings), expected, strict=True
    ):
        assert torch.equal(mine, other)


def test_wrong_inputs_are_named():
    x, w, y, bias, _ = make_problem(5, 4, 40, bias=True)
    x, w, bias = x.float(), w.float(), bias.float()
    cases = [
        (lambda: linear_logprob(x, w[:, :3], y), "hidden has shape"),
        (lambda: linear_logprob(x, w, y[:4]), "target has shape"),
        (lambda: linear_logprob(x, w, y.float()), "target is torch.float32"),
        (lambda: linear_logprob(x, w, y, bias[:3]), "bias is"),
        (lambda: linear_logprob(x, w, y, temperature=0.0), "temperature is 0.0"),
        (lambda: linear_logprob(x, w, y, softcap=-1.0), "softcap is -1.0"),
        (lambda: linear_logprob(x, w, y, active_rows=y), "needs checked=True"),
        (lambda: linear_logprob(x, w, y, checked=True, active_rows=y > 0), "active_rows is torch"),
        (lambda: check_same_device("op", a=x, b=w.to("meta")), "b is on meta"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_gradients_twice_over_a_retained_graph():
    x, w, y, _, upstream = make_problem(9, 8, 300)
    for saved in (RECOMPUTE, SAVED):
        hidden = x.float().requires_grad_()
        logp = linear_logprob(hidden, w.float().requires_grad_(), y, saved_bytes=saved)[0]
        first, second = (
            torch.autograd.grad(logp, hidden, upstream[0].float(), retain_graph=True)[0]
            for _ in range(2)
        )
        assert torch.equal(first, second)


# -------------------------------------------------------------------------------------- the package


def test_works_without_triton():
    """With an import hook that refuses triton, the package imports and the torch paths run."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kernels\n"
        "logp, entropy, _ = kernels.linear_logprob(torch.ones(2, 3), torch.eye(3), "
        "torch.tensor([0, 2]), saved_bytes=0)\n"
        "assert abs(float(logp[0]) + 1.0986123) < 1e-6 and abs(float(entropy[1]) - 1.0986123) < "
        "1e-6\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=KERNELS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_imports_torch_and_triton_only():
    imported = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert imported - set(sys.stdlib_module_names) <= {"torch", "triton", "kernels"}


MEASURE = """
import json, sys, torch
from bench.kernels import PROVIDERS, HeadShape, measure_once
torch.set_num_threads(1)
(provider,) = [item for item in PROVIDERS if item.name == sys.argv[1]]
print(json.dumps(measure_once(provider, HeadShape(model="narrow", D=128, V=151_936), 512)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ours", "ours_frozen", "ours_entropy"])
def test_memory_on_a_cpu_with_a_real_vocabulary(variant):
    """Qwen2.5's vocabulary with 512 tokens, in a separate process. Plain torch holds 0.4 to 1 GB in
    addition to weights and gradients.
    """
    command = [sys.executable, "-c", MEASURE, variant]
    done = subprocess.run(command, cwd=KERNELS.parent, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    assert figures["extra_mb"] < 100 and figures["error"] < 1e-5, figures
