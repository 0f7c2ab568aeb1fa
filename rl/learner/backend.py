"""Define where a learner's weights, gradients and optimizer live.

They are replicated on every rank, or sharded by DeepSpeed or FSDP2.

A backend accumulates gradients over backward calls and ranks. Each rank passes its part of a sum.
The step's gradient is the sum over all backward calls and all ranks, however the backend
distributes ranks internally.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from rl.distributed import FSDPSharding, ZeroSharding, get_launch_sharding
from rl.learner.backend_4bit import FourBitBackend
from rl.learner.backend_replicated import ReplicatedBackend
from rl.models import UnloadedParameters
from rl.types import AdamParams


class Backend(Protocol):
    """Hold the weights, gradients and optimizer of a learner.

    All ranks call every method in the same order with the same names, because the methods may
    communicate.
    """

    wrapped: nn.Module  # the outermost module, which a forward calls
    trainable: Mapping[str, Tensor]  # trained parameters as this rank stores them

    def micro_batch(self) -> AbstractContextManager:
        """Wrap the forward and the backward of a micro-batch."""
        ...

    def backward(self, value: Tensor) -> None:
        """Add the gradient of `value`, an output of `wrapped`, to the accumulated gradients."""
        ...

    def step(self, params: AdamParams) -> tuple[float, bool]:
        """Return (gradient norm before clipping, whether an update was made).

        No update is made if the gradient is not finite.
        """
        ...

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients."""
        ...

    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named full parameters in turn, as a forward uses them.

        Each tensor is valid until the next is requested.
        """
        ...

    def iter_master_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield a copy of each named trained parameter, full, at the optimizer's
        precision.
        """
        ...

    def max_gradient_magnitudes(self) -> dict[str, float]:
        """Return the largest magnitude of each trained parameter's accumulated gradient.

        It covers this rank's shard only, and is 0 for a parameter without a gradient.
        """
        ...

    def full_model(self, names: Collection[str]) -> AbstractContextManager[Any | None]:
        """Yield on rank 0 the model with at least the named parameters full, at full precision.

        Other ranks get None.
        """
        ...

    @property
    def skeleton(self) -> Any:
        """Return the model's modules with parameters of the right shapes; their values are
        meaningless.
        """
        ...

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy full parameters in, at full precision; every rank passes the same tensors."""
        ...

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return on rank 0 AdamW's full state by parameter name.

        Keys: `<name>/exp_avg`, `<name>/exp_avg_sq`, `<name>/step`.
        """
        ...

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace AdamW's state; `tensors` has the format of `optimizer_tensors` of any backend."""
        ...

    def release(self) -> None:
        """Free memory that would stay allocated after the last reference to the backend is dropped.

        The backend must not be used afterwards.
        """
        ...


def move_to_device(model: nn.Module, accelerator: Any) -> None:
    """Move a model to its device, unless its sharding backend does so.

    A sharding backend moves it in less memory than the full model takes.
    """
    if not get_launch_sharding().divides:
        model.to(accelerator.device)


def make_backend(
    model: Any,
    trainable: Mapping[str, Tensor],
    accelerator: Any,
    optimizer: str = "adamw",
    skeleton: Any = None,
    lazy_weights: UnloadedParameters | None = None,
) -> Backend:
    """Return the backend that this launch requests.

    `optimizer`: its kind, see rl.learner.adamw. `skeleton`: for a model with 4-bit matrices, its
    modules before quantization. `lazy_weights`: for a model without values
    (`Sharding.reads_shards`), the source of its weights.
    """
    if skeleton is not None:
        return FourBitBackend(model, trainable, accelerator, skeleton, optimizer)
    sharding = get_launch_sharding()
    if isinstance(sharding, ZeroSharding):
        from rl.learner.backend_deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(
            model, trainable, accelerator.state.deepspeed_plugin.deepspeed_config, lazy_weights
        )
    if isinstance(sharding, FSDPSharding):
        from rl.learner.backend_fsdp import FSDPBackend

        return FSDPBackend(
            model, bf16=accelerator.mixed_precision == "bf16", lazy_weights=lazy_weights
        )
    return ReplicatedBackend(model, trainable, accelerator, optimizer)
