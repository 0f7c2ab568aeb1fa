"""Score samples on the rank that sampled them: decode a finished sample, and give its text to the
reward workers of this machine, while sampling continues. Only numbers leave the rank.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl.errors import UserError
from rl.renderers import Renderer, format_with_calls
from rl.rewards import (
    PendingScore,
    Reward,
    SampleScore,
    Score,
    ScoredProblem,
    Scorer,
    ScoreTicket,
    ScoringTask,
    hash_beginning,
)
from rl.sanitize import describe_error
from rl.types import SampledSequence

logger = logging.getLogger(__name__)

_MAX_TICKETS = 10_000  # that rank 0 has not asked for: those of dropped samples stay


def parse_answer(renderer: Renderer, sample: SampledSequence) -> tuple[str, bool]:
    """Return (the text of an answer with its calls, whether an end mark was sampled)."""
    message, ended = renderer.parse_response(sample.tokens)
    return format_with_calls(message), ended


@dataclass(frozen=True)
class ScorerSettings:
    """Describe a scorer that every rank opens.

    `workers`: reward workers of a machine, None: the default. `variables`: environment variables of
    rank 0 that its workers receive.
    """

    renderer: Renderer
    reward: Reward
    timeout: float
    workers: int | None
    variables: Mapping[str, str]

    def pack(self) -> bytes:
        """Return the settings for `SampleScorer`. Raises an error if it cannot be pickled."""
        return pickle.dumps(self)


class SampleScorer:
    """Score this rank's samples with an equal part of the machine's reward workers, at least one.

    `packed`: ScorerSettings. `rank`: this rank. `num_ranks`: ranks of this machine that
    score. Raises an error if the reward cannot be loaded here.
    """

    def __init__(self, packed: bytes, rank: int, num_ranks: int):
        unpacked: ScorerSettings = pickle.loads(packed)
        self._renderer = unpacked.renderer
        self._scorer = Scorer(
            unpacked.reward,
            timeout=unpacked.timeout,
            workers=unpacked.workers,
            environment=unpacked.variables,
            num_processes=num_ranks,
        )
        self._rank, self._has_warned = rank, False
        # the scores of samples that are still on this rank, of those that have left it, and of
        # those that rank 0 has asked for
        self._pending: list[tuple[SampledSequence, bool, bytes, PendingScore]] = []
        self._tickets: dict[ScoreTicket, PendingScore] = {}
        self._expected: dict[ScoreTicket, PendingScore | None] = {}
        self._next_tickets = ((rank, number) for number in itertools.count())

    def submit(self, task: ScoringTask, samples: Sequence[SampledSequence]) -> None:
        """Begin to score the finished samples of a request. An error leaves samples without a
        score: rank 0 scores them, or fails as it would have without this rank.
        """
        try:
            problem: ScoredProblem = pickle.loads(task.problem)
            for sample in samples:
                response, ended = parse_answer(self._renderer, sample)
                item = problem.make_item(response, sample.num_tokens, sample.stop_reason)
                pending = self._scorer.submit(*item)
                self._pending.append((sample, ended, hash_beginning(response), pending))
        except Exception as error:  # boundary: unpickling and decoding run the user's code
            self._warn(error)

    def hand_over(self, seconds: float | None) -> None:
        """Set in each submitted sample its score, or a ticket for `take_scores` if it takes longer
        than `seconds` in all. None: a ticket, unless the reward runs at once. A sample that could
        not be scored has neither.
        """
        pending, self._pending = self._pending, []
        deadline = None if seconds is None else time.monotonic() + seconds
        for sample, ended, beginning, result in pending:
            score = self._get_score(result, deadline)
            if score is not None:
                sample.score = SampleScore(ended, beginning, score)

    def drop_pending(self) -> None:
        """Remove the submitted samples that were not handed over, since sampling failed."""
        self._pending = []

    def _get_score(
        self, result: PendingScore, deadline: float | None
    ) -> Score | ScoreTicket | None:
        """Return a score, a ticket if it is not there at the deadline, or None if it failed."""
        if deadline is not None or result.immediate:
            try:
                return result.result(max(0.0, (deadline or 0.0) - time.monotonic()))
            except TimeoutError:
                pass
            except Exception as error:  # the last worker was lost
                self._warn(error)
                return None
        ticket = next(self._next_tickets)
        self._tickets[ticket] = result
        if len(self._tickets) > _MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        return ticket

    def take_scores(self, tickets: Iterable[ScoreTicket]) -> dict[ScoreTicket, Score | None]:
        """Return the scores that have been computed, of these tickets and of those of earlier
        calls, each once; None for a sample that could not be scored. Tickets of other ranks are
        ignored.
        """
        for ticket in tickets:
            if ticket[0] == self._rank:
                self._expected[ticket] = self._tickets.pop(ticket, None)
        scores: dict[ScoreTicket, Score | None] = {}
        for ticket, result in list(self._expected.items()):
            if result is None or result.done():
                del self._expected[ticket]
                scores[ticket] = None
                if result is not None and (error := result.exception()) is not None:
                    self._warn(error)
                elif result is not None:
                    scores[ticket] = result.result()
        return scores

    def _warn(self, error: BaseException) -> None:
        """Log the first error after which rank 0 scores samples of this rank."""
        if not self._has_warned:
            self._has_warned = True
            reason = str(error) if isinstance(error, UserError) else describe_error(error)
            logger.warning(
                "rank 0 has answers of %s (rank %d) scored: %s (later ones are not reported)",
                socket.gethostname(),
                self._rank,
                reason,
            )

    def close(self) -> None:
        """Stop the reward workers."""
        self._scorer.close()


def open_sample_scorer(
    packed: bytes, rank: int, num_ranks: int
) -> tuple[SampleScorer | None, str | None]:
    """Return (a SampleScorer, None), or (None, the reason) if the reward cannot be loaded here."""
    try:
        return SampleScorer(packed, rank, num_ranks), None
    except Exception as error:  # boundary: loading runs the user's code
        return None, str(error) if isinstance(error, UserError) else describe_error(error)
