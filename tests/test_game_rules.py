"""The games' rules and the players that follow one, against exhaustive search and counts known from
elsewhere.
"""

import itertools
import math
import random
from functools import cache

import pytest

from rl.envs.rules import (
    bug_generator,
    debate_rules,
    guess_number_rules,
    tic_tac_toe_rules,
    twenty_questions_rules,
)

# --------------------------------------------------------------------------------- guess the number


@cache
def fewest_guesses(count: int) -> int:
    """By search over every first guess: the guesses that find any of `count` numbers for sure."""
    if count == 0:
        return 0
    return 1 + min(
        max(fewest_guesses(below), fewest_guesses(count - 1 - below)) for below in range(count)
    )


def play(game, player, draw):
    while not game.solved:
        game.guess(player(game, draw))
    return game.guesses


@pytest.mark.parametrize("count", [*range(1, 40), 64, 100])
def test_halving_needs_as_few_guesses_as_any_strategy(count):
    draw = random.Random(0)
    needed = [
        play(guess_number_rules.NumberGame(s, 5, 4 + count), guess_number_rules.guess_middle, draw)
        for s in range(5, 5 + count)
    ]
    assert (
        max(needed)
        == fewest_guesses(count)
        == guess_number_rules.count_guesses_needed(count)
        == math.floor(math.log2(count)) + 1
    )


def test_answers_say_where_the_secret_is():
    for secret, number in itertools.product(range(1, 9), range(-3, 12)):
        game = guess_number_rules.NumberGame(secret, 1, 8)
        answer = game.guess(number)
        assert answer == ("right" if number == secret else "higher" if secret > number else "lower")
        assert game.lower_bound <= secret <= game.upper_bound and game.solved == (number == secret)


@pytest.mark.parametrize("name", ["any_left", "any_number"])
def test_careless_players_find_it_too(name):
    draw = random.Random(1)
    counts = [
        play(guess_number_rules.NumberGame(s, 1, 8), guess_number_rules.PLAYERS[name], draw)
        for s in range(1, 9)
        for _ in range(50)
    ]
    assert max(counts) > 4 and (name == "any_number" or max(counts) <= 8)


@pytest.mark.parametrize(
    "text, number",
    [
        ("4", 4),
        ("I say 4.", 4),
        ("4 or 4", 4),
        ("4 or 5", None),
        ("", None),
        ("four", None),
        ("-2", -2),
        ("12345678901234567890", None),
    ],
)
def test_a_guess_is_the_only_number_in_a_reply(text, number):
    assert guess_number_rules.read_number(text) == number


# -------------------------------------------------------------------------------------- tic-tac-toe


@cache
def games_from(board: str) -> tuple[int, int, int]:
    """How many ways to play on end with X winning, O winning, and drawn."""
    won = tic_tac_toe_rules.find_winner(board)
    if won is not None or not tic_tac_toe_rules.find_free_cells(board):
        return (int(won == "X"), int(won == "O"), int(won is None))
    mark = tic_tac_toe_rules.next_mark(board)
    parts = [
        games_from(tic_tac_toe_rules.place_mark(board, cell, mark))
        for cell in tic_tac_toe_rules.find_free_cells(board)
    ]
    return tuple(map(sum, zip(*parts, strict=True)))


def test_all_games_are_as_many_as_there_are():
    """255,168 games, 131,184 won by who begins, 77,904 by the other, 46,080 drawn (a count known
    from many places).
    """
    assert games_from(tic_tac_toe_rules.EMPTY) == (131184, 77904, 46080)


@pytest.mark.parametrize("mark", tic_tac_toe_rules.MARKS)
def test_perfect_play_never_loses_whatever_the_other_does(mark):
    """Every move that the perfect player may draw, against every move of the other."""
    seen, boards = set(), [tic_tac_toe_rules.EMPTY]
    ends = set()
    while boards:
        board = boards.pop()
        if tic_tac_toe_rules.is_over(board):
            ends.add(tic_tac_toe_rules.find_winner(board))
            continue
        turn = tic_tac_toe_rules.next_mark(board)
        cells = (
            tic_tac_toe_rules.find_best_cells(board)
            if turn == mark
            else tic_tac_toe_rules.find_free_cells(board)
        )
        for cell in cells:
            after = tic_tac_toe_rules.place_mark(board, cell, turn)
            if after not in seen:
                seen.add(after)
                boards.append(after)
    assert ends == {mark, None}


def test_steady_play_is_perfect_wins_at_once_and_is_always_the_same():
    boards, seen, wins = [tic_tac_toe_rules.EMPTY], set(), 0
    while boards:
        board = boards.pop()
        if board in seen or tic_tac_toe_rules.is_over(board):
            continue
        seen.add(board)
        mark = tic_tac_toe_rules.next_mark(board)
        after = {
            cell: tic_tac_toe_rules.place_mark(board, cell, mark)
            for cell in tic_tac_toe_rules.find_free_cells(board)
        }
        cells = {tic_tac_toe_rules.play_steady(board, random.Random(seed)) for seed in range(3)}
        assert len(cells) == 1 and cells <= set(tic_tac_toe_rules.find_best_cells(board))
        if any(tic_tac_toe_rules.find_winner(then) == mark for then in after.values()):
            wins += 1
            assert tic_tac_toe_rules.find_winner(after[cells.pop()]) == mark
        boards.extend(after.values())
    assert len(seen) == 4520 and wins > 1000  # of 5,478 positions 958 are ends


