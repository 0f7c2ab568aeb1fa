"""Rewards for programs, which run in a sandbox (rl.sandbox): `code_tests` by tests, `code_output`
by what a program prints.

The reward runs in a worker process as others do, and each worker has a sandbox of its own: what
hangs costs its program, not the run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rl.errors import UserError
from rl.rewards.registry import RewardResult, Starts, register_reward
from rl.rewards.text import expected_answer

if TYPE_CHECKING:
    from rl.sandbox import Grade, Sandbox, Tests

Score = Literal["all", "fraction"]
Block = Literal["fenced", "any"]
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_NAMES = {  # what a block may be called in each language
    "python": ("python", "py", "python3", ""),
    "c++": ("cpp", "c++", "cc", ""),
    "bash": ("bash", "sh", "shell", ""),
    "javascript": ("javascript", "js", "node", ""),
}
_KEYS = {
    "asserts": ({"asserts"}, {"setup", "entry_point"}),
    "dialogues": ({"cases"}, {"compare"}),
    "calls": ({"function", "cases"}, {"compare"}),
    "pytest": ({"files"}, set()),
}


class _Programs(Starts):
    """What rewards of programs share: their settings, and the sandbox, which is made where it is
    first needed.

    score: "all" gives 1 where every test passes, "fraction" the share that do. block: "fenced"
    takes the last ``` block of a response and charges 0.1 where there is none; "any" takes a
    response without one as it is. sandbox: its kind ("auto": the strongest that this host has).
    seconds: of all tests of an answer together; one has three quarters of them. packages: that
    programs may import besides the standard library (None: numpy where it is installed).
    """

    def __init__(
        self,
        *,
        score: Score = "all",
        block: Block = "fenced",
        sandbox: str = "auto",
        seconds: float = 8.0,
        packages: Sequence[str] | None = None,
    ):
        if score not in ("all", "fraction"):
            raise UserError(f"score is 'all' or 'fraction', got {score!r}")
        if block not in ("fenced", "any"):
            raise UserError(f"block is 'fenced' or 'any', got {block!r}")
        if not seconds > 0:
            raise UserError(f"seconds is a positive number, got {seconds}")
        self.score, self.block, self.mode, self.seconds, self.packages = (
            score,
            block,
            sandbox,
            seconds,
            packages,
        )
        self._sandbox: Sandbox | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sandbox": None}  # a worker makes its own

    def begin(self) -> None:
        """Where it is to run, before its first item, whose time limit the sandbox's own start is no
        part of.
        """
        self.sandbox()

    def sandbox(self) -> Sandbox:
        """Raises UserError where this host has none of the kind, with the remedy."""
        if self._sandbox is None:
            self._sandbox = make_sandbox(self.mode, self.seconds, self.packages)
        return self._sandbox

    def graded(self, program: str | None, tests: Tests) -> RewardResult:
        """The reward of a program, None where the response has none."""
        has_format, correct, passed = float(program is not None), 0.0, 0.0
        if program is not None and program.strip():
            found = self._grade(program, tests)
            correct, passed = float(found.all), found.fraction
        if self.score == "all":
            return RewardResult(
                correct + 0.1 * (has_format - 1.0), {"correct": correct, "format": has_format}
            )
        return RewardResult(
            passed + 0.1 * (has_format - 1.0),
            {"correct": correct, "format": has_format, "tests_passed": passed},
        )

    def _grade(self, program: str, tests: Tests) -> Grade:
        """Its verdicts; a second time where the sandbox itself was lost. A program that loses it
        twice fails.
        """
        found = self.sandbox().grade(program, tests, early_stop=self.score == "all")
        if any(reason.startswith("lost") for reason in found.reasons):
            found = self.sandbox().grade(program, tests, early_stop=self.score == "all")
        return found


@register_reward("code_tests", reports=("correct", "format"))
class CodeTests(_Programs):
    """What a program earns by meta["tests"]: asserts, dialogues over stdin and stdout, calls of a
    function, or files for pytest.

    A list of texts is a list of asserts (MBPP's test_list). Other forms are named: {"style":
    "asserts", "asserts": [...], "setup": "", "entry_point": None}, {"style": "dialogues", "cases":
    [[stdin, stdout], ...]}, {"style": "calls", "function": "f", "cases": [[arguments, result],
    ...]}, {"style": "pytest", "files": {name: text}}; as JSON text too. meta["head"]: what stands
    before the body of a function (HumanEval); its other functions are the tests' setup, unless the
    tests have one. Metrics: correct (every test), format (a program was found), and for "fraction"
    tests_passed, the share.
    """

    def __call__(
        self, prompt: str, response: str, meta: Mapping[str, Any] | None = None
    ) -> RewardResult:
        from rl.sandbox import Asserts, helpers_of

        language = language_of(meta)
        try:
            tests, name = tests_of(meta, language)
        except ValueError as error:
            raise UserError(str(error)) from error
        program = program_in(response, self.block, language)
        head = (meta or {}).get("head")
        if isinstance(head, str) and name is not None:
            program = None if program is None else completed(head, program, name)
            if isinstance(tests, Asserts) and not tests.setup:
                tests = dataclasses.replace(tests, setup=helpers_of(head, name))
        return self.graded(program, tests)


@register_reward("code_output", reports=("correct", "format"))
class CodeOutput(_Programs):
    """1 where the program prints meta["answer"] (or meta["expected_output"]), given meta["stdin"]
    if there is any.

    White space at the ends of lines and of the whole does not count. Metrics as of code_tests.
    """

    def __call__(
        self, prompt: str, response: str, meta: Mapping[str, Any] | None = None
    ) -> RewardResult:
        from rl.sandbox import Dialogues

        meta = meta or {}
        wanted = (
            meta["expected_output"]
            if meta.get("expected_output") is not None
            else expected_answer(meta)
        )
        language = language_of(meta)
        tests = Dialogues([(str(meta.get("stdin") or ""), str(wanted))], "trimmed", language)
        return self.graded(program_in(response, self.block, language), tests)


def make_sandbox(mode: str, seconds: float, packages: Sequence[str] | None = None) -> Sandbox:
    """A sandbox for one program at a time. Raises UserError where this host has none of the kind,
    with the remedy.
    """
    from rl.sandbox import Limits, Sandbox

    limits = Limits(wall_s=0.75 * seconds, cpu_s=0.75 * seconds, total_s=seconds)
    return Sandbox(mode=mode, limits=limits, workers=1, packages=packages)


def language_of(meta: Mapping[str, Any] | None) -> str:
    """meta["language"] by the sandbox's name for it ("cpp" is c++); python where it is not said."""
    said = str((meta or {}).get("language") or "python").lower()
    return next((language for language, names in _NAMES.items() if said in names), said)


def program_in(response: str, block: Block, language: str = "python") -> str | None:
    """The last whole fenced block of this language (or of none named); else the response itself for
    "any", None for "fenced".
    """
    names = _NAMES.get(language, (language, ""))
    response = response.removeprefix("\ufeff")
    found: str | None = None
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        if opened is None:
            opened = fence
        elif fence.group(1).startswith(opened.group(1)) and not fence.group(2):
            if opened.group(2).lower() in names:
                found = response[opened.end() + 1 : fence.start()].removeprefix("\ufeff")
            opened = None
    if found is not None or block == "fenced":
        return found
    return response if opened is None else None  # a block that was cut off is no program


def completed(head: str, program: str, name: str) -> str:
    """The whole of a program that may be the body of the function `name` alone, whose head (with
    imports and helpers) stands in `head`.
    """
    defines = re.compile(rf"^(?:async )?def {re.escape(name)}\b", re.MULTILINE)
    if defines.search(program):
        begin = defines.search(head)
        return f"{head[: begin.start()] if begin else head}\n{program}"
    lines = program.strip("\n").splitlines()
    if lines and not lines[0].startswith((" ", "\t")):
        lines = ["    " + line for line in lines]
    end = next(
        (i for i, line in enumerate(lines) if line.strip() and not line.startswith((" ", "\t"))),
        len(lines),
    )
    return head + "\n".join(lines[:end]) + "\n"


def tests_of(meta: Mapping[str, Any] | None, language: str = "python") -> tuple[Tests, str | None]:
    """meta["tests"] as rl.sandbox has them, and the function they are about where that is said.
    Raises ValueError naming what is wrong.
    """
    from rl.sandbox import Asserts, Calls, Dialogues, Pytest

    found = None if meta is None else meta.get("tests", meta.get("test_list"))
    if found is None:
        raise ValueError(
            f"the problem has nothing to test by: meta needs 'tests' (a list of asserts, say), it has {sorted(meta or {})}"
        )
    if isinstance(found, str):
        found = _parsed(found)
    if isinstance(found, (list, tuple)):
        found = {"style": "asserts", "asserts": list(found)}
    if not isinstance(found, Mapping) or found.get("style") not in _KEYS:
        raise ValueError(
            f"meta['tests'] is a list of asserts or has a style ({', '.join(_KEYS)}), this is {str(found)[:80]!r}"
        )
    style = found["style"]
    needed, also = _KEYS[style]
    here = found.keys() - {"style"}
    if needed - here or here - needed - also:
        raise ValueError(
            f"meta['tests'] of style {style} has {', '.join(sorted(needed | also))}; this has {', '.join(sorted(here))}"
        )
    if language != "python" and style != "dialogues":
        raise ValueError(
            f"meta['tests'] of style {style} is for Python, meta['language'] is {language!r}: dialogues are for any language"
        )
    given = {key: found[key] for key in here}
    if style == "asserts":
        if not given["asserts"] or not all(isinstance(line, str) for line in given["asserts"]):
            raise ValueError(
                f"meta['tests'] has one assert or more, each a text; this has {str(given['asserts'])[:80]!r}"
            )
        return Asserts(
            given.get("setup") or "", list(given["asserts"]), given.get("entry_point")
        ), given.get("entry_point")
    if style == "pytest":
        return Pytest(dict(given["files"])), None
    cases = given["cases"]
    if not cases or not all(isinstance(case, (list, tuple)) and len(case) == 2 for case in cases):
        raise ValueError(
            f"meta['tests'] has cases, each of an input and what is expected; this has {str(cases)[:80]!r}"
        )
    pairs = [(given, wanted) for given, wanted in cases]
    if style == "dialogues":
        return Dialogues(pairs, found.get("compare", "tokens"), language), None
    return Calls(given["function"], pairs, found.get("compare", "exact")), given["function"]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return [text]  # a single assert
