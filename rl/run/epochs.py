"""Epochs to steps: how many batches go so many times through the rows of a stage, before anything
is loaded that trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rl.clients import TrainingClient
from rl.errors import UserError
from rl.methods import METHODS
from rl.run.hosts import stage_renderer
from rl.run.prepare import Prepared, check_rows
from rl.run.rehearsal import outline_of
from rl.run.sources import training_problems
from rl.settings import RowLoopSettings, Run, StagePlan


def in_steps(run: Run) -> Run:
    """The run with `steps` for `epochs`: as many as take every row that is trained on so many
    times, the last batch filled up.

    The same whenever the run is begun or resumed, since it follows from data and settings alone.
    UserError where rows are bad, and where there is no telling how many there will be.
    """
    stages = list(run.stages)
    for index, plan in enumerate(stages):
        loop = plan.settings.loop
        if isinstance(loop, RowLoopSettings) and loop.epochs is not None:
            rows = _rows(stages, index)
            steps = max(1, math.ceil(round(loop.epochs * rows / loop.batch_size, 6)))
            stages[index] = replace(
                plan, settings=replace(plan.settings, loop=replace(loop, steps=steps))
            )
    return replace(run, stages=tuple(stages))


def _rows(stages: Sequence[StagePlan], index: int) -> int:
    """How many rows a stage trains on: those that it would not leave out."""
    plan = stages[index]
    data = plan.settings.data
    rows, _ = training_problems(data, plan.settings.loop.eval_every > 0)
    if rows.is_lazy:
        return len(rows)
    leaves_out = (
        data.on_bad_row == "skip"
        or data.on_too_long == "skip"
        or data.max_prompt_tokens
        or data.max_row_tokens
    )
    if not leaves_out:
        return len(rows)
    prepared = Prepared(plan, rows, None, None)
    try:
        policy = cast(
            TrainingClient,
            outline_of(stages, index, METHODS[plan.method].value_head(plan.settings)),
        )
        check_rows(prepared, policy, stage_renderer(policy, plan.settings))
    except ValueError as error:
        raise UserError(f"stage {plan.name}: {error}") from error
    return len(prepared.problems)
