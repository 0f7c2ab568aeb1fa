"""Describe a method to the command line and to a run: its settings, its hooks and its further
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.methods.base import EvaluatesRows, Hosts


def samples_alone(settings: Any) -> tuple[str, ...]:
    """Return the answers of a row that a method reads if it learns only from its samples: none."""
    return ()


def no_clients(settings: Any, hosts: Hosts) -> dict[str, Any]:
    """Return no further models."""
    return {}


def no_weights(settings: Any) -> list[str]:
    """Return no names of weights."""
    return []


def never(settings: Any) -> bool:
    """Return False."""
    return False


def _no_remark(settings: Any, problems: Any) -> str | None:
    """Return no remark."""
    return None


def _no_critic(settings: Any) -> str | None:
    """Return no critic."""
    return None


@dataclass(frozen=True)
class MethodSpec:
    """Describe a method.

    settings: the dataclass that the command line reads
    summary: one line
    hooks: creates the method from its settings
    reads: the answers of a row (fields of Problem) from which the method learns under these
        settings; none if it samples answers
    needs_reward: whether the method cannot learn without a reward
    ranks_held_out: whether it also reads those answers of held-out rows
    ranks_where_there: whether it reads them of the held-out rows that have them
    clients: creates its other models, `Models.others`, except the judge of its section `learned`
        (see `other_models`)
    weights: names of the weights from which these models are loaded
    value_head: whether the policy has a value head under these settings
    critic: the argument of `Hosts.critic`; None for no critic
    keeps_beginning: whether it scores with the policy as it was before the stage
        (`Hosts.beginning`)
    remark: a message about the training data, or None
    variants: maps each value of the setting `variant` to the flat settings that it implies;
        explicit settings override them
    """

    settings: type
    summary: str
    hooks: Callable[[Any], Any]
    reads: Callable[[Any], tuple[str, ...]] = samples_alone
    needs_reward: bool = True
    ranks_held_out: bool = False
    ranks_where_there: bool = False
    clients: Callable[[Any, Hosts], dict[str, Any]] = no_clients
    weights: Callable[[Any], list[str]] = no_weights
    value_head: Callable[[Any], bool] = never
    critic: Callable[[Any], str | None] = _no_critic
    keeps_beginning: Callable[[Any], bool] = never
    remark: Callable[[Any, Any], str | None] = _no_remark
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def judges(self, settings: Any) -> list[str]:
        """Return the names of the models that judge answers, from the section `learned`; none if
        the settings lack it.
        """
        learned = getattr(settings, "learned", None)
        return [] if learned is None else list(learned.named)

    def other_models(self, settings: Any, hosts: Hosts) -> dict[str, Any]:
        """Create the models in addition to the policy: those that the method declares, and the
        judge that the section `learned` names.

        The run applies the judge to the samples of any method, so no method has to request it.
        """
        models = self.clients(settings, hosts)
        return (
            models
            if "rewards" in models or not self.judges(settings)
            else {**models, **hosts.rewards(settings.learned)}
        )

    def other_weights(self, settings: Any) -> list[str]:
        """Return the names of the weights that `other_models` loads."""
        return [*self.weights(settings), *self.judges(settings)]


# The properties that a method class may declare, as a value or a static method, under the names of
# the fields of MethodSpec.
DECLARED = (
    "reads",
    "needs_reward",
    "ranks_held_out",
    "ranks_where_there",
    "clients",
    "weights",
    "value_head",
    "critic",
    "keeps_beginning",
    "remark",
    "variants",
)


def method_spec(method: type, settings: type, summary: str, **given: Any) -> MethodSpec:
    """Create the spec of a method class from the properties that it declares or inherits; explicit
    arguments override them.
    """
    names = [name for name in DECLARED if hasattr(method, name)]
    if issubclass(method, EvaluatesRows):
        # EvaluatesRows.remark is an instance method of another signature
        names = [name for name in names if name != "remark"]
    return MethodSpec(
        settings, summary, method, **{**{name: getattr(method, name) for name in names}, **given}
    )
