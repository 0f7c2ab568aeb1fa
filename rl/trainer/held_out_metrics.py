"""Collect a stage's held-out metrics and judge the gain from training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

HELD_OUT_ACCURACY = "test/env/all/correct"


@dataclass
class HeldOutMetrics:
    """Hold the held-out metrics before the first step and at the last evaluation.

    `before` and `after` are of samples, the `greedy_` fields of greedy responses.
    """

    before: float | None = None
    after: float | None = None
    greedy_before: float | None = None
    greedy_after: float | None = None
    what: str = "accuracy"  # or "reward" if the reward does not report correctness
    headline: str = ""  # the metric that the method measures on rows
    # (before, after) of all rows ("") and of each data set by its name
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the held-out metrics saved in a checkpoint.

        Older checkpoints save a single metric of rows, as (name, before, after) or None.
        """
        held_out = cls(**state)
        if not isinstance(held_out.rows, dict):
            name, *figures = held_out.rows or ("",)
            held_out.headline, held_out.rows = (
                name.removeprefix("test/"),
                {"": (figures[0], figures[1])} if figures else {},
            )
        return held_out

    def record_rows(self, headline: str, metrics: Mapping[str, float]) -> None:
        """Record the method's headline metric, for all held-out rows and for each data set."""
        self.headline = headline.removeprefix("test/")
        for name, value in metrics.items():
            if name == headline or (
                name.startswith("test/") and name.endswith(f"/{self.headline}")
            ):
                set_name = name.removeprefix("test/").removesuffix(self.headline).rstrip("/")
                self.rows[set_name] = (self.rows.get(set_name, (value,))[0], value)

    def describe_no_gain(self) -> str | None:
        """Return a remark if the sampled answers to held-out problems did not improve."""
        if self.before is None or self.after is None or self.after > self.before:
            return None
        if self.what == "accuracy" and self.before == 1:
            return None
        return (
            f"The held-out {self.what} did not rise. docs/troubleshooting.md lists causes under "
            '"It does not learn".'
        )

    def describe_sharpening(self) -> str | None:
        """Return a remark on the share of the gain that greedy decoding had before training.

        None if there is no gain, and if the metric is not accuracy.
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
            percent = f"{max(share, 0.0):.0%}"
            part, remainder = ("None", "All of it") if percent == "0%" else (percent, "The rest")
            return (
                f"{part} of this gain is sharpening: before the first step the greedy answer was "
                f"correct for {self.greedy_before:.1%} of the problems. {remainder} is new."
            )
        return (
            f"Most of this gain ({share:.0%}) is sharpening, not new knowledge: before the first "
            f"step the greedy answer was already correct for {self.greedy_before:.1%} of the "
            "problems; the model now samples it more often."
        )
