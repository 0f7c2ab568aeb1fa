"""What a stage saves: checkpoints to go on from, with where its loop stands, and its best weights."""

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
    """When something is saved, and what stands in it; the keeper writes it, and removes what is
    old.
    """

    def __init__(self, given: Given, evaluator: Evaluator, said: Said):
        self.given, self.evaluator, self._said = given, evaluator, said
        # of episodes under way, where sampling never stops
        self.state_of_flow: Callable[[], dict[str, Any]] | None = None
        self.in_flight: Mapping[str, Any] | None = None  # what a checkpoint held of them

    def keep(self, done: int, row: Mapping[str, float]) -> None:
        """After `done` batches: the best weights, if these are, and a checkpoint, if it is time."""
        given, loop = self.given, self.given.loop
        best = loop.keep_best
        if best == HELD_OUT and best not in row:
            rows = isinstance(given.method, EvaluatesRows) and not self.evaluator.samples_held_out
            # a reward that does not tell what is correct
            best = given.method.headline if rows else "test/env/all/reward/total"
        if (
            self.evaluator.measures
            and best is not None
            and best not in row
            and self.evaluator.is_due(done - 1)
        ):
            self._said.warn(
                best,
                f"keep_best asks for {best}, which this run does not measure: no best weights are kept",
            )
        if best is not None and best in row:
            head, mode = (
                isinstance(given.method, EvaluatesRows) and given.method.keeps_value_head,
                loop.best_is(best),
            )
            given.keeper.best(
                given.models.policy,
                given.first_step + done,
                given.name,
                best,
                row[best],
                mode=mode,
                value_head=head,
            )
        # after the best weights: a run that goes on from here has them
        if done < loop.steps and self.is_due(done):
            self.save(done)

    def is_due(self, done: int) -> bool:
        """Whether there is a checkpoint after `done` batches; there is one at the end, whatever was
        asked for.
        """
        loop = self.given.loop
        return done == loop.steps or bool(loop.save_every and done % loop.save_every == 0)

    def save(self, done: int, *, last: bool = False) -> Path:
        """A resumable checkpoint: the learner's state, and where this loop stands."""
        given = self.given
        state = {
            "stage": given.index,
            "next_batch": done,
            "first_step": given.first_step,
            "method": given.method.state(),
            "held_out": asdict(self.evaluator.held_out),
            "curriculum": given.problems.state()
            if isinstance(given.problems, Curriculum)
            else None,
            "opponents": None if given.opponents is None else given.opponents.state(),
            "run": dict(given.identity),
            **({} if self.state_of_flow is None else {"in_flight": finite(self.state_of_flow())}),
        }
        path = given.keeper.save(
            given.models.policy,
            given.first_step + done,
            given.name,
            state,
            keep_last=given.loop.keep_last,
            last=last,
            beside=given.models.learning,
        )
        if given.opponents is not None:
            given.opponents.prune()
        return path

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `save` wrote of the loop."""
        self.given.method.load_state(state["method"])
        self.in_flight = state.get("in_flight")
        self.evaluator.held_out = HeldOut.of(state["held_out"])
        if isinstance(self.given.problems, Curriculum):
            self.given.problems.load_state(state["curriculum"])
        if self.given.opponents is not None:
            self.given.opponents.load_state(state.get("opponents"))
