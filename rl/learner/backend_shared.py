"""Provide what all backends share: summed gradients, and a skeleton model filled for a save."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl.layers import shallow
from rl.models import Unread
from rl.ranks import distributed


def hollow(model: nn.Module) -> Any:
    """Return a copy of a model with parameters that hold no values.

    They are untouched CPU memory, which the system does not allocate yet.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


@torch.no_grad()
def first_layers(model: nn.Module, unread: Unread) -> Any:
    """Return a copy of a model without values in which only the first layers are read.

    `rl.layers.shallow` selects these layers; the other layers hold no values.
    """
    trial, parameters = hollow(model), dict(model.named_parameters())
    with shallow(trial):
        for name, parameter in trial.named_parameters():
            parameter.copy_(unread.whole(name) if name in unread else parameters[name])
    return trial


@contextlib.contextmanager
def filled(shell: nn.Module, pieces: Iterable[tuple[str, Tensor]]) -> Iterator[Any | None]:
    """Yield on rank 0 a skeleton model filled with full parameters, elsewhere None.

    The parameters lie in CPU memory, which is freed afterwards.
    """
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


def summed_gradients(parameters: Collection[Tensor]) -> list[Tensor]:
    """Return the gradients, summed over the ranks in place; zeros for a parameter without a
    gradient.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    distributed.all_sum_(gradients)
    return gradients
