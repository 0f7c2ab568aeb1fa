"""Test preference rows in their common formats, and the errors for invalid rows."""

import gzip
import json

import pytest
from data_helpers import USER, write_rows

from rl.data import addition, concatenate_sets, load_problems
from rl.errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}
OTHER_USER = {"role": "user", "content": "Ho?"}


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


YES, NO = say("Yes"), say("No")
TEXTS = {"chosen": "Yes", "rejected": "No"}
TURNS = "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: a?\n\nAssistant: "


def load(tmp_path, *rows: dict, **settings):
    path = write_rows(tmp_path / "pairs.jsonl", *rows)
    return load_problems(path, **{"format": "preferences", **settings})


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "a?", **TEXTS}, [USER]),
        ({"prompt": [SYSTEM, USER], **TEXTS}, [SYSTEM, USER]),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, [USER]),
        ({"chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]}, [SYSTEM, USER]),
        ({"prompt": "a?", "chosen": [USER, YES], "rejected": [USER, NO]}, [USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [USER, YES], "rejected": [USER, NO]},
         [SYSTEM, USER]),
        ({"prompt": [SYSTEM], "chosen": [USER, YES], "rejected": [USER, NO]}, [SYSTEM, USER]),
        ({"prompt": [{**SYSTEM, "content": "x"}, USER], "chosen": [SYSTEM, USER, YES],
          "rejected": [SYSTEM, USER, NO]}, [SYSTEM, USER]),
        ({"prompt": [], "chosen": [USER, YES], "rejected": [USER, NO]}, [USER]),
        ({"instruction": "a?", "input": "", "output": "x", **TEXTS}, [USER]),
        ({"instruction": "Say", "input": "hi", **TEXTS}, [{**USER, "content": "Say\n\nhi"}]),
        ({"input": "a?", "output_1": "No", "output_2": "Yes", "label": 2}, [USER]),
        *(({"chosen": f"{begin}{TURNS.lstrip()}Yes", "rejected": f"{TURNS}No"},
           [{**USER, "content": "A?"}, say("B."), USER]) for begin in ("\n\n", "\n", " ", "")),
    ],
    ids=str,
)  # fmt: skip
def test_every_shape_reads_as_prompt_preferred_and_other(tmp_path, row, messages):
    (problem,) = load(tmp_path, row)
    assert (list(problem.messages), problem.response, problem.rejected) == (messages, "Yes", "No")


def test_columns_can_be_named_and_others_reach_the_reward(tmp_path):
    row = {"q": "Hi?", "good": "Yes", "bad": "No", "answer": "Y", "source": "web"}
    (problem,) = load(tmp_path, row, prompt_column="q", chosen_column="good", rejected_column="bad")
    assert (problem.response, problem.rejected) == ("Yes", "No")
    assert problem.meta == {"answer": "Y", "source": "web"}
    (problem,) = load(tmp_path, {"chosen": [USER, YES], "rejected": [USER, NO]}, format="auto")
    assert (problem.response, problem.rejected) == ("Yes", "No")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi?", "chosen": "Yes"}, "no column 'rejected'"),
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": 3}, "'rejected' has the type int"),
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": ["No"]}, "'rejected' is a list, but no "),
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": " "}, "'rejected' is empty"),
        ({"chosen": "Yes", "rejected": "No"}, "no column 'prompt'"),
        ({"chosen": [USER, YES], "rejected": [OTHER_USER, NO]}, "differ before their last"),
        ({"chosen": [USER, YES], "rejected": [USER, say("")]}, "answer in 'rejected' is empty"),
        ({"prompt": [USER], "chosen": [YES, YES], "rejected": [NO]}, "it has 2 messages"),
        ({"chosen": [USER, YES], "rejected": [USER, USER]}, "ends with a message of the assistant"),
        ({"input": "Hi?", "output_1": "No", "output_2": "Yes", "label": 3}, "'label' is 1 or 2"),
    ],
    ids=str,
)
def test_rows_that_are_no_pair_are_named_by_file_and_line(tmp_path, row, message):
    good = {"prompt": "Hi?", **TEXTS}
    with pytest.raises(UserError, match=f"pairs.jsonl line 2: .*{message}"):
        load(tmp_path, good, row)
    assert len(load(tmp_path, good, row, on_bad_row="skip")) == 1


def test_real_preferences(shared_data):
    folder = shared_data / "preferences"
    path = folder / "hh_rlhf" / "harmless-base_test.jsonl.gz"
    hh = load_problems(path, format="preferences", on_bad_row="skip")
    assert len(hh) > 2300
    assert all(p.messages[-1]["role"] == "user" and p.response and p.rejected for p in hh)
    with gzip.open(path, "rt") as file:
        first = json.loads(file.readline())
    names = {"user": "Human", "assistant": "Assistant"}
    text = "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in hh[0].messages)
    assert f"{text}\n\nAssistant: {hh[0].response}" == first["chosen"].rstrip()
    assert len(load_problems(folder / "llmbar" / "Natural.json", format="preferences")) == 100
    path = folder / "rasbt_dpo" / "instruction-data-with-preference.json"
    rows, raw = load_problems(path, format="preferences"), json.loads(path.read_text())
    assert [(p.response, p.rejected) for p in rows] == [(r["chosen"], r["rejected"]) for r in raw]


def test_generated_sums_come_with_a_wrong_one():
    for problem in addition("test"):
        right, wrong = str(problem.response), str(problem.rejected)
        assert len(right) == len(wrong)
        assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1


def test_joined_sets_keep_their_rows_tags_and_variants():
    plain, noisy = addition("test", tag="plain"), addition("train", {"noise": "1"}, tag="noisy")
    both, at = concatenate_sets([plain, noisy]), len(plain) + 7
    assert [p.index for p in both] == list(range(len(plain) + len(noisy)))
    assert both[3].response == plain[3].response
    assert (both[3].tag, both[at].tag) == ("plain", "noisy")
    drawn = [both.at(at, epoch).response for epoch in range(20)]
    assert drawn == [noisy.at(7, epoch).response for epoch in range(20)] and len(set(drawn)) > 3
    assert concatenate_sets([plain]) is plain