def test_careful_play_is_steady_nine_times_of_ten():
    board, draw = tic_tac_toe_rules.EMPTY, random.Random(4)
    steady = sum(tic_tac_toe_rules.play_careful(board, draw) == 5 for _ in range(3000))
    assert abs(steady / 3000 - (0.9 + 0.1 / 9)) < 0.016  # three standard errors


def test_two_perfect_players_draw_and_random_ones_do_not():
    def result(first, second, draw):
        board = tic_tac_toe_rules.EMPTY
        while not tic_tac_toe_rules.is_over(board):
            mark = tic_tac_toe_rules.next_mark(board)
            board = tic_tac_toe_rules.place_mark(
                board, (first if mark == "X" else second)(board, draw), mark
            )
        return tic_tac_toe_rules.find_winner(board)

    draw, perfect, at_random = (
        random.Random(2),
        tic_tac_toe_rules.play_perfect,
        tic_tac_toe_rules.play_random,
    )
    assert tic_tac_toe_rules.compute_value(tic_tac_toe_rules.EMPTY) == 0
    assert {result(perfect, perfect, draw) for _ in range(30)} == {None}
    results = [result(at_random, at_random, draw) for _ in range(2000)]
    # random against random: 58.5% and 28.8% are won by the first and the second, to three standard
    # errors
    assert (
        abs(results.count("X") / 2000 - 0.585) < 0.034
        and abs(results.count("O") / 2000 - 0.288) < 0.031
    )


@pytest.mark.parametrize(
    "text, cell",
    [
        ("5", 5),
        ("I take 5!", 5),
        ("0", None),
        ("10", None),
        ("5 or 6", None),
        ("V", None),
        ("", None),
    ],
)
def test_a_move_is_the_only_number_in_a_reply(text, cell):
    assert tic_tac_toe_rules.read_cell(text) == cell


def test_a_taken_cell_cannot_be_taken_again():
    board = tic_tac_toe_rules.place_mark(tic_tac_toe_rules.EMPTY, 5, "X")
    assert (
        tic_tac_toe_rules.render_board(board) == "123\n4X6\n789"
        and tic_tac_toe_rules.next_mark(board) == "O"
    )
    with pytest.raises(ValueError, match="cell 5 of 1234X6789 is not free"):
        tic_tac_toe_rules.place_mark(board, 5, "O")


# --------------------------------------------------------------------------------- twenty questions


@cache
def fewest_questions(things: frozenset[str]) -> int:
    """By search over every attribute and every guess: the questions that name any of the things for
    sure.
    """
    if len(things) == 1:
        return 1
    best = 10**6
    for attribute in twenty_questions_rules.WORDS:
        held = twenty_questions_rules.filter_by_attribute(attribute, things)
        if held and held != things:
            best = min(best, 1 + max(fewest_questions(held), fewest_questions(things - held)))
    guess = sorted(things)[0]
    return min(best, 1 + fewest_questions(things - {guess}))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_splitting_needs_as_few_questions_as_any_strategy(count):
    things = frozenset(list(twenty_questions_rules.THINGS)[:count])
    assert (
        twenty_questions_rules.count_questions_needed(things)
        == fewest_questions(things)
        == int(math.log2(count)) + 1
    )


def test_things_are_told_apart_by_what_holds_of_them():
    assert (
        len(set(twenty_questions_rules.THINGS.values())) == len(twenty_questions_rules.THINGS) == 16
    )
    assert {a for held in twenty_questions_rules.THINGS.values() for a in held} == set(
        twenty_questions_rules.WORDS
    )


@pytest.mark.parametrize(
    "thing, text, answer",
    [
        ("cat", "Is it alive?", "yes"),
        ("cat", "Does it fly?", "no"),
        ("cat", "Is it a CAT?", "right"),
        ("cat", "Is it a dog?", "no"),
        ("cat", "Is it a cat or a dog?", "unclear"),
        ("cat", "Is it alive and big?", "unclear"),
        ("cat", "What is it?", "unclear"),
        ("plane", "Is it made of iron?", "yes"),
        ("book", "catalogue", "unclear"),
    ],
)
def test_the_rule_answers_what_is_asked(thing, text, answer):
    assert (
        twenty_questions_rules.answer_by_rule(thing, text, twenty_questions_rules.THINGS) == answer
    )


# ---------------------------------------------------------------------------------------- debugging


def outcome(source: str, case: bug_generator.Case):
    """What the function returns; here the programs are this test's own."""
    space: dict = {}
    exec(source, space)
    return space[bug_generator.FUNCTION_NAME](*case.arguments)


