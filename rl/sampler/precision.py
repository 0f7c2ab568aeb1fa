"""A model's weights in a low precision, everything else as a learner under autocast has it.

Only the matrices of linear layers, embeddings and experts are cast. Rotary frequencies and other
buffers, norms, biases, the parameters of recurrences and an adapter's matrices stay as they are:
frequencies rounded to bfloat16 are wrong by whole turns some hundred tokens on. The forward then
runs under autocast, as the learner's does. Hidden states are float32 between the layers (from the
embedding on) and so are the logits: sampler and learner differ by what the matrices' products lose
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_COLUMNS = 2048  # of a head at once, where its weights have to be turned to float32 first
LOW = (torch.bfloat16, torch.float16)


def linear_fp32(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x [.., I] times the weight, in float32 also where both are half precision: products and sums
    are not rounded.
    """
    if weight_OI.dtype not in LOW:
        return F.linear(x.to(weight_OI.dtype), weight_OI, bias_O)
    flat = x.reshape(-1, x.shape[-1]).to(weight_OI.dtype)
    if flat.is_cuda:
        y = torch.mm(flat, weight_OI.t(), out_dtype=torch.float32)
    else:
        y, wide = flat.new_empty(len(flat), len(weight_OI), dtype=torch.float32), flat.float()
        for start in range(0, len(weight_OI), _COLUMNS):
            y[:, start : start + _COLUMNS] = wide @ weight_OI[start : start + _COLUMNS].float().t()
    if bias_O is not None:
        y += bias_O.float()
    return y.view(*x.shape[:-1], -1)


def cast_(model: Any, dtype: torch.dtype, *, frozen: bool = False, hollow: bool = False) -> None:
    """The matrices of a HF model (`frozen`: those that are not trained) to `dtype`, in place. See
    the module.

    `hollow`: they hold nothing yet, and are not touched.
    """
    for _, parameter in frozen_matrices(model) if frozen else _matrices(model):
        if parameter.dtype != dtype:
            parameter.data = (
                torch.empty_like(parameter.data, dtype=dtype)
                if hollow
                else parameter.data.to(dtype)
            )


def frozen_matrices(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """What `lower_frozen_` casts, each once: a tied one under its first name."""
    seen: set[int] = set()
    for name, parameter in _matrices(model):
        if not parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def lower_frozen_(
    model: Any, dtype: torch.dtype, *, hollow: bool = False, widen: bool = True
) -> None:
    """A learner's matrices that are not trained to `dtype`, in place; embeddings give float32 as
    before. `hollow`: see `cast_`.

    `widen`: False where something else than autocast sees to the precision (FSDP2).
    """
    cast_(model, dtype, frozen=True, hollow=hollow)
    if widen:
        _widen_embeddings_(model)


def _matrices(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    from transformers.pytorch_utils import Conv1D

    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if any(part in own for part in kept):
                continue
            of_layer = (
                isinstance(module, nn.Linear | nn.Embedding | Conv1D) and parameter.dim() == 2
            )
            of_experts = parameter.dim() >= 3 and not isinstance(module, nn.modules.conv._ConvNd)
            if parameter.is_floating_point() and "lora_" not in own and (of_layer or of_experts):
                yield own, parameter


def widen_(model: Any) -> None:
    """Embeddings and the output head of a model that is in a low precision give float32, in place."""
    _widen_embeddings_(model)
    head = model.get_output_embeddings()
    for module in head.modules():  # the head itself, or the layers inside an adapter around it
        if (
            type(module) is nn.Linear
            and module.weight.shape[0] == head.weight.shape[0]
            and module.weight.dtype in LOW
        ):
            module.forward = MethodType(_head, module)  # type: ignore[method-assign]


def _widen_embeddings_(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.dtype in LOW:
            # A method, so that a copy of the model has one of its own.
            module.forward = MethodType(_embed, module)  # type: ignore[method-assign]


def _embed(self: nn.Embedding, *args: Any, **kwargs: Any) -> Tensor:
    if type(self) is nn.Embedding:
        return type(self).forward(self, *args, **kwargs).float()
    with _AsFloat32(self.weight):  # some scale what they looked up, in their weights' dtype
        return type(self).forward(self, *args, **kwargs).float()


class _AsFloat32(TorchFunctionMode):
    """Inside, a table in low precision says that it is float32, and what is looked up is."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.dtype.__get__ and args[0] is self.table:  # type: ignore[attr-defined]
            return torch.float32
        out = func(*args, **(kwargs or {}))
        return out.float() if func is F.embedding else out


def _head(self: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return linear_fp32(x, self.weight, self.bias)
