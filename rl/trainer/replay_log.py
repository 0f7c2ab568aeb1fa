"""Record the timing decisions of a run in its folder, so that a replay is bit-identical.

The decisions are those of rl.rollout.EventLog.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rl.config import RunConfig
from rl.errors import UserError
from rl.jsonl import format_json_line, read_jsonl, write_jsonl
from rl.reporting import load_saved_config
from rl.rollout import EventLog, ReplayedEventLog
from rl.sampler import check_features
from rl.trainer.config_diff import find_replay_differences

DECISIONS_FILE = "decisions.jsonl"
EVALUATION_PARTS = ("test ", "greedy ")  # begin the names of the parts that are evaluations


class ReplayLog:
    """Hold the event log of a stage.

    `done` is the number of its batches that are trained already; recorded events of later batches
    belong to no checkpoint and are removed. `replay` is the folder of the run to
    replay. `replays_evaluations`: its evaluations too, which have to be of the same settings.
    Raises UserError if that folder has no event log.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        done: int,
        replay: Path | None = None,
        *,
        replays_evaluations: bool = True,
    ):
        self.path, self.stage = folder / DECISIONS_FILE, stage
        self.batch = done
        self.path.touch()
        rows = read_jsonl(self.path)
        kept_rows = [row for row in rows if row["stage"] != stage or row["batch"] < done]
        if len(kept_rows) != len(rows):
            write_jsonl(self.path, kept_rows)
        self._recorded_events: list[dict[str, Any]] | None = None
        if replay is not None:
            self._recorded_events = [
                row
                for row in read_jsonl(_find_log(replay))
                if row["stage"] == stage
                and (replays_evaluations or not row.get("part", "").startswith(EVALUATION_PARTS))
            ]

    def create_event_log(
        self, tick: int = 0, *, whole_stage: bool = False, part: str = ""
    ) -> EventLog:
        """Return the event log of batch `self.batch` (ticks begin at 0), or of the `whole_stage`
        stage.

        `part` names a further rollout of the batch. The first tick is `tick`. The log replays
        recorded events if the run is a replay.
        """
        write = partial(self._write, {"part": part} if part else {})
        if self._recorded_events is None:
            return EventLog(write, tick)
        return ReplayedEventLog(
            [
                row
                for row in self._recorded_events
                if row.get("part", "") == part and (whole_stage or row["batch"] == self.batch)
            ],
            write,
            tick,
        )

    def _write(self, part: dict[str, str], row: dict[str, Any]) -> None:
        """Append an event to the log."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(format_json_line({"stage": self.stage, "batch": self.batch, **part, **row}))


def check_replay_sampler(run: RunConfig) -> None:
    """Raise UserError for a replay with a sampler whose samples cannot be repeated."""
    kinds = {stage.settings.sampling.sampler for stage in run.stages}
    if run.options.replay is not None and "vllm" in kinds:
        check_features(("vllm", "replay"))


def check_replay(run: RunConfig, warn: Callable[[str], None]) -> None:
    """Check a replay before anything is loaded.

    Raises UserError if the folder has no event log. Warns if settings differ, so that the replay
    cannot be bit-identical.
    """
    if run.options.replay is None:
        return
    if differs := list_replay_differences(run):
        warn(
            f"this replay of {_find_log(run.options.replay).parent} will not be bit-identical, "
            f"because settings differ: {'; '.join(differs)}"
        )


def list_replay_differences(run: RunConfig) -> list[str]:
    """Return the settings in which `run` differs from the run that it replays; [] if it replays
    none.
    """
    if run.options.replay is None:
        return []
    folder = _find_log(run.options.replay).parent
    return find_replay_differences(load_saved_config(folder), run)


def _find_log(replay: Path) -> Path:
    """Return the path of the event log in a run's folder. Raises UserError if it has none."""
    path = Path(replay).expanduser() / DECISIONS_FILE
    if not path.is_file():
        raise UserError(
            f"replay {replay}: the folder has no {DECISIONS_FILE}, which runs write with "
            "--rollout-mode async or settings that require it"
        )
    return path
