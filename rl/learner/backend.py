"""Where a learner's weights, gradients and optimizer live: whole on every rank, or sharded by
DeepSpeed or FSDP2.

A backend adds gradients up over backwards and ranks. What it is given is this rank's part of a sum;
the step's gradient is the sum over all backwards and all ranks, whatever the backend does with
ranks underneath.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from rl.learner.backend_packed import PackedBackend
from rl.learner.backend_replicated import ReplicatedBackend
from rl.models import Unread
from rl.ranks import asks_for_fsdp, distributed
from rl.types import AdamParams


class Backend(Protocol):
    """Every method is called on all ranks in the same order (they may talk to each other), with the
    same names.
    """

    wrapped: nn.Module  # what a forward goes through
    trainable: Mapping[str, Tensor]  # what is trained, as it lives here

    def micro_batch(self) -> AbstractContextManager:
        """Around the forward and the backward of one micro-batch."""
        ...

    def backward(self, value: Tensor) -> None:
        """Adds the gradient of `value`, which came out of `wrapped`, to what is accumulated."""
        ...

    def step(self, params: AdamParams) -> tuple[float, bool]:
        """(norm of the gradient before clipping, whether an update was made: not where the gradient
        is not finite).
        """
        ...

    def drop_gradients(self) -> None: ...

    def pieces(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The named parameters as a forward uses them, whole, one at a time; each is good until the
        next is asked for.
        """
        ...

    def exact(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The named trained parameters as the optimizer has them, whole and of one's own, one at a
        time.
        """
        ...

    def gradient_sizes(self) -> dict[str, float]:
        """The largest magnitude in what is accumulated for each trained parameter, as far as this
        rank has it; 0 where there is none.
        """
        ...

    def whole_model(self, names: Collection[str]) -> AbstractContextManager[Any | None]:
        """On rank 0 the model with (at least) the named parameters whole and at full precision,
        elsewhere None.
        """
        ...

    @property
    def shell(self) -> Any:
        """The model's modules with parameters of the right shapes; their values count for nothing."""
        ...

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies whole parameters in, at full precision; every rank is given the same."""
        ...

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """On rank 0 AdamW's whole state by parameter name: `<name>/exp_avg`, `<name>/exp_avg_sq`,
        `<name>/step`.
        """
        ...

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces AdamW's state; `tensors` as `optimizer_tensors` gives them under any backend."""
        ...

    def release(self) -> None:
        """Gives back what outlives the last reference; the backend is not used afterwards."""
        ...


def place(model: nn.Module, accelerator: Any) -> None:
    """Moves a model to its device, unless what shards it will do that itself (in less memory than
    the whole takes).
    """
    if accelerator.distributed_type.value != "DEEPSPEED" and not asks_for_fsdp():
        model.to(accelerator.device)


def reads_in_parts(accelerator: Any) -> bool:
    """Whether each rank of this launch keeps a part of the weights alone, and is to read no more
    than that.
    """
    if accelerator.distributed_type.value == "DEEPSPEED":
        stage = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
        return stage == 3 and distributed.world() > 1
    return asks_for_fsdp()


def make_backend(
    model: Any,
    trainable: Mapping[str, Tensor],
    accelerator: Any,
    optimizer: str = "adamw",
    shell: Any = None,
    unread: Unread | None = None,
) -> Backend:
    """The backend that this launch asks for. `optimizer`: its kind, see rl.learner.adamw.

    `shell`: of a model some of whose matrices are in 4 bit, its modules as they were before.
    `unread`: of a model without values, where `reads_in_parts`, what it is filled from.
    """
    if shell is not None:
        return PackedBackend(model, trainable, accelerator, shell, optimizer)
    if accelerator.distributed_type.value == "DEEPSPEED":
        from rl.learner.backend_deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(
            model, trainable, accelerator.state.deepspeed_plugin.deepspeed_config, unread
        )
    if asks_for_fsdp():
        from rl.learner.backend_fsdp import FSDPBackend

        return FSDPBackend(model, bf16=accelerator.mixed_precision == "bf16", unread=unread)
    return ReplicatedBackend(model, trainable, accelerator, optimizer)
