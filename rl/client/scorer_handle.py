"""Provide SampleScorerHandle: the scorers that the ranks have opened for their own samples."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rl.rewards import PendingScore, RewardItem, Score, Scorer, ScoreTicket
from rl.runtime import Driver

_POLL_SECONDS = 0.05  # between two requests for the scores of tickets


class SampleScorerHandle:
    """Represent a scorer on every rank that samples. Thread-safe.

    `scorer_id`: names it in requests. `refusals`: by machine, why its ranks cannot score: the
    samples of these ranks come without a score. A thread asks the ranks for the scores of tickets
    while any are expected, because a rank is told what to do by verbs alone.
    """

    def __init__(self, driver: Driver, scorer_id: int, packed: bytes):
        self._driver, self.scorer_id = driver, scorer_id
        opened: list[tuple[str, str | None]] = driver.submit(
            "open_scorer", scorer_id, packed
        ).result()
        self.refusals = {machine: reason for machine, reason in opened if reason is not None}
        self._lock = threading.Condition()
        self._expected: dict[
            ScoreTicket, tuple[PendingScore, Scorer, Callable[[], RewardItem]]
        ] = {}
        # scores that are not expected yet: the sample is still on its way, or was dropped
        self._arrived: dict[ScoreTicket, Score | None] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def expect(
        self, ticket: ScoreTicket, scorer: Scorer, make_item: Callable[[], RewardItem]
    ) -> PendingScore:
        """Return the score of a ticket. `scorer` counts it, and scores `make_item()` if the rank
        cannot.
        """
        pending = PendingScore("", None)
        with self._lock:
            self._expected[ticket] = (pending, scorer, make_item)
            self._lock.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._poll, name="scores of ranks", daemon=True
                )
                self._thread.start()
        return pending

    def _poll(self) -> None:
        """Ask the ranks for scores while any are expected."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._expected or self._closed)
                if self._closed:
                    return
            try:
                scores = self._driver.submit("take_scores", self.scorer_id).result()
            except BaseException as error:  # the thread that waits for a score raises it
                with self._lock:
                    lost, self._expected = list(self._expected.values()), {}
                for pending, _, _ in lost:
                    pending.set_exception(error)
                continue
            self._arrived |= scores
            with self._lock:
                ready = [
                    (self._arrived.pop(ticket), *self._expected.pop(ticket))
                    for ticket in self._arrived.keys() & self._expected.keys()
                ]
            for score, pending, scorer, make_item in ready:
                if score is None:
                    _score_here(pending, scorer, make_item)
                else:
                    scorer.record_score(score)
                    pending.set_result(score)
            with self._lock:
                self._lock.wait_for(lambda: self._closed, _POLL_SECONDS)

    def close(self) -> None:
        """Stop the reward workers of the ranks."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
        if not self._driver.closed:
            self._driver.submit("close_scorer", self.scorer_id).result()


def _score_here(pending: PendingScore, scorer: Scorer, make_item: Callable[[], RewardItem]) -> None:
    """Set the score that the scorer of this process computes."""
    try:
        local = scorer.submit(*make_item())
        local.add_done_callback(lambda done: _copy_result(done, pending))
    except BaseException as error:  # the thread that waits for the score raises it
        pending.set_exception(error)


def _copy_result(done: PendingScore, pending: PendingScore) -> None:
    error = done.exception()
    if error is not None:
        pending.set_exception(error)
    else:
        pending.set_result(done.result())
