"""End a run with a clear error when a loss or logits are not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rl.errors import UserError
from rl.trainer.trainer import Trainer


class NonFiniteError(UserError):
    """Raised when a loss or logits are NaN or infinite.

    Continuing would destroy the weights, or train on nothing.
    """


def report_nonfinite(train: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """Wrap a training loop so that a non-finite number raises NonFiniteError with stage, step and
    remedy instead of a traceback.

    Nothing is saved at that point: a checkpoint must not contain what the step has already changed
    (baselines, earlier substeps).
    """

    @functools.wraps(train)
    def loop(trainer: Trainer) -> None:
        try:
            train(trainer)
        except FloatingPointError as error:
            raise NonFiniteError(_error_message(trainer, str(error))) from error

    return loop


def _error_message(trainer: Trainer, problem: str) -> str:
    complete = [row for row in trainer.logbook.checkpoints() if row.get("state_path")]
    where = (
        f"step {trainer.done + 1} of {trainer.loop.steps} of stage {trainer.name} (step "
        f"{trainer.first_step + trainer.done + 1} of the run)"
    )
    advice = "No checkpoint was written yet: start again"
    if complete:
        advice = (
            f"The checkpoints are unchanged, the newest is {complete[-1]['name']}: --resume "
            "continues from it with the same settings, and meets the same batch again; to "
            "change settings start a new run from its weights, --base-model "
            f"{complete[-1]['sampler_path']}"
        )
    return (
        f"{where}: {problem}. {advice}. Lower learning_rate (here "
        f"{trainer.settings.learning_rate:g}), add warmup_steps, keep grad_clip_norm at 1 or "
        "below, or train in precision fp32"
    )
