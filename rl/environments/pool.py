"""Older versions of a policy to play against: which are kept, which is chosen, and how strong each
is.

Ratings are Elo's (A. Elo, The Rating of Chessplayers, 1978): expected = 1 / (1 + 10^((other - own)
/ 400)), own += k (score - expected).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

START = 1000.0
BY = ("elo", "age", "any")


@dataclass
class Opponent:
    """An older version: the step it was taken at, how strong it is, how many games it has played."""

    step: int
    rating: float = START
    games: int = 0

    @property
    def name(self) -> str:
        return f"step-{self.step:06d}"


def expected_score(own: float, other: float) -> float:
    return 1 / (1 + 10 ** ((other - own) / 400))


class OpponentPool:
    """At most `size` older versions. `by`: how one is chosen, and which goes when there are too
    many.

    "elo": near the policy's own strength likelier (weight e (1 - e), e the policy's expected
    score); the weakest goes. "age": newer ones likelier (half as likely with each that is newer);
    the oldest goes. "any": all alike; the oldest goes. The newest never goes. `state` is readable
    JSON.
    """

    def __init__(self, size: int = 5, by: str = "elo", k: float = 16.0):
        if by not in BY:
            raise ValueError(f"by is one of {', '.join(BY)}; got {by!r}")
        if size < 1:
            raise ValueError(f"a pool holds at least 1 older version, got {size}")
        self.size, self.by, self.k = size, by, k
        self.rating = START  # the policy's own
        self.opponents: list[Opponent] = []  # oldest first

    def add(self, step: int) -> list[Opponent]:
        """Takes in the policy as it is at `step`, as strong as it is now. Returns those that have
        to go.
        """
        if self.opponents and self.opponents[-1].step >= step:
            raise ValueError(
                f"the pool's newest is of step {self.opponents[-1].step}; {step} is not after it"
            )
        self.opponents.append(Opponent(step, self.rating))
        gone = []
        while len(self.opponents) > self.size:
            older = self.opponents[:-1] or self.opponents
            out = (
                min(older, key=lambda one: (one.rating, one.step)) if self.by == "elo" else older[0]
            )
            self.opponents.remove(out)
            gone.append(out)
        return gone

    def weights(self) -> list[float]:
        """How likely each is to be chosen, up to a factor."""
        if self.by == "age":
            return [0.5 ** (len(self.opponents) - 1 - i) for i in range(len(self.opponents))]
        if self.by == "any":
            return [1.0] * len(self.opponents)
        expected = [expected_score(self.rating, one.rating) for one in self.opponents]
        return [e * (1 - e) for e in expected]

    def choose(self, seed: int) -> Opponent:
        """One of them: a function of the seed and of what the pool is."""
        if not self.opponents:
            raise ValueError("the pool is empty: nothing was added yet")
        return random.Random(seed).choices(self.opponents, self.weights())[0]

    def note(self, results: Sequence[tuple[str, float]]) -> None:
        """Games of the policy, in order: against whom (by name) and its score, 1 won, 0.5 drawn, 0
        lost. Of unknown names nothing.
        """
        by_name = {one.name: one for one in self.opponents}
        for name, score in results:
            other = by_name.get(name)
            if other is None:
                continue
            surprise = self.k * (score - expected_score(self.rating, other.rating))
            self.rating += surprise
            other.rating -= surprise
            other.games += 1

    def metrics(self) -> dict[str, float]:
        ratings = [one.rating for one in self.opponents]
        return {
            "opponents/count": float(len(ratings)),
            "opponents/own_rating": self.rating,
            "opponents/best_rating": max(ratings, default=START),
        }

    def state(self) -> dict[str, Any]:
        return {"rating": self.rating, "opponents": [asdict(one) for one in self.opponents]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rating = float(state["rating"])
        self.opponents = [Opponent(**one) for one in state["opponents"]]
