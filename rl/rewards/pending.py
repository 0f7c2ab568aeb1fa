"""Hold the score of a response, available now or later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.errors import UserError
from rl.plain import plain_text

Failure = Literal["error", "timeout", "nan", "death"]


class RewardsLost(UserError):
    """Raised when no worker of a scorer can be restarted: no further response can be scored."""


@dataclass(frozen=True, slots=True)
class Score:
    """Hold the reward and metrics of a response.

    If the reward failed, `reward` is None, `error` describes the failure, and `failure` is its
    kind.
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    failure: Failure | None = None


class PendingScore:
    """Represent a score that is being computed."""

    __slots__ = ("_before", "_done", "_lost", "_score", "at_once", "item", "prompt")

    def __init__(self, prompt: str, item: Any, before: Callable[[], None] | None = None):
        """Create the future of a response's score.

        `before`: called when the score is first requested; responses that are scored in a batch are
        queued until then.
        """
        self.prompt = prompt
        # Whether the score was available at once, which is constant for a scorer
        self.at_once = False
        self._before = before
        self.item = item
        self._done = threading.Event()
        self._score: Score | None = None
        self._lost: RewardsLost | None = None

    def done(self) -> bool:
        self._ask()
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Score:
        """Wait at most `timeout` seconds for the score.

        None also ends: each item before this one has its time limit. Raises TimeoutError at the
        timeout, RewardsLost if no worker remains.
        """
        self._ask()
        arrived = self._done.wait(timeout)
        if self._lost is not None:
            raise self._lost
        if not arrived or self._score is None:
            raise TimeoutError(
                f"no score within {timeout} s for the response to {excerpt(self.prompt)}"
            )
        return self._score

    def _ask(self) -> None:
        if self._before is not None and not self._done.is_set():
            self._before()
            self._before = None

    def set(self, score: Score) -> None:
        self._score = score
        self.item = None
        self._done.set()

    def lose(self, why: RewardsLost) -> None:
        self._lost = why
        self.item = None
        self._done.set()


def excerpt(text: str) -> str:
    """Return the beginning of a prompt, for an error message."""
    return plain_text(repr(text if len(text) <= 60 else text[:57] + "..."), 400)
