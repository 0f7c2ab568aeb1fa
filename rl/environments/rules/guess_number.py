"""Guess the number: a secret whole number, and after each guess whether it is higher or lower."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

HIGHER, LOWER, RIGHT = "higher", "lower", "right"


def guesses_needed(count: int) -> int:
    """Guesses that find any of `count` numbers for sure: floor(log2 count) + 1 (each splits what is
    left around itself).
    """
    return count.bit_length()


def read_number(text: str) -> int | None:
    """The number that a reply guesses: the only one in it. None where it holds none, or several
    different ones.
    """
    found = set(re.findall(r"-?\d+", text))
    return (
        int(found.pop())
        if len(found) == 1 and max(map(len, re.findall(r"\d+", text))) <= 9
        else None
    )


@dataclass
class NumberGame:
    """A secret from `low` to `high`; [least, most] is where it lies by the answers so far."""

    secret: int
    low: int
    high: int
    least: int = field(init=False)
    most: int = field(init=False)
    guesses: int = 0
    found: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.secret <= self.high:
            raise ValueError(f"the secret {self.secret} lies outside of {self.low} to {self.high}")
        self.least, self.most = self.low, self.high

    def guess(self, number: int) -> str:
        """HIGHER, LOWER or RIGHT: where the secret is from here."""
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
    """The middle of what is left: needs at most `guesses_needed`."""
    return (game.least + game.most) // 2


def any_left(game: NumberGame, draw: random.Random) -> int:
    """Any number that the answers so far leave."""
    return draw.randint(game.least, game.most)


def any_number(game: NumberGame, draw: random.Random) -> int:
    """Any number at all, whatever was answered."""
    return draw.randint(game.low, game.high)


def careless(game: NumberGame, draw: random.Random) -> int:
    """Halving half of the time, else any number at all."""
    return (halving if draw.random() < 0.5 else any_number)(game, draw)


PLAYERS = {"halving": halving, "careless": careless, "any_left": any_left, "any_number": any_number}
