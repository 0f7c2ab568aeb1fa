"""Test the games of examples/games: rules and players against exhaustive search and published
counts, and the fixes of debugging in the sandbox.
"""

import math
import random
from functools import cache

import pytest
from games import example_address, load_example

from rl.envs import resolve_environment
from rl.errors import UserError
from rl.sandbox import Sandbox

questions, debugging, debate = map(load_example, ("twenty_questions", "debugging", "debate"))

# --------------------------------------------------------------------------------- twenty questions


@cache
def count_fewest_questions(things: frozenset[str]) -> int:
    """Return the number of questions that surely identify any of the things, by search over every
    attribute and every guess.
    """
    if len(things) == 1:
        return 1
    counts = [1 + count_fewest_questions(things - {sorted(things)[0]})]  # after a guess
    for attribute in questions.WORDS:
        held = questions.filter_by_attribute(attribute, things)
        if held and held != things:
            counts.append(1 + max(map(count_fewest_questions, (held, things - held))))
    return min(counts)


def count_questions(secret: str, things: frozenset[str]) -> int:
    """Return the number of questions that the rule `splitting` needs to name the secret."""
    answers = []
    while questions.RIGHT not in answers:
        question = questions.choose_question(things)
        answers.append(questions.answer_by_rule(secret, question, questions.THINGS))
        things = questions.filter_by_answer(things, question, answers[-1])
    return len(answers)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_splitting_needs_as_few_questions_as_any_strategy(count):
    things = frozenset(list(questions.THINGS)[:count])
    assert (
        max(count_questions(secret, things) for secret in things)
        == count_fewest_questions(things)
        == int(math.log2(count)) + 1
    )


def test_things_are_told_apart_by_what_holds_of_them():
    assert len(set(questions.THINGS.values())) == len(questions.THINGS) == 16
    assert {a for held in questions.THINGS.values() for a in held} == set(questions.WORDS)


@pytest.mark.parametrize("item, text, answer", [
    ("cat", "Is it alive?", "yes"),
    ("cat", "Does it fly?", "no"),
    ("cat", "Is it a CAT?", "right"),
    ("cat", "Is it a dog?", "no"),
    ("cat", "Is it a cat or a dog?", "unclear"),
    ("cat", "Is it alive and big?", "unclear"),
    ("cat", "What is it?", "unclear"),
    ("plane", "Is it made of iron?", "yes"),
    ("book", "catalogue", "unclear"),
])  # fmt: skip
def test_the_rule_answers_what_is_asked(item, text, answer):
    assert questions.answer_by_rule(item, text, questions.THINGS) == answer


# ---------------------------------------------------------------------------------------- debugging


def outcome(source: str, case: debugging.Case):
    """Return the result of the program's function; the programs here come from this test."""
    space: dict = {}
    exec(source, space)
    return space[debugging.FUNCTION_NAME](*case.arguments)


@pytest.mark.parametrize("level", debugging.LEVELS)
def test_a_planted_bug_fails_its_first_case_and_its_fix_passes_all(level):
    seen = set()
    for seed in range(50):
        bug = debugging.plant_bug(seed, [level])
        assert bug == debugging.plant_bug(seed, [level]) and bug.level == level
        assert len(bug.cases) == 4
        case = bug.cases[0]
        assert outcome(bug.source, case) == bug.wrong_result != case.expected
        assert all(outcome(bug.solution, case) == case.expected for case in bug.cases)
        for fix in (debugging.make_fix(bug), bug.solution):
            assert debugging.apply_reply(bug, fix) == bug.solution != bug.source
        arguments = eval(case.call, {debugging.FUNCTION_NAME: lambda *inputs: inputs})
        assert arguments == case.arguments
        seen.add(bug.source)
    assert len(seen) >= 3


def test_every_way_to_write_a_fix():
    bug = debugging.plant_bug(0, ["operator"])
    whole, line = bug.solution, debugging.make_fix(bug)
    fixes = [whole, f"\n{whole}", f"```python\n{whole}```", f"Here:\n```\n{whole}```"]
    for reply in (*fixes, line, f" {line} ", f"```\n{line}\n```"):
        assert debugging.apply_reply(bug, reply) == whole, reply
    wrong = ["", "return a + b", "9: return a + b", "0: return a", "2:", "two: return a"]
    for reply in (*wrong, "import os", f"{line}\nand more"):
        assert debugging.apply_reply(bug, reply) is None, reply
    both = debugging.apply_reply(bug, "1: def f(b, a):\n2: return a")
    assert both == "def f(b, a):\n    return a\n"


def test_other_fixes_have_the_form_of_a_fix():
    draw = random.Random(0)
    for level in debugging.LEVELS:
        bug = debugging.plant_bug(1, [level])
        replies = {debugging.sample_fix(bug, draw) for _ in range(60)}
        assert debugging.make_fix(bug) in replies and len(replies) >= 3
        assert all(debugging.apply_reply(bug, reply) is not None for reply in replies)


