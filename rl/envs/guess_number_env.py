"""Play "guess the number": the answer to each guess is higher or lower, until the number is guessed
or no guesses remain.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from rl.envs.game_env import Game, Rule
from rl.errors import UserError

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


RULES = {
    "halving": guess_middle,
    "careless": guess_carelessly,
    "any_left": guess_possible,
    "any_number": guess_any,
}


def _make_rule(name: str) -> Rule:
    """Return the rule of a name as a player of the game."""
    guess = RULES[name]
    return lambda match: str(guess(match.game, match.rng))


class GuessNumber(Game):
    """Guess a number from `low` to `high`. Reward 1 for guessing it within `guesses`, else 0.

    guesses: by default as many as halving needs, floor(log2 n) + 1. A reply that does not contain
    exactly one number counts as a guess.
    """

    names = ("guesser",)
    PLAYERS = {name: _make_rule(name) for name in RULES}

    def __init__(self, low: int = 1, high: int = 16, guesses: int | None = None):
        super().__init__()
        if high < low:
            raise UserError(f"--environment.low {low} is above --environment.high {high}")
        if guesses is not None and guesses < 1:
            raise UserError(f"--environment.guesses must be at least 1, got {guesses}")
        self.low, self.high = low, high
        self.guesses = guesses or count_guesses_needed(high - low + 1)
        self.malformed = 0

    def open(self) -> None:
        """Choose the number and send the first text."""
        self.game = NumberGame(self.rng.randint(self.low, self.high), self.low, self.high)
        self.observe(0, f"Guess my number, {self.low} to {self.high}.\n> ")

    def move(self, text: str) -> None:
        """Process a guess."""
        number = read_number(text)
        if number is None:
            self.game.guesses += 1
            self.malformed += 1
        answer = "a number" if number is None else self.game.guess(number)
        if not self.game.solved and self.game.guesses < self.guesses:
            self.observe(0, f"{answer}\n> ")
            return
        count = self.game.guesses
        self.seat_metrics[0] = {
            "correct": float(self.game.solved),
            "guesses": float(count),
            "malformed": self.malformed / count,
        }
        self.end({0: float(self.game.solved)})
