"""What the clock decided in a run, in its folder: enough to repeat it bit for bit
(rl.episodes.Clock).
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
    """A stage's log. `done`: its batches that are trained already; what the log says of later ones
    was never saved, and is forgotten.

    `replay`: the folder of a run whose decisions are to be made again. UserError where it has none.
    """

    def __init__(self, folder: Path, stage: str, done: int, replay: Path | None = None):
        self.path, self.stage = folder / DECISIONS, stage
        self.batch = done
        self.path.touch()
        before = read_rows(self.path)
        kept = [row for row in before if row["stage"] != stage or row["batch"] < done]
        if len(kept) != len(before):
            write_atomically(self.path, "".join(map(json_line, kept)))
        self._then: list[dict[str, Any]] | None = None
        if replay is not None:
            self._then = [row for row in read_rows(_log_of(replay)) if row["stage"] == stage]

    def clock(self, tick: int = 0, *, whole: bool = False) -> Clock:
        """Of the batch `self.batch`, whose ticks begin at 0; or of the `whole` stage, from `tick`
        on.
        """
        if self._then is None:
            return Clock(self._write, tick)
        return Replayed(
            [row for row in self._then if whole or row["batch"] == self.batch], self._write, tick
        )

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_line({"stage": self.stage, "batch": self.batch, **row}))


def check_replay(run: Run, warn: Callable[[str], None]) -> None:
    """Before anything is loaded: UserError where there is nothing to replay; a warning where it
    cannot be bit for bit.
    """
    if run.options.replay is None:
        return
    folder = _log_of(run.options.replay).parent
    if differs := replayed_otherwise(saved_config(folder), run):
        warn(f"this replay is not {folder} bit for bit, for settings differ: {'; '.join(differs)}")


def _log_of(replay: Path) -> Path:
    path = Path(replay).expanduser() / DECISIONS
    if not path.is_file():
        raise UserError(
            f"replay {replay}: there is no {DECISIONS}, which runs write with episodes continuous or what asks for it"
        )
    return path
