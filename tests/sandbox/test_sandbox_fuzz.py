"""Test random frames in place of a candidate's replies: each gets a verdict quickly, and none gets
an unearned reward.
"""

import datetime
import json
import math
import os
import random
import time
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction

import pytest
from adversary import make_adversary

from rl.sandbox import Asserts, Calls, Sandbox, SandboxLimits, grade_tests
from rl.sandbox.inside import tester, value_codec

_TAGS = [*"l t s f q d C O D i B A M R dt da ti c r type ref zz".split(), ""]
_TEXTS = ["", "x", "0x5", "-0x" + "f" * 40]
_TEXTS += "1e9999999999 1E+999999 1/0 1/3 -1.5 NaN sNaN Infinity".split()
_TEXTS += ["0" * 30, "int", "eval", "2020-01-01", "2020-01-01T25:00"]
_TEXTS += ["9999-12-31T23:59:59.999999+23:59", "00", "zz", "\ud800", "\x00", "é", "call", "None"]
_INTEGERS = [0, 1, -1, 5, 2**31, 2**63 - 1, 2**63, -(2**63), 10**25]
_FLOATS = [0.0, -0.0, 1.5, 1e308, math.inf, -math.inf, math.nan]
_NUMBERS = [*_INTEGERS, *_FLOATS, True, False, None]
_KEYS = ["id", "value", "arguments", "raised", "call", "loaded", "failed", "ok", "verdicts"]


def any_json(draw: random.Random, deep: int = 0):
    kind = draw.random()
    if kind < 0.3 or deep > 5:
        return draw.choice(_NUMBERS)
    if kind < 0.5:
        return draw.choice(_TEXTS)
    if kind < 0.57:
        return {draw.choice(_KEYS): any_json(draw, deep + 1) for _ in range(draw.randrange(3))}
    items = [any_json(draw, deep + 1) for _ in range(draw.randrange(4))]
    return items if kind < 0.62 else [draw.choice(_TAGS), *items]


def make_random_value(draw: random.Random, deep: int = 0, hashed: bool = False):
    """Return a value of any type that the codec supports."""
    zone = datetime.timezone(datetime.timedelta(minutes=draw.randrange(-700, 700)))
    scalars = [
        lambda: None,
        lambda: draw.random() < 0.5,
        lambda: draw.randrange(-9, 9),
        lambda: draw.getrandbits(200),
        lambda: -draw.getrandbits(70),
        lambda: draw.choice([draw.gauss(0, 1e6), math.inf, -math.inf]),
        lambda: draw.choice(["", "a", "é\ud800", "x" * 50]),
        lambda: draw.randbytes(3),
        lambda: complex(draw.random(), -1.5),
        lambda: range(draw.randrange(9), draw.randrange(-9, 1 << 70), draw.choice([-2, 1, 3])),
        lambda: Decimal(draw.randrange(-999, 999)).scaleb(draw.randrange(-400, 400)),
        lambda: draw.choice([Decimal("Infinity"), Decimal("-0"), Decimal("1E+5"), Decimal("0E-9")]),
        lambda: Fraction(draw.randrange(-99, 99), draw.randrange(1, 99)),
        lambda: datetime.date.fromordinal(draw.randrange(1, 3_000_000)),
        lambda: datetime.time(draw.randrange(24), 5, 6, draw.randrange(10**6)),
        lambda: datetime.datetime.fromtimestamp(draw.randrange(10**9), zone),
        lambda: draw.choice([int, list, type(None)]),
    ]
    if deep > 3 or draw.random() < 0.5:
        return draw.choice(scalars)()
    items = [make_random_value(draw, deep + 1, hashed) for _ in range(draw.randrange(4))]
    if hashed:
        return (
            draw.choice([tuple, frozenset])(items)
            if all(not isinstance(item, Decimal) or item == item for item in items)
            else tuple(items)
        )
    keys = [make_random_value(draw, deep + 1, hashed=True) for _ in range(draw.randrange(4))]
    kinds = [
        lambda: items,
        lambda: tuple(items),
        lambda: deque(items),
        lambda: bytearray(b"ab"),
        lambda: set(keys),
        lambda: dict.fromkeys(keys, items),
        lambda: OrderedDict.fromkeys(keys, 1),
        lambda: Counter(keys),
    ]
    return draw.choice(kinds)()


