"""Test data sets: order, generated addition, real files, and bad rows reported with positions."""

import gzip
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

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
    assert [i for batch in forwards for i in batch] == [
        i for step in range(80) for i in indices(other.batch(step, 4, seed=3))
    ]
    assert indices(first.batch(0, 50, seed=3)) != indices(first.batch(0, 50, seed=4))


def test_a_problem_set_is_a_sequence():
    problems = make_problem_set(5)
    assert (
        len(problems) == 5
        and indices(problems) == [0, 1, 2, 3, 4]
        and indices(problems[1:3]) == [1, 2]
    )
    assert problems[-1].index == 4 and indices(problems.first(2)) == [0, 1]
    with pytest.raises(IndexError, match="has 5 problems, no number 5"):
        problems[5]
    with pytest.raises(ValueError, match="batch_size"):
        problems.batch(0, 0, 0)
    with pytest.raises(ValueError, match="no problem"):
        ProblemSet([])


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


@pytest.mark.parametrize("source", ["addition:nose=1", "addition:noise=2", "addition:noise=x"])
def test_addition_options_are_checked(source):
    with pytest.raises(ValueError, match=source.partition(":")[2]):
        load_problems(source)


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k_parses_whole_and_its_own_responses_earn_the_full_reward(shared_data, split, count):
    problems = load_problems(shared_data / "gsm8k", split=split)
    assert len(problems) == count
    reward = resolve_reward("gsm8k")
    raw = [json.loads(line) for line in (shared_data / "gsm8k" / f"{split}.jsonl").open()]
    for problem, row in zip(problems, raw, strict=True):
        assert float(problem.meta["answer"]) == float(
            row["answer"].split("####")[1].replace(",", "")
        )
        assert (
            problem.messages[0]["content"].startswith(row["question"])
            and "\\boxed" in problem.messages[0]["content"]
        )
        assert "<<" not in problem.response and "####" not in problem.response
        assert reward("", problem.response, problem.meta) == 1.0
    assert problems[0].tag == "gsm8k"


def test_other_real_files(shared_data):
    alpaca = load_problems(shared_data / "sft/rasbt_instruction/instruction-data.json")
    raw = json.loads((shared_data / "sft/rasbt_instruction/instruction-data.json").read_text())
    assert [problem.response for problem in alpaca] == [row["output"] for row in raw] and len(
        alpaca
    ) == 1100
    assert alpaca[0].messages[0]["content"] == f"{raw[0]['instruction']}\n\n{raw[0]['input']}"
    assert alpaca[2].messages[0]["content"] == raw[2]["instruction"]  # its input is empty

    math = shared_data / "math/MATH_train.jsonl"
    with pytest.raises(
        ValueError, match="(?s)2 bad rows beside 7498 good.*line 7037: 'answer' is empty"
    ):
        load_problems(math, prompt_column="problem")
    skipped = load_problems(math, prompt_column="problem", on_bad_row="skip")
    assert (
        len(skipped) == 7498 and skipped[0].meta["level"] == "Level 2" and skipped[-1].index == 7497
    )

    held_out = load_problems(
        shared_data / "math/math500_test.json", prompt_column="problem", response_column="solution"
    )
    assert len(held_out) == 500 and held_out[0].meta["answer"] == r"\left( 3, \frac{\pi}{2} \right)"
    code = load_problems(shared_data / "humaneval/HumanEval.jsonl.gz")
    assert (
        len(code) == 164
        and "def has_close_elements" in code[0].messages[0]["content"]
        and "test" in code[0].meta
    )


def write(path, rows):
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def test_columns_chats_and_system_prompts(tmp_path):
    requests = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    path = write(
        tmp_path / "mine.jsonl", [{"q": "1+1?", "a": 2, "hint": "h"}, {"q": requests, "a": "y"}]
    )
    problems = load_problems(path, prompt_column="q", answer_column="a", system_prompt="Be brief.")
    assert [message["content"] for message in problems[0].messages] == ["Be brief.", "1+1?"]
    assert problems[0].meta == {"a": 2, "answer": 2, "hint": "h"} and problems[0].tag == "mine"
    # the row's system message is kept
    assert [message["content"] for message in problems[1].messages] == ["s", "x"]

    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [
        {"messages": chat, "answer": "d"},
        {"messages": [*chat, {"role": "assistant", "content": "d"}], "answer": "d"},
    ]
    problems = load_problems(write(tmp_path / "chat.jsonl", rows), tag="talk")
    assert list(problems[0].messages) == list(problems[1].messages) == chat
    assert [problem.response for problem in problems] == [None, "d"] and problems[0].tag == "talk"
    assert problems[0].meta == {"answer": "d"}


