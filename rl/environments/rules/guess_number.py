"""Define "guess the number": a secret integer; the answer to each guess is higher or lower."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

HIGHER, LOWER, RIGHT = "higher", "lower", "right"


def guesses_needed(count: int) -> int:
    """Return the number of guesses that always suffice for `count` numbers: floor(log2 count) + 1.
    Each guess splits the remaining numbers around itself.
    """
    return count.bit_length()


def read_number(text: str) -> int | None:
    """Return the only number in a reply; None if it contains none, or several different numbers."""
    numbers = set(re.findall(r"-?\d+", text))
    return (
        int(numbers.pop())
        if len(numbers) == 1 and max(map(len, re.findall(r"\d+", text))) <= 9
        else None
    )


@dataclass
class NumberGame:
    """Hold a secret from `low` to `high`. The answers until now imply that it is in [least,
    most].
    """

    secret: int
    low: int
    high: int
    least: int = field(init=False)
    most: int = field(init=False)
    guesses: int = 0
    found: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.secret <= self.high:
            raise ValueError(f"the secret {self.secret} is outside of {self.low} to {self.high}")
        self.least, self.most = self.low, self.high

    def guess(self, number: int) -> str:
        """Return HIGHER, LOWER or RIGHT: the position of the secret relative to `number`."""
        self.guesses += 1
        if number == self.secret:
            self.found, self.least, self.most = True, number, number
            return RIGHT
        if number < self.secret:
            self.least = max(self.least, number + 1)
            return HIGHER
        self.most = min(self.most, number - 1)
        return LOWER


def halving(game: NumberGame, draw: random.Random) -> int:
    """Return the middle of the possible numbers; needs at most `guesses_needed` guesses."""
    return (game.least + game.most) // 2


def any_left(game: NumberGame, draw: random.Random) -> int:
    """Return a random number that agrees with all answers."""
    return draw.randint(game.least, game.most)


def any_number(game: NumberGame, draw: random.Random) -> int:
    """Return a random number, ignoring the answers."""
    return draw.randint(game.low, game.high)


def careless(game: NumberGame, draw: random.Random) -> int:
    """Return `halving` with probability 0.5, else `any_number`."""
    return (halving if draw.random() < 0.5 else any_number)(game, draw)


PLAYERS = {"halving": halving, "careless": careless, "any_left": any_left, "any_number": any_number}
