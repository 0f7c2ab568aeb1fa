"""A game between seats, told and played in words: whose turn it is, what each seat has heard, what
each has earned.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.environments.environment import Environment, Turn
from rl.errors import UserError
from rl.types import Message

Rule = Callable[[Any], str]  # the match, at its seat's turn, to what the seat says

POLICY = "policy"  # who may sit in a seat, beside rules, the pool and models by their names


class Match(Environment):
    """One game. A subclass begins it in `open` and answers a move in `move`, which say what they
    have to with `tell`, `earn` and `end`.

    `names`: of the seats, of which `turn` is to move. `seats` and `rules`: who plays them (see
    `sit`); seats that a rule plays move by themselves. Each seat hears only what it is told.
    `record`: who said what, in order.
    """

    names: Sequence[str] = ("player",)
    PLAYERS: Mapping[str, Rule] = {}  # rules that can play a seat of the policy's

    def __init__(self) -> None:
        self.seats: Sequence[str | None] = (None,) * len(self.names)
        self.rules: dict[int, Rule] = {}
        self.named: list[str] = []  # who was ever given a seat and is neither the policy nor a rule
        self.turn = 0
        self.over = self.cut_short = False
        self.record: list[tuple[int, str]] = []
        # metrics of each seat, once the match is over
        self.figures: list[dict[str, float]] = [{} for _ in self.names]
        self._heard: list[list[str]] = [[] for _ in self.names]
        self._earned: dict[int, float] = {}

    # ----------------------------------------------------------------------- what a subclass writes

    @abc.abstractmethod
    def open(self) -> None:
        """Tells every seat what it has to know before its first move."""

    @abc.abstractmethod
    def move(self, text: str) -> None:
        """The seat whose turn it is says this: tells the others, moves `turn` on, or ends the
        match.
        """

    # ------------------------------------------------------------------------ what a subclass calls

    def sit(self, seat: int, who: str, known: Mapping[str, Rule] | None = None) -> None:
        """Who plays a seat: "policy", the name of a rule in `known`, "pool" (an older version of
        the policy), or a model by its name.
        """
        players: list[str | None] = list(self.seats)
        players[seat] = None if who == POLICY else who
        self.seats = tuple(players)
        self.rules.pop(seat, None)
        if known is not None and who in known:
            self.rules[seat] = known[who]
        elif who != POLICY and who not in self.named:
            self.named.append(who)

    def tell(self, seat: int, text: str) -> None:
        self._heard[seat].append(text)

    def earn(self, seat: int, reward: float) -> None:
        """By the move that is being made, in whosever seat."""
        self._earned[seat] = self._earned.get(seat, 0.0) + reward

    def end(self, rewards: Mapping[int, float], *, truncated: bool = False) -> None:
        """The match is over. `truncated`: by a limit."""
        for seat, reward in rewards.items():
            self.earn(seat, reward)
        self.over, self.cut_short = True, truncated

    # --------------------------------------------------------------------- what an environment does

    @property
    def models(self) -> list[str]:
        """Those who may play a seat and are neither the policy nor a rule."""
        return list(self.named)

    def start(self) -> Turn:
        self.open()
        self._let_rules_play()
        return self._turn(self.turn)

    def step(self, answer: Message) -> Turn:
        seat, self._earned = self.turn, {}
        self._move(str(answer["content"]))
        self._let_rules_play()
        return self._turn(seat)

    def _move(self, text: str) -> None:
        if self.over:
            raise RuntimeError(f"the match is over, and {self.names[self.turn]} says {text[:40]!r}")
        self.record.append((self.turn, text))
        self.move(text)

    def _let_rules_play(self) -> None:
        while not self.over and self.turn in self.rules:
            self._move(self.rules[self.turn](self))

    def _turn(self, seat: int) -> Turn:
        """What comes of the moves made: to whoever is next, and of `seat`, which acted."""
        rewards = dict(self._earned)
        own = rewards.pop(seat, 0.0)
        if not self.over:
            heard, self._heard[self.turn] = "\n".join(self._heard[self.turn]), []
            return Turn(heard, reward=own, seat=self.turn, rewards=rewards)
        said = [{"seat": self.names[who], "text": text} for who, text in self.record]
        logs = {"match": said, "players": ["policy" if who is None else who for who in self.seats]}
        others = [other for other in range(len(self.names)) if other != seat]
        return Turn(
            reward=own,
            done=True,
            truncated=self.cut_short,
            metrics=self.figures[seat],
            logs=logs,
            seat=seat,
            rewards=rewards,
            metrics_of={other: self.figures[other] for other in others},
            logs_of={other: logs for other in others},
        )


def chosen(setting: str, value: str, among: Sequence[str]) -> str:
    """`value`, if it is one of those; else UserError that names the setting."""
    if value not in among:
        raise UserError(f"--environment.{setting} is one of {', '.join(among)}; got {value!r}")
    return value
