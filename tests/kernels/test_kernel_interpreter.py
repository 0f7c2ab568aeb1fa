"""Test every Triton kernel and path in Triton's interpreter, at small tiles, against the torch
paths (which are tested against float64).

The interpreter has to be chosen before Triton is imported, so the one test that a normal run
collects starts this file and others again with TRITON_INTERPRET=1. Set that variable by hand to run
single tests. Silent faults of the interpreter that are worked around: bfloat16 products are wrong
(operands are upcast), and float32 to bfloat16 truncates (tolerances of bfloat16 are doubled for
it).
"""

import sys

import pytest
import torch
from helpers import float32_bound
from interpreting import INTERPRETED, mark_interpreted, run_interpreted

pytest.importorskip("triton", reason="triton is not installed")


# Files with tests for the interpreter, by the mark that these have in its process.
FILES = {
    "not slow": ("test_kernel_interpreter", "test_kernel_draw", "test_kernel_lora"),
    "slow": (
        *("test_kernel_interpreter", "test_kernel_draw", "test_kernel_hopper"),
        *("test_kernel_lora", "test_kernel_memory", "test_kernel_step", "test_kernel_paged"),
    ),
}
RUNS = [(marked, stem) for marked, stems in FILES.items() for stem in stems]


@pytest.mark.parametrize(
    ("marked", "stem"),
    [pytest.param(*run, marks=[pytest.mark.slow] * (run[0] == "slow")) for run in RUNS],
)
def test_kernels_in_the_interpreter(marked, stem):
    """All files run in a single process."""
    results = run_interpreted(marked, *FILES[marked])[stem]
    assert results
    assert {name: text for name, text in results.items() if text} == {}


test_kernels_in_the_interpreter.__test__ = not INTERPRETED  # type: ignore[attr-defined]

if INTERPRETED:
    from interpreting import patch_once

    from kernels import linear_logprob_launch as launch
    from kernels import linear_logprob_torch as path
    from kernels import matmul_operands, score_launcher, vocab_chunks
    from kernels.common import LOG2E, HeadConfig
    from kernels.tile_config import GpuInfo, TileConfig

    patch_once()
    TILES = TileConfig(16, 32, 16, 4, 1)
    ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


def make_problem(N=19, D=24, V=70, dtype=torch.float32, bias=False, scale=1.0):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(N, D, generator=g)).to(dtype)
    w = (scale * torch.randn(V, D, generator=g)).to(dtype)
    y = torch.randint(0, V, (N,), generator=g)
    y[0] = V - 1
    return x, w, y, torch.randn(V, generator=g).to(dtype) if bias else None


def check_close(mine, truth, tolerance):
    scale = 1.0 + float(truth.float().abs().max())
    assert float((mine.float() - truth.float()).abs().max()) <= tolerance * scale


