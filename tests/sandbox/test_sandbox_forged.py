"""Test arbitrary bytes in place of the candidate's replies: the grade is `forged` in bounded time,
and the other programs of the list are graded.

The adversary of these tests holds the candidate's end of both pipes and answers with arbitrary
bytes (tests/sandbox/adversary.py).
"""

import json
import random
import textwrap
import time

import pytest
from adversary import COMPUTING, TAKE_OVER, make_adversary, make_forged_replies, value
from games import example_address, load_example
from grading import grade_many
from hostile_replies import ARGUMENTS, SORTS

from rl.envs import resolve_environment
from rl.errors import UserError
from rl.sandbox import Asserts, Calls, Grade, Pytest, Sandbox, SandboxLimits, StdinStdoutTests

pytestmark = pytest.mark.usefixtures("bubblewrap")

QUICK = SandboxLimits(wall_s=10, cpu_s=10, total_s=300)
SLOW = SandboxLimits(wall_s=30, total_s=60)  # starts pytest


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=QUICK, workers=2) as made:
        yield made


def first_words(grade: Grade) -> list[str]:
    return [reason.split(":")[0] for reason in grade.reasons]


def take_over(text: str) -> str:
    return TAKE_OVER + text


# --------------------------------------------------------------------------------- forged arguments


@pytest.mark.parametrize(
    "name",
    ["in the server's place", "the server's answer replaced", "json replaced", "a raw frame"],
)
def test_a_reply_with_a_value_changes_no_argument(sandbox, name):
    """The program returns an empty list, and claims that its argument is now empty as well."""
    grade = sandbox.grade(ARGUMENTS[name], Asserts("", SORTS[:1], "f"))
    assert grade.passed == [False] and grade.reasons[0].startswith("forged"), grade.reasons
    test = f"from solution import f\ndef test_sorts():\n{textwrap.indent(SORTS[0], '    ')}\n"
    grade = sandbox.grade(ARGUMENTS[name], Pytest({"test_it.py": test}), limits=SLOW)
    assert not any(grade.passed) and grade.reasons[-1].startswith("forged"), grade.reasons


def test_a_function_that_returns_nothing_changes_what_it_was_given_and_no_other_does(sandbox):
    program = (
        "def order(xs): xs.sort()\ndef both(xs):\n    xs.sort()\n    return xs\nclass A:\n    def "
        "order(self, xs): xs.sort()\n"
    )
    asserts = [
        "xs = [3, 1]\norder(xs)\nassert xs == [1, 3]",
        "xs = [3, 1]\nA().order(xs)\nassert xs == [1, 3]",
        "xs = [3, 1]\nassert both(xs) == [1, 3] and xs == [3, 1]",
    ]
    assert sandbox.grade(program, Asserts("", asserts)).reasons == ["ok"] * 3


def test_what_is_no_call_changes_no_argument(sandbox):
    """An item's key, an attribute's value: only the reply to a call may change its arguments."""
    program = take_over("""
def answer(request):
    if request["do"] in ("find", "call"):
        return packed({"id": request["id"], "value": ["ref", 0, "object", "A", [], True]})
    return packed({"id": request["id"], "value": None, "arguments": [["l", 5]]})
serve(answer)
""")
    grade = sandbox.grade(program, Asserts("", ["xs = [1]\nf()[xs]\nassert xs == [5]"], "f"))
    assert grade.reasons[0].startswith("forged"), grade.reasons


# -------------------------------------------------------------------------------- any other message


def test_every_malformed_reply_is_forged_whatever_asks(sandbox):
    """Covers calls, and asserts that catch all that a program can raise."""
    replies = make_forged_replies()
    program = make_adversary(list(replies.values()))
    catching = "try:\n    f({})\nexcept BaseException:\n    pass"
    for tests in (
        Calls("f", [([i], None) for i in range(len(replies))]),
        Asserts("", [catching.format(i) for i in range(len(replies))], "f"),
    ):
        grade = sandbox.grade(program, tests)
        named = zip(replies, first_words(grade), strict=True)
        assert [name for name, word in named if word != "forged"] == [] and not any(grade.passed)