def test_a_folder_gzip_and_a_byte_order_mark(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b'{"prompt": "p"}\n\n{"prompt": "\xc3\xa9"}\n'
    )
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as stream:
        stream.write('{"prompt": "t"}\n')
    assert [problem.messages[0]["content"] for problem in load_problems(tmp_path)] == ["p", "é"]
    assert len(load_problems(str(tmp_path), split="test")) == 1
    with pytest.raises(ValueError, match="no validation.jsonl.*holds test.jsonl.gz, train.jsonl"):
        load_problems(tmp_path, split="validation")


BAD_LINES = {
    "{'prompt': 'x'}": "line 2: no JSON",
    "[1]": "line 2: a JSON object is expected, this is a list",
    '{"promt": "x", "answer": "1"}': "line 2: no column 'prompt'; it has 'promt', 'answer'",
    '{"prompt": 7, "answer": "1"}': "line 2: 'prompt' is a int, text is expected",
    '{"prompt": " ", "answer": "1"}': "line 2: 'prompt' is empty",
    '{"prompt": "x"}': "line 2: no column 'answer'",
    '{"prompt": "x", "answer": null}': "line 2: 'answer' is empty",
    '{"prompt": [{"role": "user"}], "answer": "1"}': "line 2: message 1 of 'prompt' is no",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_row_is_named_by_file_and_line_and_may_be_skipped(tmp_path, caplog, line):
    good = {"prompt": "x", "answer": "1"}
    path = write(tmp_path / "rows.jsonl", [good, line, good])
    with pytest.raises(ValueError) as error:
        load_problems(path)
    assert f"rows.jsonl {BAD_LINES[line]}" in str(
        error.value
    ) and "1 bad rows beside 2 good" in str(error.value)
    assert "leave them out with on_bad_row skip" in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert indices(load_problems(path, on_bad_row="skip")) == [0, 1]
    assert f"rows.jsonl {BAD_LINES[line]}" in caplog.text


def test_many_bad_rows_are_counted_and_the_first_five_shown(tmp_path):
    path = write(tmp_path / "rows.jsonl", ["x"] * 7 + [{"prompt": "x"}] + ["x"] * 3)
    with pytest.raises(ValueError, match="10 bad rows beside 1 good") as error:
        load_problems(path)
    assert str(error.value).count("no JSON") == 5
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="line 2: no UTF-8 text"):
        load_problems(path)
    (tmp_path / "rows.json").write_text('[{"prompt": "a"}, 5]')
    with pytest.raises(ValueError, match="rows.json row 2: a JSON object is expected"):
        load_problems(tmp_path / "rows.json")


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
    write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    monkeypatch.setattr("rl.data.problem_loader.read_hub", lambda *a: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=message):
        load_problems(source)


