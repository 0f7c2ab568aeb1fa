"""Test the rules of the built-in games and the rule-based players against exhaustive search and
published counts.
"""

import itertools
import math
import random
from functools import cache

import pytest

from rl.envs import guess_number_env, tic_tac_toe_env

# --------------------------------------------------------------------------------- guess the number


@cache
def count_fewest_guesses(count: int) -> int:
    """Return the number of guesses that surely reaches any of `count` numbers, by search over every
    first guess.
    """
    if count == 0:
        return 0
    return 1 + min(
        max(count_fewest_guesses(below), count_fewest_guesses(count - 1 - below))
        for below in range(count)
    )


def play(game, player, draw):
    while not game.solved:
        game.guess(player(game, draw))
    return game.guesses


@pytest.mark.parametrize("count", [*range(1, 40), 64, 100])
def test_halving_needs_as_few_guesses_as_any_strategy(count):
    draw, rule = random.Random(0), guess_number_env.guess_middle
    games = [guess_number_env.NumberGame(secret, 5, 4 + count) for secret in range(5, 5 + count)]
    needed = max(play(game, rule, draw) for game in games)
    assert needed == count_fewest_guesses(count) == math.floor(math.log2(count)) + 1
    assert needed == guess_number_env.count_guesses_needed(count)


def test_answers_say_where_the_secret_is():
    for secret, number in itertools.product(range(1, 9), range(-3, 12)):
        game = guess_number_env.NumberGame(secret, 1, 8)
        answer = game.guess(number)
        assert answer == ("right" if number == secret else "higher" if secret > number else "lower")
        assert game.lower_bound <= secret <= game.upper_bound and game.solved == (number == secret)


@pytest.mark.parametrize("name", ["any_left", "any_number"])
def test_careless_players_find_it_too(name):
    draw = random.Random(1)
    counts = [
        play(guess_number_env.NumberGame(s, 1, 8), guess_number_env.RULES[name], draw)
        for s in range(1, 9)
        for _ in range(50)
    ]
    assert max(counts) > 4 and (name == "any_number" or max(counts) <= 8)


@pytest.mark.parametrize("text, number", [
    ("4", 4),
    ("I say 4.", 4),
    ("4 or 4", 4),
    ("4 or 5", None),
    ("", None),
    ("four", None),
    ("-2", -2),
    ("12345678901234567890", None),
])  # fmt: skip
def test_a_guess_is_the_only_number_in_a_reply(text, number):
    assert guess_number_env.read_number(text) == number


# -------------------------------------------------------------------------------------- tic-tac-toe


@cache
def games_from(board: str) -> tuple[int, int, int]:
    """Return the number of continuations of a board in which X wins, O wins, and the
    game is drawn.
    """
    won = tic_tac_toe_env.find_winner(board)
    if won is not None or not tic_tac_toe_env.find_free_cells(board):
        return (int(won == "X"), int(won == "O"), int(won is None))
    mark = tic_tac_toe_env.next_mark(board)
    parts = [
        games_from(tic_tac_toe_env.place_mark(board, cell, mark))
        for cell in tic_tac_toe_env.find_free_cells(board)
    ]
    return tuple(map(sum, zip(*parts, strict=True)))


def test_all_games_are_as_many_as_there_are():
    """The game tree has 255,168 games: 131,184 won by the first player, 77,904 by the second,
    46,080 drawn (a widely published count).
    """
    assert games_from(tic_tac_toe_env.EMPTY) == (131184, 77904, 46080)


@pytest.mark.parametrize("mark", tic_tac_toe_env.MARKS)
def test_perfect_play_never_loses_whatever_the_other_does(mark):
    """Play every move that the perfect player may draw against every move of the opponent."""
    seen, boards, ends = set(), [tic_tac_toe_env.EMPTY], set()
    while boards:
        board = boards.pop()
        if tic_tac_toe_env.is_over(board):
            ends.add(tic_tac_toe_env.find_winner(board))
            continue
        turn = tic_tac_toe_env.next_mark(board)
        is_perfect = turn == mark
        find = tic_tac_toe_env.find_best_cells if is_perfect else tic_tac_toe_env.find_free_cells
        after = {tic_tac_toe_env.place_mark(board, cell, turn) for cell in find(board)} - seen
        seen |= after
        boards += after
    assert ends == {mark, None}


def test_steady_play_is_perfect_wins_at_once_and_is_always_the_same():
    boards, seen, wins = [tic_tac_toe_env.EMPTY], set(), 0
    while boards:
        board = boards.pop()
        if board in seen or tic_tac_toe_env.is_over(board):
            continue
        seen.add(board)
        mark = tic_tac_toe_env.next_mark(board)
        after = {
            cell: tic_tac_toe_env.place_mark(board, cell, mark)
            for cell in tic_tac_toe_env.find_free_cells(board)
        }
        cells = {tic_tac_toe_env.play_steady(board, random.Random(seed)) for seed in range(3)}
        assert len(cells) == 1 and cells <= set(tic_tac_toe_env.find_best_cells(board))
        if any(tic_tac_toe_env.find_winner(then) == mark for then in after.values()):
            wins += 1
            assert tic_tac_toe_env.find_winner(after[cells.pop()]) == mark
        boards.extend(after.values())
    assert len(seen) == 4520 and wins > 1000  # of 5,478 positions, 958 are final


def test_careful_play_is_steady_nine_times_of_ten():
    board, draw = tic_tac_toe_env.EMPTY, random.Random(4)
    steady = sum(tic_tac_toe_env.play_careful(board, draw) == 5 for _ in range(3000))
    assert abs(steady / 3000 - (0.9 + 0.1 / 9)) < 0.016  # three standard errors


def test_two_perfect_players_draw_and_random_ones_do_not():
    def result(first, second, draw):
        board = tic_tac_toe_env.EMPTY
        while not tic_tac_toe_env.is_over(board):
            mark = tic_tac_toe_env.next_mark(board)
            board = tic_tac_toe_env.place_mark(
                board, (first if mark == "X" else second)(board, draw), mark
            )
        return tic_tac_toe_env.find_winner(board)

    draw = random.Random(2)
    perfect = tic_tac_toe_env.play_perfect
    at_random = tic_tac_toe_env.play_random
    assert tic_tac_toe_env.compute_value(tic_tac_toe_env.EMPTY) == 0
    assert {result(perfect, perfect, draw) for _ in range(30)} == {None}
    results = [result(at_random, at_random, draw) for _ in range(2000)]
    # random against random: the first player wins 58.5% and the second 28.8%, to three standard
    # errors
    assert abs(results.count("X") / 2000 - 0.585) < 0.034
    assert abs(results.count("O") / 2000 - 0.288) < 0.031


@pytest.mark.parametrize("text, cell", [
    ("5", 5),
    ("I take 5!", 5),
    ("0", None),
    ("10", None),
    ("5 or 6", None),
    ("V", None),
    ("", None),
])  # fmt: skip
def test_a_move_is_the_only_number_in_a_reply(text, cell):
    assert tic_tac_toe_env.read_cell(text) == cell


def test_a_taken_cell_cannot_be_taken_again():
    board = tic_tac_toe_env.place_mark(tic_tac_toe_env.EMPTY, 5, "X")
    assert tic_tac_toe_env.render_board(board) == "123\n4X6\n789"
    assert tic_tac_toe_env.next_mark(board) == "O"
    with pytest.raises(ValueError, match="cell 5 of 1234X6789 is not free"):
        tic_tac_toe_env.place_mark(board, 5, "O")
