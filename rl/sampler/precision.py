"""Cast a model's weights to a low precision; everything else stays as in a learner under autocast.

Only the matrices of linear layers, embeddings and experts are cast. Rotary frequencies and other
buffers, norms, biases, the parameters of recurrences and an adapter's matrices keep their dtype:
frequencies rounded to bfloat16 are wrong by whole turns after some hundred tokens. The forward of
the generic decoder then runs under autocast, as the learner's does. Hidden states between the
layers (from the embedding on) and the logits are float32. So sampler and learner differ only by the
rounding of the matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kernels.device_checks import check_mm_to_fp32

# columns of a head per product, if its weights have to be converted to float32 first
_COLUMNS = 2048
LOW_PRECISION = (torch.bfloat16, torch.float16)


def linear_fp32(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x [.., I] times the weight, plus the bias, in float32 even if both are half precision.

    Products and sums are not rounded to half precision.
    """
    if weight_OI.dtype not in LOW_PRECISION:
        return F.linear(x.to(weight_OI.dtype), weight_OI, bias_O)
    flat = x.reshape(-1, x.shape[-1]).to(weight_OI.dtype)
    if flat.is_cuda:
        check_mm_to_fp32()
        y = torch.mm(flat, weight_OI.t(), out_dtype=torch.float32)
    else:
        y, wide = flat.new_empty(len(flat), len(weight_OI), dtype=torch.float32), flat.float()
        for start in range(0, len(weight_OI), _COLUMNS):
            y[:, start : start + _COLUMNS] = wide @ weight_OI[start : start + _COLUMNS].float().t()
    if bias_O is not None:
        y += bias_O.float()
    return y.view(*x.shape[:-1], -1)


def iter_frozen_matrices(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, matrix) of all that `cast_frozen_` casts, a tied matrix once under its first
    name.
    """
    seen: set[int] = set()
    for name, parameter in iter_matrices(model):
        if not parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def cast_frozen_(
    model: Any, dtype: torch.dtype, *, without_values: bool = False, float32_embeddings: bool = True
) -> None:
    """Cast a learner's frozen matrices to `dtype`, in place; embeddings still return float32.

    `without_values`: the matrices hold no values yet, and their memory is not touched.
    `float32_embeddings`: False if something other than autocast handles the precision (FSDP2).
    """
    for _, parameter in iter_frozen_matrices(model):
        if parameter.dtype != dtype:
            parameter.data = (
                torch.empty_like(parameter.data, dtype=dtype)
                if without_values
                else parameter.data.to(dtype)
            )
    if float32_embeddings:
        _embeddings_output_float32_(model)


def iter_matrices(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of each matrix that may be cast (see the module)."""
    from transformers.pytorch_utils import Conv1D

    kept_fp32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if any(part in name for part in kept_fp32):
                continue
            of_layer = (
                isinstance(module, nn.Linear | nn.Embedding | Conv1D) and parameter.dim() == 2
            )
            # a recurrence's parameter has dimensions of size 1 (Kimi Linear: [1, 1, H, 1])
            of_experts = (
                parameter.dim() >= 3
                and min(parameter.shape) > 1
                and not isinstance(module, nn.modules.conv._ConvNd)
            )
            if parameter.is_floating_point() and "lora_" not in name and (of_layer or of_experts):
                yield name, parameter


def output_float32_(model: Any) -> None:
    """Make a low-precision model's embeddings and output head return float32, in place."""
    _embeddings_output_float32_(model)
    head = model.get_output_embeddings()
    for module in head.modules():  # the head itself, or the layers inside an adapter on it
        if (
            type(module) is nn.Linear
            and module.weight.shape[0] == head.weight.shape[0]
            and module.weight.dtype in LOW_PRECISION
        ):
            module.forward = MethodType(_head_float32, module)  # type: ignore[method-assign]


def _embeddings_output_float32_(model: Any) -> None:
    """Make the embeddings in low precision return float32, in place."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.dtype in LOW_PRECISION:
            # A bound method, so that a copied model gets a separate method.
            module.forward = MethodType(_embed_float32, module)  # type: ignore[method-assign]


def _embed_float32(self: nn.Embedding, *args: Any, **kwargs: Any) -> Tensor:
    """Return the float32 output of an embedding in low precision."""
    if type(self) is nn.Embedding:
        return type(self).forward(self, *args, **kwargs).float()
    with _Float32Lookup(
        self.weight
    ):  # some classes scale the vectors in the dtype of their weights
        return type(self).forward(self, *args, **kwargs).float()


class _Float32Lookup(TorchFunctionMode):
    """Report float32 as the dtype of a table in low precision, and return float32 from look-ups in
    it.
    """

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.dtype.__get__ and args[0] is self.table:  # type: ignore[attr-defined]
            return torch.float32
        out = func(*args, **(kwargs or {}))
        return out.float() if func is F.embedding else out


def _head_float32(self: nn.Linear, x: Tensor) -> Tensor:
    """Return the float32 output of an output head in low precision."""
    with torch.autocast(x.device.type, enabled=False):
        return linear_fp32(x, self.weight, self.bias)
