"""Define where a learner's weights, gradients and optimizer live.

They are replicated on every rank, or sharded by DeepSpeed or FSDP2.

A backend accumulates gradients over backward calls and ranks. Each rank passes its part of a sum.
The step's gradient is the sum over all backward calls and all ranks, however the backend
distributes ranks internally.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rl.distributed import collectives, get_launch_sharding
from rl.layers import truncated_layers
from rl.learner.adamw import (
    get_adam_state,
    load_adam_state,
    make_adamw,
    set_adam_params,
    step_if_finite,
)
from rl.learner.frozen_base import get_dequantizers
from rl.models import SafetensorsWeights
from rl.types import AdamParams


class Backend(abc.ABC):
    """Hold the weights, gradients and optimizer of a learner.

    All ranks call every method in the same order with the same names, because the methods may
    communicate.

    wrapped    the outermost module, which a forward calls
    trainable  trained parameters as this rank stores them
    skeleton   the model's modules with parameters of the right shapes; their values may be
               meaningless
    adam       the optimizer
    """

    wrapped: Any
    trainable: Mapping[str, Any]
    skeleton: Any
    adam: Any

    def micro_batch(self) -> AbstractContextManager:
        """Wrap the forward and the backward of a micro-batch."""
        return contextlib.nullcontext()

    def backward(self, value: Tensor) -> None:
        """Add the gradient of `value`, an output of `wrapped`, to the accumulated gradients."""
        value.backward()

    def step(self, params: AdamParams, is_valid: Tensor | None = None) -> tuple[float, bool]:
        """Return (gradient norm before clipping, whether an update was made).

        No update is made if the gradient is not finite, or if `is_valid`, a tensor [], is False.
        The host reads both once, after it has launched the update (with an 8-bit optimizer before
        it, see `step_if_finite`).
        """
        norm = self.reduce_gradients()
        if params.grad_clip_norm > 0:
            self._clip_gradients(params.grad_clip_norm, norm)
        set_adam_params(self.adam, params)
        result = step_if_finite(self.adam, norm, is_valid)
        self.drop_gradients()
        return result

    def reduce_gradients(self) -> Tensor:
        """Sum the gradients over the ranks, if a backward does not, and return their norm."""
        return torch.nn.utils.get_total_norm(sum_gradients(self.trainable.values()))

    def _clip_gradients(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients, whose norm is `norm`, down to the norm `limit`, on the device."""
        torch.nn.utils.clip_grads_with_norm_(self.trainable.values(), limit, norm)

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients."""
        self.adam.zero_grad()

    @abc.abstractmethod
    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named full parameters in turn, as a forward uses them.

        Each tensor is valid until the next is requested.
        """

    def _iter_precise_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named full parameters in turn, at the optimizer's precision."""
        return self.iter_weights(names)

    def iter_master_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield a copy of each named trained parameter, full, at the optimizer's
        precision.
        """
        return ((name, w.detach().clone()) for name, w in self._iter_precise_weights(names))

    def _local_gradient(self, parameter: Any) -> Tensor | None:
        """Return at least this rank's shard of a gradient. May communicate."""
        return parameter.grad

    def max_gradient_magnitudes(self) -> dict[str, float]:
        """Return the largest magnitude of each trained parameter's accumulated gradient.

        It covers at least this rank's shard, and is 0 for a parameter without a gradient. May
        communicate.
        """
        sizes = {}
        for name, parameter in self.trainable.items():
            gradient = self._local_gradient(parameter)
            sizes[name] = 0.0
            if gradient is not None and gradient.numel():
                sizes[name] = float(gradient.abs().max())
        return sizes

    def full_model(self, names: Collection[str]) -> AbstractContextManager[Any | None]:
        """Yield on rank 0 the model with at least the named parameters full, at full precision.

        Other ranks get None. The copy lies in CPU memory and is freed afterwards.
        """
        return fill_skeleton(self.skeleton, self._iter_precise_weights(names))

    def _copy_(self, parameter: Any, whole: Tensor) -> None:
        """Copy a full tensor into a parameter, or into a tensor that is stored like it."""
        parameter.copy_(whole)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy full parameters in, at full precision; every rank passes the same tensors."""
        for name, tensor in tensors.items():
            self._copy_(self.trainable[name], tensor)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return on rank 0 AdamW's full state by parameter name.

        Keys: `<name>/exp_avg`, `<name>/exp_avg_sq`, `<name>/step`. The format is the same under
        every backend and number of ranks, so any launch can load another's state.
        """
        return get_adam_state(self.adam, self.trainable) if collectives.rank() == 0 else {}

    @torch.no_grad()
    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace AdamW's state; no tensors make it a fresh optimizer."""
        load_adam_state(self.adam, self.trainable, tensors, self._copy_)

    def release(self) -> None:  # noqa: B027  (nothing, by default)
        """Free memory that would stay allocated after the last reference to the backend is dropped.

        The backend must not be used afterwards.
        """


