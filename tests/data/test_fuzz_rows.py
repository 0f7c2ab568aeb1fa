"""Test mutated rows in every format and every kind of file: either valid rows or an error that
names file and line.

Seeds are fixed. A changed row may still be accepted if it has the format: the checker decides, not
the mutation.
"""

import contextlib
import copy
import functools
import gzip
import io
import json
import random
import re
import tempfile
from pathlib import Path

import pytest
from data_helpers import SAID, USER
from fuzzing import ACCEPTED, REFUSED
from offline_hub import byte_tokenizer

from rl.data import load_problems, load_rollouts
from rl.errors import UserError
from rl.jsonl import format_json_line
from rl.renderers import get_renderer

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"role": "tool", "content": "1"}
PARTS = [{"type": "text", "text": "a?"}]
OTHER = {**SAID, "content": "c"}
TESTS = '[{"input": "[1]", "output": "2", "testtype": "functional"}]'
PAIRS = {"format": "preferences"}
# format: (a good row, settings that read it; None: of load_rollouts)
SHAPES = {
    "columns": ({"prompt": "a?", "answer": "b", "response": "c", "level": 3},
                {"response_column": "response"}),
    "messages": ({"messages": [{"role": "system", "content": "s"}, USER, SAID, USER, SAID],
                  "answer": "b"}, {}),
    "tools": ({"messages": [USER, CALLS, TOOL, SAID, USER, SAID]}, {}),
    "parts": ({"messages": [{"role": "user", "content": PARTS}, SAID]}, {}),
    "alpaca": ({"instruction": "a", "input": "i", "output": "b"}, {}),
    "gsm8k": ({"question": "a?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, {}),
    "math": ({"problem": "a?", "solution": "so \\boxed{\\frac{1}{2}}", "level": "Level 1"}, {}),
    "mbpp": ({"task_id": 601, "text": "a?", "code": "def f(): return 1",
              "test_list": ["assert f() == 1"], "test_setup_code": ""}, {}),
    "humaneval": ({"prompt": "def f():\n", "canonical_solution": "    return 1\n",
                   "entry_point": "f", "test": "def check(c):\n    assert c()"}, {}),
    "apps": ({"question": "a?", "input_output": '{"inputs": ["1"], "outputs": ["2"]}',
              "solutions": '["print(2)"]'}, {}),
    "livecodebench": ({"question_content": "a?", "public_test_cases": TESTS,
                       "private_test_cases": "[]", "starter_code": "class Solution: pass",
                       "metadata": '{"func_name": "f"}'}, {}),
    "pairs": ({"prompt": "a?", "chosen": "b", "rejected": "c"}, PAIRS),
    "pairs of messages": ({"chosen": [USER, SAID], "rejected": [USER, OTHER]}, PAIRS),
    "dialogues": ({"chosen": "\n\nHuman: a?\n\nAssistant: b",
                   "rejected": "\n\nHuman: a?\n\nAssistant: c"}, PAIRS),
    "labelled": ({"input": "a?", "output_1": "b", "output_2": "c", "label": 2}, PAIRS),
    "drawn": ({"group": 0, "index": 0, "tag": "t", "problem": 7, "prompt": "a?", "response": "b",
               "reward": 1.0, "temperature": 1.0, "prompt_tokens": [1, 2],
               "response_tokens": [3, 4], "logprobs": [-0.5, -0.25]}, None),
    "published": ({"question": "a?", "code": ["b", "c"], "score": [True, 0.5], "level": 1}, None),
    "solved": ({"question": "a?", "big": {"solution": "b", "is_correct": "True"},
                "small": {"solution": "c", "is_correct": False}}, None),
}  # fmt: skip
FILES = ("jsonl", "jsonl.gz", "json", "json.gz")


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


ODD = [
    None, True, False, 0, -1, 2, 1.5, -0.0, 10**400, 2**63, -(2**70), 1e308, float("nan"),
    float("inf"), "", " ", "x", "<|im_end|>", "\ud800", "a\udfff", "\0", "\u202e", "#### 3",
    "9" * 5000, [], {}, [[]], [1, "a", None], {"role": "user"}, {"content": "x"}, [USER], [SAID],
    ["x"], nested(60), nested(80), {"a": {"b": [1]}}, [{"type": "text", "text": "x"}],
    [{"type": "image", "image": "x"}], [{"type": "text", "text": 3}], [True, False], [-1], [2**40],
]  # fmt: skip
ODD_KEYS = ["role", "content", "tool_calls", "reasoning_content", "x", "\ud800", ""]


def mutate_row(row, rng):
    """Return the row with one to three parts changed, removed, repeated or renamed."""
    row = copy.deepcopy(row)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(row))
        where, key = rng.choice(places)
        what = rng.random()
        if what < 0.6:
            where[key] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.75:
            del where[key]
        elif isinstance(where, dict):
            where[rng.choice(ODD_KEYS)] = copy.deepcopy(rng.choice(ODD))
        else:
            where.append(copy.deepcopy(rng.choice(ODD)))
        if not row:
            break
    return row


def _places(value):
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def damage_bytes(text, rng):
    """Return damaged bytes of a line or a file."""
    at = rng.randrange(len(text))
    before, after = text[:at], text[at:]
    return rng.choice([
        before, before + bytes([rng.randrange(256)]) + after[1:], after, text + b"}",
        before + b"\xff" + after, before + b'"\\ud83d"' + after, b"[" * 100_000, b'{"a":' * 5000,
        text + text, text.replace(b":", b"", 1), b"\xef\xbb\xbf" + text, b"", b"\x00" * 9,
    ])  # fmt: skip


def write_file(path, rows, damage=None):
    """Write `rows` as the kind of file that `path` names; `damage` modifies its bytes."""
    lines = [json.dumps(row).encode() for row in rows]
    text = b"[" + b",\n".join(lines) + b"]"
    if ".jsonl" in path.suffixes:
        text = b"\n".join(lines) + b"\n"
    text = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    path.write_bytes(text if damage is None else damage(text))
    return path


def load(path, shape, **more):
    settings = SHAPES[shape][1]
    if settings is None:
        return load_rollouts(path, **more)
    return load_problems(path, **settings, **more)


def check_problem(problem, renderer):
    """Check that an accepted row can be rendered, kept and scored."""
    assert problem.messages and problem.place
    for message in problem.messages:
        assert isinstance(message["role"], str) and isinstance(message["content"], str)
    for text in (problem.response, problem.rejected):
        assert text is None or isinstance(text, str)
    if any(message.get("tool_calls") for message in problem.messages):
        return
    renderer.build_generation_prompt(problem.messages)
    if problem.response is not None:
        output = {"role": "assistant", "content": problem.response}
        assert renderer.build_supervised_example([*problem.messages, output])[1].any()
    format_json_line({"meta": repr(problem.meta)}).encode()
    repr(json.dumps(problem.meta)).encode()
    for answer in problem.answers:
        assert isinstance(answer.text, str) and isinstance(answer.reward, float)
        assert abs(answer.reward) < 1e301
        for tokens in (answer.tokens or (), answer.prompt_tokens or ()):
            assert all(type(token) is int and 0 <= token < 2**31 for token in tokens)
        if answer.logprobs is not None:
            assert all(abs(x) < 1e301 for x in answer.logprobs)
            assert len(answer.logprobs) == len(answer.tokens)
        assert answer.temperature is None or answer.temperature > 0


@functools.cache
def byte_renderer():
    """Return a renderer over bytes, which can encode every text."""
    return get_renderer("role_colon", byte_tokenizer(["<eos>"]))


@functools.cache
def asked_in_good_rows(shape):
    """Return the messages of the good rows of a format."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write_file(Path(folder) / "good.jsonl", [SHAPES[shape][0]]), shape)[0].messages


def check_mutated_row(shape, kind, rng, folder):
    """Put a mutated row third among good rows, which `skip` always keeps: it is either valid or
    reported with file and line.
    """
    good, outcome = SHAPES[shape][0], ACCEPTED
    bad = mutate_row(good, rng)
    path = write_file(folder / f"rows.{kind}", [good, good, bad, good])
    try:
        result = load(path, shape)
    except UserError as error:
        place, outcome = "line" if "jsonl" in kind else "row", REFUSED
        assert f"{path.name} {place} 3: " in str(error), (bad, error)
        str(error).encode()
        result = load(path, shape, on_bad_row="skip")
        places = {answer.place for problem in result for answer in problem.answers} or {
            problem.place for problem in result
        }
        assert places == {f"{path.name} {place} {k}" for k in (1, 2, 4)}, (bad, places)
    for problem in result:
        check_problem(problem, byte_renderer())
    assert asked_in_good_rows(shape) in [problem.messages for problem in result]
    return outcome


def check_damaged_file(shape, kind, rng, folder):
    """Damage one line of a file, or its compressed bytes: the result is valid rows or an error."""
    path = write_file(
        folder / f"file.{kind}", [SHAPES[shape][0]] * 4, lambda text: damage_bytes(text, rng)
    )
    try:
        result = load(path, shape)
    except UserError as error:
        assert path.name in str(error) or "no JSON" in str(error) or "holds no" in str(error), error
        assert re.search(
            r"line \d|row \d|no JSON|cut off or damaged|holds|more than \d+ deep", str(error)
        ), error
        return REFUSED
    for problem in result:
        check_problem(problem, byte_renderer())
    return ACCEPTED


CHECKS = {"row": check_mutated_row, "file": check_damaged_file}


def inputs(seed, count):
    """Yield (what is damaged, format of the rows, kind of file, seed of the damage)."""
    rng = random.Random(f"rows {seed}")
    for _ in range(count):
        yield (
            rng.choice(["row", "row", "row", "file"]),
            rng.choice(sorted(SHAPES)),
            rng.choice(FILES),
            rng.randrange(2**32),
        )


def check(item):
    what, shape, kind, seed = item
    # stderr receives the skipped rows
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return CHECKS[what](shape, kind, random.Random(seed), Path(folder))


@pytest.mark.parametrize("shape", SHAPES)
def test_mutated_rows_are_whole_or_named(shape, tmp_path):
    """Runs 40 rows per format, over the kinds of files."""
    rng = random.Random(f"rows {shape}")
    for number in range(40):
        check_mutated_row(shape, FILES[number % 4], rng, tmp_path)


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_whole_rows_or_one_error(kind, tmp_path):
    """Runs 40 files per kind."""
    rng = random.Random(f"files {kind}")
    results = [
        check_damaged_file(rng.choice(sorted(SHAPES)), kind, rng, tmp_path) for _ in range(40)
    ]
    assert results.count(ACCEPTED) < 30


def test_found_by_many_more():
    """A column that no row has is reported once, with the file."""
    assert check(("file", "parts", "jsonl", 3752156963)) == REFUSED


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_file_that_is_cut_off_is_refused_whatever_is_skipped(on_bad_row, tmp_path):
    rows = [{"prompt": f"{i} " + "x" * (i % 50)} for i in range(2000)]
    text = write_file(tmp_path / "rows.jsonl.gz", rows).read_bytes()
    parts = (text[:-1], text[: len(text) // 2], text[:3], b"no gzip", text[:-6] + b"xxxxxx")
    for number, part in enumerate(parts):
        path = tmp_path / f"{number}.jsonl.gz"
        path.write_bytes(part)
        says = rf"{path.name} is cut off or damaged after line \d+ .*: fetch or write it anew"
        with pytest.raises(UserError, match=says):
            load_problems(path, on_bad_row=on_bad_row)


def test_where_no_row_is_good_skipping_says_so(tmp_path):
    path = write_file(tmp_path / "rows.jsonl", [{"prompt": 3}, {"prompt": ""}])
    says = "(?s)no row is left where bad ones are skipped; 2 bad rows.*line 1: 'prompt' has the type int"
    with pytest.raises(UserError, match=says):
        load_problems(path, on_bad_row="skip")
