"""A response's score, there or still to come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.errors import UserError
from rl.plain import plain_text

Failure = Literal["error", "timeout", "nan", "death"]


class RewardsLost(UserError):
    """No worker of a scorer could be started again: nothing can be scored any more."""


@dataclass(frozen=True, slots=True)
class Score:
    """A response's reward and metrics. Where the reward failed, `reward` is None, `error` says how,
    `failure` of what kind.
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    failure: Failure | None = None


class PendingScore:
    """A score that is being worked out."""

    __slots__ = ("_before", "_done", "_lost", "_score", "at_once", "item", "prompt")

    def __init__(self, prompt: str, item: Any, before: Callable[[], None] | None = None):
        """`before`: called when it is first asked for; what is scored together is held back until
        then.
        """
        self.prompt = prompt
        self.at_once = False  # whether it was there when it was asked for, and always is
        self._before = before
        self.item = item
        self._done = threading.Event()
        self._score: Score | None = None
        self._lost: RewardsLost | None = None

    def done(self) -> bool:
        self._ask()
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Score:
        """Wait for the score, at most `timeout` seconds. None still ends: each item before it has
        its time limit.

        Raises TimeoutError; RewardsLost where nobody is left who could score it.
        """
        self._ask()
        ended = self._done.wait(timeout)
        if self._lost is not None:
            raise self._lost
        if not ended or self._score is None:
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
    """The beginning of a prompt, as an error names it."""
    return plain_text(repr(text if len(text) <= 60 else text[:57] + "..."), 400)