def test_hub_names_reach_the_hub_with_their_config(monkeypatch):
    requests = []

    def read_hub(name, config, split):
        from rl.data.row_readers import Row

        requests.append((name, config, split))
        return iter([Row("row 1", {"question": "q", "answer": "1+1=<<1+1=2>>2\n#### 2"})])

    monkeypatch.setattr("rl.data.problem_loader.read_hub", read_hub)
    problems = load_problems("openai/gsm8k", split="test")
    assert problems[0].meta == {"answer": "2"} and problems[0].tag == "gsm8k"
    assert problems[0].response == "1+1=2\nThe answer is \\boxed{2}."
    load_problems("someone/things", config="small")
    assert requests == [("openai/gsm8k", "main", "test"), ("someone/things", "small", "train")]


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_files_in_the_hubs_cache_are_read_offline_by_name(tmp_path, held_out):
    """Files as `hf download --repo-type dataset` writes them. Runs in a separate process."""
    repo, commit = tmp_path / "hub" / "datasets--acme--sums", "a" * 40
    data = repo / "snapshots" / commit / "small"
    data.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (data.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - {split: train, path: "
        "small/train*}\n"
        f"  - {{split: {held_out}, path: small/{held_out}*}}\n---\n"
    )
    for split, rows in (("train", range(3)), (held_out, range(3, 5))):
        lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in rows]
        (data / f"{split}-00000-of-00001.jsonl").write_text("".join(lines))
    code = (
        "from rl.data import load_problems; print([p.meta['answer'] for p in "
        "load_problems('acme/sums', split='test', config='small')])"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "['4', '5']", done.stderr


def test_without_the_hub_the_error_says_what_to_do(tmp_path):
    """Runs in a separate process: `datasets` reads HF_HUB_OFFLINE on import."""
    code = "from rl.data import load_problems; load_problems('someone/nothing')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    last = out.stderr.strip().splitlines()[-1]
    assert last.startswith("rl.errors.UserError: hub data set 'someone/nothing'")
    assert "HF_HUB_OFFLINE" in last and ".jsonl" in last


def test_a_row_without_text_to_learn_is_refused(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    path = write(tmp_path / "tools.jsonl", [{"messages": [{"role": "user", "content": "a"}, call]}])
    with pytest.raises(ValueError, match="line 1: the last message is not text alone .tool_calls"):
        load_problems(path)


def test_limit_and_settings_are_checked(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": str(i)} for i in range(5)])
    assert len(load_problems(path, limit=3)) == 3 and len(load_problems("addition", limit=7)) == 7
    for settings in ({"limit": 0}, {"format": "csv"}, {"on_bad_row": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            load_problems(path, **settings)
    with pytest.raises(ValueError, match="no column 'response'"):
        load_problems(path, response_column="response")
    with pytest.raises(ValueError, match="no column 'gold'"):
        load_problems(path, answer_column="gold")
    with pytest.raises(ValueError, match="holds no row"):
        load_problems(write(tmp_path / "empty.jsonl", []))


def test_a_column_that_no_row_has_is_one_error_that_names_the_nearest(tmp_path):
    rows = [{"prompt": str(i), "solution": "x", "answer": "1"} for i in range(7)]
    path = write(tmp_path / "rows.jsonl", rows)
    cases = [
        (
            {"prompt_column": "promt"},
            "no column 'promt' (prompt_column) in any of 7 rows",
            "did you mean 'prompt'?",
        ),
        ({"answer_column": "answr"}, "no column 'answr' (answer_column)", "did you mean 'answer'?"),
        (
            {"response_column": "gold"},
            "no column 'gold' (response_column)",
            "which have 'prompt', 'solution', 'answer'",
        ),
        ({"format": "alpaca"}, "no column 'instruction' in any of 7 rows", "which have"),
    ]
    for settings, *says in cases:
        for on_bad_row in ("error", "skip"):
            with pytest.raises(ValueError) as error:
                load_problems(path, on_bad_row=on_bad_row, **settings)
            assert all(text in str(error.value) for text in says) and "bad rows" not in str(
                error.value
            ), error.value
    # a row with the column, and seven without it
    first = write(tmp_path / "one.jsonl", [{"prompt": "x", "answer": "1"}, *rows])
    with pytest.raises(ValueError, match="1 bad rows beside 7 good"):
        load_problems(first, response_column="solution")
    request = write(tmp_path / "asked.jsonl", [{"level": 1, "query": "1+1", "answer": "2"}] * 3)
    with pytest.raises(
        ValueError,
        match=(
            r"no column 'prompt' \(prompt_column\) in any of 3.*; if it is 'query', say "
            r"prompt_column query"
        ),
    ):
        load_problems(request)
    plain = write(tmp_path / "plain.jsonl", [{"answer": "2", "q": "1+1"}])
    with pytest.raises(ValueError, match="that has it, such as prompt_column q"):
        load_problems(plain)
    # a line that is not JSON is not reported first
    request.write_text(request.read_text() + '{"query": ')
    with pytest.raises(
        ValueError,
        match=r"no column 'prompt' .* say prompt_column query.*1 more is bad for other reasons",
    ):
        load_problems(request)
    stored = write(tmp_path / "stored.jsonl", [{"prompt": "x", "response": "y", "reward": 1}] * 3)
    with pytest.raises(
        ValueError,
        match=r"no column 'rewrd' \(reward_column\) in any of 3 rows.*did you mean 'reward'",
    ):
        load_rollouts(stored, reward_column="rewrd")


def test_noise_may_begin_with_a_later_epoch():
    plain, late = load_problems("addition:noise=1.0"), load_problems("addition:noise=1.0,from=2")
    for epoch in range(4):
        responses = [late.at(i, epoch).response for i in range(200)]
        right = [late[i].meta["answer"] for i in range(200)]
        assert responses == (
            right if epoch < 2 else [plain.at(i, epoch).response for i in range(200)]
        )
    assert [plain.at(i, 2).response for i in range(200)] != right
    with pytest.raises(ValueError, match="from=EPOCH"):
        load_problems("addition:noise=0.5,from=-1")
