"""Queue the submitted items of a scorer: ready items, items held for a batch, and halves of failed
calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rl.rewards.pending import PendingScore


class Waiting:
    """Queue pending scores. Not thread-safe: the scorer holds a lock.

    `together`: items are held until `release`, then taken in a single batch.
    """

    def __init__(self, together: bool):
        self.together = together
        self._held: deque[PendingScore] = deque()
        self._free: deque[PendingScore] = deque()
        self._parts: deque[list[PendingScore]] = deque()

    def __bool__(self) -> bool:
        """Return whether any item is ready."""
        return bool(self._free or self._parts)

    def add(self, pending: PendingScore) -> None:
        (self._held if self.together else self._free).append(pending)

    def release(self) -> None:
        self._free.extend(self._held)
        self._held.clear()

    def back(self, items: Iterable[PendingScore]) -> None:
        """Return items that were taken but not started to the front of the queue."""
        self._free.extendleft(reversed(list(items)))

    def halve(self, items: Sequence[PendingScore]) -> None:
        """Queue each half of a failed call's items as a separate call."""
        half = len(items) // 2
        self._parts.extend([list(items[:half]), list(items[half:])])

    def take(self, workers: int, most: int) -> list[PendingScore]:
        """Return a worker's share of the ready items.

        `most`: maximum number of items, unless items are scored in a single batch.
        """
        if self._parts:
            return self._parts.popleft()
        share = -(-len(self._free) // max(1, workers))
        return [self._free.popleft() for _ in range(share if self.together else min(share, most))]

    def drain(self) -> list[PendingScore]:
        """Remove and return all items, in order."""
        remaining = [
            *(pending for part in self._parts for pending in part),
            *self._free,
            *self._held,
        ]
        for queue in (self._parts, self._free, self._held):
            queue.clear()
        return remaining
