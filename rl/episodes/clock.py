"""What the clock decides of a rollout, and nothing else does: who was ready at which tick, and when new weights had come.

A run writes its decisions to a log, a line for each tick in which something happened. From the log it can be repeated bit for bit:
whoever was late then is waited for, whoever is early now waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.episodes.waiting import Key, Waiters
from rl.errors import UserError


@dataclass(frozen=True)
class Decision:
    """Of one tick. `failed`: those of `arrived` whose environment failed, and what was said of it. `learned`: an update has ended."""

    arrived: tuple[Key, ...] = ()
    failed: Mapping[Key, str] = field(default_factory=dict)
    learned: bool = False

    def __bool__(self) -> bool:
        return bool(self.arrived or self.learned)

    def as_json(self, tick: int) -> dict[str, Any]:
        row: dict[str, Any] = {"tick": tick}
        row |= {"arrived": [list(key) for key in self.arrived]} if self.arrived else {}
        row |= {"failed": [[*key, text] for key, text in sorted(self.failed.items())]} if self.failed else {}
        return row | ({"learned": True} if self.learned else {})

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Decision:
        failed = {(group, member): text for group, member, text in row.get("failed", ())}
        return cls(tuple((group, member) for group, member in row.get("arrived", ())), failed, bool(row.get("learned", False)))


class Clock:
    """Decides by what has happened. `write`: gets each decision as a row."""

    def __init__(self, write: Callable[[dict[str, Any]], None] = lambda row: None, tick: int = 0):
        self.tick, self._write = tick, write

    def decide(self, waiters: Waiters, learned: Callable[[], bool], *, blocked: bool) -> Decision:
        """Of the tick that begins. `blocked`: there is nothing to do until something happens. `learned`: whether an update has ended."""
        while True:
            found = Decision(tuple(waiters.ready()), {}, learned())
            if found or not blocked:
                break
            waiters.wait()
        self._at, self.tick = self.tick, self.tick + 1
        return found

    def note(self, decision: Decision) -> None:
        """What became of the tick that `decide` began, failures included."""
        if decision:
            self._write(decision.as_json(self._at))


class Replayed(Clock):
    """Decides as a log says, as far as it goes; then by what happens."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], write: Callable[[dict[str, Any]], None] = lambda row: None, tick: int = 0):
        super().__init__(write, tick)
        self._rows = {int(row["tick"]): Decision.from_json(row) for row in rows}
        self._last = max(self._rows, default=-1)

    def decide(self, waiters: Waiters, learned: Callable[[], bool], *, blocked: bool) -> Decision:
        if self.tick > self._last:
            return super().decide(waiters, learned, blocked=blocked)
        found = self._rows.get(self.tick, Decision())
        missing = set(found.arrived) - waiters.keys()
        if missing or (blocked and not found):
            raise UserError(
                f"the log of decisions is of another run: at tick {self.tick} it says {found.as_json(self.tick)}, and here "
                f"{sorted(missing) or 'nothing'} is waited for. Replay with the settings, data and environments of the run"
            )
        answered = set(found.arrived) - found.failed.keys()
        while not answered <= set(waiters.ready()):
            waiters.wait(answered)
        while found.learned and not learned():
            waiters.wait({(-1, -1)})  # nobody: until the learner pokes
        self._at, self.tick = self.tick, self.tick + 1
        return found
