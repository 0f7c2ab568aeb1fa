"""What a stage's held-out figures say of what was learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

HELD_OUT = "test/env/all/correct"


@dataclass
class HeldOut:
    """Held-out figures before the first step and at the last evaluation: of samples, and of greedy
    answers.
    """

    before: float | None = None
    after: float | None = None
    greedy_before: float | None = None
    greedy_after: float | None = None
    what: str = "accuracy"  # or "reward", where the reward does not tell what is correct
    headline: str = ""  # what the method itself measures on rows
    # of all ("") and of each set by its name: before, after
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """What a checkpoint holds of it; one that knew a single figure of rows held it as (name,
        before, after), or None.
        """
        found = cls(**state)
        if not isinstance(found.rows, dict):
            name, *figures = found.rows or ("",)
            found.headline, found.rows = (
                name.removeprefix("test/"),
                {"": (figures[0], figures[1])} if figures else {},
            )
        return found

    def note_rows(self, headline: str, metrics: Mapping[str, float]) -> None:
        """The figure that a method is known by, of all held-out rows and of each set of them."""
        self.headline = headline.removeprefix("test/")
        for name, value in metrics.items():
            if name == headline or (
                name.startswith("test/") and name.endswith(f"/{self.headline}")
            ):
                of = name.removeprefix("test/").removesuffix(self.headline).rstrip("/")
                self.rows[of] = (self.rows.get(of, (value,))[0], value)

    def sharpening(self) -> str | None:
        """What an honest reader must know of the gain, if most of it was there for greedy decoding
        already.
        """
        if (
            self.before is None
            or self.after is None
            or self.greedy_before is None
            or self.after <= self.before
        ):
            return None
        if self.what != "accuracy":
            return None
        share = (min(self.greedy_before, self.after) - self.before) / (self.after - self.before)
        if share < 0.5:
            return None
        return (
            f"Most of this gain ({share:.0%}) is sharpening, not new knowledge: before the first step the likeliest answer was "
            f"already right for {self.greedy_before:.1%} of the problems; the model now says it more often."
        )
