"""Record the timing-dependent decisions of a rollout: which episodes were ready at which tick, and
when new weights had arrived. Everything else in a rollout is deterministic.

A run writes its decisions to a log, a line for each tick with an event. The log makes the run
repeatable bit for bit: a replay waits for episodes that were ready in the run, and holds back
episodes that are ready earlier than in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.episodes.waiting import Key, Waiters
from rl.errors import UserError

# state of an update's weights at the tick at which the update ended
UNDER_WAY, HERE = "under way", "here"


@dataclass(frozen=True)
class Decision:
    """Hold the events of a tick. `failed`: the items of `arrived` with a failed environment, and
    the error message. `learned`: an update has ended.

    `landed`: weights that were in transit to other ranks have arrived.
    """

    arrived: tuple[Key, ...] = ()
    failed: Mapping[Key, str] = field(default_factory=dict)
    learned: bool = False
    landed: bool = False

    def __bool__(self) -> bool:
        return bool(self.arrived or self.learned or self.landed)

    def as_json(self, tick: int) -> dict[str, Any]:
        """Return the decision as a row of the log."""
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
        """Build the decision from a row of the log."""
        failed = {(group, member): text for group, member, text in row.get("failed", ())}
        arrived = tuple((group, member) for group, member in row.get("arrived", ()))
        return cls(arrived, failed, bool(row.get("learned", False)), bool(row.get("landed", False)))


class Clock:
    """Make decisions from actual events. `write` receives each decision as a row."""

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
        """Return the decision of the tick that begins. `blocked`: no work is possible until an
        event occurs. `learned` returns whether an update has ended. `landed` returns whether
        weights in transit have arrived, None if no weights are in transit.
        """
        while True:
            decision = Decision(tuple(waiters.ready()), {}, learned(), bool(landed()))
            if decision or not blocked:
                break
            waiters.wait()
        self._at, self.tick = self.tick, self.tick + 1
        return decision

    def note(self, decision: Decision) -> None:
        """Log the outcome of the tick that `decide` began, including failures."""
        if decision:
            self._write(decision.as_json(self._at))

    def under_way(self, would: bool) -> bool:
        """Return whether sampling continues with the old weights while the weights of the update
        that ended in this tick are in transit.
        """
        if would:
            self._write({"tick": self._at, "weights": UNDER_WAY})
        return would

    def settle(self) -> bool:
        """Log that weights in transit are awaited before the next tick. Return False if the
        replayed run did not wait here.
        """
        self._write({"tick": self._at, "weights": HERE})
        return True

    def stop(self) -> None:
        """Log that the run stops here and resumes from a checkpoint, with caches that are prefilled
        again.
        """
        self._write({"tick": self._at, "stopped": True})

    def stopped(self) -> bool:
        """Return whether the replayed run was stopped here."""
        return False


class Replayed(Clock):
    """Replay the decisions of a log up to its end, then decide by actual events."""

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
        decision = self._rows.get(self.tick, Decision())
        missing = set(decision.arrived) - waiters.keys()
        if missing or (blocked and not decision):
            raise UserError(
                f"the log of decisions belongs to another run: its tick {self.tick} is "
                f"{decision.as_json(self.tick)}, but this run "
                f"waits for {sorted(missing) or 'nothing'}. Replay with the settings, data and "
                f"environments of the logged run"
            )
        answered = set(decision.arrived) - decision.failed.keys()
        while not answered <= set(waiters.ready()):
            waiters.wait(answered)
        while (decision.learned and not learned()) or (decision.landed and landed() is False):
            waiters.wait({(-1, -1)})  # a key that never exists: wait until the learner pokes
        self._at, self.tick = self.tick, self.tick + 1
        return decision
