"""Recompute layers in the backward, and hold their inputs in host memory until then.

Gradient checkpointing keeps one tensor [rows, tokens, hidden] for each layer. For long sequences
these are most of a micro-batch's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rl.errors import UserError
from rl.models import LoadedModel, unwrap_model


class HostCopy:
    """Hold a copy of a tensor in host memory.

    The copy from a GPU runs beside the layers that follow: it is queued on `stream`.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None):
        self.device = tensor.device
        if stream is None:
            self.values = tensor.detach().clone()
            return
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.values.copy_(tensor.detach(), non_blocking=True)
        # the memory of `tensor` is not reused before the copy has ended
        tensor.record_stream(stream)
        self.copied = stream.record_event()

    def restore(self) -> Tensor:
        """Return the tensor on its device."""
        if self.device.type != "cuda":
            return self.values
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        return self.values.to(self.device, non_blocking=True)


def enable_gradient_checkpointing(loaded: LoadedModel) -> None:
    """Enable gradient checkpointing, which transformers applies in training mode only.

    The probe verifies that nothing else changes. Raises UserError if the model does not support it.
    """
    if not unwrap_model(loaded.model).supports_gradient_checkpointing:
        kind = type(unwrap_model(loaded.model)).__name__
        raise UserError(
            f"{kind} ({loaded.name}) has no gradient checkpointing: turn it off (and lower "
            "token_budget, if memory is short)"
        )
    loaded.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    loaded.model.train()


def offload_layer_inputs(model: Any, make_copy: Callable[[Tensor], Any] | None = None) -> None:
    """Keep the inputs of a model's checkpointed layers in host memory.

    Call it after `gradient_checkpointing_enable`. `make_copy`: returns an object whose `restore()`
    returns the tensor; a HostCopy by default.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy_to_host(tensor: Tensor) -> HostCopy:
        if tensor.device.type != "cuda":
            return HostCopy(tensor, None)
        if tensor.device not in streams:
            streams[tensor.device] = torch.cuda.Stream(tensor.device)
        return HostCopy(tensor, streams[tensor.device])

    copy = make_copy or copy_to_host

    def pack(tensor: Tensor) -> Any:
        if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
            return copy(tensor)
        return tensor

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.restore()

    def wrap(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # torch's checkpoint saves the arguments of `function` under these hooks, and computes
            # `function` under hooks of its own
            with saved_tensors_hooks(pack, unpack):
                return checkpoint(function, *args, **kwargs)

        return run

    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = wrap(module._gradient_checkpointing_func)
