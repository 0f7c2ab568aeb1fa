"""Every Triton kernel and path in Triton's interpreter, at small tiles, against the torch paths (which are tested against float64).

The interpreter has to be chosen before Triton is imported, so the one test that a normal run sees starts this file again with
TRITON_INTERPRET=1; run it that way by hand to see single tests. Silent faults of the interpreter that are worked around: bfloat16
products are wrong (operands are upcast), float32 to bfloat16 truncates (tolerances of bfloat16 are doubled for it).
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def inside(test):
    """For the process that test_all_kernels_in_the_interpreter starts; not collected elsewhere."""
    test.__test__ = INTERPRETED
    return test


def test_all_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


test_all_kernels_in_the_interpreter.__test__ = not INTERPRETED  # type: ignore[attr-defined]

if INTERPRETED:
    from kernels import linear_logprob_launch as launch
    from kernels import linear_logprob_torch as path
    from kernels.common import Head
    from kernels.linear_logprob_triton import Tiles

    TILES = Tiles(16, 32, 16, 4, 1)
    ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


def problem(N=21, D=24, V=100, dtype=torch.float32, bias=False, scale=1.0):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(N, D, generator=g)).to(dtype), (scale * torch.randn(V, D, generator=g)).to(dtype)
    y = torch.randint(0, V, (N,), generator=g)
    y[0] = V - 1
    return x, w, y, torch.randn(V, generator=g).to(dtype) if bias else None


def close(mine, truth, tolerance):
    scale = 1.0 + float(truth.float().abs().max())
    assert float((mine.float() - truth.float()).abs().max()) <= tolerance * scale


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(launch, "SPLITS", 3)
    monkeypatch.setattr(launch, "SLAB_COLUMNS", 64)


@inside
@pytest.mark.parametrize(
    ("dtype", "descriptors", "softcap", "bias"),
    [
        (torch.float32, True, None, False),
        (torch.float32, False, 3.0, True),
        (torch.float16, True, 3.0, False),
        (torch.bfloat16, True, None, True),
        (torch.bfloat16, False, None, False),
    ],
)
def test_linear_logprob(small, dtype, descriptors, softcap, bias):
    x, w, y, b = problem(D=24 if descriptors else 23, dtype=dtype, bias=bias)
    assert launch.descriptors_fit(x, w) == descriptors
    head, N = Head(0.7, softcap), len(x)
    truth = path.forward(x, w, y, b, head, expected=True)
    kept, exponents = torch.empty(N, len(w), dtype=dtype), torch.empty(-(-len(w) // TILES.columns), N)
    frozen = launch.forward(x, w, y, b, head, expected=True, tiles=TILES)
    saved = launch.saved_forward(x, w, y, b, head, kept, exponents, entropy=True, tiles=TILES)
    for out in (launch.forward(x, w, y, b, head, tiles=TILES), frozen, saved):
        for i in range(3):
            close(out[i], truth[i], 3e-6)
    close(frozen.expected, truth.expected, ROUNDING[dtype])
    need = {"need_x": True, "need_w": True, "need_bias": bias}
    for g_entropy in (None, torch.randn(N)):
        co = path.coefficients(torch.randn(N), g_entropy, None, truth.entropy)
        expected = path.backward(x, w, y, b, head, co, truth.lse, **need)
        recomputed = launch.backward(x, w, y, b, head, co, truth.lse, tiles=TILES, **need)
        rows = None if g_entropy is None else torch.arange(N)
        from_saved = launch.saved_backward(x, w, y, b, head, co, truth.lse, kept, exponents, rows, tiles=TILES, **need)
        for mine, other, exact in zip(recomputed, from_saved, expected, strict=True):
            if exact is not None:
                close(mine, exact, ROUNDING[dtype])
                close(other, exact, ROUNDING[dtype])


@inside
def test_saved_backward_maps_rows(small):
    """Every second row, from a forward over all rows."""
    x, w, y, _ = problem()
    head, rows = Head(1.0, None), torch.arange(0, 21, 2)
    kept, exponents = torch.empty(21, 100), torch.empty(4, 21)
    out = launch.saved_forward(x, w, y, None, head, kept, exponents, entropy=True, tiles=TILES)
    co = path.coefficients(torch.randn(11), None, None, out.entropy[rows])
    need = {"need_x": True, "need_w": True, "need_bias": False}
    mine = launch.saved_backward(x[rows], w, y[rows], None, head, co, out.lse[rows], kept, exponents, rows, tiles=TILES, **need)
    exact = path.backward(x[rows], w, y[rows], None, head, co, out.lse[rows], **need)
    close(mine.x, exact.x, 1e-5)
    close(mine.w, exact.w, 1e-5)


@inside
@pytest.mark.parametrize("offset", [-500.0, 500.0])
def test_defects_1_and_2_phantom_columns_and_far_logits(small, offset):
    """V = 97 is three tiles and one column; all logits far below (above) 0."""
    x, w, y, b = problem(V=97, bias=True)
    head = Head(1.0, None)
    expected = path.forward(x, w, y, b, head)
    out = launch.forward(x, w, y, b + offset, head, tiles=TILES)
    assert (out.logp <= 0).all()
    close(out.logp, expected.logp, 1e-4)
    close(out.entropy, expected.entropy, 1e-3)


@inside
def test_exponents_move_when_the_target_is_far_below_the_maximum(small):
    """The frozen path's reference exponent starts at the target's logit; here the maximum is 2^100 to 2^300 above it.

    V = 600 makes slabs of two tiles, whose exponents have to be brought together.
    """
    x, w, y, _ = problem(V=600, scale=20.0)
    y = (x @ w.t()).argmin(1)
    head = Head(1.0, None)
    spread = ((x @ w.t()).amax(1) - (x @ w.t()).amin(1)).max() * 1.4427
    assert spread > 128
    truth = path.forward(x, w, y, None, head, expected=True)
    out = launch.forward(x, w, y, None, head, expected=True, tiles=TILES)
    close(out.expected, truth.expected, 1e-5)
    close(out.logp, truth.logp, 1e-5)


@inside
def test_banned_tokens(small):
    x, w, y, b = problem(bias=True)
    b[10:] = float("-inf")
    y = y % 10
    truth = path.forward(x, w[:10], y, b[:10], Head())
    out = launch.forward(x, w, y, b, Head(), tiles=TILES)
    for i in range(3):
        close(out[i], truth[i], 1e-5)


@inside
def test_defect_16_logprobs_do_not_depend_on_the_batch_or_the_run(small):
    x, w, y, _ = problem(N=40)
    head = Head(0.7, None)
    whole = launch.forward(x, w, y, None, head, tiles=TILES)
    for _ in range(2):
        again = launch.forward(x, w, y, None, head, tiles=TILES)
        assert torch.equal(whole.logp, again.logp) and torch.equal(whole.entropy, again.entropy)
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        part = launch.forward(x[rows].contiguous(), w, y[rows].contiguous(), None, head, tiles=TILES)
        assert torch.equal(part.logp, whole.logp[rows]) and torch.equal(part.entropy, whole.entropy[rows])


@inside
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprob(softcap, dtype):
    from kernels import token_logprob_triton
    from kernels.token_logprob import _torch_backward, _torch_forward

    g = torch.Generator().manual_seed(0)
    wide = (3 * torch.randn(9, 160, generator=g)).to(dtype)
    logits, y, head = wide[:, :150], torch.randint(0, 150, (9,), generator=g), Head(0.7, softcap)  # rows that are not contiguous
    y[3] = -100
    truth = _torch_forward(logits, y, head, -100)
    for mine, exact in zip(token_logprob_triton.forward(logits, y, head, -100, block=64), truth, strict=True):
        close(mine, exact, 1e-5)
    for g_entropy in (None, torch.randn(9) * (y >= 0)):
        co = path.coefficients(torch.randn(9) * (y >= 0), g_entropy, None, truth[1])
        expected, inplace = torch.empty(9, 150, dtype=dtype), logits.clone()
        _torch_backward(logits, y, head, co, truth[2], expected)
        token_logprob_triton.backward(inplace, y, head, co, truth[2], inplace, block=64)
        close(inplace, expected, ROUNDING[dtype])
        assert (inplace[3] == 0).all()


@inside
def test_policy_loss():
    from kernels.policy_loss import KINDS, KL_KINDS, _torch_pass
    from kernels.policy_loss_triton import policy_loss_pass

    g = torch.Generator().manual_seed(0)
    lp, old, adv, ref, low = (torch.randn(37, generator=g) for _ in range(5))
    low, cu, mask = 0.7 + 0.1 * low, torch.tensor([0, 5, 5, 20, 37]), torch.rand(37, generator=g) < 0.6
    old = torch.where(mask, lp + 0.3 * old, float("nan"))  # defect 13
    for kind, kl_kind in [(kind, "k3") for kind in KINDS] + [("ppo", kl) for kl in KL_KINDS]:
        for lower, reference in ((None, None), (low, ref)):
            expected = _torch_pass(lp, old, adv, mask, reference, 0.8 if lower is None else lower,
                                   1.2 if lower is None else torch.tensor(1.2), cu, kind, 0.05, 0.1, kl_kind)  # fmt: skip
            mine = policy_loss_pass(lp, old, adv, mask, reference, lower, None, cu, kind, 0.8, 1.2, 0.05, 0.1, kl_kind, block=16)
            close(mine[0], expected[0], 1e-5)
            close(mine[1], expected[1], 1e-5)


@inside
def test_defect_14_scans_run_backwards_rightly():
    from kernels.discounted_scan import _torch_scan, scan_op
    from kernels.discounted_scan_triton import scan

    g = torch.Generator().manual_seed(0)
    reward, value, boot = torch.randn(37, generator=g), torch.randn(37, generator=g), torch.randn(4, generator=g)
    cu, mask = torch.tensor([0, 5, 5, 20, 37]), torch.rand(37, generator=g) < 0.6
    holes = torch.where(mask, reward, float("nan"))
    for rewards, m, after in ((reward, None, None), (holes, mask, boot)):
        close(scan(rewards, value, cu, m, after, 0.97, 0.9, False, block=8), _torch_scan(rewards, value, cu, m, after, 0.97, 0.9), 1e-5)
        close(scan(rewards, None, cu, m, None, 0.9, 1.0, True, block=8), scan_op(rewards, cu, 0.9, m, True), 1e-5)


@inside
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixture"])
@pytest.mark.parametrize(("dtype", "softcap", "D"), [(torch.float32, 4.0, 21), (torch.bfloat16, None, 24)])
def test_distill_kl(small, monkeypatch, kind, dtype, softcap, D):
    from kernels import distill_kl_triton

    monkeypatch.setattr(distill_kl_triton, "SPLITS", 2)
    torch_path = sys.modules["kernels.distill_kl"]
    xs, ws, y, _ = problem(N=9, D=D, dtype=dtype)
    xt, wt = (t.flip(0).contiguous() for t in problem(N=9, D=16, dtype=dtype)[:2])
    args = (xs, ws, xt, wt, Head(0.8, softcap), Head(0.8, None), kind, 0.3)
    truth = torch_path.forward(*args)
    for mine, exact in zip(distill_kl_triton.forward(*args, tiles=TILES), truth, strict=True):
        close(mine, exact, 1e-5)
    need = {"need_x": True, "need_w": True}
    expected = torch_path.backward(*args, torch.randn(9, generator=torch.Generator().manual_seed(1)), *truth[1:], **need)
    upstream = torch.randn(9, generator=torch.Generator().manual_seed(1))
    for mine, exact in zip(distill_kl_triton.backward(*args, upstream, *truth[1:], tiles=TILES, **need), expected, strict=True):
        close(mine, exact, 3 * ROUNDING[dtype])
