"""Test which operations work correctly with the installed torch on this GPU, and cache the results.

A launch chooses between two branches by these results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch


def _allclose(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return whether two tensors agree within `tolerance`, relative to the largest expectation."""
    return bool((actual - expected).abs().max() <= tolerance * (1.0 + expected.abs().max()))


@cache
def check_mm_to_fp32() -> None:
    """Check that torch has the product of half-precision matrices into float32.

    Raises RuntimeError for torch before 2.8, which lacks it.
    """
    if "dtype" not in torch.ops.aten.mm.overloads():
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.mm(out_dtype=), the product of half-precision "
            "matrices into float32; expected torch 2.8 or newer: upgrade torch"
        )


@cache
def supports_addmm_in_place(dtype: torch.dtype) -> bool:
    """Return whether torch.addmm can add a product of `dtype` to a float32 tensor in place.

    torch 2.13 can; older versions reject `out_dtype`.
    """
    if "dtype_out" not in torch.ops.aten.addmm.overloads() or not torch.cuda.is_available():
        return False
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(64, 64, generator=g, device="cuda").to(dtype) for _ in range(2))
    total = torch.randn(64, 64, generator=g, device="cuda")
    expected = total.double() + a.double() @ b.double()
    try:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing about the kernel
        raise
    except (RuntimeError, TypeError):  # declared, but unsupported for this device or dtype
        return False
    return _allclose(total.double(), expected, 1e-5)


def outputs_agree(
    newer_outputs: tuple[torch.Tensor, ...], older_outputs: tuple[torch.Tensor, ...]
) -> bool:
    """Return whether the outputs of two kernels agree to float32's rounding, the last output to
    that of half precision.
    """
    pairs = list(zip(newer_outputs, older_outputs, strict=True))
    return all(_allclose(newer, older, 1e-4) for newer, older in pairs[:-1]) and _allclose(
        *pairs[-1], 1e-2
    )


@cache
def check_kernels_agree(
    run_kernel: Callable[[bool, torch.device, torch.dtype], tuple[torch.Tensor, ...]],
    index: int,
    dtype: torch.dtype,
    names: tuple[str, str] = ("a newer kernel", "the older kernel"),
) -> bool:
    """Return whether a newer kernel gives the same numbers as an older kernel on this GPU. `names`:
    of both, for the warning if it does not.

    `run_kernel(newer, device, dtype)` runs either kernel and returns its outputs; the last output
    has dtype `dtype`. Only the numbers are compared, not the time: the branch that a machine
    chooses must not depend on its load.
    """
    from triton.errors import TritonError

    with torch.cuda.device(index):
        try:
            device = torch.device("cuda", index)
            outputs = [run_kernel(newer, device, dtype) for newer in (True, False)]
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:  # a RuntimeError that says nothing about the kernel
            raise
        except (
            RuntimeError,
            AttributeError,
            TypeError,
            ValueError,
            TritonError,
        ) as error:  # an older Triton lacks features that the newer kernel uses
            first_line = (str(error).splitlines() or [""])[0]
            warnings.warn(
                f"{names[0]} does not run on this GPU, using {names[1]} "
                f"({type(error).__name__}: {first_line:.200})",
                stacklevel=2,
            )
            return False
    agree = outputs_agree(*outputs)
    if not agree:
        warnings.warn(
            f"{names[0]} gives other numbers than {names[1]} on this GPU, using {names[1]}",
            stacklevel=2,
        )
    return agree
