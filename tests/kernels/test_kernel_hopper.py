"""Test the saving forward of the warp-specialized branch in Triton's interpreter: the values it
keeps, and that keeping them changes no other output.
"""

import pytest
import torch
from interpreting import INTERPRETED, SLOW_INTERPRETED, mark_interpreted

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = SLOW_INTERPRETED


if INTERPRETED:
    from interpreting import patch_once

    from kernels import linear_logprob_launch as launch
    from kernels import score_launcher
    from kernels.common import LOG2E, HeadConfig
    from kernels.linear_logprob_torch import GradientCoefficients
    from kernels.tile_config import GpuInfo, TileConfig

    patch_once()
    SPECIAL = TileConfig(16, 32, 16, 4, 1)
    # For a kept value: its rounding, which the interpreter truncates. For a score: products of
    # rounded operands are exact in float32.
    ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(score_launcher, "SPLITS", 3)


def make_problem(dtype, N, D, V, scale=1.0):
    g = torch.Generator().manual_seed(N + D + V)
    x = torch.randn(N, D, generator=g).to(dtype)
    w = (scale * torch.randn(V, D, generator=g)).to(dtype)
    return x, w, torch.randint(0, V, (N,), generator=g)


def make_buffers(dtype, N, V, columns):
    """Return buffers for kept values, with rows aligned to 16 bytes, and for exponents."""
    return torch.full((N, -(-V // 8) * 8), torch.nan).to(dtype).narrow(1, 0, V), torch.full(
        (-(-V // columns), N), torch.nan
    )


@mark_interpreted
@pytest.mark.parametrize("columns", [32, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("N", "D", "V", "scale"),
    [(19, 24, 70, 1), (40, 16, 160, 1), (5, 40, 33, 1), (7, 8, 11, 1), (19, 24, 200, 20)],
)
def test_what_is_kept(small, dtype, columns, N, D, V, scale):
    """2^(z-k) and k reproduce each probability, also when scores are 2^300 apart, for readers with
    the same tiles and with tiles half as wide. All other outputs have the same bits as those of the
    launch that keeps nothing.
    """
    x, w, y = make_problem(dtype, N, D, V, scale)
    scores = score_launcher.ScoreLauncher(
        x, w, y, None, HeadConfig(0.8), TileConfig(16, columns, 16, 4, 1), SPECIAL
    )
    kept, exponents = make_buffers(dtype, N, V, columns)
    out = scores.combine(scores.statistics(True, (kept, exponents)))
    plain = scores.combine(scores.statistics(True))
    assert torch.equal(out.logp, plain.logp)
    assert torch.equal(out.entropy, plain.entropy)
    assert torch.equal(out.lse, plain.lse)
    z = x.double() @ w.double().t() / 0.8
    k = exponents.double().repeat_interleave(columns, 0)[:V].t()
    assert (kept <= 1).all() and (exponents == exponents.ceil()).all()
    result, truth = kept.double() * torch.exp2(k - out.lse.double()[:, None] * LOG2E), z.softmax(-1)
    # Score error: float32's rounding times the score.
    bound = ROUNDING[dtype] + 4e-6 * float(z.abs().max())
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-126
    lost = smallest * torch.exp2(k - out.lse.double()[:, None] * LOG2E)  # underflow within a tile
    assert ((result - truth).abs() <= bound * truth + lost).all()
    gradient = torch.zeros(N, V, dtype=dtype)
    a, b = torch.randn(N), torch.randn(N)
    scores.saved_dlogits(
        gradient, 0, V, kept, exponents, None, out.logp * LOG2E, out.lse * LOG2E, a, b
    )
    exact = torch.nn.functional.one_hot(y, V) * a.double()[:, None] + truth * b.double()[:, None]
    assert float((gradient.double() - exact).abs().max()) <= 2 * bound * float(
        exact.abs().max() + 1
    )


@mark_interpreted
def test_a_tokens_bits_are_those_of_every_plan(small, monkeypatch):
    """A token's results have the same bits with and without [T, V] kept, and in any batch. Inputs
    are multiples of 1/8, whose products add up exactly; numpy's products otherwise depend on a
    row's position.
    """
    x, w, y = make_problem(torch.bfloat16, 40, 24, 96)
    x, w = (8 * x).round() / 8, (8 * w).round() / 8
    monkeypatch.setattr(score_launcher, "select_hopper_tiles", lambda hidden: SPECIAL)
    monkeypatch.setattr(
        score_launcher, "select_tile_sizes", lambda D, dtype, device: TileConfig(16, 16, 16, 4, 1)
    )
    keep = make_buffers(torch.bfloat16, 40, 96, 16)
    results = [
        launch.forward(x, w, y, None, HeadConfig(0.7)),
        launch.saved_forward(x, w, y, None, HeadConfig(0.7), *keep, entropy=True),
    ]
    results.append(launch.forward(x[7:], w, y[7:], None, HeadConfig(0.7)))
    for name in ("logp", "entropy", "lse"):
        first, kept, part = (getattr(out, name) for out in results)
        assert torch.equal(first, kept) and torch.equal(first[7:], part)


@mark_interpreted
def test_rows_that_do_not_begin_at_16_bytes_are_kept_by_the_other_branch(small, monkeypatch):
    """The copy engine cannot write rows that are not aligned to 16 bytes."""
    x, w, y = make_problem(torch.bfloat16, 9, 24, 33)
    monkeypatch.setattr(score_launcher, "select_hopper_tiles", lambda hidden: SPECIAL)
    monkeypatch.setattr(score_launcher, "_forward_ws_kernel", None)
    monkeypatch.setattr(
        score_launcher, "select_tile_sizes", lambda D, dtype, device: TileConfig(16, 32, 16, 4, 1)
    )
    kept, exponents = torch.empty(9, 33, dtype=torch.bfloat16), torch.empty(2, 9)
    out = launch.saved_forward(x, w, y, None, HeadConfig(0.7), kept, exponents, entropy=True)
    truth = (x.double() @ w.double().t() / 0.7).log_softmax(-1).gather(1, y[:, None])[:, 0]
    assert float((out.logp.double() - truth).abs().max()) < 1e-4


@mark_interpreted
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_a_slabs_gradient_is_the_same_whoever_computes_it(small, monkeypatch, programs):
    """A slab's gradient is the same from one program, from five programs that take turns, and from
    one program per item.
    """
    x, w, y = make_problem(torch.float16, 70, 24, 200)
    a, results = torch.randn(70, generator=torch.Generator().manual_seed(0)), []
    for count in (programs, 7):
        monkeypatch.setattr(
            score_launcher, "get_gpu_info", lambda tensor, count=count: GpuInfo(90, count)
        )
        scores = score_launcher.ScoreLauncher(
            x, w, y, None, HeadConfig(0.7), TileConfig(16, 32, 16, 4, 1), SPECIAL
        )
        dz = torch.full((70, 136), torch.nan, dtype=torch.float16)
        scores.dlogits(dz, 64, 200, torch.full((70,), 30.0), GradientCoefficients(a, -a, a.flip(0)))
        results.append(dz)
    assert torch.equal(*results) and results[0].isfinite().all()
