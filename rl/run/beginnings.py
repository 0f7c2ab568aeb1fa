"""Which weights a stage begins from: a base model's, or an earlier stage's; and whether all those
that are named are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.errors import UserError
from rl.methods import METHODS
from rl.run.reopen import open_weights
from rl.settings import ModelSettings, StagePlan, nearest


def names_its_model(stages: Sequence[StagePlan], index: int) -> bool:
    """Whether a stage begins from a base model of its own: the first, and one that names another
    than those before it.

    A model named for all stages (at a recipe's top level, on the line) is the one that the first
    begins from. The name of an earlier stage is no base model: see `begins_after`.
    """
    default, earlier = ModelSettings().base_model, [stage.name for stage in stages[:index]]
    asked, before = (
        stages[index].settings.model.base_model,
        [stages[i].settings.model.base_model for i in _leads_to(stages, index)],
    )
    named = [base for base in before if base != default and base not in earlier]
    return not before or asked not in (default, *named[-1:], *earlier)


def _leads_to(stages: Sequence[StagePlan], index: int) -> list[int]:
    """The stages from which one may go on: a policy not from a reward model, which is a judge and
    answers nothing.
    """
    judge = stages[index].method == "reward_model"
    return [i for i, stage in enumerate(stages[:index]) if judge or stage.method != "reward_model"]


def begins_after(stages: Sequence[StagePlan], index: int) -> int | None:
    """The stage whose final weights a stage begins from: the one it names as its base_model, else
    the one before.

    A policy passes over reward models. None where a stage begins from a base model.
    """
    earlier = [stage.name for stage in stages[:index]]
    asked = stages[index].settings.model.base_model
    if asked in earlier:
        return earlier.index(asked)
    return None if names_its_model(stages, index) else _leads_to(stages, index)[-1]


def check_weights(stages: Sequence[StagePlan]) -> None:
    """Raises UserError where weights that a stage's method needs (a teacher, a reference) are
    neither an earlier stage's nor there.
    """
    for i, plan in enumerate(stages):
        base, default = plan.settings.model.base_model, ModelSettings().base_model
        if (
            i
            and not _leads_to(stages, i)
            and base == default != stages[i - 1].settings.model.base_model
        ):
            raise UserError(
                f"the stage {plan.name} comes after a reward model, which is a judge and no policy: name the model that it is to begin "
                f"from, base_model: {stages[i - 1].settings.model.base_model} for the one that the reward model began from"
            )
        earlier = [stage.name for stage in stages[:i]]
        _check_stage_name(base, plan, earlier)
        for target in METHODS[plan.method].other_weights(plan.settings):
            if target not in earlier:
                _check_stage_name(target, plan, earlier)
                open_weights(target)


def _check_stage_name(target: str, plan: StagePlan, earlier: Sequence[str]) -> None:
    """Raises UserError for a single word that is nearly an earlier stage's name: found late, as a
    hub name that is not there.
    """
    if (
        target in earlier
        or target.startswith("tiny:")
        or "/" in target
        or Path(target).expanduser().exists()
    ):
        return
    if (near := nearest(target, earlier)) is not None:
        raise UserError(
            f"stage {plan.name}: no earlier stage is called {target}, and no folder is; did you mean {near}?"
        )
