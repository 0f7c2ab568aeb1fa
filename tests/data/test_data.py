"""Test data sets: order, generated addition, real files, columns, and names of the hub."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from data_helpers import get_contents, write_rows

from rl.data import ProblemSet, load_problems, load_rollouts
from rl.rewards import resolve_reward
from rl.types import Problem


def make_problem_set(count: int) -> ProblemSet:
    return ProblemSet(
        [Problem(({"role": "user", "content": str(i)},), index=i) for i in range(count)]
    )


def indices(problems) -> list[int]:
    return [problem.index for problem in problems]


def test_every_epoch_holds_each_problem_once_and_no_tail_is_dropped():
    problems = make_problem_set(10)
    # 30 positions, 3 epochs
    stream = [i for step in range(10) for i in indices(problems.batch(step, 3, seed=0))]
    epochs = [stream[0:10], stream[10:20], stream[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert problems.epoch(10, 3) == 3.0
    # a batch larger than the set wraps around
    assert Counter(indices(make_problem_set(3).batch(0, 9, seed=1))) == {0: 3, 1: 3, 2: 3}


def test_the_order_is_a_function_of_seed_and_step_alone():
    first, other = make_problem_set(50), make_problem_set(50)
    forwards = [indices(first.batch(step, 8, seed=3)) for step in range(40)]
    backwards = [indices(other.batch(step, 8, seed=3)) for step in reversed(range(40))]
    assert forwards == backwards[::-1]
    # the same positions with another batch size
    halves = [i for step in range(80) for i in indices(other.batch(step, 4, seed=3))]
    assert [i for batch in forwards for i in batch] == halves
    assert indices(first.batch(0, 50, seed=3)) != indices(first.batch(0, 50, seed=4))


def test_a_problem_set_is_a_sequence():
    problems = make_problem_set(5)
    assert len(problems) == 5 and problems[-1].index == 4
    for part, expected in ((problems, [0, 1, 2, 3, 4]), (problems[1:3], [1, 2]),
                           (problems.first(2), [0, 1])):  # fmt: skip
        assert indices(part) == expected
    with pytest.raises(IndexError, match="has 5 problems, no number 5"):
        problems[5]
    with pytest.raises(ValueError, match="batch_size"):
        problems.batch(0, 0, 0)
    with pytest.raises(ValueError, match="no problem"):
        ProblemSet([])


# ----------------------------------------------------------------------------------------- addition


def test_addition_is_right_complete_and_split_without_overlap():
    train, test = load_problems("addition"), load_problems("addition", split="test")
    pairs = {}
    for split, problems in (("train", train), ("test", test)):
        for position, problem in enumerate(problems):
            prompt = problem.messages[0]["content"]
            a, b = (int(text) for text in prompt.removesuffix("=").split("+"))
            assert problem.meta["answer"] == problem.response == str(a + b)
            assert problem.index == position and problem.tag == "addition"
            assert pairs.setdefault((a, b), split) == split
    assert set(pairs) == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert len(train) + len(test) == 8100 and 0.08 < len(test) / 8100 < 0.12
    # no answer leaks through the commuted sum
    assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)
    assert load_problems("addition")[17] == train[17]


def test_addition_noise_touches_one_digit_of_the_response_at_its_rate_and_repeats():
    noisy, clean = load_problems("addition:noise=0.7"), load_problems("addition")
    differing = 0
    for problem in noisy:
        changed = [x != y for x, y in zip(problem.response, problem.meta["answer"], strict=True)]
        assert sum(changed) <= 1 and problem.meta == clean[problem.index].meta
        differing += any(changed)
    # a tenth of the draws give the original digit; the standard deviation of the share is 0.006
    assert abs(differing / len(noisy) - 0.7 * 0.9) < 0.024
    later = [noisy.at(i, epoch=1).response for i in range(len(noisy))]
    assert [problem.response for problem in noisy] != later
    again = load_problems("addition:noise=0.7")
    assert later == [again.at(i, epoch=1).response for i in range(len(again))]
    second_epoch = noisy.batch(1, len(noisy), seed=0)
    assert [p.response for p in second_epoch] == [later[p.index] for p in second_epoch]
    assert load_problems("addition:noise=0", limit=5)[4] == clean[4]


def test_noise_may_begin_with_a_later_epoch():
    plain, late = load_problems("addition:noise=1.0"), load_problems("addition:noise=1.0,from=2")
    right = [late[i].meta["answer"] for i in range(200)]
    for epoch in range(4):
        noisy = [plain.at(i, epoch).response for i in range(200)]
        expected = right if epoch < 2 else noisy
        assert [late.at(i, epoch).response for i in range(200)] == expected
        assert noisy != right


@pytest.mark.parametrize(
    ("options", "says"),
    [("nose=1", "nose=1"), ("noise=2", "noise=2"), ("noise=x", "noise=x"),
     ("noise=0.5,from=-1", "from=EPOCH")],
)  # fmt: skip
def test_addition_options_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        load_problems(f"addition:{options}")


# --------------------------------------------------------------------------------------- real files


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k_parses_whole_and_its_own_responses_earn_the_full_reward(shared_data, split, count):
    problems = load_problems(shared_data / "gsm8k", split=split)
    assert len(problems) == count and problems[0].tag == "gsm8k"
    reward = resolve_reward("gsm8k")
    raw = [json.loads(line) for line in (shared_data / "gsm8k" / f"{split}.jsonl").open()]
    for problem, row in zip(problems, raw, strict=True):
        number = row["answer"].split("####")[1].replace(",", "")
        assert float(problem.meta["answer"]) == float(number)
        prompt = problem.messages[0]["content"]
        assert prompt.startswith(row["question"]) and "\\boxed" in prompt
        assert "<<" not in problem.response and "####" not in problem.response
        assert reward("", problem.response, problem.meta) == 1.0


def test_other_real_files(shared_data):
    path = shared_data / "sft/rasbt_instruction/instruction-data.json"
    alpaca, raw = load_problems(path), json.loads(path.read_text())
    assert [problem.response for problem in alpaca] == [row["output"] for row in raw]
    assert len(alpaca) == 1100
    assert get_contents(alpaca)[0] == f"{raw[0]['instruction']}\n\n{raw[0]['input']}"
    assert get_contents(alpaca)[2] == raw[2]["instruction"]  # its input is empty

    math = shared_data / "math/MATH_train.jsonl"
    bad = "(?s)2 bad rows beside 7498 good ones:\n  MATH_train.jsonl line 7037: 'answer' is empty"
    for settings in ({}, {"prompt_column": "problem"}):
        with pytest.raises(ValueError, match=bad):
            load_problems(math, **settings)
    skipped = load_problems(math, prompt_column="problem", on_bad_row="skip")
    assert len(skipped) == 7498 and skipped[-1].index == 7497
    assert skipped[0].meta["level"] == "Level 2"

    path = shared_data / "math/math500_test.json"
    raw = json.loads(path.read_text())
    for settings in ({"split": "test"}, {"prompt_column": "problem"}):
        held_out = load_problems(path, **settings)
        assert [p.meta["answer"] for p in held_out] == [row["answer"] for row in raw]
    assert len(held_out) == 500 and held_out[0].meta["answer"] == r"\left( 3, \frac{\pi}{2} \right)"
    code = load_problems(shared_data / "humaneval/HumanEval.jsonl.gz", split="test")
    assert len(code) == 164 and "test" in code[0].meta
    assert "def has_close_elements" in get_contents(code)[0]


# ----------------------------------------------------------------------------- columns and settings


def test_columns_chats_and_system_prompts(tmp_path):
    requests = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    rows = [{"q": "1+1?", "a": 2, "hint": "h"}, {"q": requests, "a": "y"}]
    path = write_rows(tmp_path / "mine.jsonl", *rows)
    problems = load_problems(path, prompt_column="q", answer_column="a", system_prompt="Be brief.")
    assert [message["content"] for message in problems[0].messages] == ["Be brief.", "1+1?"]
    assert problems[0].meta == {"a": 2, "answer": 2, "hint": "h"} and problems[0].tag == "mine"
    # the row's system message is kept
    assert [message["content"] for message in problems[1].messages] == ["s", "x"]

    roles = ("user", "assistant", "user", "assistant")
    chat = [{"role": role, "content": text} for role, text in zip(roles, "abcd", strict=True)]
    rows = [{"messages": chat[:3], "answer": "d"}, {"messages": chat, "answer": "d"}]
    problems = load_problems(write_rows(tmp_path / "chat.jsonl", *rows), tag="talk")
    assert list(problems[0].messages) == list(problems[1].messages) == chat[:3]
    assert [problem.response for problem in problems] == [None, "d"] and problems[0].tag == "talk"
    assert problems[0].meta == {"answer": "d"}


def test_a_folder_gzip_and_a_byte_order_mark(tmp_path):
    text = b"\xef\xbb\xbf" + b'{"prompt": "p"}\n\n{"prompt": "\xc3\xa9"}\n'
    (tmp_path / "train.jsonl").write_bytes(text)
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as stream:
        stream.write('{"prompt": "t"}\n')
    assert get_contents(load_problems(tmp_path)) == ["p", "é"]
    assert len(load_problems(str(tmp_path), split="test")) == 1
    with pytest.raises(ValueError, match="no validation.jsonl.*holds test.jsonl.gz, train.jsonl"):
        load_problems(tmp_path, split="validation")


def test_limit_and_settings_are_checked(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": str(i)} for i in range(5)))
    assert len(load_problems(path, limit=3)) == 3 and len(load_problems("addition", limit=7)) == 7
    for settings in ({"limit": 0}, {"format": "csv"}, {"on_bad_row": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            load_problems(path, **settings)
    with pytest.raises(ValueError, match="holds no row"):
        load_problems(write_rows(tmp_path / "empty.jsonl"))


ROWS = [{"prompt": str(i), "solution": "x", "answer": "1"} for i in range(7)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt_column": "promt"},
         ["no column 'promt' (prompt_column) in any of 7 rows", "did you mean 'prompt'?"]),
        ({"answer_column": "answr"},
         ["no column 'answr' (answer_column)", "did you mean 'answer'?"]),
        ({"response_column": "gold"},
         ["no column 'gold' (response_column)", "which have 'prompt', 'solution', 'answer'"]),
        ({"format": "alpaca"}, ["no column 'instruction' in any of 7 rows", "which have"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_column_that_no_row_has_is_one_error_that_names_the_nearest(
    tmp_path, settings, says, on_bad_row
):
    path = write_rows(tmp_path / "rows.jsonl", *ROWS)
    with pytest.raises(ValueError) as error:
        load_problems(path, on_bad_row=on_bad_row, **settings)
    assert all(text in str(error.value) for text in says), error.value
    assert "bad rows" not in str(error.value)


def test_a_column_that_no_row_has_beside_rows_that_are_bad_otherwise(tmp_path):
    some = write_rows(tmp_path / "some.jsonl", {"prompt": "x", "answer": "1"}, *ROWS)
    with pytest.raises(ValueError, match="1 bad rows beside 7 good"):
        load_problems(some, response_column="solution")
    says = (
        r"no column 'prompt' \(prompt_column\) in any of 3.*; if it is 'query', say prompt_column"
    )
    asked = write_rows(tmp_path / "a.jsonl", *[{"level": 1, "query": "1+1", "answer": "2"}] * 3)
    with pytest.raises(ValueError, match=says):
        load_problems(asked)
    plain = write_rows(tmp_path / "plain.jsonl", {"answer": "2", "q": "1+1"})
    with pytest.raises(ValueError, match="that has it, such as prompt_column q"):
        load_problems(plain)
    pairs = write_rows(tmp_path / "pairs.jsonl", *[{"prompt": "1+1", "answer": "2"}] * 3)
    with pytest.raises(ValueError, match="without prompt_column their column 'prompt' is read"):
        load_problems(pairs, prompt_column="question")
    # a line that is not JSON is not reported first
    asked.write_text(asked.read_text() + '{"query": ')
    says = "no column 'prompt' .* say prompt_column query.*1 more is bad for other reasons"
    with pytest.raises(ValueError, match=says):
        load_problems(asked)
    row = {"prompt": "x", "response": "y", "reward": 1}
    stored = write_rows(tmp_path / "stored.jsonl", *[row] * 3)
    says = r"no column 'rewrd' \(reward_column\) in any of 3 rows.*did you mean 'reward'"
    with pytest.raises(ValueError, match=says):
        load_rollouts(stored, reward_column="rewrd")


# ---------------------------------------------------------------------------------- hub and offline


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere.jsonl", "does not exist"),
        ("nowhere.json", "does not exist"),
        ("/nowhere/at/all", "does not exist"),
        ("~/nowhere-at-all", "does not exist"),
        ("data/sets/mine", "does not exist"),
        ("rowz.jsonl", r"did you mean rows\.jsonl\?"),
        ("adition", "did you mean 'addition'"),
    ],
)
def test_a_missing_path_is_not_taken_for_a_hub_name(source, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a"})
    monkeypatch.setattr("rl.data.problem_loader.read_hub", lambda *a: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=message):
        load_problems(source)


OFFLINE = """
import json
from rl.data import load_problems
from rl.errors import UserError
results = {}
for name, config in CASES:
    try:
        results[name] = [p.meta["answer"] for p in load_problems(name, split="test", config=config)]
    except UserError as error:
        results[name] = " ".join(str(error).split())
