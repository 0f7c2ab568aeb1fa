"""Replicate weights, gradients and optimizer on every rank: a single process, or data parallel."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl.distributed import collectives
from rl.learner.adamw import get_adam_state, load_adam_state, make_adamw, set_adam_params
from rl.learner.backend_common import sum_gradients
from rl.types import AdamParams


class ReplicatedBackend:
    """Implement `rl.learner.backend.Backend` for a single process or for data parallel ranks.

    Every rank holds everything. torch's DistributedDataParallel is not used: it would allocate
    buckets of the size of all gradients, and reduce once per backward. Here the step sums the
    gradients of all micro-batches.
    """

    def __init__(
        self,
        model: Any,
        trainable: Mapping[str, Tensor],
        accelerator: Any,
        optimizer: str = "adamw",
    ):
        """Wrap `model` for this launch. `optimizer`: its kind, see rl.learner.adamw."""
        self.model, self.trainable, self.accelerator = model, trainable, accelerator
        self.wrapped = model
        collectives.copy_from_rank_0_([*model.parameters(), *model.buffers()])
        self.adam = make_adamw(trainable, optimizer)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Compute in the launch's precision."""
        with self.accelerator.autocast():
            yield

    def backward(self, value: Tensor) -> None:
        value.backward()

    def step(self, params: AdamParams) -> tuple[float, bool]:
        parameters = list(self.trainable.values())
        norm = torch.nn.utils.get_total_norm(sum_gradients(parameters))
        finite = bool(torch.isfinite(norm))
        if finite:
            if params.grad_clip_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, params.grad_clip_norm, norm)
            set_adam_params(self.adam, params)
            self.adam.step()
        self.drop_gradients()
        return float(norm), finite

    def drop_gradients(self) -> None:
        self.adam.zero_grad()

    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        named = dict(self.model.named_parameters())
        for name in names:
            yield name, named[name].detach()

    def iter_master_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.trainable[name].detach().clone()) for name in names)

    def max_gradient_magnitudes(self) -> dict[str, float]:
        return {
            name: 0.0 if p.grad is None else float(p.grad.abs().max())
            for name, p in self.trainable.items()
        }

    def full_model(self, names: Collection[str]) -> contextlib.AbstractContextManager[Any | None]:
        return contextlib.nullcontext(self.model if collectives.rank() == 0 else None)

    @property
    def skeleton(self) -> Any:
        return self.model

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.trainable[name].copy_(tensor)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return get_adam_state(self.adam, self.trainable)

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        load_adam_state(self.adam, self.trainable, tensors)

    def release(self) -> None:
        """Do nothing: all memory is freed with the last reference to the backend."""