def make_kept(N, V, dtype=torch.float32):
    """Return buffers for kept values and for their exponents."""
    return torch.empty(N, V, dtype=dtype), torch.empty(-(-V // TILES.columns), N)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(score_launcher, "SPLITS", 2)
    for module in (launch, score_launcher):
        monkeypatch.setattr(module, "CHUNK_SPLITS", 2)
    monkeypatch.setattr(vocab_chunks, "CHUNK_COLUMNS", 64)


QUICK = [(torch.float32, 90, 24, None, False), (torch.bfloat16, 80, 23, 3.0, True)]
SLOW = [
    (torch.float32, 80, 23, 3.0, True),
    (torch.float16, 90, 24, 3.0, False),
    (torch.bfloat16, 90, 23, None, True),
]


@mark_interpreted
@pytest.mark.parametrize(
    ("dtype", "capability", "D", "softcap", "bias"),
    QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_linear_logprob(small, monkeypatch, dtype, capability, D, softcap, bias):
    """The kernels agree through descriptors (90) and pointers (80), with rows aligned to 16 bytes
    (24) and unaligned rows (23).
    """
    monkeypatch.setattr(matmul_operands, "get_gpu_info", lambda tensor: GpuInfo(capability))
    x, w, y, b = make_problem(D=D, dtype=dtype, bias=bias)
    head, N = HeadConfig(0.7, softcap), len(x)
    problem = (x, w, y, b, head)
    truth = path.forward(*problem, expected=True)
    # A logit is a sum of D products that each side rounds in a different order, and a probability
    # has the same error, relatively.
    largest = float((x.float().abs() @ w.float().abs().T).max()) / head.temperature
    bound = max(ROUNDING[dtype], float32_bound(D, largest))
    kept, exponents = make_kept(N, len(w), dtype)
    frozen = launch.forward(*problem, expected=True, tiles=TILES)
    saved = launch.saved_forward(*problem, kept, exponents, entropy=True, tiles=TILES)
    for out in (launch.forward(*problem, tiles=TILES), frozen, saved):
        for i in range(3):
            check_close(out[i], truth[i], 3e-6)
    check_close(frozen.expected, truth.expected, ROUNDING[dtype])
    need = {"need_x": True, "need_w": True, "need_bias": bias}
    for g_entropy in (None, torch.randn(N)):
        co = path.compute_coefficients(torch.randn(N), g_entropy, None, truth.entropy)
        inputs = (*problem, co, truth.lse)
        expected = path.backward(*inputs, **need)
        results = [launch.backward(*inputs, tiles=TILES, **need)]
        if g_entropy is None:
            keep = (kept, exponents, truth.logp, None)
            results += [
                launch.saved_backward(*inputs, *keep, whole=whole, tiles=TILES, **need)
                for whole in (False, True)
            ]
        for grads in results:
            for mine, exact in zip(grads, expected, strict=True):
                if exact is not None:
                    assert mine.shape == exact.shape
                    check_close(mine, exact, bound)


@mark_interpreted
def test_saved_backward_maps_rows(small):
    """The backward of every second row agrees, from a forward over all rows."""
    x, w, y, _ = make_problem()
    head, rows = HeadConfig(1.0, None), torch.arange(0, len(x), 2)
    kept, exponents = make_kept(len(x), len(w))
    out = launch.saved_forward(x, w, y, None, head, kept, exponents, entropy=True, tiles=TILES)
    co = path.compute_coefficients(torch.randn(len(rows)), None, None, out.entropy[rows])
    need = {"need_x": True, "need_w": True, "need_bias": False}
    inputs = (x[rows], w, y[rows], None, head, co, out.lse[rows])
    exact, keep = path.backward(*inputs, **need), (kept, exponents, out.logp[rows], rows)
    for whole in (False, True):
        mine = launch.saved_backward(*inputs, *keep, whole=whole, tiles=TILES, **need)
        check_close(mine.x, exact.x, 1e-5)
        check_close(mine.w, exact.w, 1e-5)


@mark_interpreted
def test_many_tokens_go_through_a_slab_in_chunks(small, monkeypatch):
    """19 rows with room for 16: every gradient equals the torch path's, and a token's bits on the
    frozen path do not depend on the chunk.
    """
    x, w, y, b = make_problem(bias=True)
    x, w, head = (8 * x).round() / 8, (8 * w).round() / 8, HeadConfig(0.7, None)
    single = launch.forward(x[17:18].contiguous(), w, y[17:18], b, head, expected=True, tiles=TILES)
    monkeypatch.setattr(vocab_chunks, "CHUNK_ELEMENTS", 16 * 32)
    problem = (x, w, y, b, head)
    truth = path.forward(*problem, expected=True)
    result = launch.forward(*problem, expected=True, tiles=TILES)
    check_close(result.logp, truth.logp, 3e-6)
    check_close(result.expected, truth.expected, 1e-5)
    assert torch.equal(result.logp[17:18], single.logp)
    assert torch.equal(result.entropy[17:18], single.entropy)
    kept, exponents = make_kept(len(x), len(w))
    launch.saved_forward(*problem, kept, exponents, entropy=True, tiles=TILES)
    co = path.compute_coefficients(torch.randn(len(x)), None, None, truth.entropy)
    need = {"need_x": True, "need_w": True, "need_bias": True}
    inputs, keep = (*problem, co, truth.lse), (kept, exponents, truth.logp, None)
    expected = path.backward(*inputs, **need)
    mine = launch.backward(*inputs, tiles=TILES, **need)
    saved = launch.saved_backward(*inputs, *keep, tiles=TILES, **need)
    for grads in (mine, saved):
        for grad, exact in zip(grads, expected, strict=True):
            check_close(grad, exact, 1e-5)
    part = launch.backward(*inputs, tiles=TILES, frozen_columns=16, **need).w
    assert (part[:, :16] == 0).all()
    check_close(part[:, 16:], expected.w[:, 16:], 1e-5)


@mark_interpreted
@pytest.mark.parametrize("V", [70, 96, 20])
def test_hoppers_branch_gives_the_others_numbers(small, V):
    """The branches agree for a vocabulary that ends within a tile, at a tile's end, and within the
    first tile.
    """
    x, w, y, _ = make_problem(V=V)
    a, results = torch.randn(len(x)), []
    for special in (None, TILES):
        scores = score_launcher.ScoreLauncher(x, w, y, None, HeadConfig(0.7), TILES, special)
        out = scores.combine(scores.statistics(True))
        slabs = [torch.zeros(len(x), hi - lo) for lo, hi in ((0, min(32, V)), (32, V)) if hi > lo]
        for dz, lo in zip(slabs, (0, 32), strict=False):
            co = path.GradientCoefficients(a, -a, a.flip(0))
            scores.dlogits(dz, lo, lo + dz.shape[1], out.lse * LOG2E, co)
        results.append((out.logp, out.entropy, out.lse, *slabs))
    for mine, other in zip(*results, strict=True):
        check_close(mine, other, 3e-6)
    check_close(results[0][0], path.forward(x, w, y, None, HeadConfig(0.7)).logp, 3e-6)


@mark_interpreted
@pytest.mark.slow
def test_a_hundred_random_cases_of_hoppers_branch_against_float64(small):
    """Logprobs, entropies and the gradient of a slab of scores agree with float64 for random sizes,
    dtypes, temperatures and upstream gradients, with and without a gradient of the entropy.
    Operands are rounded first, so that scores differ only by float32's sums.
    """
    g = torch.Generator().manual_seed(1)

    def number(most):
        return int(torch.randint(1, most, (), generator=g))

    for case in range(100):
        N, D, V = number(60), number(40), number(200)
        temperature = 0.3 + float(torch.rand((), generator=g))
        dtype, bent = (torch.float32, torch.bfloat16, torch.float16)[case % 3], case % 4 > 0
        x, w = torch.randn(N, D, generator=g).to(dtype), torch.randn(V, D, generator=g).to(dtype)
        y, upstream = torch.randint(0, V, (N,), generator=g), torch.randn(2, N, generator=g)
        # dlogits are gradients of the scores divided by the temperature.
        z = (x.double() @ w.double().t() / temperature).requires_grad_()
        every = z.log_softmax(-1)
        logp, entropy = every.gather(1, y[:, None])[:, 0], -(every.exp() * every).sum(-1)
        ((logp * upstream[0]).sum() + (entropy * upstream[1]).sum() * bent).backward()
        scores = score_launcher.ScoreLauncher(x, w, y, None, HeadConfig(temperature), TILES, TILES)
        keep = None
        if case % 2:
            kept = torch.zeros(N, -(-V // 16) * 16, dtype=dtype)[:, :V]
            keep = (kept, torch.zeros(-(-V // TILES.columns), N))
        out = scores.combine(scores.statistics(bent, keep))
        check_close(out.logp, logp.detach(), 1e-5)
        if keep is not None:  # the saved plan keeps each probability up to rounding
            k = keep[1].repeat_interleave(TILES.columns, 0)[:V].t()
            p = keep[0].float() * torch.exp2(k - out.lse[:, None] * LOG2E)
            rounding = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
            check_close(p, every.exp().detach(), rounding)
        if bent:
            check_close(out.entropy, entropy.detach(), 1e-5)
        lo = number(V + 1) // TILES.columns * TILES.columns
        if V > lo:
            dz, g_entropy = torch.zeros(N, V - lo, dtype=dtype), upstream[1] if bent else None
            co = path.compute_coefficients(upstream[0], g_entropy, None, out.entropy)
            scores.dlogits(dz, lo, V, out.lse * LOG2E, co)
            # Rounding of the stored gradient: 2^-11, 2^-8.
            rounding = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
            check_close(dz, z.grad[:, lo:], rounding)


@pytest.fixture(params=["saved", "whole"])
def forced_launches(small, monkeypatch, request):
    """Return the public function with the launches that it makes on CUDA, and [T, V] always kept
    between forward and backward.
    """
    from functools import partial

    from kernels import linear_logprob

    public = sys.modules["kernels.linear_logprob"]
    for module in (score_launcher, public):
        monkeypatch.setattr(module, "select_tile_sizes", lambda D, dtype, device: TILES)
    monkeypatch.setattr(public, "can_run_triton", lambda tensor: True)
    monkeypatch.setattr(public, "_is_small_problem", lambda *_: False)
    monkeypatch.setattr(public, "_select_plan", lambda *_: request.param)
    return partial(linear_logprob, saved_bytes=1 << 40)


def gradients(function, dtype, x, w, y, upstream, **settings):
    """Return (dX, dW) of sum(upstream * outputs) in float64. `upstream` holds the gradient of logp
    and that of the entropy, which may be None.
    """
    x, w = (t.detach().to(dtype, copy=True).requires_grad_() for t in (x, w))
    outputs = function(x, w, y, **settings)
    sum(
        (outputs[i].double() * g.double()).sum() for i, g in enumerate(upstream) if g is not None
    ).backward()
    return x.grad.double(), w.grad.double()


@mark_interpreted
@pytest.mark.parametrize(
    ("dtype", "temperature"), [(torch.float16, 1.0), (torch.bfloat16, 0.25), (torch.float32, 0.15)]
)
def test_a_target_far_below_its_tiles_maximum_keeps_its_gradient_under_softcap(
    forced_launches, dtype, temperature
):
    """2^(z-k) of the target is 0 in `dtype`; its gradient is still its upstream times the tanh's
    slope.
    """
    from kernel_references import linear_logprob_reference

    x, w, y = torch.ones(3, 1), torch.zeros(7, 1), torch.tensor([1, 2, 1])
    w[0], w[1], w[2] = 28.0, 1.0, -20.0
    settings = {"temperature": temperature, "softcap": 30.0}
    upstream = (torch.tensor([1.0, 0.5, -2.0]), None)
    exact = gradients(linear_logprob_reference, torch.float64, x, w, y, upstream, **settings)
    assert exact[1][1].abs() > 0.5 and exact[1][2].abs() > 0.2
    for mine, truth in zip(
        gradients(forced_launches, dtype, x, w, y, upstream, **settings), exact, strict=True
    ):
        check_close(mine, truth, ROUNDING[dtype])


@mark_interpreted
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_confident_tokens_have_no_noise_in_their_gradient(forced_launches, dtype, softcap):
    """With a vocabulary of one token, and with a target probability near 1, dX is zero or tiny,
    with and without an entropy gradient.

    Kept values are rounded to 2^-9 (bfloat16), so a gradient made of them only would be 1e-3 to
    1e-2 here.
    """
    from kernel_references import linear_logprob_reference

    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 8, generator=g).to(dtype).double()
    w = torch.randn(1, 8, generator=g).to(dtype).double()
    upstream = (torch.randn(9, generator=g), torch.randn(9, generator=g))
    for inputs in (upstream, (upstream[0], None), (None, upstream[1])):
        dx, dw = gradients(
            forced_launches, dtype, x, w, torch.zeros(9, dtype=torch.long), inputs, softcap=softcap
        )
        assert dx.abs().max() < 1e-5 and dw.abs().max() < 1e-5
    x = torch.nn.functional.normalize(torch.randn(12, 16, generator=g), dim=1) * 5
    # Weight rows equal hidden rows: the target's logit is 25.
    x, y = x.to(dtype).double(), torch.arange(12)
    for inputs in (upstream, (upstream[0], None)):
        inputs = tuple(None if t is None else torch.cat([t, t[:3]]) for t in inputs)
        exact = gradients(linear_logprob_reference, torch.float64, x, x, y, inputs, temperature=0.8)
        # Rounding of log p, which is a difference of two such values.
        rounding = float32_bound(16 + 12, 2 * 25 / 0.8) * float(inputs[0].abs().max()) * 5
        for mine, truth in zip(
            gradients(forced_launches, dtype, x, x, y, inputs, temperature=0.8), exact, strict=True
        ):
            assert (mine - truth).abs().max() < 2**-8 * truth.abs().max() + rounding


@mark_interpreted
@pytest.mark.parametrize("offset", [-500.0, 500.0])
def test_defects_1_and_2_phantom_columns_and_far_logits(small, offset):
    """V = 97 is three tiles and one column. All logits are far below (above) 0."""
    x, w, y, b = make_problem(V=97, bias=True)
    head = HeadConfig(1.0, None)
    expected = path.forward(x, w, y, b, head)
    out = launch.forward(x, w, y, b + offset, head, tiles=TILES)
    assert (out.logp <= 0).all()
    check_close(out.logp, expected.logp, 1e-4)
    check_close(out.entropy, expected.entropy, 1e-3)


@mark_interpreted
def test_exponents_move_when_the_target_is_far_below_the_maximum(small):
    """The frozen path's reference exponent starts at the target's logit; here the maximum is 2^100
    to 2^300 above it.

    V = 600 makes slabs of two tiles, whose exponents have to be aligned.
    """
    x, w, y, _ = make_problem(V=600, scale=20.0)
    y = (x @ w.t()).argmin(1)
    head = HeadConfig(1.0, None)
    spread = ((x @ w.t()).amax(1) - (x @ w.t()).amin(1)).max() * 1.4427
    assert spread > 128
    truth = path.forward(x, w, y, None, head, expected=True)
    out = launch.forward(x, w, y, None, head, expected=True, tiles=TILES)
    # The largest sum of absolute products: its rounding is a probability's relative error.
    largest = float((x.abs() @ w.abs().t()).max())
    check_close(out.expected, truth.expected, float32_bound(24 + 600, largest))
    check_close(
        out.logp, truth.logp, float32_bound(24 + 600, largest) / float(truth.logp.abs().max())
    )


@mark_interpreted
def test_banned_tokens(small):
    x, w, y, b = make_problem(bias=True)
    b[10:] = float("-inf")
    y = y % 10
    truth = path.forward(x, w[:10], y, b[:10], HeadConfig())
    out = launch.forward(x, w, y, b, HeadConfig(), tiles=TILES)
    for i in range(3):
        check_close(out[i], truth[i], 1e-5)


@mark_interpreted
def test_defect_16_logprobs_do_not_depend_on_the_batch_or_the_run(small):
    """Inputs are multiples of 1/8, whose products add up exactly: on some CPUs numpy's products
    depend on a row's position in its tile.
    """
    x, w, y, _ = make_problem(N=40)
    x, w = (8 * x).round() / 8, (8 * w).round() / 8
    head = HeadConfig(0.7, None)
    whole = launch.forward(x, w, y, None, head, tiles=TILES)
    for _ in range(2):
        again = launch.forward(x, w, y, None, head, tiles=TILES)
        assert torch.equal(whole.logp, again.logp) and torch.equal(whole.entropy, again.entropy)
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        part = launch.forward(
            x[rows].contiguous(), w, y[rows].contiguous(), None, head, tiles=TILES
        )
        assert torch.equal(part.logp, whole.logp[rows])
        assert torch.equal(part.entropy, whole.entropy[rows])


@mark_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprob(monkeypatch, dtype):
    from kernels import token_logprob_triton
    from kernels.token_logprob import _torch_backward, _torch_forward

    monkeypatch.setattr(token_logprob_triton, "BLOCK", 64)  # several blocks in a row
    g = torch.Generator().manual_seed(0)
    wide = (3 * torch.randn(9, 160, generator=g)).to(dtype)
    # These rows are not contiguous.
    logits, y = wide[:, :150], torch.randint(0, 150, (9,), generator=g)
    logits[1, :70], y[1] = -torch.inf, 100  # banned tokens
    truth = _torch_forward(logits, y, 0.7)
    for mine, exact in zip(token_logprob_triton.forward(logits, y, 0.7), truth, strict=True):
        check_close(mine, exact, 1e-5)
    used = torch.arange(9) != 3
    for g_entropy in (None, torch.randn(9) * used):
        co = path.compute_coefficients(torch.randn(9) * used, g_entropy, None, truth[1])
        expected, mine = torch.empty(2, 9, 150, dtype=dtype)
        _torch_backward(logits, y, 0.7, co, truth[2], expected)
        token_logprob_triton.backward(logits, y, 0.7, co, truth[2], mine)
        check_close(mine, expected, ROUNDING[dtype])
        assert (mine[3] == 0).all()


@mark_interpreted
def test_policy_loss(monkeypatch):
    from kernels import policy_loss_triton
    from kernels.policy_loss import KINDS, _policy_loss_torch

    monkeypatch.setattr(policy_loss_triton, "BLOCK", 16)  # several programs
    g = torch.Generator().manual_seed(0)
    lp, old, adv, low = (torch.randn(39, generator=g) for _ in range(4))
    low = 0.7 + 0.1 * low
    cu = torch.tensor([0, 5, 5, 20, 37, 39])
    mask = torch.rand(39, generator=g) < 0.6
    old = torch.where(mask, lp + 0.3 * old, float("nan"))  # defect 13
    old[37:], adv[37:], mask[37:] = -200.0, 0.0, True  # ratios overflow, and have no advantage
    for kind in KINDS:
        for lower in (None, low):
            bounds = (0.8, 1.2) if lower is None else (lower, torch.tensor(1.2))
            expected = _policy_loss_torch(lp, old, adv, mask, *bounds, cu, kind, 0.05)
            mine = policy_loss_triton.launch_policy_loss(
                lp, old, adv, mask, lower, None, cu, kind, 0.8, 1.2, 0.05
            )
            check_close(mine[0], expected[0], 1e-5)
            check_close(mine[1], expected[1], 1e-5)
            assert mine[0].isfinite().all() and mine[1].isfinite().all()


@mark_interpreted
@pytest.mark.parametrize("mask_name", ["mask", "sequence_ratio_mask"])
def test_a_datums_mask_decides_in_every_fused_loss(monkeypatch, mask_name):
    """The fused losses, called as the clients call the kernel, agree with the formulas token by
    token in float64.
    """
    import test_loss_mask as by_hand

    import kernels.policy_loss  # noqa: F401
    from rl.losses import get_loss

    calls = []
    monkeypatch.setattr(
        sys.modules["kernels.policy_loss"],
        "can_run_triton",
        lambda tensor: calls.append(tensor) or True,
    )
    cases = [(name, {}) for name in by_hand.POLICY] + list(by_hand.CONFIGS.items())
    for name, config in cases:
        logp, inputs = by_hand.make_inputs(1, mask_name)
        exact, leaf = logp.clone().requires_grad_(True), logp.float().requires_grad_(True)
        expected, counted = by_hand.reference(name, exact, inputs, mask_name, config)
        fields = {field: value.float() for field, value in inputs.items()}
        value, metrics = get_loss(name).fused_function(
            leaf, torch.zeros(11), fields, torch.tensor(by_hand.CU), config
        )
        check_close(value, expected, 1e-5)
        check_close(
            torch.autograd.grad(value, leaf)[0], torch.autograd.grad(expected, exact)[0], 1e-5
        )
        assert {key: int(count) for key, count in metrics.items()} == counted
    assert len(calls) == len(cases)


@mark_interpreted
def test_a_nan_in_the_policy_loss_is_not_dropped(monkeypatch):
    """A NaN in any field of an active token makes the loss and that token's gradient NaN. (The
    compile test covers the device's min.)
    """
    from kernels import policy_loss_triton
    from kernels.policy_loss import KINDS, _policy_loss_torch

    monkeypatch.setattr(policy_loss_triton, "BLOCK", 16)
    cu, mask = torch.tensor([0, 3, 5]), torch.ones(5)
    for kind in KINDS:
        for field in range(3):
            signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
            fields = [torch.full((5,), -0.5), torch.full((5,), -0.7), signs]
            fields[field][1] = float("nan")
            rest = (mask, None, None, cu, kind, 0.8, 1.2, 0.05)
            plain = (mask, 0.8, 1.2, cu, kind, 0.05)
            for sums, grad in (
                policy_loss_triton.launch_policy_loss(*fields, *rest),
                _policy_loss_torch(*fields, *plain),
            ):
                assert sums[0].isnan() and grad[1].isnan() and not grad[3:].isnan().any(), (
                    kind,
                    field,
                )
