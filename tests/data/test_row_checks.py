"""Test checks of rows and stored answers: invalid ones are reported before the first step, with
file and line, and `skip` drops them.
"""

import json
import logging
from types import SimpleNamespace

import pytest
from test_fuzz_rows import byte_renderer
from test_renderer_specials import llama_like
from whole_runs import train

from rl.algorithms import RewardModelTraining, check_stored_answer
from rl.algorithms.offline import OfflineSettings
from rl.algorithms.reward_model import RewardModelOptions, RewardModelSettings
from rl.data import (
    RowCheck,
    addition,
    concatenate_sets,
    load_problems,
    load_rollouts,
    make_answers_check,
    select_good_rows,
)
from rl.errors import UserError
from rl.jsonl import format_json_line, read_jsonl
from rl.renderers import get_renderer
from rl.rollout.episode_state import EpisodeState, build_groups
from rl.types import ModelInput

USER, SAID = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
INFO = {"max_context": 200, "vocab_size": 300}


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def get_contents(problems):
    return [problem.messages[-1]["content"] for problem in problems]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"messages": [{**USER, "content": 3}, SAID]},
            "message 1 of 'messages' has content of type int",
        ),
        ({"messages": [{**USER, "content": None}, SAID]}, "content of type NoneType"),
        (
            {"messages": [{**USER, "content": [{"type": "image_url"}]}, SAID]},
            "message 1 has a place for an image",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "video"}]}, SAID]},
            "a part of content that is not text .'video'",
        ),
        (
            {"messages": [USER, {**SAID, "content": {"text": "b"}}]},
            "message 2 of 'messages' has content of type dict",
        ),
        ({"messages": [{**USER, "role": ""}, SAID]}, "message 1 of 'messages' has an empty role"),
        (
            {"messages": [USER, {**SAID, "tool_calls": "f"}, USER, SAID]},
            "tool_calls that are no list of calls",
        ),
        (
            {"messages": [USER, {**SAID, "reasoning_content": 3}, USER, SAID]},
            "reasoning_content that is no text",
        ),
        (
            {"messages": [{**USER, "content": "\ud800"}, SAID]},
            r"half of a surrogate pair, which is no text: '.ud800'",
        ),
        ({"messages": [USER, SAID], "extra": json.loads("[" * 70 + "]" * 70)}, "more than 64 deep"),
    ],
)
def test_rows_that_no_renderer_could_write_are_named_when_they_are_read(
    tmp_path, caplog, row, says
):
    good = {"messages": [USER, SAID]}
    path = write(tmp_path / "rows.jsonl", good, row, good)
    with pytest.raises(
        UserError, match=f"(?s)1 bad rows beside 2 good.*rows.jsonl line 2: .*{says}"
    ):
        load_problems(path)
    with caplog.at_level(logging.WARNING):
        assert len(load_problems(path, on_bad_row="skip")) == 2
    assert "rows.jsonl line 2" in caplog.text


def test_depth_that_the_parser_itself_cannot_take_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' + "[" * 100_000 + '\n{"prompt": "b"}\n')
    with pytest.raises(
        UserError,
        match="rows.jsonl line 2: lists and objects within one another, more than 64 deep",
    ):
        load_problems(path)
    assert get_contents(load_problems(path, on_bad_row="skip")) == ["a", "b"]
    (tmp_path / "rows.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="rows.json has lists and objects within one another"):
        load_problems(tmp_path / "rows.json", on_bad_row="skip")


def test_content_in_parts_is_read_as_its_text(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]
    (problem,) = load_problems(
        write(
            tmp_path / "rows.jsonl",
            {"messages": [{**USER, "content": parts}, {**SAID, "content": parts}]},
        )
    )
    assert (
        get_contents([problem]) == ["a?"]
        and problem.response == "a?"
        and problem.place == "rows.jsonl line 1"
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"response_tokens": [True, 4]}, "'response_tokens' is a list of one or more token ids"),
        ({"prompt_tokens": [2**40]}, "'prompt_tokens' is a list of one or more token ids"),
        ({"logprobs": [float("nan"), -1.0]}, "'logprobs' has one number"),
        (
            {"logprobs": [0.5, -1.0]},
            "'logprobs' has one number for each of the 2 response_tokens, at most 0",
        ),
        ({"reward": 10**400}, "'reward' is a number"),
        ({"temperature": "hot"}, "'temperature' is a positive number"),
        ({"temperature": 0}, "'temperature' is a positive number"),
        ({"group": [1]}, "'group' is a number or a name"),
        ({"response": 3}, "'response' is a text"),
        ({"prompt": None}, "'prompt' is a text"),
    ],
)
def test_odd_fields_of_rollouts_are_named(tmp_path, row, says):
    good = {
        "group": 0,
        "prompt": "a",
        "response": "b",
        "reward": 1,
        "prompt_tokens": [1],
        "response_tokens": [2, 3],
        "logprobs": [-1, -2],
    }
    path = write(tmp_path / "rows.jsonl", good, {**good, **row})
    with pytest.raises(UserError, match=f"(?s)rows.jsonl line 2: {says}"):
        load_rollouts(path)
    assert len(load_rollouts(path, on_bad_row="skip")[0].answers) == 1


