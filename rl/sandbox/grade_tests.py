"""Run a candidate's tests of each kind and yield verdicts (passed, reason)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rl.errors import UserError
from rl.sandbox.compare_values import COMPARERS
from rl.sandbox.inside import reply_parser, value_codec
from rl.sandbox.inside.message_framing import JsonObject
from rl.sandbox.inside.value_display import show
from rl.sandbox.program_language import LANGUAGES, find_command
from rl.sandbox.sandbox_types import (
    Asserts,
    Calls,
    Compare,
    Pytest,
    SandboxLimits,
    StdinStdoutTests,
    Tests,
)
from rl.sandbox.worker_pool import WorkerJob
from rl.sandbox.zygote_launch import find_pytest_folder

T = TypeVar("T")
Verdict = tuple[bool, str]
_BUILD_SECONDS = 30.0
_END_REPLY_SECONDS = 10.0
# Total length of the ranges in a decoded value, outside of the sandbox
MAX_RANGE_LENGTH = 1 << 24
_IMPORT_SECONDS = 10.0  # of pytest, before its first verdict


def count_tests(tests: Tests) -> int:
    """Return the number of tests; 0 for pytest, which counts them itself."""
    if isinstance(tests, Pytest):
        return 0
    return len(tests.asserts if isinstance(tests, Asserts) else tests.cases)


def grade_tests(
    job: WorkerJob, tests: Tests, limits: SandboxLimits, early_stop: bool
) -> Iterator[Verdict]:
    """Yield the verdicts of all tests in order; fewer after an early stop."""
    if isinstance(tests, Asserts):
        return grade_asserts(job, tests, limits, early_stop)
    if isinstance(tests, StdinStdoutTests):
        return grade_dialogues(job, tests, limits)
    if isinstance(tests, Calls):
        return grade_calls(job, tests, limits)
    return grade_pytest(job, tests, limits, early_stop)


def build_case_message(
    language: str, stdin: str, limits: SandboxLimits, clean: bool = False
) -> JsonObject:
    """Return the message that runs a program from start to end."""
    about = LANGUAGES[language]
    return {
        "do": "case",
        "mode": "exec" if about.start else "script",
        "stdin": stdin,
        "wall_s": limits.wall_s,
        "clean": clean,
        "argv": _fill_command(language, about.start),
        "address_space": about.address_space,
    }


def _fill_command(language: str, words: Sequence[str]) -> list[str]:
    return [word.replace("{tool}", find_command(language)) for word in words]


def compile_program(job: WorkerJob, language: str, limits: SandboxLimits) -> JsonObject | None:
    """Compile the program of a compiled language. Return the reply if that failed, else None."""
    about = LANGUAGES[language]
    if not about.build:
        return None
    message = build_case_message(language, "", limits)
    message |= {"argv": _fill_command(language, about.build), "address_space": False}
    seconds = min(_BUILD_SECONDS, limits.total_s)
    reply = job.request({**message, "wall_s": seconds}, seconds)
    return None if reply["code"] == 0 and not reply["ended_by"] else reply


def grade_dialogues(
    job: WorkerJob, tests: StdinStdoutTests, limits: SandboxLimits
) -> Iterator[Verdict]:
    """Yield a verdict for each (stdin, expected stdout). The time to compile counts too."""
    cases = iter_timed(enumerate(tests.cases), limits)
    built = compile_program(job, tests.language, limits)
    for (number, (stdin, expected)), wall_s in cases:
        if wall_s <= 0:
            yield make_late_verdict(limits)
            continue
        if built is not None:
            yield False, f"load: it does not compile: {built['stderr'][:300]}"
            continue
        message = build_case_message(tests.language, stdin, limits, clean=number > 0)
        reply = job.request({**message, "wall_s": wall_s}, wall_s)
        yield _failed_verdict(reply, limits, wall_s) or compare_values(
            tests.compare, reply["stdout"], expected
        )


def grade_calls(job: WorkerJob, tests: Calls, limits: SandboxLimits) -> Iterator[Verdict]:
    """Yield a verdict for each call. Raises UserError if arguments are not plain data."""
    for (arguments, expected), wall_s in iter_timed(tests.cases, limits):
        if wall_s <= 0:
            yield make_late_verdict(limits)
            continue
        request: JsonObject = {"do": "call", "name": tests.function}
        try:
            named = arguments if isinstance(arguments, Mapping) else {}
            request["named"] = {str(key): value_codec.encode(v) for key, v in named.items()}
            plain = [] if isinstance(arguments, Mapping) else arguments
            request["arguments"] = [value_codec.encode(item) for item in plain]
        except value_codec.NotPlain as error:
            raise UserError(
                f"arguments of {tests.function} must be plain data "
                f"(numbers, texts, lists, ...): {error}"
            ) from error
        reply = job.request({"do": "call", "request": request, "wall_s": wall_s}, wall_s)
        verdict = _failed_verdict(reply, limits, wall_s, serving=True)
        if verdict is None:
            try:
                message = reply_parser.parse(reply["reply"])
                answer = reply_parser.read_answer(message, reply["number"], len(plain))
                verdict = _grade_answer(answer, tests.compare, expected)
            except reply_parser.ForgedMessageError as error:
                # the next call gets another candidate
                job.request({"do": "end"}, _END_REPLY_SECONDS)
                verdict = False, f"forged: {show(str(error), 300)}"
        yield verdict


def _grade_answer(
    answer: reply_parser.ResultReply | reply_parser.ErrorReply,
    compare: Compare,
    expected: Any,
) -> Verdict:
    """Return the verdict of an answer. Raises ForgedMessageError if the value is not encoded
    properly.
    """
    if isinstance(answer, reply_parser.ErrorReply):
        return False, f"error: {answer.text[:300]}"
    try:
        value = value_codec.decode(answer.value, longest_range=MAX_RANGE_LENGTH)
        # The arguments are unused, but decoding them detects forged messages.
        for item in answer.arguments or []:
            value_codec.decode(item)
    except value_codec.NotPlain as error:
        return False, f"wrong: no plain data ({str(error)[:200]})"
    return compare_values(compare, value, expected)


def compare_values(compare: Compare, value: Any, expected: Any) -> Verdict:
    """Return the verdict of a comparer. A comparer that raises fails the test."""
    comparer = COMPARERS[compare] if isinstance(compare, str) else compare
    try:
        ok = bool(comparer(value, expected))
    # boundary: the caller's function, or a value that cannot be compared
    except Exception as error:
        return False, f"error: the comparer: {type(error).__name__}: {str(error)[:300]}"
    return (True, "ok") if ok else (False, f"wrong: {show(value)!r}")


def iter_timed(cases: Iterable[T], limits: SandboxLimits) -> Iterator[tuple[T, float]]:
    """Yield each case with the seconds that its test may take: at most 0 after the time of all
    tests, which begins with this call.
    """
    until = time.monotonic() + limits.total_s
    return ((case, min(limits.wall_s, until - time.monotonic())) for case in cases)


def make_late_verdict(limits: SandboxLimits) -> Verdict:
    return False, f"timeout: all tests together took longer than {limits.total_s:g} s"


def _failed_verdict(
    reply: JsonObject, limits: SandboxLimits, wall_s: float, serving: bool = False
) -> Verdict | None:
    """Return a failed verdict if a program did not end as its test requires, else None. `wall_s`:
    the seconds that the test had.
    """
    if "ended" not in reply:
        return None
    by = reply["ended_by"]
    if by == "load":
        return False, f"load: {reply.get('text', '')}"
    if by == "timeout" and wall_s < limits.wall_s:
        return make_late_verdict(limits)
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


def grade_asserts(
    job: WorkerJob, tests: Asserts, limits: SandboxLimits, early_stop: bool
) -> Iterator[Verdict]:
    """Yield a verdict for each assert.

    A tester runs until it or the candidate is lost; then another tester takes the next test.
    """
    until = time.monotonic() + limits.total_s
    message = {
        "do": "tests",
        "setup": tests.setup,
        "tests": list(tests.asserts),
        "entries": tests.list_entry_points(),
        "program_names": [tests.entry_point] if tests.entry_point is not None else [],
        "early_stop": early_stop,
    }
    done, count = 0, len(tests.asserts)
    while done < count:
        remaining = until - time.monotonic()
        if remaining <= 0:
            yield make_late_verdict(limits)
            done += 1
            continue
        reply = job.request(
            {**message, "from": done, "wall_s": limits.wall_s, "total_s": remaining}, remaining
        )
        verdicts = _read_verdicts(reply, limits)[: count - done]
        yield from verdicts
        done += len(verdicts)


def grade_pytest(
    job: WorkerJob, tests: Pytest, limits: SandboxLimits, early_stop: bool
) -> Iterator[Verdict]:
    """Yield a verdict for each test that pytest collected; a failed verdict if it collected none.

    A lost candidate fails the running test and all later tests. Raises UserError if pytest is not
    installed.
    """
    if find_pytest_folder() is None:
        raise UserError("tests of pytest need pytest, which is not installed: pip install pytest")
    message = {
        "do": "tests",
        "files": dict(tests.files),
        "module": tests.module,
        "early_stop": early_stop,
    }
    reply = job.request(
        {**message, "wall_s": limits.wall_s + _IMPORT_SECONDS, "total_s": limits.total_s},
        limits.total_s,
    )
    verdicts = _read_verdicts(reply, limits)
    rest = "skipped" if early_stop else "error: not run"
    if reply["ended_by"]:
        rest = f"{verdicts[-1][1].partition(':')[0]}: not run, the program had ended"
    yield from verdicts
    yield from [(False, rest)] * (reply["collected"] - len(verdicts))


def _read_verdicts(reply: JsonObject, limits: SandboxLimits) -> list[Verdict]:
    """Return the verdicts of a tester, with a failed one for the test that ended it or the
    candidate.
    """
    verdicts = [(bool(ok), str(reason)) for ok, reason in reply["verdicts"]]
    if reply["ended_by"]:
        by = "" if reply["ended_by"] == "tester" else reply["ended_by"]
        failed = _failed_verdict({**reply, "ended_by": by}, limits, limits.wall_s, serving=True)
        verdicts.append(failed or (False, "error: no verdict"))
    return verdicts
