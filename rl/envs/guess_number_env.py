"""Play "guess the number": the answer to each guess is higher or lower, until the number is guessed
or no guesses remain.
"""

from __future__ import annotations

from rl.envs.game_env import Game, Rule
from rl.envs.rules import guess_number_rules as rules
from rl.errors import UserError


def _make_rule(name: str) -> Rule:
    """Return the rule of a name as a player of the game."""
    guess = rules.PLAYERS[name]
    return lambda match: str(guess(match.game, match.rng))


class GuessNumber(Game):
    """Guess a number from `low` to `high`. Reward 1 for guessing it within `guesses`, else 0.

    guesses: by default as many as halving needs, floor(log2 n) + 1. A reply that does not contain
    exactly one number counts as a guess.
    """

    names = ("guesser",)
    PLAYERS = {name: _make_rule(name) for name in rules.PLAYERS}

    def __init__(self, low: int = 1, high: int = 16, guesses: int | None = None):
        super().__init__()
        if high < low:
            raise UserError(f"--environment.low {low} is above --environment.high {high}")
        if guesses is not None and guesses < 1:
            raise UserError(f"--environment.guesses must be at least 1, got {guesses}")
        self.low, self.high = low, high
        self.guesses = guesses or rules.count_guesses_needed(high - low + 1)
        self.malformed = 0

    def open(self) -> None:
        """Choose the number and send the first text."""
        self.game = rules.NumberGame(self.rng.randint(self.low, self.high), self.low, self.high)
        self.observe(0, f"Guess my number, {self.low} to {self.high}.\n> ")

    def move(self, text: str) -> None:
        """Process a guess."""
        number = rules.read_number(text)
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
