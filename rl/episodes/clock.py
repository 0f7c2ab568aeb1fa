"""What the clock decides of a rollout, and nothing else does: who was ready at which tick, and when
new weights had come.

A run writes its decisions to a log, a line for each tick in which something happened. From the log
it can be repeated bit for bit: whoever was late then is waited for, whoever is early now waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.episodes.waiting import Key, Waiters
from rl.errors import UserError

UNDER_WAY, HERE = "under way", "here"  # of an update's weights, at the tick at which it ended


@dataclass(frozen=True)
class Decision:
    """Of one tick. `failed`: those of `arrived` whose environment failed, and what was said of it.
    `learned`: an update has ended.

    `landed`: weights that were on their way to other ranks are there.
    """

    arrived: tuple[Key, ...] = ()
    failed: Mapping[Key, str] = field(default_factory=dict)
    learned: bool = False
    landed: bool = False

    def __bool__(self) -> bool:
        return bool(self.arrived or self.learned or self.landed)

    def as_json(self, tick: int) -> dict[str, Any]:
        row: dict[str, Any] = {"tick": tick}
        row |= {"arrived": [list(key) for key in self.arrived]} if self.arrived else {}
        row |= (
            {"failed": [[*key, text] for key, text in sorted(self.failed.items())]}
            if self.failed
            else {}
        )
        return (
            row
            | ({"learned": True} if self.learned else {})
            | ({"landed": True} if self.landed else {})
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Decision:
        failed = {(group, member): text for group, member, text in row.get("failed", ())}
        arrived = tuple((group, member) for group, member in row.get("arrived", ()))
        return cls(arrived, failed, bool(row.get("learned", False)), bool(row.get("landed", False)))


class Clock:
    """Decides by what has happened. `write`: gets each decision as a row."""

    def __init__(self, write: Callable[[dict[str, Any]], None] = lambda row: None, tick: int = 0):
        self.tick, self._write = tick, write
        self._at = tick - 1

    def decide(
        self,
        waiters: Waiters,
        learned: Callable[[], bool],
        *,
        blocked: bool,
        landed: Callable[[], bool | None] = lambda: None,
    ) -> Decision:
        """Of the tick that begins. `blocked`: there is nothing to do until something happens.
        `learned`: whether an update has ended; `landed`: whether weights that are on their way have
        come, None where none are.
        """
        while True:
            found = Decision(tuple(waiters.ready()), {}, learned(), bool(landed()))
            if found or not blocked:
                break
            waiters.wait()
        self._at, self.tick = self.tick, self.tick + 1
        return found

    def note(self, decision: Decision) -> None:
        """What became of the tick that `decide` began, failures included."""
        if decision:
            self._write(decision.as_json(self._at))

    def under_way(self, would: bool) -> bool:
        """Whether sampling goes on with the old weights while those of the update that ended in
        this tick are on their way.
        """
        if would:
            self._write({"tick": self._at, "weights": UNDER_WAY})
        return would

    def settle(self) -> bool:
        """Weights that are under way are waited for, after all, before the next tick; False where
        that was otherwise then.
        """
        self._write({"tick": self._at, "weights": HERE})
        return True

    def stop(self) -> None:
        """A run that is stopped here goes on from a checkpoint, with caches that are read again."""
        self._write({"tick": self._at, "stopped": True})

    def stopped(self) -> bool:
        """Whether the run that is repeated was stopped here."""
        return False


class Replayed(Clock):
    """Decides as a log says, as far as it goes; then by what happens."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        write: Callable[[dict[str, Any]], None] = lambda row: None,
        tick: int = 0,
    ):
        super().__init__(write, tick)
        rows = list(rows)
        self._rows = {
            int(row["tick"]): Decision.from_json(row)
            for row in rows
            if not {"weights", "stopped"} & row.keys()
        }
        self._stops = {int(row["tick"]) for row in rows if "stopped" in row}
        self._weights = {int(row["tick"]): row["weights"] for row in rows if "weights" in row}
        self._last = max(self._rows, default=-1)

    def under_way(self, would: bool) -> bool:
        return super().under_way(
            would if self._at > self._last else self._weights.get(self._at) == UNDER_WAY
        )

    def settle(self) -> bool:
        return self._at > self._last and super().settle()

    def stopped(self) -> bool:
        if self._at not in self._stops:
            return False
        self.stop()
        return True

    def decide(
        self,
        waiters: Waiters,
        learned: Callable[[], bool],
        *,
        blocked: bool,
        landed: Callable[[], bool | None] = lambda: None,
    ) -> Decision:
        if self.tick > self._last:
            return super().decide(waiters, learned, blocked=blocked, landed=landed)
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
        while (found.learned and not learned()) or (found.landed and landed() is False):
            waiters.wait({(-1, -1)})  # nobody: until the learner pokes
        self._at, self.tick = self.tick, self.tick + 1
        return found
