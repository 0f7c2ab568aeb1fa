"""Prepare operands for the kernels and cuBLAS: aligned rows, tensor descriptors, products that
accumulate in float32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.device_checks import check_mm_to_fp32, supports_addmm_in_place
from kernels.tile_config import TileConfig, get_gpu_info

Operand: TypeAlias = Tensor | TensorDescriptor


def is_interpreting() -> bool:
    """Return whether Triton runs its kernels in Python (TRITON_INTERPRET=1), for tests without a
    GPU.
    """
    return bool(triton.knobs.runtime.interpret)


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 from operands of lower precision, without intermediate rounding.

    Raises RuntimeError on CUDA if torch lacks that product.
    """
    if a.dtype == torch.float32:
        return a @ b
    if not a.is_cuda:
        return a.float() @ b.float()
    check_mm_to_fp32()
    return torch.mm(a, b, out_dtype=torch.float32)


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the float32 tensor `total` in place.

    If torch has that product, a single pass over `total` does it (8 bytes fewer for each element).
    """
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda and supports_addmm_in_place(a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(matmul_fp32(a, b))


def narrow_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Return tensor[rows] without Python's indexing, which queries the device even for fake
    tensors.
    """
    return tensor.narrow(0, rows.start, rows.stop - rows.start)


def align_operand(tensor: Tensor) -> Tensor:
    """Return the tensor with rows aligned as the copy engine or fast pointer loads require.

    The copy engine (TMA) needs rows that begin at multiples of 16 bytes. Loads through pointers are
    fast if Triton takes the strides for aligned: multiples of 16 elements. The elements of a row
    must be contiguous.

    Other row lengths are padded with zeros, which change no product. Unaligned loads are ten times
    slower than the copy.
    """
    lines = 16 // tensor.element_size() if get_gpu_info(tensor).has_tma else 16
    missing = -tensor.shape[1] % lines
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    # a fake tensor has no address
    address = tensor.data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else 0
    fits = tensor.stride(-1) == 1 and tensor.stride(0) % lines == 0 and address % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def build_matmul_options(
    x: Tensor, w: Tensor, tiles: TileConfig
) -> tuple[Operand, Operand, dict[str, Any]]:
    """Return x and w as kernel arguments, and the compile-time options of every kernel that
    multiplies.
    """
    descriptors = get_gpu_info(x).has_tma and x.shape[1] > 0
    options = {
        "D": x.shape[1],
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "DESCRIPTORS": descriptors,
        "UPCAST": is_interpreting(),
        # Three tf32 products keep float32's accuracy at a third of tf32's speed; "ieee" would not
        # use the tensor cores.
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    if not descriptors:
        return x, w, options
    x_rows, w_rows = [tiles.rows, tiles.depth], [tiles.columns, tiles.depth]
    return TensorDescriptor.from_tensor(x, x_rows), TensorDescriptor.from_tensor(w, w_rows), options
