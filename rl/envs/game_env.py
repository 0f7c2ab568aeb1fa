"""Define a game between seats, played in words: which seat moves, which text each seat has
received, and the rewards of each.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rl.envs.environment import Environment, TurnResult
from rl.errors import UserError
from rl.types import Message

Rule = Callable[[Any], str]  # the match, at its seat's turn, to what the seat says

POLICY = "policy"  # a possible player of a seat, like names of rules, the pool and models


class Game(Environment):
    """Play a game. A subclass begins it in `open` and processes a move in `move`. Both report
    with `observe`, `reward` and `end`.

    `names`: names of the seats; `turn` is the seat to move. `seats` and `rules`: the players of the
    seats (see `assign`). Seats of a rule move automatically. Each seat receives only the texts
    passed to it with `observe`. `record`: (seat, text) of each move, in order.
    """

    names: Sequence[str] = ("player",)
    PLAYERS: Mapping[str, Rule] = {}  # rules that can play a seat of the policy
    held_out_opponent = ""  # see `set_opponents`

    def __init__(self) -> None:
        self.seats: Sequence[str | None] = (None,) * len(self.names)
        self.rules: dict[int, Rule] = {}
        # players that were ever assigned a seat and are neither the policy nor a rule
        self.named: list[str] = []
        self.turn = 0
        self.finished = self.truncated = False
        self.record: list[tuple[int, str]] = []
        # metrics of each seat, set when the match is over
        self.seat_metrics: list[dict[str, float]] = [{} for _ in self.names]
        self._pending_texts: list[list[str]] = [[] for _ in self.names]
        self._rewards: dict[int, float] = {}

    # ------------------------------------------------------------------- implemented by a subclass

    @abc.abstractmethod
    def open(self) -> None:
        """Send each seat the text that it needs before its first move."""

    @abc.abstractmethod
    def move(self, text: str) -> None:
        """Process the text of the seat to move: inform the other seats, then advance `turn` or end
        the match.
        """

    # ------------------------------------------------------------------------ called by a subclass

    def assign(self, seat: int, player: str, rules: Mapping[str, Rule] | None = None) -> None:
        """Assign a player to a seat: "policy", the name of a rule in `rules`, "pool" (an older
        version of the policy), or a model's name.
        """
        players: list[str | None] = list(self.seats)
        players[seat] = None if player == POLICY else player
        self.seats = tuple(players)
        self.rules.pop(seat, None)
        if rules is not None and player in rules:
            self.rules[seat] = rules[player]
        elif player != POLICY and player not in self.named:
            self.named.append(player)

    def set_opponents(self, opponent: str, held_out_opponent: str) -> None:
        """Set the opponent of the policy in a game of two seats, in training and in held-out
        episodes; called by `__init__`. `seat_opponent` gives it a seat.
        """
        self.opponent, self.held_out_opponent = opponent, held_out_opponent
        for player in (held_out_opponent, opponent):
            self.assign(1, player, self.PLAYERS)

    def seat_opponent(self, plays: str) -> None:
        """Assign the seats 0 and 1 to the policy and the opponent. `plays`: the name of the seat of
        the policy, or "either".
        """
        self.opponent = self.row.get("opponent", self.opponent)
        seat = plays == self.names[1] or (plays == "either" and self.rng.random() < 0.5)
        self.assign(int(seat), POLICY)
        self.assign(1 - seat, self.opponent, self.PLAYERS)

    def observe(self, seat: int, text: str) -> None:
        """Add a text to the next observation of a seat."""
        self._pending_texts[seat].append(text)

    def reward(self, seat: int, reward: float) -> None:
        """Add a reward to any seat for the current move."""
        self._rewards[seat] = self._rewards.get(seat, 0.0) + reward

    def end(self, rewards: Mapping[int, float], *, truncated: bool = False) -> None:
        """End the match and add the final rewards. `truncated`: a limit ended it."""
        for seat, reward in rewards.items():
            self.reward(seat, reward)
        self.finished, self.truncated = True, truncated

    # ------------------------------------------------------------------ implements Environment

    def rows(self, split: str, count: int) -> list[dict[str, Any]]:
        """Return empty rows, with the held-out opponent for tests if the game has one."""
        row = {"opponent": self.held_out_opponent} if self.held_out_opponent else {}
        return [dict(row) if split == "test" else {} for _ in range(count)]

    @property
    def models(self) -> list[str]:
        """Return the players of seats that are neither the policy nor a rule."""
        return list(self.named)

    def start(self) -> TurnResult:
        """Begin the match. Return the first TurnResult of a seat that no rule plays."""
        self.open()
        self._play_rules()
        return self._make_result(self.turn)

    def step(self, answer: Message) -> TurnResult:
        """Process a move, then the moves of rules, and return the result."""
        seat = self.turn
        self._move(str(answer["content"]))
        self._play_rules()
        result = self._make_result(seat)
        self._rewards = {}  # those of moves before the first answer are paid with it
        return result

    def _move(self, text: str) -> None:
        """Record and process a move. Raises RuntimeError if the match is over."""
        if self.finished:
            raise RuntimeError(
                f"the match is over, but {self.names[self.turn]} moves {text[:40]!r}"
            )
        self.record.append((self.turn, text))
        self.move(text)

    def _play_rules(self) -> None:
        """Make moves while a rule plays the seat to move."""
        while not self.finished and self.turn in self.rules:
            self._move(self.rules[self.turn](self))

    def _make_result(self, seat: int) -> TurnResult:
        """Return the result of the moves: messages for the next seat, and the reward of `seat`,
        which acted.
        """
        rewards = dict(self._rewards)
        reward = rewards.pop(seat, 0.0)
        if not self.finished:
            pending, self._pending_texts[self.turn] = "\n".join(self._pending_texts[self.turn]), []
            return TurnResult(pending, reward=reward, seat=self.turn, rewards=rewards)
        moves = [{"seat": self.names[player], "text": text} for player, text in self.record]
        logs = {
            "match": moves,
            "players": ["policy" if player is None else player for player in self.seats],
        }
        others = [other for other in range(len(self.names)) if other != seat]
        return TurnResult(
            reward=reward,
            done=True,
            truncated=self.truncated,
            metrics=self.seat_metrics[seat],
            logs=logs,
            seat=seat,
            rewards=rewards,
            metrics_of={other: self.seat_metrics[other] for other in others},
            logs_of={other: logs for other in others},
        )


def check_choice(setting: str, value: str, choices: Collection[str]) -> str:
    """Return `value` if it is in `choices`. Raises UserError, which names the setting, if it is
    not.
    """
    if value not in choices:
        raise UserError(f"--environment.{setting} is one of {', '.join(choices)}; got {value!r}")
    return value
