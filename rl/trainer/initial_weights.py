"""Determine and check the initial weights of a stage: a base model's or an earlier stage's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.algorithms import METHODS, ModelRequests
from rl.config import ModelSettings, StageConfig, nearest_name
from rl.errors import UserError
from rl.trainer.saved_weights import open_weights


def begins_from_base_model(stages: Sequence[StageConfig], index: int) -> bool:
    """Return whether a stage begins from a base model and not from an earlier stage.

    That holds for the first stage, and for a stage that names a base model different from those of
    the stages before it. A model named for all stages (at a recipe's top level or on the command
    line) is the base model of the first. The name of an earlier stage is no base model: see
    `find_previous_stage`.
    """
    default, earlier = ModelSettings().base_model, [stage.name for stage in stages[:index]]
    base_model, earlier_models = (
        stages[index].settings.model.base_model,
        [stages[i].settings.model.base_model for i in _continuable_stages(stages, index)],
    )
    named_models = [base for base in earlier_models if base != default and base not in earlier]
    return not earlier_models or base_model not in (default, *named_models[-1:], *earlier)


def _continuable_stages(stages: Sequence[StageConfig], index: int) -> list[int]:
    """Return the indices of the stages from which a stage may continue.

    A policy cannot continue from a reward model, which scores responses and generates none.
    """
    is_reward_model = stages[index].method == "reward_model"
    return [
        i
        for i, stage in enumerate(stages[:index])
        if is_reward_model or stage.method != "reward_model"
    ]


def find_previous_stage(stages: Sequence[StageConfig], index: int) -> int | None:
    """Return the index of the stage from which a stage takes its initial weights.

    It is the stage named as base_model, else the previous stage; a policy skips reward models.
    None if the stage begins from a base model.
    """
    earlier = [stage.name for stage in stages[:index]]
    base_model = stages[index].settings.model.base_model
    if base_model in earlier:
        return earlier.index(base_model)
    return None if begins_from_base_model(stages, index) else _continuable_stages(stages, index)[-1]


def check_initial_weights(stages: Sequence[StageConfig]) -> None:
    """Check the weights that the stages need.

    Raises UserError if weights of a method (a teacher, a reference) are neither an earlier stage's
    nor existing weights, or if a policy would have to begin from a reward model.
    """
    for i, plan in enumerate(stages):
        base, default = plan.settings.model.base_model, ModelSettings().base_model
        if (
            i
            and not _continuable_stages(stages, i)
            and base == default != stages[i - 1].settings.model.base_model
        ):
            raise UserError(
                f"stage {plan.name} comes after a reward model, which scores responses and cannot "
                "be a policy: name the model to begin from, base_model: "
                f"{stages[i - 1].settings.model.base_model} to begin "
                "from the reward model's base model"
            )
        earlier = [stage.name for stage in stages[:i]]
        _check_stage_name(base, plan, earlier)
        for target in ModelRequests(METHODS[plan.method](plan.settings)).weights:
            if target not in earlier:
                _check_stage_name(target, plan, earlier)
                open_weights(target)


# tiny models learn little below this rate: the recipes train them with 3e-4 to 3e-3
_TINY_MODEL_RATE = 1e-4


def describe_random_weights(stages: Sequence[StageConfig]) -> list[str]:
    """Return a line for each stage that learns from the rewards of a model with random weights."""
    lines = []
    for i, plan in enumerate(stages):
        base = plan.settings.model.base_model
        if (
            not base.startswith("tiny:")
            or not METHODS[plan.method](plan.settings).needs_reward
            or not begins_from_base_model(stages, i)
        ):
            continue
        rate = getattr(plan.settings, "learning_rate", None)  # a user's method may have none
        advice = "train it with sft first (docs/models.md#tiny-models)"
        if rate is not None and rate < _TINY_MODEL_RATE:
            advice += f", and with --learning-rate 1e-3 instead of {rate:g}"
        lines.append(
            f"stage {plan.name}: the weights of {base} are random, so hardly any answer earns a "
            f"reward; {advice}"
        )
    return lines


def _check_stage_name(target: str, plan: StageConfig, earlier: Sequence[str]) -> None:
    """Raise UserError if `target` is a single word close to the name of an earlier stage.

    Otherwise the typing error would surface late, as a model that the hub does not have.
    """
    if (
        target in earlier
        or target.startswith("tiny:")
        or "/" in target
        or Path(target).expanduser().exists()
    ):
        return
    if (near := nearest_name(target, earlier)) is not None:
        raise UserError(
            f"stage {plan.name}: neither an earlier stage nor a folder is called {target}; did you "
            f"mean {near}?"
        )
