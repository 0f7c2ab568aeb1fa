"""The stored answers that a stage learns from: of a run's folder or a file, or what an earlier
stage of the same run writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.data import ProblemSet, filtered, load_rollouts
from rl.errors import UserError
from rl.methods import METHODS, RolloutDataSettings
from rl.settings import StagePlan


def written_by(plan: StagePlan, earlier: Sequence[StagePlan]) -> int | None:
    """The number of the earlier stage whose rollouts a stage names as its `dataset`; None where its
    data is there already.

    Raises UserError where that stage will have written none, or none that this one can learn from.
    """
    data, names = plan.settings.data, [stage.name for stage in earlier]
    if not isinstance(data, RolloutDataSettings):
        return None
    if data.dataset not in names:
        _check_there(data.dataset, plan, earlier)
        return None
    index = names.index(data.dataset)
    source, settings = earlier[index], earlier[index].settings
    what = f"stage {plan.name} learns from the rollouts of stage {source.name}"
    if not _samples(source):
        raise UserError(f"{what}, but {source.method} samples no answers: name a stage that does")
    if settings.loop.rollouts_every == 0:
        raise UserError(f"{what}, which keeps none: set its rollouts_every (1 keeps every step's)")
    drawn, scored = settings.sampling.temperature, plan.settings.sampling.temperature
    if plan.settings.offline.needs_behaviour and drawn != scored:
        raise UserError(
            f"{what}, drawn at temperature {drawn:g}, which their logprobs are of, and would score them at {scored:g}: "
            f"give stage {plan.name} temperature: {drawn:g}"
        )
    return index


def stored_answers(
    plan: StagePlan, folder: Path | None = None, steps: range | None = None
) -> ProblemSet:
    """What a stage learns from: its `dataset`, or what the run in `folder` wrote in `steps`; of
    `bc` the best answers alone.
    """
    data, how = plan.settings.data, plan.settings.offline
    if folder is None and not data.dataset:
        raise UserError(
            "offline needs stored answers: --dataset with a run's folder, a file of answers and rewards, or in a recipe the name of an "
            "earlier stage"
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
        filtered(problems, how.top_fraction, how.reward_threshold) if how.loss == "bc" else problems
    )


def _samples(plan: StagePlan) -> bool:
    return bool(METHODS[plan.method].hooks(plan.settings).online)


def _check_there(dataset: str, plan: StagePlan, earlier: Sequence[StagePlan]) -> None:
    """A word that is neither a path nor a stage: where there are earlier stages, it may have meant
    one of them.
    """
    if not dataset or not earlier or Path(dataset).expanduser().exists():
        return
    sampling = [stage.name for stage in earlier if _samples(stage)]
    raise UserError(
        f"stage {plan.name}: stored rollouts {dataset} do not exist (seen from {Path.cwd()}), and no earlier stage is called that; "
        f"earlier stages that sample: {', '.join(sampling) or 'none'}"
    )
