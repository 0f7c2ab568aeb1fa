"""Test checks of rows and stored answers: invalid ones are reported before the first step, with
file and line, and `skip` drops them.
"""

import json
import logging
from types import SimpleNamespace

import pytest
from data_helpers import SAID, USER, get_contents, write_rows
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
from rl.sampler.rope_switch import RopeLengthSwitch
from rl.types import ModelInput

INFO = {"max_context": 200, "vocab_size": 300}


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


def make_user(content, **more):
    return {"messages": [{**USER, "content": content, **more}, SAID]}


def make_turn(**more):
    return {"messages": [USER, {**SAID, **more}, USER, SAID]}


ANSWERED, TALK = {"prompt": "x", "answer": "1"}, {"messages": [USER, SAID]}
# (a good row, a bad row or the text of a line, what the error says)
BAD_ROWS = [
    (ANSWERED, "{'prompt': 'x'}", "no JSON"),
    (ANSWERED, "[1]", "a JSON object is expected, this is a list"),
    (ANSWERED, {"promt": "x", "answer": "1"}, "no column 'prompt'; it has 'promt', 'answer'"),
    (ANSWERED, {"prompt": 7, "answer": "1"}, "'prompt' has the type int, text is expected"),
    (ANSWERED, {"prompt": " ", "answer": "1"}, "'prompt' is empty"),
    (ANSWERED, {"prompt": "x"}, "no column 'answer'"),
    (ANSWERED, {"prompt": "x", "answer": None}, "'answer' is empty"),
    (ANSWERED, {"prompt": [{"role": "user"}], "answer": "1"}, "message 1 of 'prompt' is no"),
    (TALK, make_user(3), "message 1 of 'messages' has content of type int"),
    (TALK, make_user(None), "message 1 of 'messages' has content of type NoneType"),
    (TALK, make_user([{"type": "image_url"}]), "message 1 has a place for an image"),
    (TALK, make_user([{"type": "video"}]), "a part of content that is not text ('video'"),
    (TALK, make_turn(content={"text": "b"}), "message 2 of 'messages' has content of type dict"),
    (TALK, make_user("a?", role=""), "message 1 of 'messages' has an empty role"),
    (TALK, make_turn(tool_calls="f"), "tool_calls that are no list of calls"),
    (TALK, make_turn(reasoning_content=3), "reasoning_content that is no text"),
    (TALK, {"messages": [USER, {**SAID, "content": "", "tool_calls": [{"name": "f"}]}]},
     "the last message is not text alone (tool_calls"),
    (TALK, make_user("\ud800"), r"half of a surrogate pair, which is no text: '\ud800'"),
    (TALK, {**TALK, "extra": json.loads("[" * 70 + "]" * 70)}, "more than 64 deep"),
    # too deep for the parser
    (ANSWERED, "[" * 100_000, "lists and objects within one another, more than 64 deep"),
]  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "says"), BAD_ROWS, ids=lambda value: str(value)[:40])
def test_a_bad_row_is_named_by_file_and_line_and_may_be_skipped(tmp_path, caplog, good, bad, says):
    path = write_rows(tmp_path / "rows.jsonl", good, bad, good)
    with pytest.raises(UserError, match="1 bad rows beside 2 good") as error:
        load_problems(path)
    (line,) = (line for line in str(error.value).splitlines() if "rows.jsonl line 2: " in line)
    assert says in line
    assert "leave them out with on_bad_row skip" in str(error.value)
    with caplog.at_level(logging.WARNING):
        kept = load_problems(path, on_bad_row="skip")
    assert [problem.index for problem in kept] == [0, 1] and "rows.jsonl line 2: " in caplog.text


def test_many_bad_rows_are_counted_and_the_first_five_shown(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", *["x"] * 7, {"prompt": "x"}, *["x"] * 3)
    with pytest.raises(UserError, match="10 bad rows beside 1 good") as error:
        load_problems(path)
    assert str(error.value).count("no JSON") == 5


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: no UTF-8 text"),
        ("a.json", b'[{"prompt": "a"}, 5]', "a.json row 2: a JSON object is expected"),
        ("a.json", b"[" * 100_000, "a.json has lists and objects within one another"),
    ],
    ids=["no UTF-8", "no object", "deep"],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text, says):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match=says):
        load_problems(tmp_path / name)


