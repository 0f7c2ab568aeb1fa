"""Score programs in a sandbox (rl.sandbox): `code_tests` by tests, `code_output` by their output.

Like other rewards, these run in a worker process. Each worker has its own sandbox, so a program
that hangs affects only its own score, not the run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rl.errors import UserError
from rl.rewards.reward_calls import Meta, make_formatted_result
from rl.rewards.reward_registry import ResourceReward, RewardResult, register_reward
from rl.rewards.text import expected_answer

if TYPE_CHECKING:
    from rl.sandbox import Sandbox, Tests

ScoreMode = Literal["all", "fraction"]
BlockMode = Literal["fenced", "any"]
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<mark>`{3,}|~{3,})[ \t]*(?P<tag>[\w+#.-]*)[^\n]*$", re.MULTILINE
)
_LANGUAGE_NAMES = {  # accepted code block tags of each language
    "python": ("python", "py", "python3", ""),
    "c++": ("cpp", "c++", "cc", ""),
    "bash": ("bash", "sh", "shell", ""),
    "javascript": ("javascript", "js", "node", ""),
}
# Starter code of LiveCodeBench and APPS names these types without an import, as LeetCode allows.
_TYPES = "from typing import Any, Dict, List, Optional, Set, Tuple, Union\n"
_TEST_KEYS = {
    "asserts": ({"asserts"}, {"setup", "entry_point"}),
    "dialogues": ({"cases"}, {"compare"}),
    "calls": ({"function", "cases"}, {"compare"}),
    "pytest": ({"files"}, set()),
}


class _ProgramReward(ResourceReward):
    """Hold the settings and the sandbox that all program rewards share.

    The sandbox is created on first use. score: "all" gives 1 if every test passes, "fraction" the
    share of tests that pass. block: "fenced" takes the last ``` block of a response and subtracts
    0.1 if it has none; "any" also takes a response without a block as the program. sandbox: its
    kind ("auto": the strongest that this host supports). seconds: time limit of all tests of an
    answer together; a single test has three quarters of it. packages: packages that programs may
    import besides the standard library (None: numpy if it is installed).
    """

    def __init__(
        self,
        *,
        score: ScoreMode = "all",
        block: BlockMode = "fenced",
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
        self.score, self.block, self.sandbox_mode = score, block, sandbox
        self.seconds, self.packages = seconds, packages
        self._sandbox: Sandbox | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sandbox": None}  # a worker creates its own sandbox

    def start(self) -> None:
        """Start the sandbox before the first item, so that its start does not count against the
        item's time limit.
        """
        self.sandbox()

    def sandbox(self) -> Sandbox:
        """Return the sandbox, created on first use.

        Raises UserError, with the remedy, if this host does not support the requested kind.
        """
        if self._sandbox is None:
            self._sandbox = make_sandbox(self.sandbox_mode, self.seconds, self.packages)
        return self._sandbox

    def score_program(self, program: str | None, tests: Tests) -> RewardResult:
        """Return the reward of a program; None means that the response contains no program.

        Raises UserError if the sandbox was lost twice: the program was not graded.
        """
        correct = passed = 0.0
        if program is not None and program.strip():
            for _ in range(2):
                grade = self.sandbox().grade(program, tests, early_stop=self.score == "all")
                losses = [reason for reason in grade.reasons if reason.startswith("lost")]
                if not losses:
                    break
            else:
                raise UserError(
                    f"the sandbox ({self.sandbox().kind}) graded a program in neither of two "
                    f"attempts ({losses[0]}): free processes and memory of this host, or check "
                    "the sandbox service"
                )
            correct, passed = float(grade.all), grade.fraction
        if self.score == "all":
            return make_formatted_result(correct, program is not None)
        return make_formatted_result(
            passed, program is not None, correct=correct, tests_passed=passed
        )


@register_reward("code_tests", reports=("correct", "format"))
class CodeTests(_ProgramReward):
    """Score a program by meta["tests"]: asserts, stdin/stdout dialogues, function calls, or pytest
    files.

    A list of strings is a list of asserts (MBPP's test_list). Other forms name their style:
    {"style": "asserts", "asserts": [...], "setup": "", "entry_point": None}, {"style": "dialogues",
    "cases": [[stdin, stdout], ...]}, {"style": "calls", "function": "f", "cases": [[arguments,
    result], ...]}, {"style": "pytest", "files": {name: text}}. Each may also be JSON text.
    meta["head"] is the code before the function's body (HumanEval); its other functions become the
    tests' setup, unless the tests have a setup. With calls, a program may name the types of typing
    without an import. Metrics: correct (every test passes), format (the
    response contains a program), and for "fraction" tests_passed (the share).
    """

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        from rl.sandbox import Asserts, Calls, extract_helpers

        language = get_language(meta)
        try:
            tests, name = parse_tests(meta, language)
        except ValueError as error:
            raise UserError(str(error)) from error
        program = extract_program(response, self.block, language)
        head = (meta or {}).get("head")
        if isinstance(head, str) and name is not None:
            program = None if program is None else complete_program(head, program, name)
            if isinstance(tests, Asserts) and not tests.setup:
                tests = dataclasses.replace(tests, setup=extract_helpers(head, name))
        if isinstance(tests, Calls) and program and "from __future__" not in program:
            program = _TYPES + program
        return self.score_program(program, tests)


@register_reward("code_output", reports=("correct", "format"))
class CodeOutput(_ProgramReward):
    """Score 1 if the program prints meta["answer"] (or meta["expected_output"]).

    Its stdin is meta["stdin"], if present. White space at the ends of lines and of the whole output
    is ignored. Metrics as for code_tests.
    """

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        from rl.sandbox import StdinStdoutTests

        meta = meta or {}
        expected = (
            meta["expected_output"]
            if meta.get("expected_output") is not None
            else expected_answer(meta)
        )
        language = get_language(meta)
        tests = StdinStdoutTests(
            [(str(meta.get("stdin") or ""), str(expected))], "trimmed", language
        )
        return self.score_program(extract_program(response, self.block, language), tests)


def make_sandbox(mode: str, seconds: float, packages: Sequence[str] | None = None) -> Sandbox:
    """Create a sandbox that runs a single program at a time.

    Raises UserError, with the remedy, if this host does not support the requested kind.
    """
    from rl.sandbox import Sandbox, SandboxLimits

    limits = SandboxLimits(wall_s=0.75 * seconds, cpu_s=0.75 * seconds, total_s=seconds)
    return Sandbox(mode=mode, limits=limits, workers=1, packages=packages)


def get_language(meta: Meta) -> str:
    """Return the sandbox's name of meta["language"] ("cpp" becomes c++); python by default."""
    language_name = str((meta or {}).get("language") or "python").lower()
    return next(
        (language for language, names in _LANGUAGE_NAMES.items() if language_name in names),
        language_name,
    )


def extract_program(response: str, block: BlockMode, language: str = "python") -> str | None:
    """Return the last complete fenced block tagged with this language, else the last untagged one.

    An untagged block beside a tagged one may show the program's output. As in CommonMark a fence
    that is indented by 4 or more columns beyond the opening one closes no block: it may be part of
    a docstring.
    Without such a block, return the response itself for "any", None for "fenced".
    """
    names = _LANGUAGE_NAMES.get(language, (language, ""))
    response = response.removeprefix("\ufeff")
    programs: dict[bool, str] = {}  # the last block with a tag (True) and without one
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        if opening is None:
            opening = fence
        elif (
            fence["mark"].startswith(opening["mark"])
            and not fence["tag"]
            and _indent_width(fence) <= _indent_width(opening) + 3
        ):
            if opening["tag"].lower() in names:
                text = response[opening.end() + 1 : fence.start()].removeprefix("\ufeff")
                programs[opening["tag"] != ""] = _remove_indent(text, opening["indent"])
            opening = None
    if programs or block == "fenced":
        return programs.get(True, programs.get(False))
    return response if opening is None else None  # a truncated block is not a program


def _indent_width(fence: re.Match[str]) -> int:
    """Return the columns before a fence."""
    return len(fence["indent"].expandtabs(4))


def _remove_indent(text: str, indent: str) -> str:
    """Return the text of a block without the indentation of its fence (a block in a list), if all
    of its lines have it.
    """
    lines = text.split("\n")
    if not all(line.startswith(indent) or not line.strip() for line in lines):
        return text
    return "\n".join(line.removeprefix(indent) for line in lines)


def complete_program(head: str, program: str, name: str) -> str:
    """Return the complete program for a response that may contain only the body of function `name`.

    `head` holds the function's signature, with imports and helper functions.
    """
    from rl.sandbox import is_python

    defines = re.compile(rf"^(?:async )?def {re.escape(name)}\b", re.MULTILINE)
    if defines.search(program):
        definition = defines.search(head)
        return f"{head[: definition.start()] if definition else head}\n{program}"
    lines = program.strip("\n").splitlines()
    if lines and not lines[0].startswith((" ", "\t")):
        whole = ["    " + line for line in lines]
        # Of an answer without the white space at its start only the first line lacks it.
        lines = whole if is_python(head + "\n".join(whole)) else [whole[0], *lines[1:]]
    end = next(
        (i for i, line in enumerate(lines) if line.strip() and not line.startswith((" ", "\t"))),
        len(lines),
    )
    return head + "\n".join(lines[:end]) + "\n"


def parse_tests(meta: Meta, language: str = "python") -> tuple[Tests, str | None]:
    """Return meta["tests"] as an rl.sandbox test object, and the name of the tested function if
    known.

    Raises ValueError if the tests are missing or malformed.
    """
    from rl.sandbox import Asserts, Calls, Pytest, StdinStdoutTests

    spec = (meta or {}).get("tests")
    if spec is None:
        spec = (meta or {}).get("test_list")
    if spec is None:
        raise ValueError(
            "the problem has no tests: meta needs 'tests' (a list of asserts, for example), "
            f"it has {sorted(meta or {})}"
        )
    if isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except ValueError:
            spec = [spec]  # a single assert
    if isinstance(spec, (list, tuple)):
        spec = {"style": "asserts", "asserts": list(spec)}
    if not isinstance(spec, Mapping) or spec.get("style") not in list(_TEST_KEYS):
        raise ValueError(
            f"meta['tests'] is a list of asserts or has a style ({', '.join(_TEST_KEYS)}), got "
            f"{str(spec)[:80]!r}"
        )
    spec = _drop_nulls(spec)
    style = spec["style"]
    needed, also = _TEST_KEYS[style]
    keys = spec.keys() - {"style"}
    if needed - keys or keys - needed - also:
        raise ValueError(
            f"meta['tests'] of style {style} has {', '.join(sorted(needed | also))}; got "
            f"{', '.join(sorted(keys))}"
        )
    if language != "python" and style != "dialogues":
        raise ValueError(
            f"meta['tests'] of style {style} is for Python, but meta['language'] is "
            f"{language!r}: dialogues work for any language"
        )
    if style == "asserts":
        asserts, name = spec["asserts"], spec.get("entry_point")
        if not asserts or not all(isinstance(line, str) for line in asserts):
            raise ValueError(
                f"meta['tests'] needs at least 1 assert, each a string; got {str(asserts)[:80]!r}"
            )
        return Asserts(spec.get("setup") or "", list(asserts), name), name
    if style == "pytest":
        return Pytest(_drop_nulls(dict(spec["files"]))), None
    cases = spec["cases"]
    if not cases or not all(isinstance(case, (list, tuple)) and len(case) == 2 for case in cases):
        raise ValueError(
            "meta['tests'] needs cases, each a pair of input and expected result; got "
            f"{str(cases)[:80]!r}"
        )
    pairs = [(inputs, expected) for inputs, expected in cases]
    if style == "dialogues":
        return StdinStdoutTests(pairs, spec.get("compare", "tokens"), language), None
    return Calls(spec["function"], pairs, spec.get("compare", "exact")), spec["function"]


def _drop_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that are not null: in a table each record has the keys of all records."""
    return {key: value for key, value in record.items() if value is not None}
