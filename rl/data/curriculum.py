"""Schedule problems by level of difficulty: by step, or up and down by success rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl.config import DataSettings
from rl.data.problem_set import ProblemSet
from rl.errors import UserError
from rl.types import Problem


class Curriculum:
    """Provide batches of the current level's problems, with the interface of a `ProblemSet`.

    Levels are the distinct values of meta[curriculum_column], ascending (texts that are numbers, as
    in a .csv file, as numbers); level 0 is the easiest. A batch depends only on (level, step,
    seed): each level has separate endless shuffled epochs, which a level change enters at the
    current step. `state` holds what a resumed run needs. Raises UserError if a row has no level, if
    levels mix numbers and texts, if fewer than 2 levels exist, or if curriculum_steps has the wrong
    length.
    """

    def __init__(self, problems: ProblemSet, settings: DataSettings):
        self.settings = settings
        self.name = problems.name
        self.level = 0
        self._recent: list[float] = []
        self._problems, self._indices = problems, self._levels(problems)
        self._set_order(_sort_levels(self._indices))
        if settings.curriculum == "steps" and len(settings.curriculum_steps) != len(self.names) - 1:
            raise UserError(
                f"{self.name} has {len(self.names)} levels of {settings.curriculum_column!r} "
                f"({self._listing()}), so curriculum_steps takes {len(self.names) - 1} steps, one "
                f"for each level after the first; got {len(settings.curriculum_steps)}"
            )

    def _set_order(self, names: Sequence[Any]) -> None:
        """Set the levels, from the easiest."""
        self.names = list(names)
        self._sets: list[ProblemSet] = []
        for i, name in enumerate(self.names):
            mixes = self.settings.curriculum_mix == "up_to"
            level_names = self.names[: i + 1] if mixes else [name]
            indices = [index for n in level_names for index in self._indices[n]]
            self._sets.append(self._problems.subset(indices))

    def _levels(self, problems: ProblemSet) -> dict[Any, list[int]]:
        """Return the problem indices of each level."""
        column = self.settings.curriculum_column
        by_level: dict[Any, list[int]] = {}
        for index, problem in enumerate(problems):
            value = problem.meta.get(column)
            if not isinstance(value, (int, float, str)) or value != value:  # NaN: missing
                raise UserError(
                    f"row {problem.index} of {problems.name} has no level: its column {column!r} "
                    f"holds {value!r}, a number or a text is expected (the row has "
                    f"{', '.join(map(repr, problem.meta)) or 'none'}); name the "
                    f"column with --curriculum-column"
                )
            by_level.setdefault(value, []).append(index)
        if len({isinstance(value, str) for value in by_level}) > 1:
            raise UserError(
                f"the levels of {problems.name} in {column!r} are numbers and texts; use only "
                f"numbers or only texts"
            )
        if len(by_level) < 2:
            raise UserError(
                f"a curriculum needs at least 2 levels; {problems.name} has {list(by_level)} in "
                f"{column!r}"
            )
        return by_level

    def _listing(self) -> str:
        return ", ".join(map(str, self.names[:8])) + (", ..." if len(self.names) > 8 else "")

    def batch(self, step: int, batch_size: int, seed: int) -> list[Problem]:
        """Return the problems of step `step` (from 0) at the level of that step."""
        if self.settings.curriculum == "steps":
            self.level = sum(step >= start for start in self.settings.curriculum_steps)
        return self._sets[self.level].batch(step, batch_size, seed)

    def epoch(self, step: int, batch_size: int) -> float:
        """Return the epochs of the current level's problems in `step` batches."""
        return self._sets[self.level].epoch(step, batch_size)

    def record_success(self, success: float) -> None:
        """Record a batch's success rate; change the level if the curriculum is by success.

        A level change clears the window of success rates.
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
        """Return the current level and its number of problems."""
        return {"curriculum/level": self.level, "curriculum/problems": len(self._sets[self.level])}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"level": self.level, "recent": list(self._recent), "names": self.names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. The state of other levels, from before a change of the
        data, is ignored.
        """
        # Older versions sorted numbers that are texts as texts, and did not save the order.
        names = state.get("names", sorted(self._indices))
        if {*names} == self._indices.keys():
            self._set_order(names)
            self.level, self._recent = state["level"], list(state["recent"])


def _sort_levels(levels: Iterable[Any]) -> list[Any]:
    """Return levels in ascending order: by number if all of them are numbers, else as texts."""
    ordered = sorted(levels)
    try:
        numbers = [float(level) for level in ordered]
    except (ValueError, OverflowError):
        return ordered
    return sorted(ordered, key=float) if all(map(math.isfinite, numbers)) else ordered
