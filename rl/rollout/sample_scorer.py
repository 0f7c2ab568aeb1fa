"""Score samples on the rank that sampled them: decode a finished sample, and give its text to the
reward workers of this machine, while sampling continues. Only numbers leave the rank.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
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
        # the scores of samples that are still on this rank, and of those that have left it
        self._pending: list[tuple[SampledSequence, bool, bytes, PendingScore]] = []
        self._tickets: dict[ScoreTicket, PendingScore] = {}
        self._next_tickets = ((rank, number) for number in itertools.count())

    def submit(self, task: ScoringTask, samples: Sequence[SampledSequence]) -> None:
        """Begin to score the finished samples of a request."""
        problem: ScoredProblem = pickle.loads(task.problem)
        for sample in samples:
            response, ended = parse_answer(self._renderer, sample)
            item = problem.make_item(response, sample.num_tokens, sample.stop_reason)
            try:
                pending = self._scorer.submit(*item)
            except UserError:  # no worker can be started: rank 0 scores the sample
                continue
            self._pending.append((sample, ended, hash_beginning(response), pending))

    def wait(self) -> None:
        """Wait for the scores of all submitted samples, and set them. A sample that could not be
        scored has none.
        """
        pending, self._pending = self._pending, []
        for sample, ended, beginning, result in pending:
            if (score := _get_score(result)) is not None:
                sample.score = SampleScore(ended, beginning, score)

    def leave_tickets(self) -> None:
        """Set a ticket in each submitted sample, for `take_scores`; or the score of a reward that
        runs at once.
        """
        pending, self._pending = self._pending, []
        for sample, ended, beginning, result in pending:
            if result.immediate:
                sample.score = SampleScore(ended, beginning, result.result())
            else:
                ticket = next(self._next_tickets)
                self._tickets[ticket] = result
                sample.score = SampleScore(ended, beginning, ticket)

    def take_scores(self) -> dict[ScoreTicket, Score | None]:
        """Return the scores that have been computed since the last call, by ticket; None for a
        sample that could not be scored.
        """
        done = {ticket: result for ticket, result in self._tickets.items() if result.done()}
        for ticket in done:
            del self._tickets[ticket]
        return {ticket: _get_score(result) for ticket, result in done.items()}

    def close(self) -> None:
        """Stop the reward workers."""
        self._scorer.close()


def _get_score(result: PendingScore) -> Score | None:
    """Wait for a score. Return None if the last worker was lost before."""
    try:
        return result.result()
    except UserError:
        return None


def open_sample_scorer(
    packed: bytes, rank: int, num_ranks: int
) -> tuple[SampleScorer | None, str | None]:
    """Return (a SampleScorer, None), or (None, the reason) if the reward cannot be loaded here."""
    try:
        return SampleScorer(packed, rank, num_ranks), None
    except Exception as error:  # boundary: loading runs the user's code
        return None, str(error) if isinstance(error, UserError) else describe_error(error)