def test_a_call_of_a_function_that_no_test_gave_is_forged(sandbox):
    """It is forged even if the right value follows."""
    program = take_over("""
def answer(request):
    if request["do"] == "find":
        return packed({"id": request["id"], "value": ["ref", 0, "object", "function", [], True]})
    send({"call": "f7", "arguments": []})
    take(int.from_bytes(take(8), "big"))
    return packed({"id": request["id"], "value": 5})
serve(answer)
""")
    assert first_words(sandbox.grade(program, Asserts("", ["assert f(1) == 5"], "f"))) == ["forged"]


def test_the_first_message_says_that_it_is_loaded_or_why_not(sandbox):
    for first in ('{"loaded": 1}', '{"loaded": true, "failed": 1}', '{"failed": "x"}', '{"failed": {}}', '{"failed": ["lost", "x"]}',
                  '{"failed": ["load", 5]}', "{}", "[]", "x", '{"failed": ["load", ["R", "1e9999999999"]]}'):  # fmt: skip
        program = take_over(f"send({first.encode()!r})\nimport time; time.sleep(60)")
        for tests in (Calls("f", [([1], 1)]), Asserts("", ["assert f(1)"], "f")):
            assert first_words(sandbox.grade(program, tests)) == ["forged"], first
    assert sandbox.grade("1 +", Calls("f", [([1], 1)])).reasons[0].startswith("load: SyntaxError")


def test_bytes_that_are_no_frames(sandbox):
    raw = {
        b"\x00" * 8: "forged",
        b"\xff" * 40: "output",
        (1 << 40).to_bytes(8, "big"): "output",
        (3).to_bytes(8, "big") + b"abc": "forged",
        b"HTTP/1.1 200 OK\r\n\r\n": "output",
    }
    program = make_adversary(list(raw), bare=True)
    for tests in (
        Calls("f", [([i], None) for i in range(len(raw))]),
        Asserts("", [f"f({i})" for i in range(len(raw))], "f"),
    ):
        grade = sandbox.grade(program, tests)
        assert first_words(grade) == list(raw.values()), grade.reasons


def test_a_program_that_forges_one_reply_is_asked_the_next(sandbox):
    program = make_adversary([value(["R", "1e9"]), value(["l", 1]), value([]), value(7)])
    grade = sandbox.grade(program, Calls("f", [([0], 0), ([1], [1]), ([2], 0), ([3], 7)]))
    assert grade.passed == [False, True, False, True], grade.reasons


def test_a_forged_reply_loses_nobodys_list(sandbox):
    tests = Calls("f", [([0], 1)])
    programs = [make_adversary([value(encoded)]) for encoded in list(COMPUTING.values())[::5]]
    grades = grade_many(
        sandbox, [(text, tests) for program in programs for text in (program, "def f(x): return 1")]
    )
    assert [grade.all for grade in grades] == [False, True] * len(programs)
    assert all(grade.reasons[0].startswith("forged") for grade in grades[::2])


def test_a_forged_reply_earns_nothing_and_is_scored():
    from rl.rewards.code import CodeTests

    reward = CodeTests(score="fraction")
    tests = {"style": "calls", "function": "f", "cases": [[[0], 5], [[1], 5]]}
    program = make_adversary([value(["R", "1e9999999999"]), value(5)])
    try:
        scored = reward("", f"```python\n{program}```", {"tests": tests})
        assert scored.reward == 0.5 and scored.metrics["correct"] == 0.0
    finally:
        reward.sandbox().close()


def test_a_program_that_ends_is_no_exception_that_a_test_may_catch(sandbox):
    program = "import os\ndef f(n): os._exit(0)\n"
    catching = "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"
    grade = sandbox.grade(program, Asserts("", [catching, catching], "f"))
    assert grade.passed == [False, False] and first_words(grade) == ["exit"] * 2, grade.reasons
    test = (
        "import pytest\nfrom solution import f\n"
        "def test_a():\n    with pytest.raises(Exception): f(1)\ndef test_b():\n    test_a()\n"
    )
    grade = sandbox.grade(program, Pytest({"test_it.py": test}), limits=SLOW)
    assert not any(grade.passed), grade.reasons