def mutate_value(draw: random.Random, value):
    """Return `value` with a single random change."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        return {**value, key: mutate_value(draw, value[key])}
    if isinstance(value, list) and len(value) > 0 and draw.random() < 0.8:
        i, mode = draw.randrange(len(value)), draw.random()
        new = [] if mode < 0.2 else [value[i], value[i]]
        if mode >= 0.4:
            new = [mutate_value(draw, value[i])]
        return [*value[:i], *new, *value[i + 1 :]]
    return any_json(draw)


def frame(draw: random.Random, number: int) -> bytes:
    """Return bytes that a candidate could send in reply to request `number`, a call with a single
    argument.
    """
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.randrange(40))
    if kind < 0.2:
        letters = '[]{}",:0123456789eE+-.nulltrueidvalue\\ '
        return "".join(draw.choices(letters, k=draw.randrange(60))).encode()
    if kind < 0.4:
        message = {"id": number, "value": any_json(draw)}
    elif kind < 0.5:
        message = {"id": number, "value": None, "arguments": [any_json(draw)]}
    elif kind < 0.6:
        message = any_json(draw)
    else:
        value = value_codec.encode(make_random_value(draw))
        message = draw.choice(
            [
                {"id": number, "value": value},
                {"id": number, "value": None, "arguments": [["l", value]]},
                {"id": number, "value": value, "arguments": [value]},
                {"id": number, "raised": ["A", ["ValueError", "Exception"], "x"]},
                {"id": number, "value": ["ref", 3, "class", "A", ["ValueError"], True]},
                {"call": "f0", "arguments": [value]},
            ]
        )
        if draw.random() < 0.7:
            message = mutate_value(draw, message)
    return json.dumps(message).encode()


class ScriptedJob:
    """Stand-in for a job: a candidate's server that answers with the frames of a list, after the
    monitor's checks.
    """

    def __init__(self, frames: list[str]):
        self.frames, self.ends = iter(frames), 0

    def request(self, message, seconds):
        if message["do"] == "end":
            self.ends += 1
            return {"ended": None}
        return {"reply": next(self.frames), "number": 1, "stdout": "", "stderr": "", "wall_s": 0.0}


def check_calls(count: int, seed: int) -> Counter:
    draw = random.Random(seed)
    bodies = []
    while len(bodies) < count:
        try:
            # the monitor rejects invalid UTF-8 earlier
            bodies.append(frame(draw, 1).decode("utf-8"))
        except UnicodeDecodeError:
            continue
    job, words, start = ScriptedJob(bodies), Counter(), time.thread_time()
    compare = draw.choice(["exact", "trimmed", "tokens", "floats", "sets"])
    tests = Calls("f", [([1], object())] * count, compare=compare)
    verdicts = grade_tests.grade_tests(job, tests, SandboxLimits(total_s=1e6), False)
    for body, (ok, reason) in zip(bodies, verdicts, strict=True):
        assert not ok and len(reason) < 700, (body, reason)
        reason.encode("utf-8", "surrogatepass")
        word = reason.split(":")[0]
        assert word in ("forged", "wrong", "error"), (body, reason)
        words[word] += 1
        now = time.thread_time()
        assert now - start < 2.0, (body, now - start)
        start = now
    assert job.ends == words["forged"]
    return words


class TesterExit(BaseException):
    """The tester's process has ended."""


def end(by: str, why: str):
    raise TesterExit(by)


def check_link(count: int, seed: int) -> Counter:
    """Check the tester's end: the argument changes only if the frame is a valid reply of a call
    that returns None.
    """
    draw, words = random.Random(seed), Counter()
    sink = os.open(os.devnull, os.O_WRONLY)
    for _ in range(count):
        body = frame(draw, 1)
        replies, theirs = os.pipe()
        os.write(theirs, len(body).to_bytes(8, "big") + body)
        os.close(theirs)
        link, argument = tester.CandidateClient(sink, replies, 1 << 20, end), [3, 1]
        link.functions["f0"] = lambda *_: None
        start = time.thread_time()
        try:
            link.request("call", 0, (argument,))
            words["value"] += 1
        except TesterExit as ended:
            words[str(ended)] += 1
        except Exception as error:
            assert json.loads(body).keys() == {"id", "raised"}, (body, error)
            words["raised"] += 1
        finally:
            os.close(replies)
        assert time.thread_time() - start < 2.0, body
        if argument != [3, 1]:
            message = json.loads(body)
            assert message.keys() == {"id", "value", "arguments"} and message["value"] is None, body
            assert len(message["arguments"]) == 1, body
            words["changed"] += 1
    os.close(sink)
    return words


def check_values(count: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        value = make_random_value(draw)
        back = value_codec.decode(json.loads(json.dumps(value_codec.encode(value))))
        assert type(back) is type(value) and back == value, value
        job = ScriptedJob([json.dumps({"id": 1, "value": value_codec.encode(value)})])
        tests = Calls("f", [([1], value)], compare=lambda a, b: a == b)
        (verdict,) = grade_tests.grade_tests(job, tests, SandboxLimits(), False)
        is_long_range = "a range over more" in verdict[1] and "range(" in repr(value)
        assert verdict == (True, "ok") or is_long_range, (value, verdict)


def test_random_frames():
    """Half of the frames go to the grading of calls, half to the tester, which could change a
    test's argument.
    """
    words = check_calls(10_000, 1)
    assert min(words[word] for word in ("forged", "wrong", "error")) > 100, words
    words = check_link(10_000, 2)
    assert min(words[word] for word in ("value", "forged", "raised", "changed")) > 100, words


def test_random_values_arrive_as_they_are():
    check_values(1000, 3)


@pytest.mark.usefixtures("bubblewrap")
def test_random_bytes_from_the_candidates_process():
    """A sandboxed adversary sends them: half with the right length prefix, half without."""
    draw = random.Random(4)
    with Sandbox(workers=1, limits=SandboxLimits(wall_s=1, cpu_s=5, total_s=120)) as sandbox:
        for bare in (False, True):
            raw = [
                draw.randbytes(draw.randrange(60)) if bare else frame(draw, draw.randrange(3))
                for _ in range(30)
            ]
            raw = [body if body or not bare else b"\x00" * 9 for body in raw]
            program = make_adversary(raw, bare)
            cases = [([i], "never sent") for i in range(len(raw))]
            asserts = [f"assert f({i}) == 'never sent'" for i in range(len(raw))]
            for tests in (Calls("f", cases), Asserts("", asserts, "f")):
                grade = sandbox.grade(program, tests)
                assert len(grade.passed) == len(raw) and not any(grade.passed)
                words = Counter(reason.split(":")[0] for reason in grade.reasons)
                assert words.keys() <= {"forged", "wrong", "error", "output", "timeout"}, words
                assert words["output" if bare else "forged"] > 3, words
