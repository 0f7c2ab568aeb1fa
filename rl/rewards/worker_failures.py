"""Log workers that a reward crashed or hung, with bounded output: a reward may do so at every
answer.
"""

from __future__ import annotations

import logging
import threading

from rl.rewards.reward_futures import PendingScore, shorten_prompt
from rl.rewards.worker_protocol import RewardReply

logger = logging.getLogger(__name__)


class WorkerFailureLog:
    """Log lost workers of each failure kind: the 1st, 10th, 100th, ... with their count.
    Thread-safe.
    """

    def __init__(self, reward: str):
        self._reward, self._lock = reward, threading.Lock()
        self._counts: dict[str | None, int] = {}

    def __call__(self, reply: RewardReply, culprit: PendingScore) -> None:
        """Count a lost worker and log it if the count is a power of 10.

        `culprit`: the answer that the worker was scoring. `reply`: the failure.
        """
        with self._lock:
            self._counts[reply.failure] = count = self._counts.get(reply.failure, 0) + 1
        if str(count).rstrip("0") == "1":
            total = f" ({count} answers so far)" if count > 1 else ""
            logger.warning(
                "reward %r %s%s (prompt %s)",
                self._reward,
                reply.error,
                total,
                shorten_prompt(culprit.prompt),
            )
