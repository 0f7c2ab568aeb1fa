"""What this machine's torch and GPU do rightly, found out once by doing it: which of two branches a
launch takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch


def _same(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found - expected).abs().max() <= tolerance * (1.0 + expected.abs().max()))


@cache
def adds_in_place(dtype: torch.dtype) -> bool:
    """Whether torch.addmm adds a product of `dtype` to a float32 tensor in place (torch 2.13 does;
    older ones refuse `out_dtype`).
    """
    if "dtype_out" not in torch.ops.aten.addmm.overloads() or not torch.cuda.is_available():
        return False
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(64, 64, generator=g, device="cuda").to(dtype) for _ in range(2))
    total = torch.randn(64, 64, generator=g, device="cuda")
    expected = total.double() + a.double() @ b.double()
    try:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # declared, but not for this device or these dtypes
        return False
    return _same(total.double(), expected, 1e-5)


@cache
def branches_agree(
    trial: Callable[[bool, int, torch.dtype], tuple[torch.Tensor, ...]],
    index: int,
    dtype: torch.dtype,
) -> bool:
    """Whether a newer branch gives an older one's numbers on this GPU: `trial(newer, index,
    dtype)`, the last of them of `dtype`.

    The check is of what comes out, not of its time: which branch a machine takes must not hang on
    how busy it was.
    """
    from triton.errors import TritonError

    with torch.cuda.device(index):
        try:
            found = [trial(newer, index, dtype) for newer in (True, False)]
            torch.cuda.synchronize()
        except (
            RuntimeError,
            AttributeError,
            TypeError,
            TritonError,
        ) as error:  # an older Triton has not all that they are written in
            first = (str(error).splitlines() or [""])[0]
            warnings.warn(
                f"a newer kernel does not run here, the older one is taken ({type(error).__name__}: {first:.200})",
                stacklevel=2,
            )
            return False
    pairs = list(zip(*found, strict=True))
    agree = all(_same(mine, other, 1e-4) for mine, other in pairs[:-1]) and _same(
        pairs[-1][0], pairs[-1][1], 1e-2
    )
    if not agree:
        warnings.warn(
            "a newer kernel gives other numbers than the older one here, which is taken",
            stacklevel=2,
        )
    return agree
