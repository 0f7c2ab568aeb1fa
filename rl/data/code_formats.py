"""Define the row formats of published programming problems. Each converts a row to a prompt, tests
in meta["tests"], and a solution if the row has it.

meta["tests"] defines the tests of a program as plain data (rl.rewards.code reads it): {"style":
"asserts", "setup", "asserts", "entry_point"}, {"style": "dialogues", "cases": [[stdin, stdout],
...]} or {"style": "calls", "function", "cases": [[arguments, result], ...]}. The expected
results stay in meta: the model sees only those in its prompt, and its program only the inputs.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.data.row_formats import RowFormat, collect_meta, get_column, make_prompt, read_text
from rl.data.row_readers import BadRow, Columns
from rl.sandbox import extract_helpers, is_python
from rl.types import Problem

INSTRUCTION = "\n\nWrite Python, the whole of it in one block between ```python and ```."
_SPLITS = {  # of MBPP, by task_id
    "train": range(601, 975),
    "validation": range(511, 601),
    "test": range(11, 511),
    "prompt": range(1, 11),
}
_MOST_UNPACKED = 1 << 28  # bytes of a problem's unpacked tests


class _CodeFormat(RowFormat):
    """Read rows of programs to write."""

    reward = "code_tests"


class MBPP(_CodeFormat):
    """Read MBPP (Austin et al. 2021, arXiv 2108.07732).

    Columns: text (sanitized: prompt), code, test_list; test_setup_code or test_imports.

    The prompt shows the first assert, which names the function; all asserts test it.
    """

    required = ({"code", "test_list"},)

    def read(self, columns: Columns) -> Problem:
        description = read_text(columns, "text" if "text" in columns else "prompt")
        asserts = _texts(columns, "test_list")
        solution = read_text(columns, "code").replace("\r\n", "\n")
        if not asserts:
            raise BadRow("'test_list' is empty")
        setup = columns.get("test_setup_code") or "\n".join(
            _texts(columns, "test_imports") if "test_imports" in columns else []
        )
        for test in asserts:
            if not is_python(test):
                raise BadRow(f"'test_list' holds what is no Python: {test[:60]!r}")
        tests = {"style": "asserts", "setup": setup, "asserts": asserts, "entry_point": None}
        prompt = (
            f"{description.strip()}\n\nYour code should pass tests such as:\n\n"
            f"{asserts[0]}{INSTRUCTION}"
        )
        return _problem(prompt, tests, solution, columns, ("text", "prompt", "code"))

    def split_of(self, columns: Columns) -> str | None:
        """Return the published split of a task_id; None if the row has no task_id.

        601 to 974: train; 511 to 600: validation; 11 to 510: test; 1 to 10: examples in prompts.
        """
        number = columns.get("task_id")
        return next(
            (name for name, ids in _SPLITS.items() if type(number) is int and number in ids), None
        )


class HumanEval(_CodeFormat):
    """Read HumanEval (Chen et al. 2021, arXiv 2107.03374).

    Columns: prompt (a function's head and docstring), canonical_solution (its body), test
    (`check(candidate)`), entry_point. A program that does not define the function counts as its
    body. Other functions of the prompt are in the setup of the tests: a program cannot redefine
    them for the tests.
    """

    required = ({"prompt", "entry_point", "test"},)

    def read(self, columns: Columns) -> Problem:
        head, test, name = (read_text(columns, key) for key in ("prompt", "test", "entry_point"))
        if not re.search(rf"^def {re.escape(name)}\b", head, re.MULTILINE):
            raise BadRow(f"'prompt' does not define the function {name!r} of 'entry_point'")
        if not is_python(test) or not re.search(r"^def check\b", test, re.MULTILINE):
            raise BadRow("'test' is no Python that defines check(candidate)")
        tests = {
            "style": "asserts",
            "setup": extract_helpers(head, name),
            "asserts": [test],
            "entry_point": name,
        }
        body = columns.get("canonical_solution")
        solution = head + body if isinstance(body, str) else None
        prompt = f"Complete this function.\n\n```python\n{head.rstrip()}\n```{INSTRUCTION}"
        problem = _problem(prompt, tests, solution, columns, ("prompt", "canonical_solution"))
        return replace(problem, meta={**problem.meta, "head": head})


class APPS(_CodeFormat):
    """Read APPS (Hendrycks et al. 2021, arXiv 2105.09938).

    Columns: question, input_output (JSON: inputs, outputs, and fn_name if a function is called),
    starter_code, solutions (JSON, a list).
    """

    required = ({"question", "input_output"},)

    def read(self, columns: Columns) -> Problem:
        question, cases = read_text(columns, "question"), _json(columns, "input_output", dict)
        inputs, outputs, function = cases.get("inputs"), cases.get("outputs"), cases.get("fn_name")
        if (
            not isinstance(inputs, list)
            or not isinstance(outputs, list)
            or len(inputs) != len(outputs)
            or not inputs
        ):
            raise BadRow("'input_output' holds no inputs with as many outputs: nothing to test by")
        if function is None:
            tests = _dialogues(
                zip(map(_join_lines, inputs), map(_join_lines, outputs), strict=True)
            )
        else:
            if (
                not isinstance(function, str)
                or not function.isidentifier()
                or not all(isinstance(arguments, list) for arguments in inputs)
            ):
                raise BadRow(
                    f"'input_output' calls {str(function)[:40]!r} with inputs that are not lists "
                    "of arguments"
                )
            tests = _calls(function, [list(case) for case in zip(inputs, outputs, strict=True)])
            # Some problems wrap each result in a list: [12] for 12, and [[1, 2]] for [1, 2]. Others
            # return lists of a single item, so that [12] and 12 are both accepted for [12].
            if all(isinstance(output, list) and len(output) == 1 for output in outputs):
                tests["compare"] = "wrapped"
        solutions = _json(columns, "solutions", list) if columns.get("solutions") else []
        solution = next(
            (text for text in solutions if isinstance(text, str) and text.strip()), None
        )
        prompt = _build_prompt(question, columns.get("starter_code"), function)
        return _problem(
            prompt,
            tests,
            solution,
            columns,
            ("question", "input_output", "solutions", "starter_code"),
        )


class LiveCodeBench(_CodeFormat):
    """Read LiveCodeBench (Jain et al. 2024, arXiv 2403.07974).

    Columns: question_content, public_test_cases and private_test_cases (JSON lists of input,
    output, testtype), starter_code, metadata. Private tests may be packed (base64 of zlib of a
    pickled text); only a text is unpickled.
    """

    required = ({"question_content", "public_test_cases"},)

    def read(self, columns: Columns) -> Problem:
        question = read_text(columns, "question_content")
        cases = _json(columns, "public_test_cases", list)
        if columns.get("private_test_cases"):
            cases = [*cases, *_unpack_private_tests(columns["private_test_cases"])]
        if not cases or not all(
            isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases
        ):
            raise BadRow("'public_test_cases' is a list of {input, output, testtype}")
        kinds = {case.get("testtype", "stdin") for case in cases}
        function = None
        if kinds == {"functional"}:
            function_name = _json(columns, "metadata", dict).get("func_name")
            if (
                not isinstance(function_name, str)
                or not function_name.rpartition(".")[2].isidentifier()
            ):
                raise BadRow("'metadata' has no func_name, and 'public_test_cases' call a function")
            function = function_name.rpartition(".")[2]
            tests = _calls(function, [_call(case) for case in cases])
        elif kinds == {"stdin"}:
            tests = _dialogues((str(case["input"]), str(case["output"])) for case in cases)
        else:
            raise BadRow(
                f"'testtype' is stdin or functional, the same for all tests of a problem; "
                f"received {sorted(map(str, kinds))}"
            )
        prompt = _build_prompt(question, columns.get("starter_code"), function)
        used = (
            "question_content",
            "public_test_cases",
            "private_test_cases",
            "starter_code",
            "metadata",
        )
        return _problem(prompt, tests, None, columns, used)


def _problem(
    prompt: str,
    tests: Mapping[str, Any],
    solution: str | None,
    columns: Columns,
    used: Sequence[str],
) -> Problem:
    meta = {**collect_meta(columns, None, used), "tests": dict(tests)}
    response = None if solution is None else f"```python\n{solution.strip(chr(10))}\n```"
    return Problem(make_prompt(prompt), meta, response)


def _build_prompt(question: str, starter: Any, function: str | None) -> str:
    task = (
        f"Define {function}."
        if function is not None
        else "Read the input from stdin and write the output to stdout."
    )
    begin = (
        f"\n\nBegin with:\n\n```python\n{starter.rstrip()}\n```"
        if isinstance(starter, str) and starter.strip()
        else ""
    )
    return f"{question.strip()}\n\n{task}{begin}{INSTRUCTION}"


def _dialogues(cases: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {"style": "dialogues", "cases": [list(case) for case in cases]}


def _calls(function: str, cases: list[Any]) -> dict[str, Any]:
    return {"style": "calls", "function": function, "cases": cases, "compare": "floats"}


def _join_lines(value: Any) -> str:
    """Return a text; a list of lines is joined."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(case: Mapping[str, Any]) -> list[Any]:
    """Parse [arguments, result] from JSON texts: an argument per line, and the result."""
    try:
        arguments = [json.loads(line) for line in str(case["input"]).split("\n") if line.strip()]
        return [arguments, json.loads(str(case["output"]))]
    except (ValueError, RecursionError) as error:
        raise BadRow(f"a test's input or output is no JSON ({error}): {str(case)[:80]!r}") from None


def _unpack_private_tests(packed: Any) -> list[Any]:
    """Unpack private tests: JSON, or base64 of zlib of a pickled JSON text."""
    if not isinstance(packed, str):
        raise BadRow(f"'private_test_cases' is a {type(packed).__name__}, text is expected")
    text = packed
    if not packed.lstrip().startswith("["):
        try:
            unpacker = zlib.decompressobj()
            pickled = unpacker.decompress(base64.b64decode(packed, validate=True), _MOST_UNPACKED)
            text = _TextOnly(io.BytesIO(pickled)).load()
        except (
            ValueError,
            zlib.error,
            pickle.UnpicklingError,
            EOFError,
            AttributeError,
            IndexError,
            KeyError,
            MemoryError,
        ) as error:
            raise BadRow(
                f"'private_test_cases' is neither JSON nor packed as LiveCodeBench packs it "
                f"({error})"
            ) from None
    try:
        cases = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRow(f"'private_test_cases' holds no JSON ({error})") from None
    if not isinstance(cases, list):
        raise BadRow("'private_test_cases' holds no list")
    return cases


class _TextOnly(pickle.Unpickler):
    """Unpickle a text (or other plain data) without importing anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it requires {module}.{name}, a text is expected")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to external data, a text is expected")


def _texts(columns: Columns, name: str) -> list[str]:
    """Return the texts of a column. Raises BadRow if it is absent or no list of texts."""
    value = get_column(columns, name)
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise BadRow(f"{name!r} is a list of texts, this is {str(value)[:60]!r}")
    return list(value)


def _json(columns: Columns, name: str, kind: type) -> Any:
    """Return a column's value of type `kind`; a text is parsed as JSON.

    Raises BadRow if the column is absent, or holds no JSON or another type.
    """
    value = get_column(columns, name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"{name!r} is no JSON ({str(error)[:80]})") from None
    if not isinstance(value, kind):
        raise BadRow(f"{name!r} holds a {type(value).__name__}, a {kind.__name__} is expected")
    return value