@pytest.mark.parametrize("level", debugging.LEVELS)
def test_an_untried_fix_is_neither_what_stands_nor_what_failed(level):
    """A player that never repeats a fix of a kind finishes within as many tries as the number of
    alternatives.
    """
    others = {"operator": 2, "bounds": 3, "start": 3, "compare": 4}[level]
    needed = []
    for seed in range(40):
        bug, draw, tried = debugging.plant_bug(seed, [level]), random.Random(seed), []
        while debugging.make_fix(bug) not in tried:
            tried.append(debugging.sample_untried_fix(bug, tried, draw))
        assert len(set(tried)) == len(tried) and debugging.apply_reply(bug, tried[0]) != bug.source
        needed.append(len(tried))
    assert set(needed) == set(range(1, others + 1))


def test_a_careful_fix_is_right_as_often_as_its_two_parts_are():
    """One of three operators is in place. With probability 4/5 the fix is either of the other two,
    else any of the three: 0.4 + 0.2/3.
    """
    bug = debugging.plant_bug(0, ["operator"])
    draw = random.Random(3)
    right = sum(
        debugging.sample_careful_fix(bug, (), draw) == debugging.make_fix(bug) for _ in range(3000)
    )
    assert abs(right / 3000 - 7 / 15) < 0.028  # three standard errors


@pytest.fixture(scope="module")
def sandbox_walls():
    try:
        Sandbox().close()
    except UserError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def start_match(seed=0, **settings):
    match = resolve_environment(example_address("debugging"), **settings).make()
    match.seed, match.rng, match.row = seed, random.Random(seed), {}
    return match, match.start()


@pytest.mark.parametrize("level", debugging.LEVELS)
def test_the_right_line_is_enough_and_a_wrong_one_shows_what_fails(level, sandbox_walls):
    match, turn = start_match(3, levels=(level,))
    case, bug = match.bug.cases[0], match.bug
    assert bug.numbered_source() in turn.messages
    assert f"{case.call} should be {case.expected!r}, is {bug.wrong_result!r}" in turn.messages
    turn = match.step({"content": f"{bug.line}: {bug.lines[bug.line - 1].strip()}"})  # unchanged
    assert not turn.done and turn.reward == 0
    assert f"{case.call} should be {case.expected!r}, is {bug.wrong_result!r}" in turn.messages
    turn = match.step({"content": debugging.make_fix(bug)})
    assert turn.done and turn.reward == 1
    assert turn.metrics == {"correct": 1.0, "correct_at_once": 0.0, "malformed": 0.0}
    match, _ = start_match(3, levels=(level,))
    turn = match.step({"content": bug.solution})
    assert turn.done and turn.reward == 1 and turn.metrics["correct_at_once"] == 1.0


@pytest.mark.parametrize(("reply", "text"), [
    ("nonsense", "That is no fix"),
    ("2: return a / 0", "error: ZeroDivisionError"),
    ("2: return a +", "load: "),
    ("2: import os; os._exit(0)", "exit: "),
    ("def f(a, b):\n    class E(int):\n        __eq__ = lambda s, o: True\n    return E(0)",
     "should be"),
    ("2: return " + "'x' * 10**6", "should be"),
])  # fmt: skip
def test_what_a_reply_comes_to_is_told_in_a_line_and_costs_a_try(reply, text, sandbox_walls):
    match, _ = start_match(1)
    turn = match.step({"content": reply})
    assert not turn.done and text in turn.messages and len(turn.messages) < 200
    turn = match.step({"content": reply})
    assert turn.done and turn.reward == 0 and turn.metrics["correct"] == 0.0
    assert turn.metrics["malformed"] == float(reply == "nonsense")


def test_what_passes_the_test_that_is_shown_alone_does_not_pass(sandbox_walls):
    match, _ = start_match(2)
    case = match.bug.cases[0]
    turn = match.step({"content": f"def f(a, b):\n    return {case.expected!r}\n"})
    assert not turn.done and case.call not in turn.messages


# ------------------------------------------------------------------------------------------- debate


def test_a_point_counts_once_and_for_its_own_side():
    motion = debate.MOTIONS[0]
    speeches = [("for", "They are clean, clean and QUIET"), ("against", "clean loyal dogs")]
    assert debate.count_points(motion, speeches) == {"for": 2, "against": 1}
    speeches = [("for", "clean"), ("for", "clean calm")]
    assert debate.count_points(motion, speeches) == {"for": 2, "against": 0}
    assert debate.find_points(motion, "for", "clean and calm", frozenset({"clean"})) == {"calm"}


@pytest.mark.parametrize("swap", [1, -1])
def test_the_verdict_is_of_who_made_more_points(swap):
    motion = debate.MOTIONS[0]
    reference, other = ("for", "against")[::swap]
    text = [(reference, " ".join(motion.points[reference][:2])), (other, motion.points[other][0])]
    assert debate.judge_by_points(motion, text) == swap
    assert debate.judge_by_points(motion, [*text, (other, motion.points[other][1])]) == 0
    assert debate.judge_by_points(motion, []) == 0


def test_motions_have_as_many_points_for_either_side():
    for motion in debate.MOTIONS:
        made, others = motion.points["for"], motion.points["against"]
        assert len(set(made)) == len(made) == len(set(others)) == len(others)
        assert not set(made) & set(others)
        assert all(debate.split_words(word) == [word] for word in (*made, *others))