class ReplicatedBackend(Backend):
    """Replicate weights, gradients and optimizer on every rank: a single process, or data parallel.

    torch's DistributedDataParallel is not used: it would allocate buckets of the size of all
    gradients, and reduce once per backward. Here the step sums the gradients of all micro-batches.
    """

    def __init__(
        self,
        model: Any,
        trainable: Mapping[str, Tensor],
        accelerator: Any,
        optimizer: str = "adamw",
        skeleton: Any = None,
    ):
        """Wrap `model` for this launch; see `make_backend` for the arguments."""
        self.wrapped, self.trainable, self.accelerator = model, trainable, accelerator
        self.skeleton = model if skeleton is None else skeleton
        self._dequantizers = get_dequantizers(model)
        collectives.copy_from_rank_0_([*model.parameters(), *model.buffers()])
        self.adam = make_adamw(trainable, optimizer)

    def micro_batch(self) -> AbstractContextManager:
        """Compute in the launch's precision."""
        return self.accelerator.autocast()

    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named parameters; those in 4 bit are returned in bf16."""
        parameters = dict(self.wrapped.named_parameters())
        for name in names:
            dequantize = self._dequantizers.get(name)
            yield name, parameters[name].detach() if dequantize is None else dequantize()

    def full_model(self, names: Collection[str]) -> AbstractContextManager[Any | None]:
        if self.skeleton is not self.wrapped:
            return super().full_model(names)
        return contextlib.nullcontext(self.wrapped if collectives.rank() == 0 else None)


def move_to_device(model: nn.Module, accelerator: Any) -> None:
    """Move a model to its device, unless its sharding backend does so.

    A sharding backend moves it in less memory than the full model takes.
    """
    if not get_launch_sharding().divides:
        model.to(accelerator.device)


def make_skeleton(model: nn.Module) -> Any:
    """Return a copy of a model with parameters that hold no values.

    They are untouched CPU memory, which the system does not allocate yet.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


@torch.no_grad()
def load_first_layers(model: nn.Module, lazy_weights: SafetensorsWeights) -> Any:
    """Return a copy of a model without values in which only the first layers are read.

    `rl.layers.truncated_layers` selects these layers; the other layers hold no values.
    """
    trial, parameters = make_skeleton(model), dict(model.named_parameters())
    with truncated_layers(trial):
        for name, parameter in trial.named_parameters():
            parameter.copy_(lazy_weights.read(name) if name in lazy_weights else parameters[name])
    return trial


@contextlib.contextmanager
def fill_skeleton(
    skeleton: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[Any | None]:
    """Yield on rank 0 a skeleton model filled with full parameters, elsewhere None.

    The parameters lie in CPU memory, which is freed afterwards.
    """
    writes = collectives.rank() == 0
    copies, names = dict(skeleton.named_parameters()), []
    for name, tensor in weights:
        if writes:
            copies[name].data.copy_(tensor)
            names.append(name)
        del tensor
    try:
        yield skeleton if writes else None
    finally:
        for name in names:
            copies[name].data = torch.empty_like(copies[name].data)


def sum_gradients(parameters: Collection[Tensor]) -> list[Tensor]:
    """Return the gradients, summed over the ranks in place; zeros for a parameter without a
    gradient.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    collectives.all_sum_(gradients)
    return gradients