@pytest.mark.parametrize("level", bug_generator.LEVELS)
def test_a_planted_bug_fails_its_first_case_and_its_fix_passes_all(level):
    seen = set()
    for seed in range(150):
        bug = bug_generator.plant_bug(seed, [level])
        assert (
            bug == bug_generator.plant_bug(seed, [level])
            and bug.level == level
            and len(bug.cases) == 4
        )
        assert outcome(bug.source, bug.cases[0]) == bug.wrong_result != bug.cases[0].expected
        assert all(outcome(bug.solution, case) == case.expected for case in bug.cases)
        assert (
            bug_generator.apply_reply(bug, bug_generator.make_fix(bug))
            == bug_generator.apply_reply(bug, bug.solution)
            == bug.solution
            != bug.source
        )
        assert (
            eval(bug.cases[0].call, {bug_generator.FUNCTION_NAME: lambda *given: given})
            == bug.cases[0].arguments
        )
        seen.add(bug.source)
    assert len(seen) >= 3


def test_every_way_to_write_a_fix():
    bug = bug_generator.plant_bug(0, ["operator"])
    whole, line = bug.solution, bug_generator.make_fix(bug)
    for reply in (
        whole,
        f"\n{whole}",
        f"```python\n{whole}```",
        f"Here:\n```\n{whole}```",
        line,
        f" {line} ",
        f"```\n{line}\n```",
    ):
        assert bug_generator.apply_reply(bug, reply) == whole, reply
    for reply in (
        "",
        "return a + b",
        "9: return a + b",
        "0: return a",
        "2:",
        "two: return a",
        "import os",
        f"{line}\nand more",
    ):
        assert bug_generator.apply_reply(bug, reply) is None, reply
    assert (
        bug_generator.apply_reply(bug, "1: def f(b, a):\n2: return a")
        == "def f(b, a):\n    return a\n"
    )


def test_other_fixes_have_the_form_of_a_fix():
    draw = random.Random(0)
    for level in bug_generator.LEVELS:
        bug = bug_generator.plant_bug(1, [level])
        replies = {bug_generator.sample_fix(bug, draw) for _ in range(60)}
        assert bug_generator.make_fix(bug) in replies and len(replies) >= 3
        assert all(bug_generator.apply_reply(bug, reply) is not None for reply in replies)


@pytest.mark.parametrize("level", bug_generator.LEVELS)
def test_an_untried_fix_is_neither_what_stands_nor_what_failed(level):
    """Whoever tries each fix of a kind once has the right one after as many tries as there are
    others.
    """
    others = {"operator": 2, "bounds": 3, "start": 3, "compare": 4}[level]
    needed = []
    for seed in range(40):
        bug, draw, tried = bug_generator.plant_bug(seed, [level]), random.Random(seed), []
        while bug_generator.make_fix(bug) not in tried:
            tried.append(bug_generator.sample_untried_fix(bug, tried, draw))
        assert (
            len(set(tried)) == len(tried) and bug_generator.apply_reply(bug, tried[0]) != bug.source
        )
        needed.append(len(tried))
    assert set(needed) == set(range(1, others + 1))


def test_a_careful_fix_is_right_as_often_as_its_two_parts_are():
    """Of the three operators one stands there: four times of five one of the other two, else one of
    all: 0.4 + 0.2/3.
    """
    bug = bug_generator.plant_bug(0, ["operator"])
    draw = random.Random(3)
    right = sum(
        bug_generator.sample_careful_fix(bug, (), draw) == bug_generator.make_fix(bug)
        for _ in range(3000)
    )
    assert abs(right / 3000 - 7 / 15) < 0.028  # three standard errors


# ------------------------------------------------------------------------------------------- debate


def test_a_point_counts_once_and_for_its_own_side():
    motion = debate_rules.MOTIONS[0]
    assert debate_rules.count_points(
        motion, [("for", "They are clean, clean and QUIET"), ("against", "clean loyal dogs")]
    ) == {"for": 2, "against": 1}
    assert debate_rules.count_points(motion, [("for", "clean"), ("for", "clean calm")]) == {
        "for": 2,
        "against": 0,
    }
    assert debate_rules.find_points(motion, "for", "clean and calm", frozenset({"clean"})) == {
        "calm"
    }


@pytest.mark.parametrize("swap", [1, -1])
def test_the_verdict_is_of_who_made_more_points(swap):
    motion = debate_rules.MOTIONS[0]
    own, other = ("for", "against")[::swap]
    said = [(own, " ".join(motion.points[own][:2])), (other, motion.points[other][0])]
    assert debate_rules.judge_by_points(motion, said) == swap
    assert debate_rules.judge_by_points(motion, [*said, (other, motion.points[other][1])]) == 0
    assert debate_rules.judge_by_points(motion, []) == 0


def test_motions_have_as_many_points_for_either_side():
    for motion in debate_rules.MOTIONS:
        made, others = motion.points["for"], motion.points["against"]
        assert len(set(made)) == len(made) == len(set(others)) == len(others) and not set(
            made
        ) & set(others)
        assert all(debate_rules.split_words(word) == [word] for word in (*made, *others))
