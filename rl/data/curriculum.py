"""Curriculum: problems in levels of difficulty, and which levels are asked when (by step, or by
success, up and back).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.errors import UserError
from rl.settings import DataSettings
from rl.types import Problem


class Curriculum:
    """A problem set whose batches hold the present level's problems. Stands where a `ProblemSet`
    stands.

    Levels are the distinct values of meta[curriculum_column], ascending; level 0 is the easiest. A
    batch is a function of (level, step, seed) alone: each level has endless shuffled epochs of its
    own, which a change enters at the present step. `state` holds what a resumed run needs.
    """

    def __init__(self, problems: ProblemSet, settings: DataSettings):
        self.settings = settings
        self.name = problems.name
        self.level = 0
        self._recent: list[float] = []
        by_level = self._levels(problems)
        self.names = sorted(by_level)
        self._sets: list[ProblemSet] = []
        for i, name in enumerate(self.names):
            wanted = self.names[: i + 1] if settings.curriculum_mix == "up_to" else [name]
            self._sets.append(problems.subset([index for n in wanted for index in by_level[n]]))
        if settings.curriculum == "steps" and len(settings.curriculum_steps) != len(self.names) - 1:
            raise UserError(
                f"{self.name} has {len(self.names)} levels of {settings.curriculum_column!r} ({self._listing()}), so curriculum_steps "
                f"takes {len(self.names) - 1} steps, one for each level after the first; got {len(settings.curriculum_steps)}"
            )

    def _levels(self, problems: ProblemSet) -> dict[Any, list[int]]:
        column = self.settings.curriculum_column
        by_level: dict[Any, list[int]] = {}
        for index, problem in enumerate(problems):
            value = problem.meta.get(column)
            if value is None or not isinstance(value, (int, float, str)):
                raise UserError(
                    f"row {problem.index} of {problems.name} has no level: its column {column!r} holds {value!r}, a number or a text is "
                    f"expected (it has {', '.join(map(repr, problem.meta)) or 'none'}); name the column with --curriculum-column"
                )
            by_level.setdefault(value, []).append(index)
        if len({isinstance(value, str) for value in by_level}) > 1:
            raise UserError(
                f"the levels of {problems.name} in {column!r} are numbers and texts; one kind is expected"
            )
        if len(by_level) < 2:
            raise UserError(
                f"a curriculum needs two levels or more; {problems.name} has {list(by_level)} in {column!r}"
            )
        return by_level

    def _listing(self) -> str:
        return ", ".join(map(str, self.names[:8])) + (", ..." if len(self.names) > 8 else "")

    def batch(self, step: int, batch_size: int, seed: int) -> list[Problem]:
        """The problems of step `step` (from 0) at the level of that step."""
        if self.settings.curriculum == "steps":
            self.level = sum(step >= start for start in self.settings.curriculum_steps)
        return self._sets[self.level].batch(step, batch_size, seed)

    def epoch(self, step: int, batch_size: int) -> float:
        """Epochs of the present level's problems that `step` batches would make."""
        return self._sets[self.level].epoch(step, batch_size)

    def learn(self, success: float) -> None:
        """Takes in a batch's success rate and moves up or back, where that is what decides. At a
        change the window starts anew.
        """
        s = self.settings
        if s.curriculum != "success":
            return
        self._recent.append(success)
        if len(self._recent) < s.curriculum_window:
            return
        self._recent = self._recent[-s.curriculum_window :]
        mean = sum(self._recent) / len(self._recent)
        move = (mean >= s.curriculum_up and self.level < len(self.names) - 1) - (
            mean < s.curriculum_down and self.level > 0
        )
        if move:
            self.level += move
            self._recent = []

    def metrics(self) -> dict[str, float]:
        return {"curriculum/level": self.level, "curriculum/problems": len(self._sets[self.level])}

    def state(self) -> dict[str, Any]:
        return {"level": self.level, "recent": list(self._recent)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.level, self._recent = state["level"], list(state["recent"])