def test_requests_that_nobody_reads_take_no_longer_than_their_limit(sandbox):
    program = take_over('send({"loaded": True})\nimport time\ntime.sleep(600)')
    start, limits = time.monotonic(), SandboxLimits(wall_s=0.5, cpu_s=5)
    grade = sandbox.grade(program, Calls("f", [([list(range(100_000))], 1)]), limits=limits)
    assert first_words(grade) == ["timeout"] and time.monotonic() - start < 20, grade.reasons


def test_keys_that_fall_into_one_place_are_given_up():
    """A set of ints with equal hashes (0): as many as fit into a reply would take minutes."""
    from rl.sandbox.inside import value_codec

    colliding = [["i", hex(i * (2**61 - 1))] for i in range(1, 40_000)]
    for message in (["s", *colliding], ["d", *[item for key in colliding for item in (key, 1)]]):
        start = time.thread_time()
        with pytest.raises(value_codec.ForgedMessageError, match="colliding hashes"):
            value_codec.decode(message)
        assert time.thread_time() - start < 10
    assert len(value_codec.decode(["s", *range(200_000)])) == 200_000


# ---------------------------------------------------------------------------------- honest programs


def test_an_honest_number_of_any_size_is_compared_and_told(sandbox):
    program = "def f(n): return 10**n\ndef g(n): return {'a': [(10**n, 1.5), 'x']}\n"
    assert sandbox.grade(program, Calls("f", [([6000], 10**6000), ([400_000], 10**400_000)])).all
    grade = sandbox.grade(program, Calls("f", [([6000], 1), ([6000], 1.5)], compare="floats"))
    assert first_words(grade) == ["wrong"] * 2, grade.reasons
    grade = sandbox.grade(program, Calls("g", [([6000], 1)]))
    assert first_words(grade) == ["wrong"] and "int of 19932 bits" in grade.reasons[0]
    program += "class A:\n    def __str__(self): raise ValueError\n"
    asserts = ["f(6000) == 1, f(6000)", "f(6000) == 1, A()", "f(6000) == 10**6000, A()"]
    grade = sandbox.grade(program, Asserts("", [f"assert {text}" for text in asserts]))
    assert first_words(grade) == ["wrong", "wrong", "ok"], grade.reasons
    grade = sandbox.grade("def f(): return 1 << (1 << 23)", Calls("f", [([], 1)]))
    assert grade.reasons[0].startswith("error: NotPlain"), grade.reasons


def test_honest_values_at_the_bounds_are_never_called_forged(sandbox):
    """A value that cannot be encoded is an error of the program, reported by its process."""
    results = [
        "Decimal('1E+1000000')", "Decimal('sNaN')", "Decimal('NaN123')", "Fraction(1 << 70000, 3)",
        "range(10**12)", "range(True, 9)", "range(1 << 70)", "deep(390)", "deep(500)", "A", "A()",
        "Bad()", "(i for i in [1])", "b'x' * 900_000", "type('x' * 5000, (ValueError,), {})",
    ]  # fmt: skip
    program = (
        "from decimal import Decimal\nfrom fractions import Fraction\nclass A: pass\n"
        "class Meta(type):\n    __name__ = 5\nclass Bad(metaclass=Meta): pass\n"
        "def deep(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x\n"
        f"def f(i): return [{', '.join('lambda: ' + text for text in results)}][i]()\n"
    )
    for tests in (
        Calls("f", [([i], "none of them") for i in range(len(results))]),
        Asserts("", [f"f({i})" for i in range(len(results))], "f"),
    ):
        reasons = sandbox.grade(program, tests).reasons
        assert not any(r.startswith(("forged", "lost", "signal")) for r in reasons), reasons


