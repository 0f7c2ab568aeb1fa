"""Run a candidate's tests of each kind and yield verdicts (passed, reason)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rl.errors import UserError
from rl.sandbox.compare import COMPARERS
from rl.sandbox.inside import replies, values
from rl.sandbox.inside.display import show
from rl.sandbox.languages import LANGUAGES, command_of
from rl.sandbox.launch import PACKAGES
from rl.sandbox.results import Limits
from rl.sandbox.slots import Job
from rl.sandbox.styles import Asserts, Calls, Compare, Dialogues, Pytest, Tests

Verdict = tuple[bool, str]
_BUILD_SECONDS = 30.0
_END_SECONDS = 10.0
# Total length of the ranges in a decoded value, outside of the sandbox
LONGEST_RANGE = 1 << 24
_IMPORT_SECONDS = 10.0  # of pytest, before its first verdict


def count_of(tests: Tests) -> int:
    """Return the number of tests; 0 for pytest, which counts them itself."""
    if isinstance(tests, Asserts):
        return len(tests.asserts)
    if isinstance(tests, Pytest):
        return 0  # pytest counts them
    return len(tests.cases)


def verdicts(job: Job, tests: Tests, limits: Limits, early_stop: bool) -> Iterator[Verdict]:
    """Yield the verdicts of all tests in order; fewer after an early stop."""
    if isinstance(tests, Asserts):
        return asserts(job, tests, limits, early_stop)
    if isinstance(tests, Dialogues):
        return dialogues(job, tests, limits)
    if isinstance(tests, Calls):
        return calls(job, tests, limits)
    return pytest(job, tests, limits, early_stop)


def case(language: str, stdin: str, limits: Limits, clean: bool = False) -> dict[str, Any]:
    """Return the message that runs a program from start to end."""
    about = LANGUAGES[language]
    message: dict[str, Any] = {
        "do": "case",
        "mode": "script",
        "stdin": stdin,
        "wall_s": limits.wall_s,
        "clean": clean,
    }
    if about.start:
        argv = [word.replace("{tool}", command_of(language)) for word in about.start]
        message |= {
            "mode": "exec",
            "argv": argv,
            "address_space": about.address_space,
            "environment": about.environment,
        }
    return message


def build(job: Job, language: str, limits: Limits) -> dict[str, Any] | None:
    """Compile the program of a compiled language. Return the reply if that failed, else None."""
    about = LANGUAGES[language]
    if not about.build:
        return None
    argv = [word.replace("{tool}", command_of(language)) for word in about.build]
    message = {
        **case(language, "", limits),
        "argv": argv,
        "address_space": False,
        "wall_s": _BUILD_SECONDS,
    }
    reply = job.ask(message, _BUILD_SECONDS)
    return None if reply["code"] == 0 and not reply["by"] else reply


def dialogues(job: Job, tests: Dialogues, limits: Limits) -> Iterator[Verdict]:
    """Yield a verdict for each (stdin, expected stdout)."""
    built = build(job, tests.language, limits)
    until = time.monotonic() + limits.total_s
    for number, (stdin, expected) in enumerate(tests.cases):
        if built is not None:
            yield False, f"load: it does not compile: {built['stderr'][:300]}"
        elif time.monotonic() >= until:
            yield False, f"timeout: all tests together took longer than {limits.total_s:g} s"
        else:
            reply = job.ask(case(tests.language, stdin, limits, clean=number > 0), limits.wall_s)
            yield _ended(reply, limits) or compared(tests.compare, reply["stdout"], expected)


def calls(job: Job, tests: Calls, limits: Limits) -> Iterator[Verdict]:
    """Yield a verdict for each call. Raises UserError if arguments are not plain data."""
    until = time.monotonic() + limits.total_s
    for arguments, expected in tests.cases:
        if time.monotonic() >= until:
            yield False, f"timeout: all tests together took longer than {limits.total_s:g} s"
            continue
        request: dict[str, Any] = {"do": "call", "name": tests.function}
        try:
            if isinstance(arguments, Mapping):
                request["named"] = {
                    str(key): values.encode(item) for key, item in arguments.items()
                }
            else:
                request["arguments"] = [values.encode(item) for item in arguments]
        except values.NotPlain as error:
            raise UserError(
                f"arguments of {tests.function} must be plain data "
                f"(numbers, texts, lists, ...): {error}"
            ) from error
        reply = job.ask({"do": "call", "request": request, "wall_s": limits.wall_s}, limits.wall_s)
        verdict = _ended(reply, limits, serving=True)
        if verdict is None:
            count = 0 if isinstance(arguments, Mapping) else len(arguments)
            try:
                answer = replies.read_answer(replies.parse(reply["reply"]), reply["number"], count)
                verdict = _answered(answer, tests.compare, expected)
            except replies.Forged as error:
                job.ask({"do": "end"}, _END_SECONDS)  # the next call gets another candidate
                verdict = False, f"forged: {show(str(error), 300)}"
        yield verdict


def _answered(
    answer: replies.Returned | replies.Raised, compare: Compare, expected: Any
) -> Verdict:
    """Return the verdict of an answer. Raises Forged if the value is not encoded properly."""
    if isinstance(answer, replies.Raised):
        return False, f"error: {answer.text[:300]}"
    try:
        value = values.decode(answer.value, longest_range=LONGEST_RANGE)
        # The arguments are unused, but decoding them detects forged messages.
        for item in answer.arguments or []:
            values.decode(item)
    except values.NotPlain as error:
        return False, f"wrong: no plain data ({str(error)[:200]})"
    return compared(compare, value, expected)


def compared(compare: Compare, value: Any, expected: Any) -> Verdict:
    """Return the verdict of a comparer. A comparer that raises fails the test."""
    try:
        ok = bool(
            COMPARERS[compare](value, expected)
            if isinstance(compare, str)
            else compare(value, expected)
        )
    # boundary: the caller's function, or a value that cannot be compared
    except Exception as error:
        return False, f"error: the comparer: {type(error).__name__}: {str(error)[:300]}"
    return (True, "ok") if ok else (False, f"wrong: {show(value)!r}")


def _ended(reply: dict[str, Any], limits: Limits, serving: bool = False) -> Verdict | None:
    """Return a failed verdict if a program did not end as its test requires, else None."""
    if "ended" not in reply:
        return None
    by = reply["by"]
    if by == "load":
        return False, f"load: {reply.get('text', '')}"
    if by:
        detail = {
            "timeout": f"longer than {limits.wall_s:g} s",
            "memory": f"more than {limits.memory_mb} MB",
            "output": f"more than {limits.output_kb} KB",
            "forged": "a message that no program's server sends",
        }.get(by, "")
        return False, f"{by}: {detail}"
    if reply["signal"] is not None:
        return False, f"signal: {reply['signal']}"
    if serving:
        return False, "exit: the program exited"
    if reply["code"] != 0:
        return False, f"error: exit code {reply['code']}: {reply['stderr'][-300:]}"
    return None


def asserts(job: Job, tests: Asserts, limits: Limits, early_stop: bool) -> Iterator[Verdict]:
    """Yield a verdict for each assert.

    A tester runs until it or the candidate is lost; then another tester takes the next test.
    """
    until = time.monotonic() + limits.total_s
    owned = [tests.entry_point] if tests.entry_point is not None else []
    message = {
        "do": "tests",
        "setup": tests.setup,
        "tests": list(tests.asserts),
        "entries": tests.entries(),
        "owned": owned,
        "early_stop": early_stop,
    }
    done, count = 0, len(tests.asserts)
    while done < count:
        remaining = until - time.monotonic()
        if remaining <= 0:
            yield False, f"timeout: all tests together took longer than {limits.total_s:g} s"
            done += 1
            continue
        reply = job.ask(
            {**message, "from": done, "wall_s": limits.wall_s, "total_s": remaining}, remaining
        )
        for ok, reason in reply["verdicts"]:
            yield bool(ok), str(reason)
        done += len(reply["verdicts"])
        if reply["by"] and done < count:  # the test after the last verdict ended it
            by = "" if reply["by"] == "tester" else reply["by"]
            yield _ended({**reply, "by": by}, limits, serving=True) or (False, "error: no verdict")
            done += 1


def pytest(job: Job, tests: Pytest, limits: Limits, early_stop: bool) -> Iterator[Verdict]:
    """Yield a verdict for each test that pytest collected; a failed verdict if it collected none.

    A lost candidate fails the running test and all later tests.
    """
    message = {
        "do": "tests",
        "files": dict(tests.files),
        "module": tests.module,
        "packages": PACKAGES,
        "early_stop": early_stop,
    }
    reply = job.ask(
        {**message, "wall_s": limits.wall_s + _IMPORT_SECONDS, "total_s": limits.total_s},
        limits.total_s,
    )
    passed = [(bool(ok), str(reason)) for ok, reason in reply["verdicts"]]
    rest = "skipped" if early_stop else "error: not run"
    if reply["by"]:
        by = "" if reply["by"] == "tester" else reply["by"]
        passed.append(
            _ended({**reply, "by": by}, limits, serving=True) or (False, "error: no verdict")
        )
        rest = f"{passed[-1][1].partition(':')[0]}: not run, the program had ended"
    yield from passed
    yield from [(False, rest)] * (reply["collected"] - len(passed))
