"""Split the experts of each layer over a group of N ranks (expert parallelism).

Rank r of a group holds the experts [r E / N, (r + 1) E / N) of every layer. The rows of a
micro-batch go to the ranks of their experts and come back (all-to-all, GShard, arXiv 2006.16668),
so no rank gathers experts that another rank of the group holds. A rank computes its experts on the
rows of all ranks. Their gradient is then already the sum over the group, and the gradients of all
other weights are unchanged. The local experts run the module's forward with one expert per row;
the router's weights are applied where the rows come from.

transformers' own plan (`ep_plan`) computes every row of the group on each rank and sums the
results, so ranks cannot have micro-batches of their own. Shapes: T tokens of a rank, K experts per
token, E experts, D hidden size, R received rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl.distributed import collectives
from rl.errors import UserError
from rl.layers import ModelLayers, describe_layers
from rl.models import unwrap_model


@dataclass(frozen=True)
class ExpertGroup:
    """Hold the ranks that divide the experts of each layer. `mesh`: torch's DeviceMesh of the ranks
    with the same experts, over which these are sharded.
    """

    group: collectives.RankGroup
    mesh: Any

    def split_(self, model: Any) -> list[nn.Module]:
        """Keep this rank's experts in the model, in place; return the modules of the experts."""
        modules = keep_experts_(model, self.group.size, self.group.rank)
        for module in modules:
            module.forward = partial(_forward, module.forward, self.group, module.num_experts)
        return modules

    def take_columns(self, rows: Tensor) -> Tensor:
        """Return this rank's shard of its experts' weights."""
        return rows.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]


def make_expert_group(size: int, timeout_seconds: float) -> ExpertGroup | None:
    """Return this rank's group of `size` consecutive ranks, None for size 1.

    All ranks call it together.
    """
    group = collectives.get_rank_group(size, timeout_seconds)
    if group is None:
        return None
    return ExpertGroup(group, collectives.get_column_mesh(size, timeout_seconds))


def keep_experts_(model: Any, size: int, rank: int) -> list[Any]:
    """Keep the experts of one of `size` ranks, in place; return the modules of the experts."""
    modules = _list_experts(model)
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = nn.Parameter(parameter.detach().chunk(size)[rank].clone())
            setattr(module, name, local.requires_grad_(parameter.requires_grad))
        module.num_experts //= size
    return modules


def _list_experts(model: Any) -> list[Any]:
    """Return the modules that hold the experts of a layer."""
    layout = describe_layers(model).experts
    blocks = () if layout is None else layout.blocks
    return [unwrap_model(model).get_submodule(block).experts for block in blocks]


class _ExchangeRows(torch.autograd.Function):
    """Send sent[i] rows to rank i of a group, and receive received[i] rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: collectives.RankGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.back = group, received, sent
        return group.exchange_rows(x, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        group, sent, received = ctx.back
        return group.exchange_rows(gradients[0], sent, received), None, None, None


def _forward(
    compute: Any,
    group: collectives.RankGroup,
    held: int,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the output [T, D] of the experts of all ranks; the inputs are [T, D] and [T, K].

    `compute`: the forward of this rank's `held` experts.
    """
    tokens, per_token = top_k_index.shape
    order = top_k_index.flatten().argsort(stable=True)
    sent = top_k_index.flatten().bincount(minlength=held * group.size).view(group.size, held)
    received = group.all_to_all(sent)
    splits: list[list[int]] = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    rows = _ExchangeRows.apply(hidden_states[order // per_token], group, *splits)
    local = torch.arange(held, device=order.device).repeat(group.size)
    local = local.repeat_interleave(received.flatten())
    # A row of zeros keeps the weights, and the exchange, in the graph of a rank without rows.
    rows, local = F.pad(rows, (0, 0, 0, 1)), F.pad(local, (0, 1))
    out = compute(rows, local[:, None], torch.ones_like(rows[:, :1]))[:-1]
    out = _ExchangeRows.apply(out, group, *reversed(splits))
    out = out[order.argsort()].view(tokens, per_token, -1)
    return (out * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def check_experts(model: Any, layers: ModelLayers, size: int, world: int, name: str) -> None:
    """Raise UserError if the experts of a model cannot be divided over groups of `size` of `world`
    ranks.
    """
    reason = _find_obstacle(model, layers, size, world // size)
    if reason is not None:
        raise UserError(
            f"expert_parallel_size {size} divides experts over ranks, but {name} {reason}: set it "
            "to 1"
        )


def _find_obstacle(model: Any, layers: ModelLayers, size: int, replicas: int) -> str | None:
    """Return why experts cannot be divided, None if they can. `replicas`: ranks that hold the same
    experts.
    """
    if layers.experts is None:
        return "has no experts that are described in its config"
    count = layers.experts.count
    if count % size:
        return f"has {count} experts, which {size} does not divide"
    for experts in _list_experts(model):
        parameters = dict(experts.named_parameters())
        if any("lora_" in name for name in parameters):
            return "has adapters on its experts (train_experts)"
        # transformers sets `has_gate` where a function of its ExpertsInterface computes the experts
        if not hasattr(experts, "has_gate") or any("." in name for name in parameters):
            return f"does not compute {type(experts).__name__} by transformers' ExpertsInterface"
        for name, parameter in parameters.items():
            if parameter.shape[0] != count or parameter.shape[1] % replicas:
                shape = tuple(parameter.shape)
                return f"has {name} of shape {shape}, which {size} x {replicas} ranks do not divide"
    return None
