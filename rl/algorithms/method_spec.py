"""Describe a method to the command line and to a run: its settings, its hooks and its further
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.algorithms.method_interface import ModelFactory, RowEvaluator


def reads_no_answers(settings: Any) -> tuple[str, ...]:
    """Return the answers of a row that a method reads if it learns only from its samples: none."""
    return ()


def make_no_models(settings: Any, factory: ModelFactory) -> dict[str, Any]:
    """Return no further models."""
    return {}


def list_no_weights(settings: Any) -> list[str]:
    """Return no names of weights."""
    return []


def return_false(settings: Any) -> bool:
    """Return False."""
    return False


def _make_no_remark(settings: Any, problems: Any) -> str | None:
    """Return no remark."""
    return None


def _name_no_critic(settings: Any) -> str | None:
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
    reads_held_out_answers: whether it also reads those answers of held-out rows
    reads_optional_answers: whether it reads them of the held-out rows that have them
    clients: creates its other models, `Models.others`, except the judge of its section `learned`
        (see `make_other_models`)
    weights: names of the weights from which these models are loaded
    value_head: whether the policy has a value head under these settings
    critic: the argument of `ModelFactory.critic`; None for no critic
    needs_initial_policy: whether it scores with the policy as it was before the stage
        (`ModelFactory.initial_policy`)
    remark: a message about the training data, or None
    variants: maps each value of the setting `variant` to the flat settings that it implies;
        explicit settings override them
    """

    settings: type
    summary: str
    hooks: Callable[[Any], Any]
    reads: Callable[[Any], tuple[str, ...]] = reads_no_answers
    needs_reward: bool = True
    reads_held_out_answers: bool = False
    reads_optional_answers: bool = False
    clients: Callable[[Any, ModelFactory], dict[str, Any]] = make_no_models
    weights: Callable[[Any], list[str]] = list_no_weights
    value_head: Callable[[Any], bool] = return_false
    critic: Callable[[Any], str | None] = _name_no_critic
    needs_initial_policy: Callable[[Any], bool] = return_false
    remark: Callable[[Any, Any], str | None] = _make_no_remark
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def list_judges(self, settings: Any) -> list[str]:
        """Return the names of the models that judge answers, from the section `learned`; none if
        the settings lack it.
        """
        learned = getattr(settings, "learned", None)
        return [] if learned is None else list(learned.model_names)

    def make_other_models(self, settings: Any, factory: ModelFactory) -> dict[str, Any]:
        """Create the models in addition to the policy: those that the method declares, and the
        judge that the section `learned` names.

        The run applies the judge to the samples of any method, so no method has to request it.
        """
        models = self.clients(settings, factory)
        return (
            models
            if "rewards" in models or not self.list_judges(settings)
            else {**models, **factory.rewards(settings.learned)}
        )

    def list_other_weights(self, settings: Any) -> list[str]:
        """Return the names of the weights that `make_other_models` loads."""
        return [*self.weights(settings), *self.list_judges(settings)]


# The properties that a method class may declare, as a value or a static method, under the names of
# the fields of MethodEntry.
DECLARED_PROPERTIES = (
    "reads",
    "needs_reward",
    "reads_held_out_answers",
    "reads_optional_answers",
    "clients",
    "weights",
    "value_head",
    "critic",
    "needs_initial_policy",
    "remark",
    "variants",
)


def make_method_spec(method: type, settings: type, summary: str, **overrides: Any) -> MethodSpec:
    """Create the spec of a method class from the properties that it declares or inherits; explicit
    arguments override them.
    """
    names = [name for name in DECLARED_PROPERTIES if hasattr(method, name)]
    if issubclass(method, RowEvaluator):
        # RowEvaluator.remark is an instance method of another signature
        names = [name for name in names if name != "remark"]
    return MethodSpec(
        settings,
        summary,
        method,
        **{**{name: getattr(method, name) for name in names}, **overrides},
    )
