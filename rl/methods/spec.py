"""What the command line and a run know of a method: its settings, its hooks, and what it needs
beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.methods.base import EvaluatesRows, Hosts


def samples_alone(settings: Any) -> tuple[str, ...]:
    """Return the answers of a row that a method reads where it learns from its own samples: none."""
    return ()


def no_clients(settings: Any, hosts: Hosts) -> dict[str, Any]:
    return {}


def no_weights(settings: Any) -> list[str]:
    return []


def never(settings: Any) -> bool:
    return False


def _no_remark(settings: Any, problems: Any) -> str | None:
    return None


def _no_critic(settings: Any) -> str | None:
    return None


@dataclass(frozen=True)
class MethodSpec:
    """settings: the dataclass the command line reads. summary: one line. hooks: makes the method
    from its settings.

    reads: which answers of a row (fields of Problem) it learns from under given settings; none
    where it samples its own. needs_reward: whether it cannot learn without. ranks_held_out: whether
    it reads those answers of held-out rows, too; ranks_where_there: of those that have them.
    clients: makes the other models it needs, `Models.others`, except the judge of its section
    `learned` (see `other_models`). weights: names of weights that these are loaded from.
    value_head: whether the policy has a value head under given settings. critic: what
    `Hosts.critic` is asked for, None for nothing. keeps_beginning: whether it scores with the
    policy as it was before the stage (`Hosts.beginning`). remark: what its reader should know of
    the training data that was found. variants: by the value of its setting `variant`, the flat
    settings that this stands for where they are not given.
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
        """Return the names of the models that judge answers, by the section `learned`; none where
        the settings lack it.
        """
        learned = getattr(settings, "learned", None)
        return [] if learned is None else list(learned.named)

    def other_models(self, settings: Any, hosts: Hosts) -> dict[str, Any]:
        """Make the models beside the policy: those that the method declares, and the judge that the
        section `learned` names.

        The run applies the judge to what any method samples, so that no method has to ask for it.
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


# The properties that a method class may declare, each under its name in MethodSpec: as a value or a
# static method.
DECLARED = (
    "reads", "needs_reward", "ranks_held_out", "ranks_where_there", "clients", "weights", "value_head", "critic", "keeps_beginning",
    "remark", "variants",
)  # fmt: skip


def method_spec(method: type, settings: type, summary: str, **given: Any) -> MethodSpec:
    """Make the spec of a method class from the properties that it declares or inherits; those in
    `given` win.
    """
    names = [name for name in DECLARED if hasattr(method, name)]
    if issubclass(method, EvaluatesRows):
        # that class calls its remark on rows so, by the instance
        names = [name for name in names if name != "remark"]
    return MethodSpec(
        settings, summary, method, **{**{name: getattr(method, name) for name in names}, **given}
    )
