"""Record the timing decisions of a run in its folder, so that a replay is bit-identical.

The decisions are those of rl.episodes.Clock.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.episodes import Clock, Replayed
from rl.errors import UserError
from rl.jsonl import json_line, read_rows, write_atomically
from rl.report import saved_config
from rl.run.changed import replayed_otherwise
from rl.settings import Run

DECISIONS = "decisions.jsonl"


class Decisions:
    """Hold the event log of a stage.

    `done` is the number of its batches that are trained already; recorded events of later batches
    belong to no checkpoint and are removed. `replay` is the folder of the run to
    replay. Raises UserError if that folder has no event log.
    """

    def __init__(self, folder: Path, stage: str, done: int, replay: Path | None = None):
        self.path, self.stage = folder / DECISIONS, stage
        self.batch = done
        self.path.touch()
        rows = read_rows(self.path)
        kept_rows = [row for row in rows if row["stage"] != stage or row["batch"] < done]
        if len(kept_rows) != len(rows):
            write_atomically(self.path, "".join(map(json_line, kept_rows)))
        self._then: list[dict[str, Any]] | None = None
        if replay is not None:
            self._then = [row for row in read_rows(_log_of(replay)) if row["stage"] == stage]

    def clock(self, tick: int = 0, *, whole: bool = False) -> Clock:
        """Return the clock of batch `self.batch` (ticks begin at 0), or of the `whole` stage.

        The first tick is `tick`. The clock replays recorded events if the run is a replay.
        """
        if self._then is None:
            return Clock(self._write, tick)
        return Replayed(
            [row for row in self._then if whole or row["batch"] == self.batch], self._write, tick
        )

    def _write(self, row: dict[str, Any]) -> None:
        """Append an event to the log."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_line({"stage": self.stage, "batch": self.batch, **row}))


def check_replay(run: Run, warn: Callable[[str], None]) -> None:
    """Check a replay before anything is loaded.

    Raises UserError if the folder has no event log. Warns if settings differ, so that the replay
    cannot be bit-identical.
    """
    if run.options.replay is None:
        return
    folder = _log_of(run.options.replay).parent
    if differs := replayed_otherwise(saved_config(folder), run):
        warn(
            f"this replay of {folder} will not be bit-identical, because settings differ: "
            f"{'; '.join(differs)}"
        )


def _log_of(replay: Path) -> Path:
    """Return the path of the event log in a run's folder. Raises UserError if it has none."""
    path = Path(replay).expanduser() / DECISIONS
    if not path.is_file():
        raise UserError(
            f"replay {replay}: the folder has no {DECISIONS}, which runs write with episodes "
            "continuous or settings that require it"
        )
    return path
