"""Tic-tac-toe: the board, its ends, and players that move at random or perfectly.

A board is a text of nine cells, row by row: X, O, or the digit (1 to 9) of a free cell.
"""

from __future__ import annotations

import random
import re
from functools import cache

EMPTY = "123456789"
MARKS = ("X", "O")  # who moves first, who second
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_ORDER = (5, 1, 3, 7, 9, 2, 4, 6, 8)  # the centre, corners, edges


def free_cells(board: str) -> list[int]:
    """The digits of the free cells, ascending."""
    return [int(cell) for cell in board if cell not in MARKS]


def to_move(board: str) -> str:
    """Whose turn it is: X has moved as often as O, or once more."""
    return "X" if len(free_cells(board)) % 2 == 1 else "O"


def put(board: str, cell: int, mark: str) -> str:
    """The board with `mark` in the free cell `cell`. ValueError where it is not free."""
    if str(cell) not in board:
        raise ValueError(f"cell {cell} of {board} is not free")
    return board.replace(str(cell), mark)


def winner(board: str) -> str | None:
    """The mark that has a line of three."""
    return next((board[a] for a, b, c in _LINES if board[a] == board[b] == board[c]), None)


def is_over(board: str) -> bool:
    return winner(board) is not None or not free_cells(board)


def read_cell(text: str) -> int | None:
    """The cell that a reply names: the only digit in it."""
    found = set(re.findall(r"\d+", text))
    number = int(found.pop()[:2]) if len(found) == 1 else 0
    return number if 1 <= number <= 9 else None


def shown(board: str) -> str:
    """The board as three rows, as players see it."""
    return "\n".join(board[row : row + 3] for row in (0, 3, 6))


@cache
def value(board: str) -> int:
    """What the board is worth to X with perfect play on both sides: 1 won, 0 drawn, -1 lost
    (minimax).
    """
    won = winner(board)
    if won is not None:
        return 1 if won == "X" else -1
    mark = to_move(board)
    values = [value(put(board, cell, mark)) for cell in free_cells(board)]
    return 0 if not values else max(values) if mark == "X" else min(values)


def best_cells(board: str) -> list[int]:
    """The moves that keep the board's value for whoever is to move."""
    mark = to_move(board)
    return [cell for cell in free_cells(board) if value(put(board, cell, mark)) == value(board)]


def random_player(board: str, draw: random.Random) -> int:
    """Any free cell."""
    return draw.choice(free_cells(board))


def perfect_player(board: str, draw: random.Random) -> int:
    """One of the best moves, drawn evenly: it never loses. Of winning moves it does not seek the
    shortest way.
    """
    return draw.choice(best_cells(board))


def steady_player(board: str, draw: random.Random) -> int:
    """Perfect, and always the same move in a position: one that wins at once, else of the best the
    first in `_ORDER`.
    """
    mark = to_move(board)
    best = sorted(best_cells(board), key=_ORDER.index)
    return next((cell for cell in best if winner(put(board, cell, mark)) == mark), best[0])


def careful_player(board: str, draw: random.Random) -> int:
    """Steady nine times of ten, else random."""
    return (steady_player if draw.random() < 0.9 else random_player)(board, draw)


def careless_player(board: str, draw: random.Random) -> int:
    """Perfect half of the time, else random."""
    return (perfect_player if draw.random() < 0.5 else random_player)(board, draw)


PLAYERS = {
    "random": random_player,
    "careless": careless_player,
    "careful": careful_player,
    "perfect": perfect_player,
    "steady": steady_player,
}
