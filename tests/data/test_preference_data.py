"""Test preference rows in their common formats, and the errors for invalid rows."""

import gzip
import json
from pathlib import Path

import pytest

from rl.data import addition, concatenate_sets, load_problems
from rl.errors import UserError

USER = {"role": "user", "content": "Hi?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def make_message(text: str) -> dict:
    return {"role": "assistant", "content": text}


def load(tmp_path: Path, *rows: dict, **kwargs):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_problems(path, **{"format": "preferences", **kwargs})


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": "No"}, [USER]),
        ({"prompt": [SYSTEM, USER], "chosen": "Yes", "rejected": "No"}, [SYSTEM, USER]),
        (
            {"prompt": [USER], "chosen": [make_message("Yes")], "rejected": [make_message("No")]},
            [USER],
        ),
        (
            {
                "chosen": [SYSTEM, USER, make_message("Yes")],
                "rejected": [SYSTEM, USER, make_message("No")],
            },
            [SYSTEM, USER],
        ),
        (
            {
                "prompt": "Hi?",
                "chosen": [USER, make_message("Yes")],
                "rejected": [USER, make_message("No")],
            },
            [USER],
        ),
        (
            {"instruction": "Hi?", "input": "", "output": "x", "chosen": "Yes", "rejected": "No"},
            [USER],
        ),
        (
            {"instruction": "Say", "input": "hi", "chosen": "Yes", "rejected": "No"},
            [{"role": "user", "content": "Say\n\nhi"}],
        ),
        ({"input": "Hi?", "output_1": "No", "output_2": "Yes", "label": 2}, [USER]),
        (
            {
                "chosen": "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: Hi?\n\nAssistant: Yes",
                "rejected": "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: Hi?\n\nAssistant: No",
            },
            [{"role": "user", "content": "A?"}, make_message("B."), USER],
        ),
    ],
)
def test_every_shape_reads_as_prompt_preferred_and_other(tmp_path, row, messages):
    (problem,) = load(tmp_path, row)
    assert (list(problem.messages), problem.response, problem.rejected) == (messages, "Yes", "No")


def test_columns_can_be_named_and_others_reach_the_reward(tmp_path):
    row = {"q": "Hi?", "good": "Yes", "bad": "No", "answer": "Y", "source": "web"}
    (problem,) = load(tmp_path, row, prompt_column="q", chosen_column="good", rejected_column="bad")
    assert (problem.response, problem.rejected, problem.meta) == (
        "Yes",
        "No",
        {"answer": "Y", "source": "web"},
    )
    (problem,) = load(
        tmp_path,
        {"chosen": [USER, make_message("Yes")], "rejected": [USER, make_message("No")]},
        format="auto",
    )
    assert (problem.response, problem.rejected) == ("Yes", "No")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi?", "chosen": "Yes"}, "no column 'rejected'"),
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": 3}, "'rejected' is a int"),
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": " "}, "'rejected' is empty"),
        ({"chosen": "Yes", "rejected": "No"}, "no column 'prompt'"),
        (
            {
                "chosen": [USER, make_message("Yes")],
                "rejected": [{"role": "user", "content": "Ho?"}, make_message("No")],
            },
            "differ before their last",
        ),
        (
            {"chosen": [USER, make_message("Yes")], "rejected": [USER, make_message("")]},
            "answer in 'rejected' is empty",
        ),
        (
            {
                "prompt": [USER],
                "chosen": [make_message("Yes"), make_message("Yes")],
                "rejected": [make_message("No")],
            },
            "it has 2 messages",
        ),
        (
            {"chosen": [USER, make_message("Yes")], "rejected": [USER, USER]},
            "ends with a message of the assistant",
        ),
        ({"input": "Hi?", "output_1": "No", "output_2": "Yes", "label": 3}, "'label' is 1 or 2"),
    ],
)
def test_rows_that_are_no_pair_are_named_by_file_and_line(tmp_path, row, message):
    good = {"prompt": "Hi?", "chosen": "Yes", "rejected": "No"}
    with pytest.raises(UserError, match=f"pairs.jsonl line 2: .*{message}"):
        load(tmp_path, good, row)
    assert len(load(tmp_path, good, row, on_bad_row="skip")) == 1


def test_real_preferences(shared_data):
    folder = shared_data / "preferences"
    hh = load_problems(
        folder / "hh_rlhf" / "harmless-base_test.jsonl.gz", format="preferences", on_bad_row="skip"
    )
    assert len(hh) > 2300 and all(
        p.messages[-1]["role"] == "user" and p.response and p.rejected for p in hh
    )
    with gzip.open(folder / "hh_rlhf" / "harmless-base_test.jsonl.gz", "rt") as file:
        first = json.loads(file.readline())
    text = "".join(
        f"\n\n{'Human' if m['role'] == 'user' else 'Assistant'}: {m['content']}"
        for m in hh[0].messages
    )
    assert f"{text}\n\nAssistant: {hh[0].response}" == first["chosen"].rstrip()
    assert len(load_problems(folder / "llmbar" / "Natural.json", format="preferences")) == 100
    rows = load_problems(
        folder / "rasbt_dpo" / "instruction-data-with-preference.json", format="preferences"
    )
    raw = json.loads((folder / "rasbt_dpo" / "instruction-data-with-preference.json").read_text())
    assert [(p.response, p.rejected) for p in rows] == [(r["chosen"], r["rejected"]) for r in raw]


def test_generated_sums_come_with_a_wrong_one():
    for problem in addition("test"):
        right, wrong = str(problem.response), str(problem.rejected)
        assert (
            len(right) == len(wrong) and sum(a != b for a, b in zip(right, wrong, strict=True)) == 1
        )


def test_joined_sets_keep_their_rows_tags_and_variants():
    plain, noisy = addition("test", tag="plain"), addition("train", {"noise": "1"}, tag="noisy")
    both = concatenate_sets([plain, noisy])
    assert len(both) == len(plain) + len(noisy) and [p.index for p in both] == list(
        range(len(both))
    )
    at = len(plain) + 7
    assert both[3].response == plain[3].response and (both[3].tag, both[at].tag) == (
        "plain",
        "noisy",
    )
    assert [both.at(at, epoch).response for epoch in range(5)] == [
        noisy.at(7, epoch).response for epoch in range(5)
    ]
    assert len({both.at(at, epoch).response for epoch in range(20)}) > 3
    assert concatenate_sets([plain]) is plain
