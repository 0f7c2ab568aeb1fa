"""Shard weights, gradients and optimizer with PyTorch's FSDP2: ZeRO-3 without DeepSpeed.

Every trained parameter is a DTensor; this rank stores a shard of its first dimension in fp32. A
layer's parameters are gathered when the layer runs, in bf16 if requested. Each backward adds the
sum over ranks to the gradients of the shards. With hybrid sharding (HSDP) each machine holds all
weights once: gathering stays inside it, and only sums of gradients cross machines.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl.distributed import collectives
from rl.learner.adamw import make_adamw, set_adam_params
from rl.learner.backend_common import fill_skeleton, make_skeleton
from rl.models import UnloadedParameters, unwrap_model
from rl.types import AdamParams


class FSDPBackend:
    """Implement `rl.learner.backend.Backend` with FSDP2; see the module.

    `bf16`: layers compute in bf16; sums over ranks stay fp32.
    """

    def __init__(self, model: Any, *, bf16: bool, lazy_weights: UnloadedParameters | None = None):
        # Modules can be copied only before the weights are sharded.
        self.skeleton = make_skeleton(model)
        kinds = set(unwrap_model(model)._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        collectives.shard_model(model, layers, bf16=bf16)
        self.wrapped = model
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        self.trainable: Mapping[str, Any] = {
            name: p for name, p in self.parameters.items() if p.requires_grad
        }
        if lazy_weights is not None:
            self._load_shards(lazy_weights)
        self.adam = make_adamw(self.trainable)

    @torch.no_grad()
    def _load_shards(self, lazy_weights: UnloadedParameters) -> None:
        """Read this rank's shard of each tensor, and no other part of it."""
        for name, parameter in self.parameters.items():
            if name in lazy_weights:
                mesh = collectives.shard_mesh()
                size = -(-len(parameter) // mesh.size)  # same split as torch.chunk
                start, local_shard = size * mesh.rank, parameter.to_local()
                if len(local_shard):
                    local_shard.copy_(lazy_weights.read_rows(name, start, start + len(local_shard)))

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        yield
        # A backward reshards by itself. After a forward without a backward the root would keep its
        # gathered weights past an update.
        self.wrapped.reshard()

    def backward(self, value: Tensor) -> None:
        value.backward()

    def step(self, params: AdamParams) -> tuple[float, bool]:
        for parameter in self.trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad.to_local() for p in self.trainable.values()]
        square = torch.nn.utils.get_total_norm(gradients).square()
        # The sum over all ranks, and not over a shard group alone, gives every rank the same bits.
        collectives.all_sum_([square])
        square /= collectives.world() // collectives.shard_mesh().size
        norm = float(square.sqrt())
        finite = bool(torch.isfinite(square))
        if finite:
            if params.grad_clip_norm > 0:
                torch._foreach_mul_(gradients, min(1.0, params.grad_clip_norm / (norm + 1e-6)))
            set_adam_params(self.adam, params)
            self.adam.step()
        self.drop_gradients()
        return norm, finite

    def drop_gradients(self) -> None:
        self.adam.zero_grad()

    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self.parameters[name].detach().full_tensor()

    def iter_master_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.trainable[name].detach().full_tensor().clone()) for name in names)

    def max_gradient_magnitudes(self) -> dict[str, float]:
        local_grads = {
            name: None if p.grad is None else p.grad.to_local()
            for name, p in self.trainable.items()
        }
        return {
            name: 0.0 if grad is None or not grad.numel() else float(grad.abs().max())
            for name, grad in local_grads.items()
        }

    def full_model(self, names: Collection[str]) -> contextlib.AbstractContextManager[Any | None]:
        """Yield the full model on rank 0; the copy lies in CPU memory and is freed afterwards."""
        return fill_skeleton(self.skeleton, self.iter_weights(names))

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._copy_shard(self.trainable[name], tensor)

    @staticmethod
    def _copy_shard(parameter: Any, whole: Tensor) -> None:
        """Copy this rank's shard of a full tensor into a sharded parameter.

        The shards of the last ranks may be empty.
        """
        mesh, local_shard = collectives.shard_mesh(), parameter.to_local()
        shares = whole.chunk(mesh.size)
        local_shard.copy_(shares[mesh.rank] if mesh.rank < len(shares) else whole[:0])

    def optimizer_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                whole = value if key == "step" else value.full_tensor()  # a collective
                if collectives.rank() == 0:
                    tensors[f"{name}/{key}"] = whole.to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.adam.state.clear()
        for full_name, value in tensors.items():
            name, key = full_name.rsplit("/", 1)
            parameter = self.trainable[name]
            state = self.adam.state[parameter]
            if key == "step":
                state[key] = value.to(parameter.device, copy=True)
            else:
                state[key] = torch.zeros_like(parameter)
                self._copy_shard(state[key], value)

    def release(self) -> None:
        del self.wrapped, self.parameters, self.trainable, self.adam, self.skeleton
        gc.collect()  # FSDP's hooks and modules refer to each other
