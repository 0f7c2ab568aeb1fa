"""Interactive debugging, its fixes run in the sandbox."""

import random

import pytest

from rl.envs import resolve_environment
from rl.envs.rules import bug_generator
from rl.errors import UserError
from rl.sandbox import Sandbox


@pytest.fixture(scope="module", autouse=True)
def walls():
    try:
        Sandbox().close()
    except UserError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def begun(seed=0, **settings):
    match = resolve_environment("debugging", **settings).make()
    match.seed, match.rng, match.row = seed, random.Random(seed), {}
    return match, match.start()


@pytest.mark.parametrize("level", bug_generator.LEVELS)
def test_the_right_line_is_enough_and_a_wrong_one_shows_what_fails(level):
    match, turn = begun(3, levels=(level,))
    case, bug = match.bug.cases[0], match.bug
    assert (
        bug.numbered_source() in turn.messages
        and f"{case.call} should be {case.expected!r}, is {bug.wrong_result!r}" in turn.messages
    )
    turn = match.step({"content": f"{bug.line}: {bug.lines[bug.line - 1].strip()}"})  # as it was
    assert (
        not turn.done
        and turn.reward == 0
        and f"{case.call} should be {case.expected!r}, is {bug.wrong_result!r}" in turn.messages
    )
    turn = match.step({"content": bug_generator.make_fix(bug)})
    assert (
        turn.done
        and turn.reward == 1
        and turn.metrics == {"correct": 1.0, "correct_at_once": 0.0, "malformed": 0.0}
    )
    match, _ = begun(3, levels=(level,))
    turn = match.step({"content": bug.solution})
    assert turn.done and turn.reward == 1 and turn.metrics["correct_at_once"] == 1.0


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("nonsense", "That is no fix"),
        ("2: return a / 0", "error: ZeroDivisionError"),
        ("2: return a +", "load: "),
        ("2: import os; os._exit(0)", "exit: "),
        (
            "def f(a, b):\n    class E(int):\n        __eq__ = lambda s, o: True\n    return E(0)",
            "should be",
        ),
        ("2: return " + "'x' * 10**6", "should be"),
    ],
)
def test_what_a_reply_comes_to_is_told_in_a_line_and_costs_a_try(reply, said):
    match, _ = begun(1)
    turn = match.step({"content": reply})
    assert not turn.done and said in turn.messages and len(turn.messages) < 200
    turn = match.step({"content": reply})
    assert turn.done and turn.reward == 0 and turn.metrics["correct"] == 0.0
    assert turn.metrics["malformed"] == float(reply == "nonsense")


def test_what_passes_the_test_that_is_shown_alone_does_not_pass():
    match, _ = begun(2)
    case = match.bug.cases[0]
    turn = match.step({"content": f"def f(a, b):\n    return {case.expected!r}\n"})
    assert not turn.done and case.call not in turn.messages
