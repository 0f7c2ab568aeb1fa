"""What a scorer was handed and has not begun: what may begin, what is held back to be scored
together, parts of calls that failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rl.rewards.pending import PendingScore


class Waiting:
    """A queue; not safe by itself, its scorer holds a lock. `together`: items are held back until
    `release`, then taken at once.
    """

    def __init__(self, together: bool):
        self.together = together
        self._held: deque[PendingScore] = deque()
        self._free: deque[PendingScore] = deque()
        self._parts: deque[list[PendingScore]] = deque()

    def __bool__(self) -> bool:
        """Whether there is work to begin now."""
        return bool(self._free or self._parts)

    def add(self, pending: PendingScore) -> None:
        (self._held if self.together else self._free).append(pending)

    def release(self) -> None:
        self._free.extend(self._held)
        self._held.clear()

    def back(self, items: Iterable[PendingScore]) -> None:
        """What was taken and not begun, to the front again."""
        self._free.extendleft(reversed(list(items)))

    def halve(self, items: Sequence[PendingScore]) -> None:
        """A call on all of these failed: each half is to be tried apart."""
        half = len(items) // 2
        self._parts.extend([list(items[:half]), list(items[half:])])

    def take(self, workers: int, most: int) -> list[PendingScore]:
        """A worker's share of what is there; `most`: items at once, where they are scored one by
        one.
        """
        if self._parts:
            return self._parts.popleft()
        share = -(-len(self._free) // max(1, workers))
        return [self._free.popleft() for _ in range(share if self.together else min(share, most))]

    def drain(self) -> list[PendingScore]:
        """Everything, in order; nothing is left."""
        found = [*(one for part in self._parts for one in part), *self._free, *self._held]
        for queue in (self._parts, self._free, self._held):
            queue.clear()
        return found