# ---------------------------------------------------------------------- against the model's context


def test_rows_that_do_not_fit_or_cannot_be_rendered_are_named_or_left_out(tmp_path, caplog):
    tokenizer = llama_like()
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% "
        "endif %}",
    )
    chat = get_renderer("chat_template", tokenizer)
    rows = [
        {"messages": [USER, SAID]},
        {"messages": [{**USER, "content": "x" * 300}, SAID]},
        {"messages": [USER, {"role": "tool", "content": "x"}, USER, SAID]},
        {"messages": [USER, {**SAID, "content": "y" * 300}]},
        {"messages": [{**USER, "content": "z"}, SAID]},
    ]
    problems = load_problems(write(tmp_path / "rows.jsonl", *rows))
    check = RowCheck(INFO, chat, problems.name, ["response"], 0)
    expected = {
        2: "its prompt and response take 3.. tokens, the model's context holds 200",
        3: "no tools",
        4: "take 3.. tokens",
    }
    for line, says in expected.items():
        with pytest.raises(UserError, match=rf"^rows.jsonl line {line}\b.*{says}"):
            check(problems[line - 1])
    with pytest.raises(UserError, match="rows.jsonl line 2"):
        select_good_rows(problems, check, "error")
    with caplog.at_level(logging.WARNING):
        kept = select_good_rows(problems, check, "skip")
    assert get_contents(kept) == ["a?", "z"] and all(
        caplog.text.count(f"rows.jsonl line {line}") == 1 for line in expected
    )
    assert select_good_rows(kept, check, "skip") is kept
    with pytest.raises(UserError, match="no row is left"):
        select_good_rows(problems.subset([1, 2]), check, "skip")


def test_pairs_that_fit_alone_and_not_side_by_side(tmp_path, renderer):
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * n} for n in (5, 80)]
    problems = load_problems(write(tmp_path / "rows.jsonl", *rows), format="preferences")
    requests = {
        form: RewardModelTraining(
            RewardModelSettings(reward_modelling=RewardModelOptions(form=form))
        )
        for form in ("scalar", "comparison")
    }
    checks = {
        form: RowCheck(INFO, renderer, "x", ["response", "rejected"], 0, hooks.longest)
        for form, hooks in requests.items()
    }
    assert len(select_good_rows(problems, checks["scalar"], "error")) == 2
    with pytest.raises(
        UserError,
        match=r"^rows.jsonl line 2 does not fit: its longest sequence takes",
    ):
        select_good_rows(problems, checks["comparison"], "error")
    assert len(select_good_rows(problems, checks["comparison"], "skip")) == 1


def test_what_is_left_out_of_joined_sets_leaves_variants_and_order(tmp_path, renderer):
    """A file has a row that is too long, and is joined with generated rows with noise: the other
    rows are unchanged in each epoch.
    """
    path = write(
        tmp_path / "rows.jsonl",
        {"prompt": "a", "response": "b"},
        {"prompt": "x" * 300, "response": "b"},
    )
    both = concatenate_sets(
        [load_problems(path, response_column="response"), addition("test", {"noise": "1"})]
    )
    kept = select_good_rows(both, RowCheck(INFO, renderer, both.name, ["response"], 0), "skip")
    assert len(kept) == len(both) - 1
    assert [(p.index, p.response) for p in (kept.at(i, 3) for i in range(1, 40))] == [
        (p.index, p.response) for p in (both.at(i, 3) for i in range(2, 41))
    ]


