"""What is said of workers that a reward cost: it may do so at every answer."""

from __future__ import annotations

import logging
import threading

from rl.rewards.frames import Reply
from rl.rewards.pending import PendingScore, excerpt

logger = logging.getLogger(__name__)


class Losses:
    """Logs a lost worker: the first of its kind at once, then the tenth, the hundredth, ... with
    their number. From any thread.
    """

    def __init__(self, reward: str):
        self._reward, self._lock = reward, threading.Lock()
        self._counts: dict[str | None, int] = {}

    def __call__(self, reply: Reply, culprit: PendingScore) -> None:
        """`culprit`: the answer at which the worker was lost, in the way that `reply` says."""
        with self._lock:
            self._counts[reply.failure] = count = self._counts.get(reply.failure, 0) + 1
        if str(count).rstrip("0") == "1":
            so_far = f" ({count} answers so far)" if count > 1 else ""
            logger.warning(
                "reward %r %s%s (prompt %s)",
                self._reward,
                reply.error,
                so_far,
                excerpt(culprit.prompt),
            )
