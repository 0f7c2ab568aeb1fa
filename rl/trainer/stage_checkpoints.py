"""Save checkpoints of a stage, with the state of its loop, and its best weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.algorithms import RowEvaluator
from rl.data import Curriculum
from rl.jsonl import replace_nonfinite
from rl.trainer.evaluator import HELD_OUT_ACCURACY, Evaluator, HeldOutMetrics
from rl.trainer.stage_context import StageContext
from rl.trainer.warn_once import WarnOnce


class StageCheckpoints:
    """Choose when to save, and assemble the state. The CheckpointManager writes checkpoints and
    removes old ones.
    """

    def __init__(self, context: StageContext, evaluator: Evaluator, warn_once: WarnOnce):
        self.context, self.evaluator, self._warn_once = context, evaluator, warn_once
        # state of unfinished episodes, if sampling is continuous
        self.get_engine_state: Callable[[], dict[str, Any]] | None = None
        # a checkpoint's state of unfinished episodes
        self.in_flight: Mapping[str, Any] | None = None

    def save_if_due(self, done: int, row: Mapping[str, float]) -> None:
        """Save after `done` batches: the best weights if these are the best, and a checkpoint if it
        is due.
        """
        context, loop = self.context, self.context.loop
        best = loop.keep_best
        if best == HELD_OUT_ACCURACY and best not in row:
            rows = isinstance(context.method, RowEvaluator) and not self.evaluator.samples_held_out
            # a reward without a "correct" metric
            best = context.method.headline if rows else "test/env/all/reward/total"
        if (
            self.evaluator.measures_held_out
            and best is not None
            and best not in row
            and self.evaluator.is_due(done - 1)
        ):
            self._warn_once.warn(
                best,
                f"keep_best asks for {best}, which this run does not measure: no best weights "
                "are saved",
            )
        if best is not None and best in row:
            head, mode = (
                isinstance(context.method, RowEvaluator) and context.method.keeps_value_head,
                loop.get_best_mode(best),
            )
            context.checkpoints.save_best(
                context.models.policy,
                context.first_step + done,
                context.name,
                best,
                row[best],
                mode=mode,
                value_head=head,
            )
        # saved after the best weights, so that a resumed run has them
        if done < loop.steps and self.is_due(done):
            self.save(done)

    def is_due(self, done: int) -> bool:
        """Return whether a checkpoint is due after `done` batches. The end of the stage always has
        a checkpoint, whatever save_every is.
        """
        loop = self.context.loop
        return done == loop.steps or bool(loop.save_every and done % loop.save_every == 0)

    def save(self, done: int, *, final: bool = False) -> Path:
        """Save a resumable checkpoint: learner state and loop state. Return its path."""
        context = self.context
        state = {
            "stage": context.index,
            "next_batch": done,
            "first_step": context.first_step,
            "method": context.method.state(),
            "held_out": asdict(self.evaluator.held_out),
            "curriculum": context.problems.state()
            if isinstance(context.problems, Curriculum)
            else None,
            "opponents": None if context.opponents is None else context.opponents.state(),
            "run": dict(context.identity),
            **(
                {}
                if self.get_engine_state is None
                else {"in_flight": replace_nonfinite(self.get_engine_state())}
            ),
        }
        path = context.checkpoints.save(
            context.models.policy,
            context.first_step + done,
            context.name,
            state,
            keep_last=context.loop.keep_last,
            final=final,
            other_clients=context.models.trainable,
        )
        if context.opponents is not None:
            context.opponents.prune()
        return path

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the loop's state from what `save` wrote."""
        self.context.method.load_state(state["method"])
        self.in_flight = state.get("in_flight")
        self.evaluator.held_out = HeldOutMetrics.from_state(state["held_out"])
        if isinstance(self.context.problems, Curriculum):
            self.context.problems.load_state(state["curriculum"])
        if self.context.opponents is not None:
            self.context.opponents.load_state(state.get("opponents"))
