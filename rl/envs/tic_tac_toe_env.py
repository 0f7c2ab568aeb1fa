"""Play tic-tac-toe between two seats, each played by the policy, an older version of it, another
model, or a rule.
"""

from __future__ import annotations

from typing import Any

from rl.envs.game_env import Game, Rule, check_choice
from rl.envs.rules import tic_tac_toe_rules as rules


def _make_rule(name: str) -> Rule:
    """Return the rule of a name as a player of the game."""
    move = rules.PLAYERS[name]
    return lambda match: str(move(match.board, match.rng))


class TicTacToeEnv(Game):
    """Play tic-tac-toe. X begins. A move is the number of a free cell; any other reply loses the
    game.

    opponent: random, careless, perfect, policy (self-play, both seats are trained), pool (an older
    version of the policy), or a model. held_out_opponent: the opponent in held-out episodes, so
    that these measure the strength of the policy independently of its training opponent. plays: X,
    O, or either (X or O, the same within a group): the policy's seat, if the opponent is not the
    policy. instructions: send the rules to the players first. Rewards: 1 for a win, -1 for a loss,
    0 for a draw. A player that wins because the other's reply was not a valid move gets 0.
    """

    names = rules.MARKS
    PLAYERS = {name: _make_rule(name) for name in rules.PLAYERS}

    def __init__(
        self,
        opponent: str = "random",
        plays: str = "either",
        held_out_opponent: str = "random",
        instructions: bool = True,
    ):
        super().__init__()
        self.held_out_opponent = held_out_opponent
        self.assign(1, held_out_opponent, self.PLAYERS)
        self.opponent = opponent
        self.plays = check_choice("plays", plays, ("X", "O", "either"))
        self.instructions = instructions
        self.board = rules.EMPTY
        self.assign(1, opponent, self.PLAYERS)

    def rows(self, split: str, count: int) -> list[dict[str, Any]]:
        """Return empty rows for training, and rows with the held-out opponent for tests."""
        return [
            {"opponent": self.held_out_opponent} if split == "test" else {} for _ in range(count)
        ]

    def open(self) -> None:
        """Assign the seats and send the first texts."""
        self.opponent = self.row.get("opponent", self.opponent)
        self.assign(1, self.opponent, self.PLAYERS)
        if self.plays == "O" or (self.plays == "either" and self.rng.random() < 0.5):
            self.assign(1, "policy")
            self.assign(0, self.opponent, self.PLAYERS)
        if self.instructions:
            for seat, mark in enumerate(self.names):
                self.observe(
                    seat,
                    f"Tic-tac-toe. You are {mark}. Reply with the number of a free cell, nothing"
                    " else.",
                )
        self._ask()

    def _ask(self) -> None:
        """Send the board to the seat that moves next."""
        self.observe(self.turn, f"{rules.render_board(self.board)}\n{self.names[self.turn]}: ")

    def move(self, text: str) -> None:
        """Process a move."""
        seat, mark = self.turn, self.names[self.turn]
        cell = rules.read_cell(text)
        if cell is None or cell not in rules.find_free_cells(self.board):
            self._finish(loser=seat, illegal=True)
            return
        self.board = rules.place_mark(self.board, cell, mark)
        if rules.is_over(self.board):
            self._finish(loser=None if rules.find_winner(self.board) is None else 1 - seat)
            return
        self.turn = 1 - seat
        self._ask()

    def _finish(self, loser: int | None, *, illegal: bool = False) -> None:
        """End the match with its rewards and metrics. `loser`: losing seat, None for a draw."""
        for seat in (0, 1):
            self.seat_metrics[seat] = {
                "won": float(loser == 1 - seat),
                "lost": float(loser == seat),
                "drawn": float(loser is None),
            }
            self.seat_metrics[seat]["illegal"] = float(illegal and loser == seat)
        self.end(
            {0: 0.0, 1: 0.0} if loser is None else {loser: -1.0, 1 - loser: 0.0 if illegal else 1.0}
        )
