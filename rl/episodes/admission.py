"""Which groups begin, and which make up a batch, where sampling goes on while the learner updates.
Pure: no clock, no threads.

The bound is kept by counting, not by hoping: a group that began at version v may be trained at v +
bound at the latest, so no more groups are ever under way than the batches up to then can take, and
a batch leaves none behind that the batches after it could not take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Admission:
    """Groups by number, 0 to `total` - 1: each begins once, and is in one batch. `bound`: a token's
    age in updates at most.

    `version`: of the weights that are drawn from, in updates; the learner may be ahead of it by
    one, on whose way they are. A batch's number, `taken` before it, is the version that learns from
    it.

    A batch is made of groups that have ended, those that began first before others. Where one that
    has not ended may wait no longer, the batch waits for it, or (`redraw`) it is given back: it
    begins again, at the version of now.
    """

    batch_size: int
    bound: int
    total: int
    redraw: bool = False
    version: int = 0
    next: int = 0
    taken: int = 0  # batches
    # version at which each group under way began
    since: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    awaited: int = 0  # groups that a batch had to wait for because of their age
    redrawn: int = 0
    _late: set[int] = field(default_factory=set)

    def begin(self) -> list[int]:
        """Groups to begin now: as many as may be under way without one growing too old."""
        room = (self.version + self.bound + 1 - self.taken) * self.batch_size - len(self.since)
        new = list(range(self.next, min(self.next + max(0, room), self.total)))
        self.next += len(new)
        self.since |= dict.fromkeys(new, self.version)
        return new

    def end(self, number: int) -> None:
        self.ended.add(number)

    def take(self) -> tuple[list[int], list[int]]:
        """(the next batch, or nothing where it is not there yet; groups that are given back, to
        begin again).
        """
        given_back: list[int] = []
        while missing := self._missing():
            # the others would be no younger for a new start
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
        """The weights that are drawn from have changed."""
        self.version += 1

    def _candidates(self) -> list[int]:
        return sorted(self.ended, key=lambda number: (self.since[number], number))[
            : self.batch_size
        ]

    def _missing(self) -> set[int]:
        """Groups that have not ended and whose age asks for a batch now; empty where the batch may
        be taken.
        """
        left = Counter(self.since.values())  # after this batch, by when they began
        left.subtract(self.since[number] for number in self._candidates())
        due, latest = 0, None
        for began in sorted(left):
            due += left[began]
            # what the batches after this one can take of them in time
            if due > (began + self.bound - self.taken) * self.batch_size:
                latest = began
        if latest is None:
            return set()
        return {
            number
            for number, since in self.since.items()
            if since <= latest and number not in self.ended
        }

    def state(self) -> dict[str, Any]:
        since = [[number, version] for number, version in sorted(self.since.items())]
        now = {"version": self.version, "next": self.next, "taken": self.taken}
        return {**now, "since": since, "ended": sorted(self.ended), "late": sorted(self._late)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.version, self.next, self.taken = state["version"], state["next"], state["taken"]
        pairs: Sequence[tuple[int, int]] = state["since"]
        self.since, self.ended, self._late = dict(pairs), set(state["ended"]), set(state["late"])