def test_stored_answers_that_are_too_long_are_skipped_one_by_one(tmp_path, renderer, caplog):
    rows = [
        {"prompt": "a?", "response": "fits", "reward": 1},
        {"prompt": "a?", "response": "x" * 300, "reward": 0},
        {"prompt": "b?", "response": "x" * 300, "reward": 0},
        {"prompt": "c?", "response": ["y", "z" * 300, "w"], "reward": [1, 0, 0.5]},
    ]
    problems = load_rollouts(write(tmp_path / "rows.jsonl", *rows))

    def check(row, answer):
        check_stored_answer(OfflineSettings(), INFO, renderer, row, answer)

    with pytest.raises(
        UserError,
        match="rows.jsonl line 2: prompt and answer take 3.. tokens, but the model's context holds 200",
    ):
        select_good_rows(problems, make_answers_check(check, "error"), "error")
    with caplog.at_level(logging.WARNING):
        kept = select_good_rows(problems, make_answers_check(check, "skip"), "skip")
    assert [[answer.text for answer in problem.answers] for problem in kept] == [
        ["fits"],
        ["y", "w"],
    ]
    assert (
        [problem.index for problem in kept] == [0, 2]
        and "rows.jsonl line 3" in caplog.text
        and "rows.jsonl line 4" in caplog.text
    )


def test_all_faults_of_all_rows_are_told_at_once(tmp_path):
    """A single error covers unreadable rows, rows that exceed the model's context, and rows of a
    second file.
    """
    good = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(20)]
    path = write(
        tmp_path / "rows.jsonl",
        *good[:3],
        {"prompt": "1" * 600, "completion": "2"},
        {"prompt": "2+2="},
        *good[3:],
    )
    with path.open("a") as file:
        file.write(
            '{"prompt": "1+1=", "compl\n' * 40
            + '{"prompt": 3, "completion": "4"}\n{"query": "1"}\n'
        )
    other = write(tmp_path / "other.jsonl", *good[:2], {"prompt": " ", "completion": "1"})
    words = f"sft --dataset {path} --eval-dataset {other} --batch-size 4 --steps 2 --save-every 0"
    with pytest.raises(UserError) as error:
        train(words, tmp_path / "run")
    text = str(error.value)
    assert (
        text.startswith("45 bad rows beside ")
        and text.count("no JSON") < 5
        and text.count("\n") < 12
    ), text
    for place, what in [
        ("rows.jsonl line 4", "does not fit"), ("rows.jsonl line 5", "no response to learn"), ("rows.jsonl line 23", "no JSON"),
        ("rows.jsonl line 63", "'prompt' is a int"), ("rows.jsonl line 64", "no column 'prompt'"), ("other.jsonl line 3", "is empty"),
    ]:  # fmt: skip
        assert any(place in line and what in line for line in text.splitlines()), (place, text)
    assert not (tmp_path / "run").exists()


