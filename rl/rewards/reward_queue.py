"""Queue the submitted items of a scorer: ready items, items held for a batch, and halves of failed
calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rl.rewards.reward_futures import PendingScore


class RewardQueue:
    """Queue pending scores. Not thread-safe: the scorer holds a lock.

    `batched`: items are held until `release`, then taken in a single batch.
    """

    def __init__(self, together: bool):
        self.batched = together
        self._held_back: deque[PendingScore] = deque()
        self._ready: deque[PendingScore] = deque()
        self._halves: deque[list[PendingScore]] = deque()

    def __bool__(self) -> bool:
        """Return whether any item is ready."""
        return bool(self._ready or self._halves)

    def add(self, pending: PendingScore) -> None:
        (self._held_back if self.batched else self._ready).append(pending)

    def release(self) -> None:
        self._ready.extend(self._held_back)
        self._held_back.clear()

    def put_back(self, items: Iterable[PendingScore]) -> None:
        """Return items that were taken but not started to the front of the queue."""
        self._ready.extendleft(reversed(list(items)))

    def add_halves(self, items: Sequence[PendingScore]) -> None:
        """Queue each half of a failed call's items as a separate call."""
        half = len(items) // 2
        self._halves.extend([list(items[:half]), list(items[half:])])

    def take(self, workers: int, limit: int) -> list[PendingScore]:
        """Return a worker's share of the ready items.

        `limit`: maximum number of items, unless items are scored in a single batch.
        """
        if self._halves:
            return self._halves.popleft()
        share = -(-len(self._ready) // max(1, workers))
        return [self._ready.popleft() for _ in range(share if self.batched else min(share, limit))]

    def drain(self) -> list[PendingScore]:
        """Remove and return all items, in order."""
        remaining = [
            *(pending for part in self._halves for pending in part),
            *self._ready,
            *self._held_back,
        ]
        for queue in (self._halves, self._ready, self._held_back):
            queue.clear()
        return remaining
