"""Decide which groups start and which groups form a batch while sampling overlaps with updates.

The module is pure: it reads no clock and starts no threads.

The staleness bound holds by counting. A group that started at version v is trained at version v +
bound at the latest. Therefore no more groups run than the batches up to that version can take, and
a batch leaves no group that later batches could not take in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Admission:
    """Control the staleness of groups, numbered 0 to `total` - 1: each group is part of a single
    batch. `bound` is the maximum age of a token in updates.

    `version` counts the updates of the weights that are sampled from. The learner may be ahead of
    `version` by 1 update, while the newer weights are in transit. Batch `taken` (the number of
    batches taken before it) is trained at version `taken`.

    A batch consists of groups that have ended, ordered by their start version. If a group that has
    not ended is too old to wait for a later batch, the batch waits for that group, or (with
    `redraw`) the group is rescheduled: it starts again at the current version.
    """

    batch_size: int
    bound: int
    total: int
    redraw: bool = False
    version: int = 0
    next: int = 0
    taken: int = 0  # number of batches
    # version at which each running group started
    since: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    awaited: int = 0  # groups that a batch waited for because of their age
    redrawn: int = 0
    _late: set[int] = field(default_factory=set)

    def begin(self) -> list[int]:
        """Start as many groups as may run without a group growing too old. Return their numbers."""
        room = (self.version + self.bound + 1 - self.taken) * self.batch_size - len(self.since)
        new = list(range(self.next, min(self.next + max(0, room), self.total)))
        self.next += len(new)
        self.since |= dict.fromkeys(new, self.version)
        return new

    def end(self, number: int) -> None:
        """Mark group `number` as ended."""
        self.ended.add(number)

    def take(self) -> tuple[list[int], list[int]]:
        """Return (numbers of the next batch, numbers of rescheduled groups). The batch is empty if
        it is not complete yet. Rescheduled groups start again.
        """
        given_back: list[int] = []
        while missing := self._missing():
            # A group that started at the current version would not get younger by a new start.
            late = {number for number in missing if self.since[number] < self.version}
            if not (self.redraw and late):
                self.awaited += len(late - self._late)
                self._late |= late
                return [], given_back
            for number in sorted(late):
                self.since[number] = self.version
                self.redrawn += 1
                given_back.append(number)
        batch = self._candidates()
        if len(batch) < min(self.batch_size, len(self.since)) or not batch:
            return [], given_back
        self.taken += 1
        for number in batch:
            del self.since[number]
            self.ended.discard(number)
            self._late.discard(number)
        return sorted(batch), given_back

    def updated(self) -> None:
        """Record that the weights that are sampled from have changed."""
        self.version += 1

    def _candidates(self) -> list[int]:
        """Return the groups of the next batch: ended groups, oldest start version first."""
        return sorted(self.ended, key=lambda number: (self.since[number], number))[
            : self.batch_size
        ]

    def _missing(self) -> set[int]:
        """Return the groups that have not ended but are so old that they require a batch now;
        empty if the batch may be taken.
        """
        remaining = Counter(self.since.values())  # groups after this batch, by start version
        remaining.subtract(self.since[number] for number in self._candidates())
        due, latest = 0, None
        for start_version in sorted(remaining):
            due += remaining[start_version]
            # Compare with the number of groups that later batches can take in time.
            if due > (start_version + self.bound - self.taken) * self.batch_size:
                latest = start_version
        if latest is None:
            return set()
        return {
            number
            for number, since in self.since.items()
            if since <= latest and number not in self.ended
        }

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values."""
        since = [[number, version] for number, version in sorted(self.since.items())]
        now = {"version": self.version, "next": self.next, "taken": self.taken}
        return {**now, "since": since, "ended": sorted(self.ended), "late": sorted(self._late)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state that `state` returned."""
        self.version, self.next, self.taken = state["version"], state["next"], state["taken"]
        pairs: Sequence[tuple[int, int]] = state["since"]
        self.since, self.ended, self._late = dict(pairs), set(state["ended"]), set(state["late"])
