"""Tic-tac-toe between two seats, each of them the policy, an older version of it, another model, or
a rule.
"""

from __future__ import annotations

from typing import Any

from rl.environments.match import Match, Rule, chosen
from rl.environments.rules import tic_tac_toe as rules


def _player(name: str) -> Rule:
    move = rules.PLAYERS[name]
    return lambda match: str(move(match.board, match.rng))


class TicTacToe(Match):
    """Tic-tac-toe. X begins; a move is the number of a free cell, another reply loses the game.

    opponent: random, careless, perfect, policy (self-play, both seats are trained), pool (an older
    version of the policy), or a model; held_out_opponent: the same, of held-out episodes, so that
    these tell how strong the policy is whoever it learns against. plays: X, O, or either (X or O,
    the same within a group): the policy's seat, where the opponent is another. instructions:
    whether the players are told the rules first.
    Rewards: 1 for a win, -1 for a loss, 0 for a draw. Who wins because the other's reply was no
    move gets 0: it did nothing.
    """

    names = rules.MARKS
    PLAYERS = {name: _player(name) for name in rules.PLAYERS}

    def __init__(
        self,
        opponent: str = "random",
        plays: str = "either",
        held_out_opponent: str = "random",
        instructions: bool = True,
    ):
        super().__init__()
        self.held_out_opponent = held_out_opponent
        self.sit(1, held_out_opponent, self.PLAYERS)
        self.opponent, self.plays, self.instructions = (
            opponent,
            chosen("plays", plays, ("X", "O", "either")),
            instructions,
        )
        self.board = rules.EMPTY
        self.sit(1, opponent, self.PLAYERS)

    def rows(self, split: str, count: int) -> list[dict[str, Any]]:
        return [
            {"opponent": self.held_out_opponent} if split == "test" else {} for _ in range(count)
        ]

    def open(self) -> None:
        self.opponent = self.row.get("opponent", self.opponent)
        self.sit(1, self.opponent, self.PLAYERS)
        if self.plays == "O" or (self.plays == "either" and self.rng.random() < 0.5):
            self.sit(1, "policy")
            self.sit(0, self.opponent, self.PLAYERS)
        if self.instructions:
            for seat, mark in enumerate(self.names):
                self.tell(
                    seat,
                    f"Tic-tac-toe. You are {mark}. Reply with the number of a free cell, nothing else.",
                )
        self._ask()

    def _ask(self) -> None:
        self.tell(self.turn, f"{rules.shown(self.board)}\n{self.names[self.turn]}: ")

    def move(self, text: str) -> None:
        seat, mark = self.turn, self.names[self.turn]
        cell = rules.read_cell(text)
        if cell is None or cell not in rules.free_cells(self.board):
            self._settle(loser=seat, illegal=True)
            return
        self.board = rules.put(self.board, cell, mark)
        if rules.is_over(self.board):
            self._settle(loser=None if rules.winner(self.board) is None else 1 - seat)
            return
        self.turn = 1 - seat
        self._ask()

    def _settle(self, loser: int | None, *, illegal: bool = False) -> None:
        for seat in (0, 1):
            self.figures[seat] = {
                "won": float(loser == 1 - seat),
                "lost": float(loser == seat),
                "drawn": float(loser is None),
            }
            self.figures[seat]["illegal"] = float(illegal and loser == seat)
        self.end(
            {0: 0.0, 1: 0.0} if loser is None else {loser: -1.0, 1 - loser: 0.0 if illegal else 1.0}
        )
