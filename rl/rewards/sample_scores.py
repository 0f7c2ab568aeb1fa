"""Describe how a sample is scored on the rank that sampled it, and what that rank returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from rl.rewards.reward_calls import Episode, EpisodeTurn, Meta, RewardItem, Score
from rl.rewards.reward_scorer import PendingScore, Scorer
from rl.types import Message

_BEGINNING_CHARACTERS = 50


@dataclass(frozen=True, slots=True)
class ScoringTask:
    """Describe how a rank scores the samples of a request. `scorer_id`: of a scorer that each rank
    has opened. `problem`: a pickled ScoredProblem.
    """

    scorer_id: int
    problem: bytes


@dataclass(frozen=True, slots=True)
class ScoredProblem:
    """Hold what a reward receives of a problem. `messages`: of its conversation, without images, if
    the reward takes episodes.
    """

    prompt: str
    meta: Meta
    messages: Sequence[Message] | None
    tag: str

    def make_item(self, response: str, tokens: int, stop_reason: str = "stop") -> RewardItem:
        """Return the arguments of `Scorer.submit` for an answer of `tokens` tokens."""
        episode = None
        if self.messages is not None:
            turn = EpisodeTurn(response, tokens=tokens, stop_reason=stop_reason)
            answer: Message = {"role": "assistant", "content": response}
            episode = Episode([*self.messages, answer], [turn], self.tag)
        return self.prompt, response, self.meta, episode


ScoreTicket = tuple[int, int]  # a score that a rank still computes: the rank and a number


@dataclass(frozen=True, slots=True)
class SampleScore:
    """Hold what the rank that sampled an answer computed of its text. `ended`: whether the answer
    has an end mark. `beginning`: see `hash_beginning`. `score`: a ticket while it is computed.
    """

    ended: bool
    beginning: bytes
    score: Score | ScoreTicket

    def __reduce__(self) -> tuple[Any, ...]:
        packed = astuple(self.score) if isinstance(self.score, Score) else self.score
        return _restore_score, (self.ended, self.beginning, *packed)


def _restore_score(ended: bool, beginning: bytes, *packed: Any) -> SampleScore:
    score = packed if len(packed) == 2 else Score(*packed)
    return SampleScore(ended, beginning, score)


class RankScores(Protocol):
    """Provide the scores that ranks compute of their samples."""

    def make_task(self, problem: ScoredProblem) -> ScoringTask | None:
        """Return the task of a problem; None if it cannot be pickled."""
        ...

    def expect(
        self, ticket: ScoreTicket, scorer: Scorer, make_item: Callable[[], RewardItem]
    ) -> PendingScore:
        """Return the score of a ticket. `scorer` counts it, and scores `make_item()` if the rank
        cannot.
        """
        ...


def hash_beginning(text: str) -> bytes:
    """Return 8 bytes that are equal for answers whose first 50 characters are equal."""
    beginning = text[:_BEGINNING_CHARACTERS].encode("utf-8", "surrogatepass")
    return hashlib.blake2b(beginning, digest_size=8).digest()
