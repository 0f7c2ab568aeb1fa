"""Shard weights, gradients and optimizer with PyTorch's FSDP2: ZeRO-3 without DeepSpeed.

Every trained parameter is a DTensor; this rank stores a shard of its first dimension in fp32. A
layer's parameters are gathered when the layer runs, in bf16 if requested. Each backward adds the
sum over ranks to the gradients of the shards. With hybrid sharding (HSDP) each machine holds all
weights once: gathering stays inside it, and only sums of gradients cross machines. With expert
parallelism a rank's experts are sharded over the ranks with the same experts alone, in their second
dimension (rl.learner.expert_parallel).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl.distributed import collectives
from rl.learner.adamw import make_adamw
from rl.learner.backend import Backend, make_skeleton
from rl.learner.expert_parallel import ExpertGroup
from rl.models import SafetensorsWeights, unwrap_model


class FSDPBackend(Backend):
    """Implement a backend with FSDP2; see the module.

    `bf16`: layers compute in bf16; sums over ranks stay fp32. `expert_group`: the ranks that divide
    the experts.
    """

    def __init__(
        self,
        model: Any,
        *,
        bf16: bool,
        lazy_weights: SafetensorsWeights | None = None,
        expert_group: ExpertGroup | None = None,
    ):
        # Modules can be copied only before the weights are sharded.
        self.skeleton = make_skeleton(model)
        kinds = set(unwrap_model(model)._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        self.expert_group = expert_group
        experts = [] if expert_group is None else expert_group.split_(model)
        mesh = None if expert_group is None else expert_group.mesh
        collectives.shard_model(model, layers, bf16=bf16, experts=experts, expert_mesh=mesh)
        self.wrapped = model
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        self.trainable: Mapping[str, Any] = {
            name: p for name, p in self.parameters.items() if p.requires_grad
        }
        if lazy_weights is not None:
            self._load_shards(lazy_weights)
        self.adam = make_adamw(self.trainable)

    @torch.no_grad()
    def _load_shards(self, lazy_weights: SafetensorsWeights) -> None:
        """Read this rank's shard of each tensor, and no other part of it."""
        for name, parameter in self.parameters.items():
            if name not in lazy_weights:
                continue
            local_shard = parameter.to_local()
            if (experts := self._expert_group_of(parameter)) is not None:
                start = len(local_shard) * experts.group.rank
                rows = lazy_weights.read_rows(name, start, start + len(local_shard))
                local_shard.copy_(experts.take_columns(rows))
                continue
            mesh = collectives.shard_mesh()
            start = -(-len(parameter) // mesh.size) * mesh.rank  # same split as torch.chunk
            if len(local_shard):
                local_shard.copy_(lazy_weights.read_rows(name, start, start + len(local_shard)))

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        yield
        # A backward reshards by itself. After a forward without a backward the root would keep its
        # gathered weights past an update.
        self.wrapped.reshard()

    def _local_gradient(self, parameter: Any) -> Tensor | None:
        return None if parameter.grad is None else parameter.grad.to_local()

    def reduce_gradients(self) -> Tensor:
        for parameter in self.trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        square = torch.nn.utils.get_total_norm(self._local_gradients()).square()
        # The sum over all ranks, and not over a shard group alone, gives every rank the same bits.
        collectives.all_sum_([square])
        square /= collectives.world() // collectives.shard_mesh().size
        return square.sqrt()

    def _local_gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients."""
        return [parameter.grad.to_local() for parameter in self.trainable.values()]

    def _clip_gradients(self, limit: float, norm: Tensor) -> None:
        # In float64 the factor is rounded once, as a number of the host is. A dtype that is not the
        # gradients' would take a kernel for each of them.
        factor = (limit / (norm.double() + 1e-6)).clamp(max=1.0).to(norm.dtype)
        torch._foreach_mul_(self._local_gradients(), factor)

    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._gather(self.parameters[name].detach())

    def _expert_group_of(self, tensor: Any) -> ExpertGroup | None:
        """Return the ranks that divide a tensor by experts, None if it is divided by rows."""
        experts = self.expert_group
        return experts if experts is not None and tensor.device_mesh == experts.mesh else None

    def _gather(self, tensor: Any) -> Tensor:
        """Return the full tensor of a parameter, or of a tensor that is stored like it."""
        experts, whole = self._expert_group_of(tensor), tensor.full_tensor()
        return whole if experts is None else torch.cat(experts.group.all_gather(whole))

    def _copy_(self, parameter: Any, whole: Tensor) -> None:
        """Copy this rank's shard of a full tensor into a sharded parameter.

        The shards of the last ranks may be empty.
        """
        mesh, local_shard = collectives.shard_mesh(), parameter.to_local()
        if (experts := self._expert_group_of(parameter)) is not None:
            rows = whole.chunk(experts.group.size)[experts.group.rank]
            local_shard.copy_(experts.take_columns(rows))
            return
        shares = whole.chunk(mesh.size)
        local_shard.copy_(shares[mesh.rank] if mesh.rank < len(shares) else whole[:0])

    def optimizer_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                whole = value if key == "step" else self._gather(value)  # a collective
                if collectives.rank() == 0:
                    tensors[f"{name}/{key}"] = whole.to("cpu", copy=True)
        return tensors

    def release(self) -> None:
        del self.wrapped, self.parameters, self.trainable, self.adam, self.skeleton
        gc.collect()  # FSDP's hooks and modules refer to each other
