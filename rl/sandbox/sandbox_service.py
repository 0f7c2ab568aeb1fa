"""Run programs on a sandbox service with SandboxFusion's `POST /run_code`.

The service provides the isolation. Expected values stay in this process.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import http.client
import json
import operator
import secrets
import time
import urllib.request
from collections.abc import Iterator, Mapping

from rl.errors import UserError
from rl.sandbox.grade_tests import (
    MAX_RANGE_LENGTH,
    Verdict,
    compare_values,
    iter_timed,
    make_late_verdict,
)
from rl.sandbox.inside import reply_parser, value_codec
from rl.sandbox.inside.value_display import make_printable
from rl.sandbox.sandbox_types import (
    Asserts,
    Calls,
    ProgramRun,
    SandboxLimits,
    StdinStdoutTests,
    Tests,
)
from rl.sandbox.worker_pool import SandboxLost

_LANGUAGES = {"python": "python", "c++": "cpp", "bash": "bash", "javascript": "nodejs"}
_NETWORK_SECONDS = 10.0
# Appended to the program: calls its function for each case and prints the result as JSON after a
# nonce of this run. It finds the function as `candidate.Server` does.
_DRIVER = """
import json as _json
def _plain(x):
    if isinstance(x, int) and type(x) is not bool and not -(2**63) < x < 2**63:
        return ["i", hex(x)]
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, (list, tuple)):
        return ["t" if isinstance(x, tuple) else "l", *map(_plain, x)]
    if isinstance(x, dict):
        return ["d", *[_plain(y) for pair in x.items() for y in pair]]
    if isinstance(x, (set, frozenset)):
        return ["s", *map(_plain, x)]
    raise TypeError(type(x).__name__)
def _find(name):
    first, *rest = name.split(".")
    space = globals()
    if first not in space and "Solution" in space:
        result = getattr(space["Solution"](), first)
    elif first in space:
        result = space[first]
    else:
        raise NameError("name " + repr(first) + " is not defined")
    for part in rest:
        result = getattr(result() if isinstance(result, type) else result, part)
    return result
for _arguments, _named in {cases!r}:
    try:
        _value = _plain(_find({function!r})(*_arguments, **_named))
        print("\\n{nonce}" + _json.dumps({{"value": _value}}))
    except Exception as _error:
        print("\\n{nonce}" + _json.dumps({{"raised": repr(_error)[:300]}}))
