"""Keep older versions of a policy as opponents: which are kept, which is sampled, and their
ratings.

Ratings follow Elo (A. Elo, The Rating of Chessplayers, 1978): expected = 1 / (1 + 10^((other -
rating) / 400)), rating += k (score - expected).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

START_RATING = 1000.0
SELECTION_RULES = ("elo", "age", "any")


@dataclass
class Opponent:
    """Describe an older version: the step it was saved at, its rating, and the number of games it
    has played.
    """

    step: int
    rating: float = START_RATING
    games: int = 0

    @property
    def name(self) -> str:
        """Return the name under which the checkpoint plays."""
        return f"step-{self.step:06d}"


def compute_expected_score(rating: float, opponent_rating: float) -> float:
    """Return the expected score (0 to 1) of a player rated `rating` against a player rated
    `opponent_rating`.
    """
    return 1 / (1 + 10 ** ((opponent_rating - rating) / 400))


class OpponentPool:
    """Keep at most `size` older versions. `by` selects the sampling weights and the version to
    remove.

    "elo": versions near the policy's rating are likelier (weight e (1 - e), e the policy's expected
    score); the weakest is removed. "age": newer versions are likelier (half as likely for each
    newer version); the oldest is removed. "any": all are equally likely; the oldest is removed. The
    newest is never removed. `state` returns readable JSON.
    """

    def __init__(self, size: int = 5, by: str = "elo", k: float = 16.0):
        if by not in SELECTION_RULES:
            raise ValueError(f"by is one of {', '.join(SELECTION_RULES)}; got {by!r}")
        if size < 1:
            raise ValueError(f"a pool holds at least 1 older version, got {size}")
        self.size, self.by, self.k = size, by, k
        self.rating = START_RATING  # of the policy
        self.opponents: list[Opponent] = []  # oldest first

    def add(self, step: int) -> list[Opponent]:
        """Add the policy at `step` with its current rating. Return the versions that have to be
        removed.

        Raises ValueError if `step` is not after the newest version's step.
        """
        if self.opponents and self.opponents[-1].step >= step:
            raise ValueError(
                f"the pool's newest is of step {self.opponents[-1].step}; {step} is not after it"
            )
        self.opponents.append(Opponent(step, self.rating))
        removed = []
        while len(self.opponents) > self.size:
            older = self.opponents[:-1] or self.opponents
            weakest = (
                min(older, key=lambda opponent: (opponent.rating, opponent.step))
                if self.by == "elo"
                else older[0]
            )
            self.opponents.remove(weakest)
            removed.append(weakest)
        return removed

    def weights(self) -> list[float]:
        """Return the unnormalized sampling weight of each version."""
        if self.by == "age":
            return [0.5 ** (len(self.opponents) - 1 - i) for i in range(len(self.opponents))]
        if self.by == "any":
            return [1.0] * len(self.opponents)
        expected = [
            compute_expected_score(self.rating, opponent.rating) for opponent in self.opponents
        ]
        return [e * (1 - e) for e in expected]

    def sample(self, seed: int) -> Opponent:
        """Sample a version. The result depends only on the seed and the state of the pool. Raises
        ValueError if the pool is empty.
        """
        if not self.opponents:
            raise ValueError("the pool is empty: nothing was added yet")
        return random.Random(seed).choices(self.opponents, self.weights())[0]

    def record_results(self, results: Sequence[tuple[str, float]]) -> None:
        """Update the ratings with games of the policy, in order.

        Each result is the opponent's name and the policy's score: 1 won, 0.5 drawn, 0 lost. Unknown
        names are ignored.
        """
        by_name = {opponent.name: opponent for opponent in self.opponents}
        for name, score in results:
            other = by_name.get(name)
            if other is None:
                continue
            surprise = self.k * (score - compute_expected_score(self.rating, other.rating))
            self.rating += surprise
            other.rating -= surprise
            other.games += 1

    def metrics(self) -> dict[str, float]:
        """Return the pool's size and ratings as metrics."""
        ratings = [opponent.rating for opponent in self.opponents]
        return {
            "opponents/count": float(len(ratings)),
            "opponents/own_rating": self.rating,
            "opponents/best_rating": max(ratings, default=START_RATING),
        }

    def state(self) -> dict[str, Any]:
        """Return the state as JSON-serializable data."""
        return {
            "rating": self.rating,
            "opponents": [asdict(opponent) for opponent in self.opponents],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.rating = float(state["rating"])
        self.opponents = [Opponent(**opponent) for opponent in state["opponents"]]
