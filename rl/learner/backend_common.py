"""Provide what all backends share: summed gradients, and a skeleton model filled for a save."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl.distributed import collectives
from rl.layers import truncated_layers
from rl.models import UnloadedParameters


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
def load_first_layers(model: nn.Module, lazy_weights: UnloadedParameters) -> Any:
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
