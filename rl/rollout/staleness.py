"""Decide which groups start and which groups form a batch while sampling overlaps with updates.

The module is pure: it reads no clock and starts no threads.

The staleness bound holds by counting. A group that started at version v is trained at version v +
bound at the latest. Therefore at most as many groups are outside a batch as the batches up to that
version can take, and a batch leaves no group that later batches could not take in time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StalenessController:
    """Control the staleness of groups, numbered 0 to `num_groups` - 1: each group is part of a
    single batch. `max_staleness` is the maximum age of a token in updates.

    The caller increments `version` when the sampler gets new weights, and adds groups that have
    ended to `ended_groups`. The learner may be ahead of `version` by 1 update,
    while the newer weights are in transit. Batch `batches_taken` (the number of batches taken
    before it) is trained at version `batches_taken`.

    A batch consists of groups that have ended, ordered by their start version. If a group that has
    not ended is too old to wait for a later batch, the batch waits for that group, or (with
    `resample`) the group is rescheduled: it starts again at the current version.
    """

    batch_size: int
    max_staleness: int
    num_groups: int
    resample: bool = False
    version: int = 0
    next_group: int = 0
    batches_taken: int = 0  # number of batches
    # version at which each group that is in no batch yet started
    start_versions: dict[int, int] = field(default_factory=dict)
    ended_groups: set[int] = field(default_factory=set)  # groups of `start_versions` that ended
    num_awaited: int = 0  # groups that a batch waited for because of their age
    num_rescheduled: int = 0
    _late_groups: set[int] = field(default_factory=set)

    def start_groups(self) -> list[int]:
        """Start as many groups as may run without a group growing too old. Return their numbers."""
        room = (self.version + self.max_staleness + 1 - self.batches_taken) * self.batch_size - len(
            self.start_versions
        )
        new = list(range(self.next_group, min(self.next_group + max(0, room), self.num_groups)))
        self.next_group += len(new)
        self.start_versions |= dict.fromkeys(new, self.version)
        return new

    def take_batch(self) -> tuple[list[int], list[int]]:
        """Return (numbers of the next batch, numbers of rescheduled groups). The batch is empty if
        it is not complete yet. Rescheduled groups start again.
        """
        rescheduled: list[int] = []
        while missing := self._find_overdue_groups():
            # A group that started at the current version would not get younger by a new start.
            late = {number for number in missing if self.start_versions[number] < self.version}
            if not (self.resample and late):
                self.num_awaited += len(late - self._late_groups)
                self._late_groups |= late
                return [], rescheduled
            for number in sorted(late):
                self.start_versions[number] = self.version
                self.num_rescheduled += 1
                rescheduled.append(number)
        batch = self._next_batch()
        if len(batch) < min(self.batch_size, len(self.start_versions)) or not batch:
            return [], rescheduled
        self.batches_taken += 1
        for number in batch:
            del self.start_versions[number]
            self.ended_groups.discard(number)
            self._late_groups.discard(number)
        return sorted(batch), rescheduled

    def _next_batch(self) -> list[int]:
        """Return the groups of the next batch: ended groups, oldest start version first."""
        return sorted(self.ended_groups, key=lambda number: (self.start_versions[number], number))[
            : self.batch_size
        ]

    def _find_overdue_groups(self) -> set[int]:
        """Return the groups that have not ended but are so old that they require a batch now;
        empty if the batch may be taken.
        """
        remaining = Counter(
            self.start_versions.values()
        )  # groups after this batch, by start version
        remaining.subtract(self.start_versions[number] for number in self._next_batch())
        due, latest = 0, None
        for start_version in sorted(remaining):
            due += remaining[start_version]
            # Compare with the number of groups that later batches can take in time.
            if due > (start_version + self.max_staleness - self.batches_taken) * self.batch_size:
                latest = start_version
        if latest is None:
            return set()
        return {
            number
            for number, since in self.start_versions.items()
            if since <= latest and number not in self.ended_groups
        }

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values."""
        return {
            "version": self.version,
            "next": self.next_group,
            "taken": self.batches_taken,
            "since": list(map(list, sorted(self.start_versions.items()))),
            "ended": sorted(self.ended_groups),
            "late": sorted(self._late_groups),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state that `state` returned."""
        self.version = state["version"]
        self.next_group = state["next"]
        self.batches_taken = state["taken"]
        self.start_versions = dict(state["since"])
        self.ended_groups = set(state["ended"])
        self._late_groups = set(state["late"])