STORED = {"group": 0, "prompt": "a", "response": "b", "reward": 1}
STORED |= {"prompt_tokens": [1], "response_tokens": [2, 3], "logprobs": [-1, -2]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"response_tokens": [True, 4]}, "'response_tokens' is a list of one or more token ids"),
        ({"prompt_tokens": [2**40]}, "'prompt_tokens' is a list of one or more token ids"),
        ({"logprobs": [float("nan"), -1.0]}, "'logprobs' has one number"),
        ({"logprobs": [0.5, -1.0]},
         "'logprobs' has one number for each of the 2 response_tokens, at most 0"),
        ({"reward": 10**400}, "'reward' is a number"),
        ({"temperature": "hot"}, "'temperature' is a positive number"),
        ({"temperature": 0}, "'temperature' is a positive number"),
        ({"group": [1]}, "'group' is a number or a name"),
        ({"response": 3}, "'response' is a text"),
        ({"prompt": None}, "'prompt' is a text"),
    ],
    ids=str,
)  # fmt: skip
def test_odd_fields_of_rollouts_are_named(tmp_path, row, says):
    path = write_rows(tmp_path / "rows.jsonl", STORED, {**STORED, **row})
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
    good = {"messages": [USER, SAID]}
    rows = [
        good,
        make_user("x" * 300),
        {"messages": [USER, {"role": "tool", "content": "x"}, USER, SAID]},
        {"messages": [USER, {**SAID, "content": "y" * 300}]},
        make_user("z"),
    ]
    problems = load_problems(write_rows(tmp_path / "rows.jsonl", *rows))
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
    assert get_contents(kept) == ["a?", "z"]
    assert [caplog.text.count(f"rows.jsonl line {line}") for line in expected] == [1, 1, 1]
    assert select_good_rows(kept, check, "skip") is kept
    with pytest.raises(UserError, match="no row is left"):
        select_good_rows(problems.subset([1, 2]), check, "skip")


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"kv_cache_tokens": 90}, r"the KV cache \(kv_cache_tokens\) holds 90"),
        (
            {"kv_cache_tokens": 164, "copies_prompts": True},
            "beside a copy of the prompt holds [0-9]+",
        ),
        (
            {"length_switch": RopeLengthSwitch("longrope", 90, True)},
            "the range of the model's rotary frequencies holds 90",
        ),
    ],
)
def test_rows_that_the_sampler_cannot_answer_are_named(tmp_path, renderer, more, name):
    """A row that is only trained on may have them all; longrope has others after 90 tokens."""
    rows = [{"prompt": "a" * n, "answer": "1"} for n in (10, 60, 95)]
    problems = load_problems(write_rows(tmp_path / "rows.jsonl", *rows))
    check = RowCheck({**INFO, **more}, renderer, "rows", (), 50)
    check(problems[0])
    with pytest.raises(
        UserError, match=f"line 2 does not fit: its prompt and max_tokens 50.*{name}"
    ):
        check(problems[1])
    assert len(select_good_rows(problems, RowCheck(INFO, renderer, "rows", (), 50), "error")) == 3
    if "length_switch" in more:
        check(problems[2])
    else:
        with pytest.raises(UserError, match="line 3"):
            check(problems[2])


def test_pairs_that_fit_alone_and_not_side_by_side(tmp_path, renderer):
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * n} for n in (5, 80)]
    problems = load_problems(write_rows(tmp_path / "rows.jsonl", *rows), format="preferences")
    checks = {}
    for form in ("scalar", "comparison"):
        settings = RewardModelSettings(reward_modelling=RewardModelOptions(form=form))
        longest = RewardModelTraining(settings).longest
        checks[form] = RowCheck(INFO, renderer, "x", ["response", "rejected"], 0, longest)
    assert len(select_good_rows(problems, checks["scalar"], "error")) == 2
    with pytest.raises(UserError, match="^rows.jsonl line 2 does not fit: its longest sequence"):
        select_good_rows(problems, checks["comparison"], "error")
    assert len(select_good_rows(problems, checks["comparison"], "skip")) == 1


