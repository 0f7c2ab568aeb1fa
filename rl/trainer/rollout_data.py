"""Load the stored answers that a stage learns from: from a run's folder or a file, or from an
earlier stage of the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.algorithms import METHODS, RolloutDataSettings
from rl.config import StageConfig
from rl.data import ProblemSet, filter_answers, load_rollouts
from rl.errors import UserError


def find_writing_stage(plan: StageConfig, earlier: Sequence[StageConfig]) -> int | None:
    """Return the number of the earlier stage whose rollouts a stage names as its `dataset`; None if
    its data exists already.

    Raises UserError if that stage writes no rollouts, or rollouts that this stage cannot learn
    from.
    """
    data, names = plan.settings.data, [stage.name for stage in earlier]
    if not isinstance(data, RolloutDataSettings):
        return None
    if data.dataset not in names:
        _check_dataset_exists(data.dataset, plan, earlier)
        return None
    index = names.index(data.dataset)
    source, settings = earlier[index], earlier[index].settings
    relation = f"stage {plan.name} learns from the rollouts of stage {source.name}"
    if not _samples_answers(source):
        raise UserError(
            f"{relation}, but {source.method} samples no answers: name a stage that does"
        )
    if settings.loop.rollouts_every == 0:
        raise UserError(
            f"{relation}, which stores none: set its rollouts_every (1 stores every step's)"
        )
    behavior_temperature, learner_temperature = (
        settings.sampling.temperature,
        plan.settings.sampling.temperature,
    )
    if (
        plan.settings.offline.needs_behavior_logprobs
        and behavior_temperature != learner_temperature
    ):
        raise UserError(
            f"{relation}, sampled at temperature {behavior_temperature:g}, which their logprobs "
            f"belong to, and would score them at {learner_temperature:g}: give stage "
            f"{plan.name} temperature: {behavior_temperature:g}"
        )
    return index


def load_stored_answers(
    plan: StageConfig, folder: Path | None = None, steps: range | None = None
) -> ProblemSet:
    """Return what a stage learns from: its `dataset`, or what the run in `folder` wrote in `steps`;
    for `bc` only the best answers.
    """
    data, offline = plan.settings.data, plan.settings.offline
    if folder is None and not data.dataset:
        raise UserError(
            "offline needs stored answers: --dataset with a run's folder, a file of answers "
            "and rewards, or in a recipe the name of an earlier stage"
        )
    problems = load_rollouts(
        data.dataset if folder is None else folder,
        steps=steps,
        prompt_column=None if data.prompt_column == "auto" else data.prompt_column,
        response_column=data.response_column,
        reward_column=data.reward_column,
        system_prompt=data.system_prompt,
        limit=data.train_limit,
        on_bad_row=data.on_bad_row,
    )
    return (
        filter_answers(problems, offline.top_fraction, offline.reward_threshold)
        if offline.loss_spec.selects_answers
        else problems
    )


def _samples_answers(plan: StageConfig) -> bool:
    return METHODS[plan.method](plan.settings).online


def _check_dataset_exists(dataset: str, plan: StageConfig, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError if a word is neither a path nor a stage. The message lists earlier stages,
    since the word may have meant an earlier stage.
    """
    if not dataset or not earlier or Path(dataset).expanduser().exists():
        return
    sampling = [stage.name for stage in earlier if _samples_answers(stage)]
    raise UserError(
        f"stage {plan.name}: stored rollouts {dataset} do not exist (seen from {Path.cwd()}), "
        "and no earlier stage has that name; earlier stages that sample: "
        f"{', '.join(sampling) or 'none'}"
    )
