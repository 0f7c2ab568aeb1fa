"""What the command line and a run know of a method: its settings, its hooks, and what it needs beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.methods.base import Hosts


def _samples(settings: Any) -> tuple[str, ...]:
    return ()


def _no_clients(settings: Any, hosts: Hosts) -> dict[str, Any]:
    return {}


def _no_weights(settings: Any) -> list[str]:
    return []


def _never(settings: Any) -> bool:
    return False


def _no_remark(settings: Any, problems: Any) -> str | None:
    return None


def _no_critic(settings: Any) -> str | None:
    return None


@dataclass(frozen=True)
class MethodSpec:
    """settings: the dataclass the command line reads. summary: one line. hooks: makes the method from its settings.

    reads: which answers of a row (fields of Problem) it learns from under given settings; none where it samples its own.
    needs_reward: whether it cannot learn without. ranks_held_out: whether it reads those answers of held-out rows, too;
    ranks_where_there: of those that have them.
    clients: makes the other models it needs, `Models.others`. weights: names of weights that these are loaded from.
    value_head: whether the policy has a value head under given settings. critic: what `Hosts.critic` is asked for, None for nothing.
    keeps_beginning: whether it scores with the policy as it was before the stage (`Hosts.beginning`).
    remark: what its reader should know of the training data that was found.
    variants: by the value of its setting `variant`, the flat settings that this stands for where they are not given.
    """

    settings: type
    summary: str
    hooks: Callable[[Any], Any]
    reads: Callable[[Any], tuple[str, ...]] = _samples
    needs_reward: bool = True
    ranks_held_out: bool = False
    ranks_where_there: bool = False
    clients: Callable[[Any, Hosts], dict[str, Any]] = _no_clients
    weights: Callable[[Any], list[str]] = _no_weights
    value_head: Callable[[Any], bool] = _never
    critic: Callable[[Any], str | None] = _no_critic
    keeps_beginning: Callable[[Any], bool] = _never
    remark: Callable[[Any, Any], str | None] = _no_remark
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
