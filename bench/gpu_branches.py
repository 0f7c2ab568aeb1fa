"""Measure the score kernels for the GPU campaign (see gpu.py): record which branch the device
checks chose, and time both branches and cuBLAS.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu_kernels import device_of, milliseconds, shapes
from bench.shapes import TFLOPS, Shape


class Operands(NamedTuple):
    """Hold hidden states x [N, D], a head w [V, D], targets y [N] and a buffer dz [N, width] for
    the gradient of a slab of the logits.
    """

    x: Tensor
    w: Tensor
    y: Tensor
    dz: Tensor

    @staticmethod
    def make(shape: Shape, dry: bool) -> Operands:
        N, width, device = (64 if dry else 8192), min(16_384, shape.V), device_of(dry)
        g = torch.Generator(device).manual_seed(0)
        x = torch.randn(N, shape.D, generator=g, device=device).bfloat16()
        w = (torch.randn(shape.V, shape.D, generator=g, device=device) * shape.D**-0.5).bfloat16()
        y = torch.randint(0, shape.V, (N,), generator=g, device=device)
        return Operands(x, w, y, torch.randn(N, width, generator=g, device=device).bfloat16())


def part_branches(table: Any, dry: bool) -> None:
    """Measure the products and both branches of the score kernels, the newest kernels last: a
    kernel that breaks the device context makes every later measurement fail.
    """
    name = (
        "cpu"
        if dry
        else "{}, capability {}.{}".format(
            torch.cuda.get_device_name(), *torch.cuda.get_device_capability()
        )
    )
    table.row("device", "torch", "name", name, note=f"torch {torch.__version__}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        _verdicts(table, dtype, device_of(dry))
    for kind in (_products, _older, _special):
        for shape in shapes(dry):
            operands = table.attempt(shape.model, "tensors", lambda s=shape: Operands.make(s, dry))
            if operands is not None:
                kind(table, shape, operands)
            del operands


def _verdicts(table: Any, dtype: torch.dtype, device: str) -> None:
    """Record which branch this device takes and the warnings that refused the other branch."""
    name = str(dtype).removeprefix("torch.")

    def special() -> None:
        from kernels.score_launcher import select_hopper_tiles

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            tiles = select_hopper_tiles(torch.zeros(16, 64, dtype=dtype, device=device))
        words = "; ".join(str(one.message) for one in said)[:200]
        table.row(
            name,
            "score kernels",
            "chosen",
            "older" if tiles is None else f"warp-specialised {tuple(tiles)}",
            note=words,
        )

    def adds() -> None:
        from kernels.device_checks import supports_addmm_in_place

        table.row(
            name,
            "addmm into float32",
            "chosen",
            "in place" if supports_addmm_in_place(dtype) else "mm and add_",
        )

    table.attempt(name, "score kernels", special)
    table.attempt(name, "addmm into float32", adds)


def _speed(
    table: Any, case: str, provider: str, run: Callable[[], object], o: Operands, columns: int
) -> None:
    """Record the TFLOP/s of `run` in a separate attempt."""

    def measure() -> None:
        ms = milliseconds(run, o.x.device.type)
        table.row(
            case, provider, "TFLOP/s", 2e-9 * o.x.numel() * columns / ms, "", TFLOPS, f"{ms:.3f} ms"
        )

    table.attempt(case, provider, measure)


def _products(table: Any, shape: Shape, o: Operands) -> None:
    """Time cuBLAS: products that the kernels are compared with, and the products between them."""
    x, dz, slab = o.x, o.dz, o.w[: o.dz.shape[1]]
    wide = torch.zeros(x.shape, device=x.device)
    products: dict[str, Callable[[], object]] = {
        "logits of a slab": lambda: torch.mm(x, slab.t()),
        "dW of a slab": lambda: torch.mm(dz.t(), x),
        "dX of a slab, mm and add_": lambda: wide.add_(torch.mm(dz, slab, out_dtype=torch.float32)),
        "dX of a slab, addmm": lambda: torch.addmm(
            wide, dz, slab, out_dtype=torch.float32, out=wide
        ),
    }
    for name, run in products.items():
        _speed(table, f"{shape.model}, {name}", "cuBLAS", run, o, dz.shape[1])


def _older(table: Any, shape: Shape, o: Operands) -> None:
    _score_kernels(table, shape, o, "older", lambda: scores_of(o, False))


def _special(table: Any, shape: Shape, o: Operands) -> None:
    case = f"{shape.model}, both branches"
    _score_kernels(table, shape, o, "warp-specialised", lambda: scores_of(o, True))
    table.attempt(case, "warp-specialised", lambda: _compare(table, case, o))


def scores_of(o: Operands, special: bool) -> Any:
    """Return the launches of a branch. Explicit tiles override the device's choice."""
    from kernels.common import HeadConfig
    from kernels.score_launcher import ScoreLauncher
    from kernels.tile_config import HOPPER_TILES, get_gpu_info, select_tile_sizes

    tiles = select_tile_sizes(o.x.shape[1], o.x.dtype, get_gpu_info(o.x))
    return ScoreLauncher(
        o.x, o.w, o.y, None, HeadConfig(), tiles, HOPPER_TILES if special else None
    )


def _score_kernels(
    table: Any, shape: Shape, o: Operands, name: str, make: Callable[[], Any]
) -> None:
    """Time a branch's launches: forward, with entropy, with kept logits [T, V], and dlogits of a
    slab.
    """
    from kernels.linear_logprob_torch import GradientCoefficients

    scores = table.attempt(f"{shape.model}, score kernels", name, make)
    if scores is None:
        return
    row, width = torch.ones(len(o.x), device=o.x.device), o.dz.shape[1]

    def keeps() -> object:
        room = (
            o.x.new_empty(len(o.x), shape.V),
            row.new_empty(-(-shape.V // scores.tiles.columns), len(o.x)),
        )
        return scores.statistics(False, room)

    runs: dict[str, tuple[Callable[[], object], int]] = {
        "forward": (lambda: scores.statistics(False), shape.V),
        "forward and entropy": (lambda: scores.statistics(True), shape.V),
        "forward that keeps [T, V]": (keeps, shape.V),
        "dlogits of a slab": (
            lambda: scores.dlogits(o.dz, 0, width, row, GradientCoefficients(row, row, None)),
            width,
        ),
    }
    for what, (run, columns) in runs.items():
        _speed(table, f"{shape.model}, {what}", name, run, o, columns)


def _compare(table: Any, case: str, o: Operands) -> None:
    """Compare the logprobs of both branches on this head; the device check uses a small head."""
    mine, older = (
        scores.combine(scores.statistics(False)).logp
        for scores in (scores_of(o, True), scores_of(o, False))
    )
    table.row(
        case, "warp-specialised", "largest_difference", float((mine - older).abs().max()), "nats"
    )
