"""Provide SampleScorerHandle: the scorers that the ranks have opened for their own samples."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
from collections.abc import Callable

from rl.rewards import (
    PendingScore,
    RewardItem,
    Score,
    ScoredProblem,
    Scorer,
    ScoreTicket,
    ScoringTask,
)
from rl.runtime import Driver
from rl.sanitize import describe_error, sanitize_text

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # between two requests for the scores of tickets


class SampleScorerHandle:
    """Represent a scorer on every rank that samples. Thread-safe.

    `scorer_id`: names it in requests. `refusals`: by machine, why its ranks cannot score: the
    samples of these ranks come without a score. A thread asks the ranks for the scores of tickets
    while any are expected, because a rank is told what to do by verbs alone.
    """

    def __init__(self, driver: Driver, scorer_id: int, packed: bytes):
        self._driver, self.scorer_id = driver, scorer_id
        machines = driver.submit("name_machine").result()
        opened: list[tuple[str, str | None]] = driver.submit(
            "open_scorer", scorer_id, packed, machines
        ).result()
        self.refusals = {machine: reason for machine, reason in opened if reason is not None}
        self._lock = threading.Condition()
        self._expected: dict[
            ScoreTicket, tuple[PendingScore, Scorer, Callable[[], RewardItem]]
        ] = {}
        self._new_tickets: list[ScoreTicket] = []  # those that the ranks have not been asked for
        self._thread: threading.Thread | None = None
        self._closed = self._has_warned = False

    def make_task(self, problem: ScoredProblem) -> ScoringTask | None:
        """Return the task of a problem; None if it cannot be pickled, which is logged once."""
        try:
            return ScoringTask(self.scorer_id, pickle.dumps(problem))
        except Exception as error:  # boundary: pickling runs code of user objects
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "rank 0 has the answers to a row scored, because the row cannot be sent to "
                    "other processes: %s (prompt %s; later rows are not reported)",
                    describe_error(error),
                    sanitize_text(repr(problem.prompt[:60]), 400),
                )
            return None

    def expect(
        self, ticket: ScoreTicket, scorer: Scorer, make_item: Callable[[], RewardItem]
    ) -> PendingScore:
        """Return the score of a ticket. `scorer` counts it, and scores `make_item()` if the rank
        cannot. Raises RuntimeError after `close`.
        """
        pending = PendingScore("", None)
        with self._lock:
            if self._closed:
                raise RuntimeError("the scorers of the ranks are closed: open them again")
            self._expected[ticket] = (pending, scorer, make_item)
            self._new_tickets.append(ticket)
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
                tickets, self._new_tickets = self._new_tickets, []
            try:
                scores: dict[ScoreTicket, Score | None] = self._driver.submit(
                    "take_scores", self.scorer_id, tickets
                ).result()
            except BaseException as error:  # the thread that waits for a score raises it
                self._fail_expected(error)
                continue
            with self._lock:
                ready = [
                    (score, *self._expected.pop(ticket))
                    for ticket, score in scores.items()
                    if ticket in self._expected
                ]
            for score, pending, scorer, make_item in ready:
                try:
                    if score is None:  # the scorer of this process computes it
                        local = scorer.submit(*make_item())
                        local.add_done_callback(functools.partial(_copy_result, pending))
                    else:
                        scorer.record_score(score)
                        pending.set_result(score)
                except BaseException as error:  # the thread that waits for the score raises it
                    pending.set_exception(error)
            with self._lock:
                self._lock.wait_for(lambda: self._closed, _POLL_SECONDS)

    def _fail_expected(self, error: BaseException) -> None:
        """Set an error on all scores that are expected."""
        with self._lock:
            lost, self._expected = list(self._expected.values()), {}
            self._new_tickets = []
        for pending, _, _ in lost:
            pending.set_exception(error)

    def close(self) -> None:
        """Stop the reward workers of the ranks, without waiting. Scores that are expected raise
        RuntimeError.
        """
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._fail_expected(RuntimeError("no score: the scorers of the ranks were closed"))
        if not self._driver.closed:
            self._driver.submit("close_scorer", self.scorer_id)


def _copy_result(pending: PendingScore, done: PendingScore) -> None:
    error = done.exception()
    if error is not None:
        pending.set_exception(error)
    else:
        pending.set_result(done.result())
