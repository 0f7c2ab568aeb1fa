"""Play tic-tac-toe between two seats, each played by the policy, an older version of it, another
model, or a rule.
"""

from __future__ import annotations

import random
import re
from functools import cache

from rl.envs.game_env import Game, Rule, check_choice

# A board is a string of nine cells, row by row: X, O, or the digit (1 to 9) of a free cell.
EMPTY = "123456789"
MARKS = ("X", "O")  # first and second player
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_CELL_ORDER = (5, 1, 3, 7, 9, 2, 4, 6, 8)  # center, corners, edges


def find_free_cells(board: str) -> list[int]:
    """Return the digits of the free cells, ascending."""
    return [int(cell) for cell in board if cell not in MARKS]


def next_mark(board: str) -> str:
    """Return the mark that moves next: X has moved as often as O, or once more."""
    return "X" if len(find_free_cells(board)) % 2 == 1 else "O"


def place_mark(board: str, cell: int, mark: str) -> str:
    """Return the board with `mark` in the free cell `cell`. Raises ValueError if the cell is not
    free.
    """
    if str(cell) not in board:
        raise ValueError(f"cell {cell} of {board} is not free")
    return board.replace(str(cell), mark)


def find_winner(board: str) -> str | None:
    """Return the mark with a line of three, or None."""
    return next((board[a] for a, b, c in _LINES if board[a] == board[b] == board[c]), None)


def is_over(board: str) -> bool:
    """Return True if a player has won or no cell is free."""
    return find_winner(board) is not None or not find_free_cells(board)


def read_cell(text: str) -> int | None:
    """Return the cell that a reply names: the only number in it, from 1 to 9; else None."""
    digits = set(re.findall(r"\d+", text))
    number = int(digits.pop()[:2]) if len(digits) == 1 else 0
    return number if 1 <= number <= 9 else None


def render_board(board: str) -> str:
    """Return the board as three rows, in the form that players receive."""
    return "\n".join(board[row : row + 3] for row in (0, 3, 6))


@cache
def compute_value(board: str) -> int:
    """Return the value of a board for X under perfect play of both sides: 1 win, 0 draw, -1 loss
    (minimax).
    """
    won = find_winner(board)
    if won is not None:
        return 1 if won == "X" else -1
    mark = next_mark(board)
    values = [compute_value(place_mark(board, cell, mark)) for cell in find_free_cells(board)]
    return 0 if not values else max(values) if mark == "X" else min(values)


def find_best_cells(board: str) -> list[int]:
    """Return the moves that preserve the board's value for the player that moves next."""
    mark = next_mark(board)
    return [
        cell
        for cell in find_free_cells(board)
        if compute_value(place_mark(board, cell, mark)) == compute_value(board)
    ]


def play_random(board: str, rng: random.Random) -> int:
    """Return a random free cell."""
    return rng.choice(find_free_cells(board))


def play_perfect(board: str, rng: random.Random) -> int:
    """Return a best move, sampled uniformly. This player never loses. It does not prefer the
    shortest win.
    """
    return rng.choice(find_best_cells(board))


def play_steady(board: str, rng: random.Random) -> int:
    """Return the same best move for a board each time: an immediate win, else the first best move
    in `_CELL_ORDER`.
    """
    mark = next_mark(board)
    best = sorted(find_best_cells(board), key=_CELL_ORDER.index)
    return next(
        (cell for cell in best if find_winner(place_mark(board, cell, mark)) == mark), best[0]
    )


def play_careful(board: str, rng: random.Random) -> int:
    """Return the move of `play_steady` with probability 0.9, else a random move."""
    return (play_steady if rng.random() < 0.9 else play_random)(board, rng)


def play_careless(board: str, rng: random.Random) -> int:
    """Return the move of `play_perfect` with probability 0.5, else a random move."""
    return (play_perfect if rng.random() < 0.5 else play_random)(board, rng)


RULES = {
    "random": play_random,
    "careless": play_careless,
    "careful": play_careful,
    "perfect": play_perfect,
    "steady": play_steady,
}


def _make_rule(name: str) -> Rule:
    """Return the rule of a name as a player of the game."""
    move = RULES[name]
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

    names = MARKS
    PLAYERS = {name: _make_rule(name) for name in RULES}

    def __init__(
        self,
        opponent: str = "random",
        plays: str = "either",
        held_out_opponent: str = "random",
        instructions: bool = True,
    ):
        super().__init__()
        self.set_opponents(opponent, held_out_opponent)
        self.plays = check_choice("plays", plays, ("X", "O", "either"))
        self.instructions = instructions
        self.board = EMPTY

    def open(self) -> None:
        """Assign the seats and send the first texts."""
        self.seat_opponent(self.plays)
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
        self.observe(self.turn, f"{render_board(self.board)}\n{self.names[self.turn]}: ")

    def move(self, text: str) -> None:
        """Process a move."""
        seat, mark = self.turn, self.names[self.turn]
        cell = read_cell(text)
        if cell is None or cell not in find_free_cells(self.board):
            self._finish(loser=seat, illegal=True)
            return
        self.board = place_mark(self.board, cell, mark)
        if is_over(self.board):
            self._finish(loser=None if find_winner(self.board) is None else 1 - seat)
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