print(json.dumps(results))
"""


def test_names_without_network_are_read_from_the_cache_or_refused_with_a_remedy(tmp_path):
    """Files as `hf download --repo-type dataset` writes them. In a separate process, because
    `datasets` reads the environment on import.
    """
    cached = {"acme/test": "test", "acme/validation": "validation"}
    for name, held_out in cached.items():
        repo, commit = tmp_path / "hub" / f"datasets--{name.replace('/', '--')}", "a" * 40
        folder = repo / "snapshots" / commit
        listed = ""
        for split, numbers in (("train", range(3)), (held_out, range(3, 5))):
            rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in numbers]
            write_rows(folder / "small" / f"{split}-00000-of-00001.jsonl", *rows)
            listed += f"  - {{split: {split}, path: small/{split}*}}\n"
        head = f"---\nconfigs:\n- config_name: small\n  data_files:\n{listed}---\n"
        (folder / "README.md").write_text(head)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
    short = ("aime", "aime25", "gpqa", "ifeval")
    cases = [(name, "small") for name in cached]
    cases += [(name, None) for name in ("someone/nothing", *short)]
    command = [sys.executable, "-c", f"CASES = {cases}\n{OFFLINE}"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [results[name] for name in cached] == [["4", "5"]] * 2
    error = results["someone/nothing"]
    assert error.startswith("hub data set 'someone/nothing'")
    assert "HF_HUB_OFFLINE" in error and ".jsonl" in error
    for name in short:
        assert f"{name}:FILE with the same columns" in results[name], results[name]
        assert "cannot be loaded" in results[name]
        assert ("is gated: accept its conditions at" in results[name]) == (name == "gpqa")
