"""A loss or logits that are no numbers end a run: what is said of it, and where it goes on from."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rl.errors import UserError
from rl.run.stage import Stage


class NotFinite(UserError):
    """A loss or logits are NaN or infinite: going on would destroy the weights, or train on
    nothing.
    """


def named(train: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """A loop that says at which step of which stage a number was not finite, with the remedy,
    instead of ending in a traceback.

    Nothing is saved there: what the step had changed already (baselines, earlier substeps) must not
    stand in a checkpoint.
    """

    @functools.wraps(train)
    def loop(stage: Stage) -> None:
        try:
            train(stage)
        except FloatingPointError as error:
            raise NotFinite(_text(stage, str(error))) from error

    return loop


def _text(stage: Stage, what: str) -> str:
    whole = [row for row in stage.logbook.checkpoints() if row.get("state_path")]
    where = f"step {stage.done + 1} of {stage.loop.steps} of stage {stage.name} (step {stage.first_step + stage.done + 1} of the run)"
    kept = "No checkpoint was written yet: start again"
    if whole:
        kept = (
            f"Checkpoints are as they were, the newest is {whole[-1]['name']}: --resume goes on from it with the same settings, and so "
            f"meets the same batch; to change them start a new run from its weights, --base-model {whole[-1]['sampler_path']}"
        )
    return (
        f"{where}: {what}. {kept}. Lower learning_rate (here {stage.settings.learning_rate:g}), add warmup_steps, keep "
        "grad_clip_norm at 1 or below, or train in precision fp32"
    )