def test_every_reason_can_be_written_to_a_file(sandbox):
    program = "def f(i):\n    if i: raise ValueError('\\ud800' * 3)\n    return '\\udfff'\n"
    asserts = ["assert f(0) == ''", "assert f(1) == ''"]
    for tests in (Calls("f", [([0], ""), ([1], "")]), Asserts("", asserts, "f")):
        for reason in sandbox.grade(program, tests).reasons:
            reason.encode("utf-8")
    assert sandbox.grade(program, Calls("f", [([0], "\udfff")])).all


def test_a_text_that_is_no_unicode_is_the_programs_own_mistake(sandbox):
    grade = sandbox.grade("def f(): return '\ud800'", Calls("f", [([], "x")]))
    assert grade.reasons[0].startswith("load: UnicodeEncodeError")
    program = "import sys\nprint(len(sys.stdin.buffer.read()))"
    assert sandbox.grade(program, StdinStdoutTests([("\ud800", "3")])).all
    assert sandbox.run("x = 1\0").returncode == 1
    with pytest.raises(UserError, match="not valid Python"):
        sandbox.grade("def f(x): return x", Asserts("", ["assert f('\ud800')"]))


def test_an_exception_with_a_constructor_of_its_own_is_still_what_it_is(sandbox):
    program = "def f(): b'\\xff'.decode()\ndef g(): raise ExceptionGroup('x', [ValueError()])\n"
    asserts = [
        "try: f()\nexcept UnicodeDecodeError: pass\nelse: assert False",
        "try: f()\nexcept ValueError: pass\nelse: assert False",
        "try: g()\nexcept TypeError: assert False\nexcept Exception: pass\nelse: assert False",
    ]
    assert sandbox.grade(program, Asserts("", asserts)).reasons == ["ok"] * 3


# ---------------------------------------------------------------- episodes that talk to a candidate


# In the middle of a turn: a forged reply precedes the interpreter's answer.
TURNS = {
    "a fraction that computes": {"id": 1, "value": ["R", "1e9999999999"]},
    "a list": {"id": 1, "value": ["l", 1]},
    "a number": {"id": 1, "value": 5},
    "raised nothing": {"id": 1, "raised": []},
    "no request's": {"value": "x"},
    "arguments": {"id": 1, "value": None, "arguments": []},
}


@pytest.mark.parametrize("message", TURNS.values(), ids=TURNS.keys())
def test_a_turn_that_forges_its_value_ends_its_interpreter(sandbox, message):
    with sandbox.session() as python:
        turn = python.run(f"{TAKE_OVER}\nsend({message!r})")
        assert turn.ended_by == "forged" and turn.value is None
        assert python.run("1 + 1").value == "2"


def test_a_value_is_text_that_a_tokenizer_takes(sandbox):
    with sandbox.session() as python:
        turn = python.run("class A:\n    def __repr__(self): return '\\ud800'\nA()")
        assert turn.ended_by == "" and turn.value == "?"


def test_the_python_tool_answers_a_forged_reply():
    environment = resolve_environment("python").make()
    try:
        output = environment.python(f"{TAKE_OVER}\nsend({TURNS['a fraction that computes']!r})")
        assert "ended by forged" in output
        assert environment.python("6 * 7") == "42"
    finally:
        environment.close()


def test_debugging_tells_a_forged_reply_and_goes_on():
    match = resolve_environment(example_address("debugging")).make()
    match.seed, match.rng, match.row = 1, random.Random(1), {}
    match.start()
    encoded = json.dumps(COMPUTING["a fraction with an exponent"])
    source = (
        f"def f(a, b): pass\n{TAKE_OVER}\nserve(lambda request: packed({{'id': request['id'], "
        f"'value': json.loads({encoded!r})}}))"
    )
    start = time.monotonic()
    turn = match.step({"content": f"```python\n{source}\n```"})
    assert not turn.done and ", forged: " in turn.messages and len(turn.messages) < 300
    assert match.step({"content": load_example("debugging").make_fix(match.bug)}).reward == 1
    assert time.monotonic() - start < 20