def test_what_is_left_out_of_joined_sets_leaves_variants_and_order(tmp_path, renderer):
    """A file has a row that is too long, and is joined with generated rows with noise: the other
    rows are unchanged in each epoch.
    """
    rows = [{"prompt": prompt, "response": "b"} for prompt in ("a", "x" * 300)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    sets = [load_problems(path, response_column="response"), addition("test", {"noise": "1"})]
    both = concatenate_sets(sets)
    kept = select_good_rows(both, RowCheck(INFO, renderer, both.name, ["response"], 0), "skip")
    assert len(kept) == len(both) - 1
    now, before = [kept.at(i, 3) for i in range(1, 40)], [both.at(i, 3) for i in range(2, 41)]
    assert [(p.index, p.response) for p in now] == [(p.index, p.response) for p in before]


def test_stored_answers_that_are_too_long_are_skipped_one_by_one(tmp_path, renderer, caplog):
    rows = [
        {"prompt": "a?", "response": "fits", "reward": 1},
        {"prompt": "a?", "response": "x" * 300, "reward": 0},
        {"prompt": "b?", "response": "x" * 300, "reward": 0},
        {"prompt": "c?", "response": ["y", "z" * 300, "w"], "reward": [1, 0, 0.5]},
        {"prompt": "d?", "response": [], "reward": []},
    ]
    problems = load_rollouts(write_rows(tmp_path / "rows.jsonl", *rows))

    def check(row, answer):
        check_stored_answer(OfflineSettings(), INFO, renderer, row, answer)

    says = "rows.jsonl line 2: prompt and answer take 3.. tokens, but the model's context holds 200"
    with pytest.raises(UserError, match=says):
        select_good_rows(problems, make_answers_check(check, "error"), "error")
    with caplog.at_level(logging.WARNING):
        kept = select_good_rows(problems, make_answers_check(check, "skip"), "skip")
    texts = [[answer.text for answer in problem.answers] for problem in kept]
    assert texts == [["fits"], ["y", "w"]] and [problem.index for problem in kept] == [0, 2]
    assert "rows.jsonl line 3" in caplog.text and "rows.jsonl line 4" in caplog.text


def make_answers(count: int) -> list[dict]:
    return [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(count)]


def test_all_faults_of_all_rows_are_told_at_once(tmp_path):
    """A single error covers unreadable rows, rows that exceed the model's context, and rows of a
    second file.
    """
    good, bad = make_answers(20), [{"prompt": "1" * 600, "completion": "2"}, {"prompt": "2+2="}]
    bad_lines = [*['{"prompt": "1+1=", "compl'] * 40, {"prompt": 3, "completion": "4"}]
    path = tmp_path / "rows.jsonl"
    write_rows(path, *good[:3], *bad, *good[3:], *bad_lines, {"query": "1"})
    other = write_rows(tmp_path / "other.jsonl", *good[:2], {"prompt": " ", "completion": "1"})
    words = f"sft --dataset {path} --eval-dataset {other} --batch-size 4 --steps 2 --save-every 0"
    with pytest.raises(UserError) as error:
        train(words, tmp_path / "run")
    text = str(error.value)
    assert text.startswith("45 bad rows beside "), text
    assert text.count("no JSON") < 5 and text.count("\n") < 12, text
    for place, what in [
        ("rows.jsonl line 4", "does not fit"),
        ("rows.jsonl line 5", "no response to learn"),
        ("rows.jsonl line 23", "no JSON"),
        ("rows.jsonl line 63", "'prompt' has the type int"),
        ("rows.jsonl line 64", "no column 'prompt'"),
        ("other.jsonl line 3", "is empty"),
    ]:
        assert any(place in line and what in line for line in text.splitlines()), (place, text)
    assert not (tmp_path / "run").exists()


PAIR = '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}'
LABELLED = '{"prompt": "2+2=", "completion": "4", "label": true}'
ANSWER = '{"prompt": "2+2=", "completion": "4"}'
TURNS = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
OTHER_ROWS = {
    "answers": make_answers(20),
    "pairs": [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(20)],
    "sums": [{"prompt": "1+1=", "answer": "2"}] * 20,
    "chats": [{"prompt": "1+1=", "messages": TURNS, "prompt_id": "a1"}] * 20,
}


@pytest.mark.parametrize(
    ("method", "rows", "says"),
    [
        ("dpo", "answers",
         ["no column 'chosen' (chosen_column) in any of 20 rows", f"Such a row is {PAIR}"]),
        ("dpo --data-format auto", "answers",
         ["no pair of answers", f"such a row is {PAIR}", "it has 'completion'",
          "All 18 rows have this fault"]),
        ("reward_model", "answers", [f"Such a row is {PAIR}"]),
        ("dpo --chosen-column better", "answers",
         ["no column 'better'", PAIR.replace("chosen", "better")]),
        ("kto", "answers", ["no column 'label' in any of 20 rows", f"Such a row is {LABELLED}"]),
        ("kto", "pairs", ["these are pairs, of which --data-format preferences makes"]),
        ("sft", "sums", ["rows.jsonl line 1 has no", "); here: --response-column answer"]),
        ("sft", "chats", ["no response to learn", "); here: --data-format messages"]),
        ("sft", "pairs", ["no response to learn", f"such a row is {ANSWER}"]),
    ],
)  # fmt: skip
def test_rows_of_another_shape_are_answered_with_one_that_would_do(tmp_path, method, rows, says):
    path = write_rows(tmp_path / "rows.jsonl", *OTHER_ROWS[rows])
    with pytest.raises(UserError) as error:
        train(
            f"{method} --dataset {path} --batch-size 4 --steps 2 --save-every 0", tmp_path / "run"
        )
    text = str(error.value)
    assert all(part in text for part in says) and text.count("\n") < 3, text


def test_kto_learns_from_pairs_as_its_error_says(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", *OTHER_ROWS["pairs"])
    words = "--data-format preferences --batch-size 4 --steps 1 --eval-every 0 --save-every 0"
    assert train(f"kto --dataset {path} {words}", tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_skips_goes_on_without_what_is_too_long(tmp_path):
    rows = [*make_answers(8), {"prompt": "1" * 600, "completion": "2"}]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    words = f"sft --dataset {path} --batch-size 8 --steps 2 --eval-every 0 --save-every 0"
    with pytest.raises(UserError, match=r"^rows.jsonl line 9 does not fit"):
        train(words, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    metrics = train(f"{words} --on-bad-row skip", tmp_path / "run")
    assert metrics[0]["progress/epoch"] == 1.0  # 8 rows, a batch of 8
    answers = {"response": ["2", "1" * 600], "reward": [1, 0]}
    rows = [{"prompt": f"{i}+1=", **answers} for i in range(4)]
    path = write_rows(tmp_path / "stored.jsonl", *rows)
    words = f"offline --dataset {path} --batch-size 4 --steps 1 --save-every 0"
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