def test_rows_of_another_shape_are_answered_with_one_that_would_do(tmp_path):
    answers = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(20)]
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(20)]
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    chat = {"prompt": "1+1=", "messages": turns}
    pair, labelled = (
        '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}',
        '{"prompt": "2+2=", "completion": "4", "label": true}',
    )
    files = {
        "answers": write(tmp_path / "answers.jsonl", *answers),
        "pairs": write(tmp_path / "pairs.jsonl", *pairs),
        "sums": write(tmp_path / "sums.jsonl", *({"prompt": "1+1=", "answer": "2"},) * 20),
        "chats": write(tmp_path / "chats.jsonl", *({**chat, "prompt_id": "a1"},) * 20),
    }
    cases = [
        (
            "dpo",
            "answers",
            ["no column 'chosen' (chosen_column) in any of 20 rows", f"Such a row is {pair}"],
        ),
        (
            "dpo --data-format auto",
            "answers",
            [
                "no pair of answers",
                f"such a row is {pair}",
                "it has 'completion'",
                "All 18 rows have this fault",
            ],
        ),
        ("reward_model", "answers", [f"Such a row is {pair}"]),
        (
            "dpo --chosen-column better",
            "answers",
            ["no column 'better'", pair.replace("chosen", "better")],
        ),
        ("kto", "answers", ["no column 'label' in any of 20 rows", f"Such a row is {labelled}"]),
        ("kto", "pairs", ["these are pairs, of which --data-format preferences makes"]),
        ("sft", "sums", ["sums.jsonl line 1 has no", "); here: --response-column answer"]),
        ("sft", "chats", ["no response to learn", "); here: --data-format messages"]),
        (
            "sft",
            "pairs",
            ["no response to learn", 'such a row is {"prompt": "2+2=", "completion": "4"}'],
        ),
    ]
    for method, file, says in cases:
        with pytest.raises(UserError) as error:
            train(
                f"{method} --dataset {files[file]} --batch-size 4 --steps 2 --save-every 0",
                tmp_path / "run",
            )
        assert (
            all(text in str(error.value) for text in says) and str(error.value).count("\n") < 3
        ), (method, file, str(error.value))
    words = (
        f"kto --dataset {files['pairs']} --data-format preferences --batch-size 4 --steps 1 "
        f"--eval-every 0 --save-every 0"
    )
    assert train(words, tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_skips_goes_on_without_what_is_too_long(tmp_path):
    good = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
    path = write(tmp_path / "rows.jsonl", *good, {"prompt": "1" * 600, "response": "2"})
    words = (
        f"sft --dataset {path} --response-column response --batch-size 8 --steps 2 --eval-every 0 "
        f"--save-every 0"
    )
    with pytest.raises(UserError, match=r"^rows.jsonl line 9 does not fit"):
        train(words, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    rows = train(f"{words} --on-bad-row skip", tmp_path / "run")
    assert rows[0]["progress/epoch"] == 1.0  # 8 rows, a batch of 8
    stored = write(
        tmp_path / "stored.jsonl",
        *({"prompt": f"{i}+1=", "response": ["2", "1" * 600], "reward": [1, 0]} for i in range(4)),
    )
    words = f"offline --dataset {stored} --batch-size 4 --steps 1 --save-every 0"
    with pytest.raises(UserError, match="stored.jsonl line 1: prompt and answer take 60. tokens"):
        train(words, tmp_path / "refused")
    # four answers and their EOS
    assert train(f"{words} --on-bad-row skip", tmp_path / "offline")[0]["optim/tokens"] == 8


# -------------------------------------------------------------------------------------------- lines


def test_half_a_surrogate_pair_is_written_as_an_escape_and_read_back(tmp_path):
    """A sample's error may contain any text from the user's code."""
    row = {"error": "a\ud800b\udfff", "text": "é数"}
    line = format_json_line(row)
    assert line.encode() and json.loads(line) == row and "é数" in line
    path = tmp_path / "metrics.jsonl"
    path.write_text(line * 2, encoding="utf-8")
    assert read_jsonl(path) == [row, row]


def test_an_error_that_cannot_be_encoded_is_kept_as_it_can_be_shown():
    episode = EpisodeState(
        0, 0, SimpleNamespace(), ModelInput.empty(), None, [], "reward raised ValueError: \ud800"
    )
    _, errors = build_groups([(SimpleNamespace(), [episode])])
    assert errors == ["reward raised ValueError: \\ud800"] and errors[0].encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"a": 1}\n\xff\n', "line 2 is not JSON"),
        (b'{"a": 1}\n' + b"[" * 100_000 + b"\n", "line 2 is not JSON"),
        (b'{"a": 1}\n5\n', "line 2 is a int, expected a JSON object"),
    ],
)
def test_a_damaged_line_of_a_runs_file_is_named(tmp_path, text, says):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError, match=f"metrics.jsonl {says}.*repair or delete that line"):
        read_jsonl(path)
    # the last line of a killed writer, perhaps cut within a character
    path.write_bytes(text.rstrip(b"\n"))
    assert read_jsonl(path) == [{"a": 1}]
