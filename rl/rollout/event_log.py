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

from rl.errors import UserError
from rl.rollout.env_executor import EnvExecutor, EpisodeKey

# state of an update's weights at the tick at which the update ended
IN_TRANSIT, ARRIVED = "under way", "here"


@dataclass(frozen=True)
class TickEvents:
    """Hold the events of a tick. `failed`: the items of `arrived` with a failed environment, and
    the error message. `update_ended`: an update has ended.

    `weights_arrived`: weights that were in transit to other ranks have arrived.
    """

    arrived: tuple[EpisodeKey, ...] = ()
    failed: Mapping[EpisodeKey, str] = field(default_factory=dict)
    update_ended: bool = False
    weights_arrived: bool = False

    def __bool__(self) -> bool:
        return bool(self.arrived or self.update_ended or self.weights_arrived)

    def as_json(self, tick: int) -> dict[str, Any]:
        """Return the decision as a row of the log: "learned" is `update_ended`, "landed" is
        `weights_arrived`.
        """
        row = {
            "arrived": [list(key) for key in self.arrived],
            "failed": [[*key, text] for key, text in sorted(self.failed.items())],
            "learned": self.update_ended,
            "landed": self.weights_arrived,
        }
        return {"tick": tick} | {name: value for name, value in row.items() if value}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TickEvents:
        """Build the decision from a row of the log."""
        failed = {(group, member): text for group, member, text in row.get("failed", ())}
        arrived = tuple((group, member) for group, member in row.get("arrived", ()))
        return cls(arrived, failed, bool(row.get("learned")), bool(row.get("landed")))


class EventLog:
    """Make decisions from actual events. `write` receives each decision as a row."""

    def __init__(self, write: Callable[[dict[str, Any]], None] = lambda row: None, tick: int = 0):
        self.tick, self._write = tick, write

    def next_events(
        self,
        executor: EnvExecutor,
        update_ended: Callable[[], bool],
        weights_arrived: Callable[[], bool | None],
        *,
        blocked: bool,
    ) -> TickEvents:
        """Return the events of the tick that begins. `blocked`: no work is possible until an event
        occurs, so it is waited for. `update_ended` returns whether an update has ended.
        `weights_arrived` returns whether weights in transit have arrived, None if no weights are in
        transit.
        """
        while True:
            events = TickEvents(
                tuple(executor.finished_keys()), {}, update_ended(), bool(weights_arrived())
            )
            if events or not blocked:
                return events
            executor.wait()

    def log_events(self, events: TickEvents) -> None:
        """Log the outcome of the tick that `next_events` began, including failures. The next tick
        begins.
        """
        if events:
            self._write(events.as_json(self.tick))
        self.tick += 1

    def log_weights_in_transit(self, in_transit: bool) -> bool:
        """Return whether sampling continues with the old weights while the weights of the update
        that ended in this tick are in transit.
        """
        if in_transit:
            self._write({"tick": self.tick - 1, "weights": IN_TRANSIT})
        return in_transit

    def log_weights_awaited(self) -> bool:
        """Log that weights in transit are awaited before the next tick. Return False if the
        replayed run did not wait here.
        """
        self._write({"tick": self.tick - 1, "weights": ARRIVED})
        return True

    def log_stop(self) -> None:
        """Log that the run stops here and resumes from a checkpoint, with caches that are prefilled
        again.
        """
        self._write({"tick": self.tick - 1, "stopped": True})

    def is_stopped(self) -> bool:
        """Return whether the replayed run was stopped here."""
        return False


class ReplayedEventLog(EventLog):
    """Replay the decisions of a log up to its end, then decide by actual events."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        write: Callable[[dict[str, Any]], None] = lambda row: None,
        tick: int = 0,
    ):
        super().__init__(write, tick)
        rows = list(rows)
        self._events = {
            int(row["tick"]): TickEvents.from_json(row)
            for row in rows
            if not {"weights", "stopped"} & row.keys()
        }
        self._stop_ticks = {int(row["tick"]) for row in rows if "stopped" in row}
        self._weight_states = {int(row["tick"]): row["weights"] for row in rows if "weights" in row}
        self._last_tick = max(self._events, default=-1)

    def log_weights_in_transit(self, in_transit: bool) -> bool:
        return super().log_weights_in_transit(
            in_transit
            if self.tick > self._last_tick + 1
            else self._weight_states.get(self.tick - 1) == IN_TRANSIT
        )

    def log_weights_awaited(self) -> bool:
        return self.tick > self._last_tick + 1 and super().log_weights_awaited()

    def is_stopped(self) -> bool:
        if self.tick - 1 not in self._stop_ticks:
            return False
        self.log_stop()
        return True

    def next_events(
        self,
        executor: EnvExecutor,
        update_ended: Callable[[], bool],
        weights_arrived: Callable[[], bool | None],
        *,
        blocked: bool,
    ) -> TickEvents:
        if self.tick > self._last_tick:
            return super().next_events(executor, update_ended, weights_arrived, blocked=blocked)
        decision = self._events.get(self.tick, TickEvents())
        missing = set(decision.arrived) - executor.keys()
        if missing or (blocked and not decision):
            raise UserError(
                f"the log of decisions belongs to another run: its tick {self.tick} is "
                f"{decision.as_json(self.tick)}, but this run "
                f"waits for {sorted(missing) or 'nothing'}. Replay with the settings, data and "
                f"environments of the logged run"
            )
        answered = set(decision.arrived) - decision.failed.keys()
        while not answered <= set(executor.finished_keys()):
            executor.wait(answered)
        while (decision.update_ended and not update_ended()) or (
            decision.weights_arrived and weights_arrived() is False
        ):
            executor.wait({(-1, -1)})  # a key that never exists: wait until the learner pokes
        return decision