"""


class SandboxService:
    """Hold the URL of a sandbox service."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.kind = f"service at {self.url}"

    def probe(self) -> None:
        """Raise UserError if the service does not run a program."""
        try:
            run = self.run("print(6 * 7)", "python", "", {}, SandboxLimits())
        except SandboxLost as error:
            raise UserError(
                f"the sandbox service {self.url} does not answer: {error}. Is it up, and does it "
                "speak POST /run_code?"
            ) from error
        if run.stdout.strip() != "42":
            raise UserError(
                f"the sandbox service {self.url} does not run Python: print(6 * 7) gave "
                f"{run.stdout[:200]!r} {run.stderr[:200]!r}, expected 42"
            )

    def run(
        self,
        program: str,
        language: str,
        stdin: str,
        files: Mapping[str, str],
        limits: SandboxLimits,
    ) -> ProgramRun:
        """Run a program. Raises SandboxLost if the service gives no valid response."""
        if language not in _LANGUAGES:
            raise UserError(f"language {language!r} is unknown, expected: {', '.join(_LANGUAGES)}")
        payload = {
            "code": program,
            "language": _LANGUAGES[language],
            "stdin": stdin,
            "files": {
                name: base64.b64encode(text.encode()).decode() for name, text in files.items()
            },
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
        }
        request = urllib.request.Request(
            f"{self.url}/run_code",
            json.dumps(payload).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.monotonic()
        try:
            with urllib.request.urlopen(
                request, timeout=limits.wall_s + _NETWORK_SECONDS
            ) as answer:
                response = json.loads(answer.read())
            ran = response.get("run_result") or response.get("compile_result") or {}
            status, code = str(ran.get("status", response.get("status"))), ran.get("return_code")
            out = str(ran.get("stdout") or "")
            err = str(ran.get("stderr") or response.get("message") or "")
            seconds = float(ran.get("execution_time") or time.monotonic() - start)
        # urllib.error.URLError is an OSError
        except (OSError, http.client.HTTPException, ValueError, AttributeError, TypeError) as error:
            raise SandboxLost(f"{type(error).__name__}: {error}") from error
        late = "TimeLimit" in status
        code = None if late or not isinstance(code, int) else code
        out, err = make_printable(out, limits.output_kb << 10), make_printable(err)
        return ProgramRun(out, err, code, None, late, "timeout" if late else "", seconds, seconds)

    def grade_tests(self, program: str, tests: Tests, limits: SandboxLimits) -> Iterator[Verdict]:
        """Yield the verdict of each test, within `total_s` together."""
        if isinstance(tests, StdinStdoutTests):
            for (stdin, expected), wall_s in iter_timed(tests.cases, limits):
                if wall_s <= 0:
                    yield make_late_verdict(limits)
                    continue
                case_limits = dataclasses.replace(limits, wall_s=wall_s)
                run = self.run(program, tests.language, stdin, {}, case_limits)
                if run.ok:
                    yield compare_values(tests.compare, run.stdout, expected)
                elif run.ended_by:
                    yield False, f"{run.ended_by}:"
                else:
                    yield False, f"error: exit code {run.returncode}: {run.stderr[-300:]}"
            return
        groups = [tests] if isinstance(tests, Calls) else self._convert_asserts(tests)
        for calls, wall_s in iter_timed(groups, limits):
            if wall_s <= 0:
                yield from [make_late_verdict(limits)] * len(calls.cases)
            else:
                calls_limits = dataclasses.replace(limits, wall_s=wall_s)
                yield from self._grade_calls(program, calls, calls_limits)

    def _grade_calls(self, program: str, tests: Calls, limits: SandboxLimits) -> Iterator[Verdict]:
        nonce = secrets.token_hex(16)
        cases = [
            ([], dict(arguments)) if isinstance(arguments, Mapping) else (list(arguments), {})
            for arguments, _ in tests.cases
        ]
        driver = _DRIVER.format(cases=cases, nonce=nonce, function=tests.function)
        run = self.run(program + driver, "python", "", {}, limits)
        printed = [line[len(nonce) :] for line in run.stdout.splitlines() if line.startswith(nonce)]
        for number, (_, expected) in enumerate(tests.cases):
            if number >= len(printed) or len(printed) > len(tests.cases):
                yield False, f"{run.ended_by or 'error'}: {run.stderr[-300:]}"
                continue
            verdict = False, f"error: {printed[number][:300]}"
            try:
                reply = reply_parser.parse(printed[number])
                if "value" in reply:
                    value = value_codec.decode(reply["value"], longest_range=MAX_RANGE_LENGTH)
                    verdict = compare_values(tests.compare, value, expected)
            except (reply_parser.ForgedMessageError, value_codec.NotPlain):
                verdict = False, f"forged: {printed[number][:300]}"
            yield verdict

    def _convert_asserts(self, tests: Tests) -> list[Calls]:
        """Convert asserts of the form `assert f(literals) == literal` to Calls: the service runs
        the calls, this process compares.
        """
        if not isinstance(tests, Asserts) or tests.setup.strip():
            raise UserError(
                "a service takes dialogues, calls and asserts `f(literals) == literal`; "
                f"{type(tests).__name__} of another form need a local sandbox"
            )
        calls = []
        for text in tests.asserts:
            try:
                name, arguments, right = _parse_equality(text)
                case = ([ast.literal_eval(item) for item in arguments], ast.literal_eval(right))
            except (ValueError, SyntaxError) as error:
                raise UserError(
                    "a service takes asserts `f(literals) == literal`; this assert needs a local "
                    f"sandbox: {text[:200]!r}"
                ) from error
            calls.append(Calls(name, [case], operator.eq))
        return calls


def _parse_equality(text: str) -> tuple[str, list[ast.expr], ast.expr]:
    """Return name, arguments and right side of `assert name(arguments) == right`. Raises ValueError
    or SyntaxError for any other text.
    """
    match ast.parse(text).body:
        case [
            ast.Assert(ast.Compare(ast.Call(ast.Name(name), arguments, []), [ast.Eq()], [right]))
        ]:
            return name, arguments, right
    raise ValueError("another form of assert")
