"""Where a learner's weights, gradients and optimizer live: whole on every rank, or sharded by DeepSpeed or FSDP2.

A backend adds gradients up over backwards and ranks. What it is given is this rank's part of a sum; the step's gradient is
the sum over all backwards and all ranks, whatever the backend does with ranks underneath.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rl import distributed
from rl.launch import asks_for_fsdp
from rl.types import AdamParams


class Backend(Protocol):
    """Every method is called on all ranks in the same order (they may talk to each other), with the same names."""

    wrapped: nn.Module  # what a forward goes through
    trainable: Mapping[str, Tensor]  # what is trained, as it lives here

    def micro_batch(self) -> AbstractContextManager:
        """Around the forward and the backward of one micro-batch."""
        ...

    def backward(self, value: Tensor) -> None:
        """Adds the gradient of `value`, which came out of `wrapped`, to what is accumulated."""
        ...

    def step(self, params: AdamParams) -> tuple[float, bool]:
        """(norm of the gradient before clipping, whether an update was made: not where the gradient is not finite)."""
        ...

    def drop_gradients(self) -> None: ...

    def pieces(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The named parameters as a forward uses them, whole, one at a time; each is good until the next is asked for."""
        ...

    def whole_model(self, names: Collection[str]) -> AbstractContextManager[Any | None]:
        """On rank 0 the model with (at least) the named parameters whole and at full precision, elsewhere None."""
        ...

    @property
    def shell(self) -> Any:
        """The model's modules with parameters of the right shapes; their values count for nothing."""
        ...

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies whole parameters in, at full precision; every rank is given the same."""
        ...

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """On rank 0 AdamW's whole state by parameter name: `<name>/exp_avg`, `<name>/exp_avg_sq`, `<name>/step`."""
        ...

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces AdamW's state; `tensors` as `optimizer_tensors` gives them under any backend."""
        ...

    def release(self) -> None:
        """Gives back what outlives the last reference; the backend is not used afterwards."""
        ...


def place(model: nn.Module, accelerator: Any) -> None:
    """Moves a model to its device, unless what shards it will do that itself (in less memory than the whole takes)."""
    if accelerator.distributed_type.value != "DEEPSPEED" and not asks_for_fsdp():
        model.to(accelerator.device)


def make_backend(model: Any, trainable: Mapping[str, Tensor], accelerator: Any) -> Backend:
    """The backend that this launch asks for."""
    if accelerator.distributed_type.value == "DEEPSPEED":
        from rl.backend_deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(model, trainable, accelerator.state.deepspeed_plugin.deepspeed_config)
    if asks_for_fsdp():
        from rl.backend_fsdp import FSDPBackend

        return FSDPBackend(model, bf16=accelerator.mixed_precision == "bf16")
    return ReplicatedBackend(model, trainable, accelerator)


def new_adamw(trainable: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """Its settings are those of each step's AdamParams."""
    return torch.optim.AdamW(list(trainable.values()), lr=0.0, betas=(0.9, 0.95), eps=1e-12, fused=True)


def set_adam(optimizer: Any, params: AdamParams) -> None:
    for group in optimizer.param_groups:
        group.update(
            lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=params.weight_decay
        )


def hollow(model: nn.Module) -> Any:
    """A copy of a model around parameters that hold nothing: untouched CPU memory, which the system does not give out yet."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def filled(shell: nn.Module, pieces: Iterable[tuple[str, Tensor]]) -> Iterator[Any | None]:
    """On rank 0 a hollow model around whole parameters, in CPU memory that is given back afterwards; elsewhere None."""
    writes = distributed.rank() == 0
    copies, names = dict(shell.named_parameters()), []
    for name, tensor in pieces:
        if writes:
            copies[name].data.copy_(tensor)
            names.append(name)
        del tensor
    try:
        yield shell if writes else None
    finally:
        for name in names:
            copies[name].data = torch.empty_like(copies[name].data)


def adam_state(optimizer: torch.optim.Optimizer, trainable: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an optimizer over the parameters themselves, in the form of `Backend.optimizer_tensors`."""
    return {f"{name}/{key}": value for name, p in trainable.items() for key, value in optimizer.state.get(p, {}).items()}


def load_adam_state(
    optimizer: torch.optim.Optimizer, trainable: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    optimizer.state.clear()
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        parameter = trainable[name]
        dtype = value.dtype if key == "step" else parameter.dtype
        optimizer.state[parameter][key] = value.to(parameter.device, dtype, copy=True)


def summed_gradients(parameters: Collection[Tensor]) -> list[Tensor]:
    """The gradients, summed over the ranks in place; zeros where a parameter has none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    distributed.all_sum_(gradients)
    return gradients


class ReplicatedBackend:
    """One process, or DDP: every rank holds everything."""

    def __init__(self, model: Any, trainable: Mapping[str, Tensor], accelerator: Any):
        self.model, self.trainable, self.accelerator = model, trainable, accelerator
        self.wrapped = model
        if distributed.world() > 1:
            devices = [accelerator.device] if accelerator.device.type == "cuda" else None
            self.wrapped = nn.parallel.DistributedDataParallel(model, device_ids=devices)
        self.adam = new_adamw(trainable)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Gradients stay on their rank until the step sums them: the number of backwards is not known in advance."""
        alone = self.wrapped.no_sync() if distributed.world() > 1 else contextlib.nullcontext()
        with alone, self.accelerator.autocast():
            yield

    def backward(self, value: Tensor) -> None:
        value.backward()

    def step(self, params: AdamParams) -> tuple[float, bool]:
        parameters = list(self.trainable.values())
        norm = torch.nn.utils.get_total_norm(summed_gradients(parameters))
        finite = bool(torch.isfinite(norm))
        if finite:
            if params.grad_clip_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, params.grad_clip_norm, norm)
            set_adam(self.adam, params)
            self.adam.step()
        self.drop_gradients()
        return float(norm), finite

    def drop_gradients(self) -> None:
        self.adam.zero_grad()

    def pieces(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        named = dict(self.model.named_parameters())
        for name in names:
            yield name, named[name].detach()

    @contextlib.contextmanager
    def whole_model(self, names: Collection[str]) -> Iterator[Any | None]:
        yield self.model if distributed.rank() == 0 else None

    @property
    def shell(self) -> Any:
        return self.model

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.trainable[name].copy_(tensor)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return adam_state(self.adam, self.trainable)

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        load_adam_state(self.adam, self.trainable, tensors)

    def release(self) -> None:
        """Nothing outlives the references."""
