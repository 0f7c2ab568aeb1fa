"""Define "guess the number": a secret integer; the answer to each guess is higher or lower."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

HIGHER, LOWER, RIGHT = "higher", "lower", "right"


def count_guesses_needed(count: int) -> int:
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
    lower_bound: int = field(init=False)
    upper_bound: int = field(init=False)
    guesses: int = 0
    solved: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.secret <= self.high:
            raise ValueError(f"the secret {self.secret} is outside of {self.low} to {self.high}")
        self.lower_bound, self.upper_bound = self.low, self.high

    def guess(self, number: int) -> str:
        """Return HIGHER, LOWER or RIGHT: the position of the secret relative to `number`."""
        self.guesses += 1
        if number == self.secret:
            self.solved, self.lower_bound, self.upper_bound = True, number, number
            return RIGHT
        if number < self.secret:
            self.lower_bound = max(self.lower_bound, number + 1)
            return HIGHER
        self.upper_bound = min(self.upper_bound, number - 1)
        return LOWER


def guess_middle(game: NumberGame, rng: random.Random) -> int:
    """Return the middle of the possible numbers; needs at most `count_guesses_needed` guesses."""
    return (game.lower_bound + game.upper_bound) // 2


def guess_possible(game: NumberGame, rng: random.Random) -> int:
    """Return a random number that agrees with all answers."""
    return rng.randint(game.lower_bound, game.upper_bound)


def guess_any(game: NumberGame, rng: random.Random) -> int:
    """Return a random number, ignoring the answers."""
    return rng.randint(game.low, game.high)


def guess_carelessly(game: NumberGame, rng: random.Random) -> int:
    """Return `guess_middle` with probability 0.5, else `guess_any`."""
    return (guess_middle if rng.random() < 0.5 else guess_any)(game, rng)


PLAYERS = {
    "halving": guess_middle,
    "careless": guess_carelessly,
    "any_left": guess_possible,
    "any_number": guess_any,
}
