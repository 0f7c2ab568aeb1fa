"""Convert the epochs of a stage to steps, before anything that trains is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rl.client import TrainingClient
from rl.config import RowLoopSettings, RunConfig, StageConfig
from rl.errors import UserError
from rl.trainer.data_source import load_training_problems
from rl.trainer.pipeline import outline_policy
from rl.trainer.stage_data import PreparedStage, check_rows
from rl.trainer.stage_models import stage_renderer


def convert_epochs_to_steps(run: RunConfig) -> RunConfig:
    """Return the run with `epochs` replaced by `steps`.

    The steps take every training row `epochs` times, with the last batch filled up. The result is
    the same at the start and when the run is resumed, since it depends only on data and settings.
    Raises UserError if rows are bad, or if their number cannot be known in advance.
    """
    stages = list(run.stages)
    for index, plan in enumerate(stages):
        loop = plan.settings.loop
        if isinstance(loop, RowLoopSettings) and loop.epochs is not None:
            rows = _count_rows(stages, index)
            steps = max(1, math.ceil(round(loop.epochs * rows / loop.batch_size, 6)))
            stages[index] = replace(
                plan, settings=replace(plan.settings, loop=replace(loop, steps=steps))
            )
    return replace(run, stages=tuple(stages))


def _count_rows(stages: Sequence[StageConfig], index: int) -> int:
    """Return the number of rows that a stage trains on, without those it would skip."""
    plan = stages[index]
    data = plan.settings.data
    rows, _ = load_training_problems(data, plan.settings.loop.eval_every > 0)
    if rows.is_lazy:
        return len(rows)
    drops_rows = (
        data.on_bad_row == "skip"
        or data.on_too_long == "skip"
        or data.max_prompt_tokens
        or data.max_row_tokens
    )
    if not drops_rows:
        return len(rows)
    prepared = PreparedStage(plan, rows, None, None)
    try:
        policy = cast(
            TrainingClient,
            outline_policy(stages, index),
        )
        check_rows(prepared, policy, stage_renderer(policy, plan.settings))
    except ValueError as error:
        raise UserError(f"stage {plan.name}: {error}") from error
    return len(prepared.problems)
