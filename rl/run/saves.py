"""Save checkpoints of a stage, with the state of its loop, and its best weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.data import Curriculum
from rl.jsonl import finite
from rl.methods import EvaluatesRows
from rl.run.evaluator import Evaluator
from rl.run.given import Given
from rl.run.held_out import HELD_OUT, HeldOut
from rl.run.said import Said


class Saves:
    """Choose when to save, and assemble the state. The Keeper writes checkpoints and removes old
    ones.
    """

    def __init__(self, given: Given, evaluator: Evaluator, said: Said):
        self.given, self.evaluator, self._said = given, evaluator, said
        # state of unfinished episodes, if sampling is continuous
        self.state_of_flow: Callable[[], dict[str, Any]] | None = None
        # a checkpoint's state of unfinished episodes
        self.in_flight: Mapping[str, Any] | None = None

    def keep(self, done: int, row: Mapping[str, float]) -> None:
        """Save after `done` batches: the best weights if these are the best, and a checkpoint if it
        is due.
        """
        context, loop = self.given, self.given.loop
        best = loop.keep_best
        if best == HELD_OUT and best not in row:
            rows = isinstance(context.method, EvaluatesRows) and not self.evaluator.samples_held_out
            # a reward without a "correct" metric
            best = context.method.headline if rows else "test/env/all/reward/total"
        if (
            self.evaluator.measures
            and best is not None
            and best not in row
            and self.evaluator.is_due(done - 1)
        ):
            self._said.warn(
                best,
                f"keep_best asks for {best}, which this run does not measure: no best weights "
                "are saved",
            )
        if best is not None and best in row:
            head, mode = (
                isinstance(context.method, EvaluatesRows) and context.method.keeps_value_head,
                loop.best_is(best),
            )
            context.keeper.best(
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
        loop = self.given.loop
        return done == loop.steps or bool(loop.save_every and done % loop.save_every == 0)

    def save(self, done: int, *, last: bool = False) -> Path:
        """Save a resumable checkpoint: learner state and loop state. Return its path."""
        context = self.given
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
            **({} if self.state_of_flow is None else {"in_flight": finite(self.state_of_flow())}),
        }
        path = context.keeper.save(
            context.models.policy,
            context.first_step + done,
            context.name,
            state,
            keep_last=context.loop.keep_last,
            last=last,
            beside=context.models.learning,
        )
        if context.opponents is not None:
            context.opponents.prune()
        return path

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the loop's state from what `save` wrote."""
        self.given.method.load_state(state["method"])
        self.in_flight = state.get("in_flight")
        self.evaluator.held_out = HeldOut.of(state["held_out"])
        if isinstance(self.given.problems, Curriculum):
            self.given.problems.load_state(state["curriculum"])
        if self.given.opponents is not None:
            self.given.opponents.load_state(state.get("opponents"))
