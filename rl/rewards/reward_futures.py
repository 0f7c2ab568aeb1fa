"""Hold the score of a response, available now or later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.errors import UserError
from rl.sanitize import sanitize_text

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

    __slots__ = ("_future", "_on_request", "immediate", "item", "prompt")
    deadline = None  # each item before this one has its time limit

    def __init__(self, prompt: str, item: Any, on_request: Callable[[], None] | None = None):
        """Create the future of a response's score.

        `on_request`: called when the score is first requested; responses that are scored in a batch
        are queued until then.
        """
        self.prompt = prompt
        # Whether the score was available at once, which is constant for a scorer
        self.immediate = False
        self._on_request = on_request
        self.item = item
        self._future: Future[Score] = Future()

    def done(self) -> bool:
        self._request()
        return self._future.done()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` when the score has been computed."""
        self._request()
        self._future.add_done_callback(callback)

    def result(self, timeout: float | None = None) -> Score:
        """Wait at most `timeout` seconds for the score.

        None also ends: each item before this one has its time limit. Raises TimeoutError at the
        timeout, RewardsLost if no worker remains.
        """
        self._request()
        try:
            return self._future.result(timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"no score within {timeout} s for the response to {shorten_prompt(self.prompt)}"
            ) from error

    def _request(self) -> None:
        if self._on_request is not None and not self._future.done():
            self._on_request()
            self._on_request = None

    def set(self, score: Score) -> None:
        self.item = None
        self._future.set_result(score)

    def fail(self, error: RewardsLost) -> None:
        self.item = None
        self._future.set_exception(error)


def shorten_prompt(text: str) -> str:
    """Return the beginning of a prompt, for an error message."""
    return sanitize_text(repr(text if len(text) <= 60 else text[:57] + "..."), 400)
