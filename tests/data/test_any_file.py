"""Test any user's file: row formats, kinds of files and folders, mixtures, streams, prompts."""

import csv
import dataclasses
import json
import logging
import time
from collections import Counter

import pytest
from data_helpers import SAID, USER, get_contents, make_sum_rows, write_rows

from rl.data import MissingSplit, Mixture, concatenate_sets, load_problems, load_rollouts
from rl.errors import UserError

# ----------------------------------------------------------------------------------- shapes of rows

SYSTEM = {"role": "system", "content": "s"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]
TURNS = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
SHAPES = {
    "completion": ({"prompt": "a?", "completion": "b"}, [USER], "b"),
    "completion as messages": ({"prompt": [USER], "completion": [SAID]}, [USER], "b"),
    "text": ({"text": "a? b"}, [], "a? b"),
    "messages": ({"messages": [USER, SAID]}, [USER], "b"),
    "parts": ({"messages": [{**USER, "content": PARTS}, {**SAID, "content": PARTS}]}, [USER], "a?"),
    "sharegpt": ({"conversations": TURNS}, [USER], "b"),
    "sharegpt with system": ({"system": "s", "conversations": TURNS}, [SYSTEM, USER], "b"),
    "roles under conversations": ({"conversations": [USER, SAID]}, [USER], "b"),
    "alpaca": ({"instruction": "a?", "input": "", "output": "b"}, [USER], "b"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_usual_shape_is_known_by_its_columns(tmp_path, shape):
    row, request, response = SHAPES[shape]
    (problem,) = load_problems(write_rows(tmp_path / "rows.jsonl", row))
    assert (list(problem.messages), problem.response) == (request, response)
    assert problem.place == "rows.jsonl line 1"


def test_instances_of_one_instruction_are_problems_of_their_own(tmp_path, shared_data):
    instances = [{"input": "1+1", "output": "2"}, {"input": "", "output": "?"}]
    row = {"instruction": "Add.", "instances": instances, "id": "seed"}
    path = write_rows(tmp_path / "seed.jsonl", row, {**row, "instances": [{"input": "x"}]})
    problems = load_problems(path, on_bad_row="skip")
    assert [(p.messages[0]["content"], p.response, p.place, p.index) for p in problems] == [
        ("Add.\n\n1+1", "2", "seed.jsonl line 1, instance 1", 0),
        ("Add.", "?", "seed.jsonl line 1, instance 2", 1),
    ]
    with pytest.raises(UserError, match="line 2: instance 1: no column 'output'"):
        load_problems(path)
    published = shared_data / "sft" / "self_instruct_seed" / "seed_tasks.jsonl"
    raw = [json.loads(line) for line in published.open()]
    assert len(load_problems(published)) == sum(len(row["instances"]) for row in raw) >= 175


def test_a_label_says_whether_an_answer_is_good(tmp_path):
    row = {"prompt": "a?", "completion": "b"}
    rows = [{**row, "label": label} for label in (True, 0, "false", "1")]
    result = load_problems(write_rows(tmp_path / "rows.jsonl", *rows), format="unpaired")
    assert [problem.meta["label"] for problem in result] == [True, False, False, True]
    path = write_rows(tmp_path / "bad.jsonl", {**row, "label": "good"})
    with pytest.raises(UserError, match="'label' is true or false"):
        load_problems(path, format="unpaired")


# -------------------------------------------------------------------------------- files and folders


def write_tables(folder):
    """Return the same four rows in every kind of file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = make_sum_rows(4)
    write_rows(folder / "a.jsonl", *rows)
    (folder / "b.json").write_text(json.dumps(rows))
    for name, delimiter in (("c.csv", ","), ("d.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8-sig") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "e.parquet", row_group_size=3)
    with pa.OSFile(str(folder / "f.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sorted(folder.iterdir())


def test_every_kind_of_file_has_the_same_rows(tmp_path):
    rows, files = make_sum_rows(4), write_tables(tmp_path / "t")
    assert len(files) == 6
    for path in files:
        result = load_problems(path)
        assert get_contents(result) == [row["prompt"] for row in rows], path
        assert [problem.meta["answer"] for problem in result] == [row["answer"] for row in rows]
        assert result[1].place.startswith(path.name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('prompt,answer\n"1+1=",2\n"2+2="\n"3+3\n=",6\n',
         "x.csv line 3: it has 1 cells, the first line names 2 columns"),
        ("prompt,prompt\na,b\n", "names the columns, each once"),
        (",prompt,answer\n0,a,b\n", "without its index"),  # as pandas writes a table by default
        ("prompt;answer\na;b\n", "separated by ';'.*by ','"),  # as spreadsheets of many countries
    ],
)  # fmt: skip
def test_a_table_names_its_bad_rows_and_what_is_no_table(tmp_path, text, says):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_problems(path)
    if "line 3" in says:
        assert get_contents(load_problems(path, on_bad_row="skip")) == ["1+1=", "3+3\n="]


def test_blank_lines_before_the_names_of_the_columns_are_skipped(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("\n\nprompt,answer\n\n1+1=,2\n")
    (problem,) = load_problems(path)
    assert get_contents([problem]) == ["1+1="] and problem.meta == {"answer": "2"}
    assert problem.place == "x.csv line 5"


def test_what_is_no_table_is_said_and_cells_may_hold_json(tmp_path):
    for name in ("y.parquet", "y.arrow"):
        (tmp_path / name).write_bytes(b"no table at all")
        with pytest.raises(UserError, match=f"{name} is no"):
            load_problems(tmp_path / name)
    with (tmp_path / "chat.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], [json.dumps([USER, SAID])]])
    assert load_problems(tmp_path / "chat.csv")[0].response == "b"


def test_what_datasets_saved_and_a_downloaded_repository(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = {"train": make_sum_rows(5), "test": make_sum_rows(3, 50)}
    prompts = {split: [row["prompt"] for row in part] for split, part in rows.items()}
    sets = {split: datasets.Dataset.from_list(part) for split, part in rows.items()}
    datasets.DatasetDict(sets).save_to_disk(str(tmp_path / "saved"))
    sets["train"].save_to_disk(str(tmp_path / "one"))
    assert get_contents(load_problems(tmp_path / "saved", split="test")) == prompts["test"]
    assert len(load_problems(tmp_path / "saved")) == len(load_problems(tmp_path / "one")) == 5
    with pytest.raises(MissingSplit):
        load_problems(tmp_path / "one", split="test")
    write_rows(tmp_path / "one" / "train.jsonl", *make_sum_rows(1))
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(UserError, match="lacks .*arrow, which its state.json names"):
        load_problems(tmp_path / "one")

    repo = tmp_path / "repo"
    (repo / "data").mkdir(parents=True)
    for name, part in (
        ("train-00000-of-00002", sets["train"].select(range(2))),
        ("train-00001-of-00002", sets["train"].select(range(2, 5))),
        ("validation-00000-of-00001", sets["test"]),
    ):
        part.to_parquet(str(repo / "data" / f"{name}.parquet"))
    (repo / "README.md").write_text("# no front matter\n")
    assert get_contents(load_problems(repo)) == prompts["train"]
    assert len(load_problems(repo, split="test")) == 3  # the validation split replaces it
    write_rows(repo / "hard" / "a.jsonl", *make_sum_rows(1))
    (repo / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files:\n  - split: train\n    path: "
        "[data/train-*, data/*-of-00002.parquet]\n"  # both match the two files
        "- config_name: hard\n  data_files: hard/*.jsonl\n---\n# words\n"
    )
    assert [len(load_problems(repo, config=name)) for name in ("easy", "hard")] == [5, 1]
    with pytest.raises(UserError, match="configurations easy, hard: .*--dataset-config"):
        load_problems(repo)
    with pytest.raises(UserError, match="no configuration 'hrd'"):
        load_problems(repo, config="hrd")

    cache = tmp_path / "datasets--me--it"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc\n")
    write_rows(cache / "snapshots" / "abc" / "train.jsonl", *make_sum_rows(2))
    write_rows(cache / "snapshots" / "old" / "train.jsonl", *make_sum_rows(1))
    assert len(load_problems(cache)) == 2


@pytest.mark.parametrize(
    ("names", "config", "expected"),
    [
        (("easy\n  default: true", "2024"), "2024", 2),  # YAML reads the name as a number
        (("easy\n  default: true", "2024"), None, 1),
        (("same", "same"), "same", 1),
        (("same", "same"), None, "has the configurations same, same: choose one"),
        (("null", "null"), None, "has the configurations None, None: choose one"),
    ],
)
def test_configurations_with_odd_names(tmp_path, names, config, expected):
    head = "---\nconfigs:\n"
    for count, name in enumerate(names, start=1):
        write_rows(tmp_path / f"{count}.jsonl", *make_sum_rows(count))
        head += f"- config_name: {name}\n  data_files: {count}.jsonl\n"
    (tmp_path / "README.md").write_text(f"{head}---\n")
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            load_problems(tmp_path, config=config)
    else:
        assert len(load_problems(tmp_path, config=config)) == expected


def test_splits_of_other_names_are_not_mixed(tmp_path):
    """A repository with train_sft and train_gen has no split train."""
    listed = ""
    for name in ("train_sft", "train_gen", "test_sft"):
        write_rows(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", *make_sum_rows(1))
        listed += f"  - split: {name}\n    path: data/{name}-*\n"
    assert len(load_problems(tmp_path)) == 2  # without a README all of them are shards of train
    head = f"---\nconfigs:\n- config_name: default\n  data_files:\n{listed}---\n"
    (tmp_path / "README.md").write_text(head)
    with pytest.raises(UserError, match="could be 'train': train_sft, train_gen; pass a file"):
        load_problems(tmp_path)
    assert len(load_problems(tmp_path, split="test")) == 1


def test_the_time_to_read_a_json_file_is_linear(tmp_path):
    """Each row once scanned the whole file. The same rows in a .jsonl file are the reference."""
    rows = [{"prompt": f"{i} [" + "x" * 400, "answer": "[1]"} for i in range(6000)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    seconds = []
    for path in (write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "rows.json"):
        begin = time.process_time()
        assert len(load_problems(path)) == 6000
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 5 * seconds[0]


@pytest.mark.parametrize(
    "error", [RuntimeError("Dataset scripts are no longer supported, but found a.py"), None]
)
def test_a_hub_set_that_cannot_be_built_is_an_error_with_a_remedy(monkeypatch, error):
    import datasets

    def fail(*_, **__):
        raise error or datasets.exceptions.DatasetGenerationError("the columns of two files differ")

    monkeypatch.setattr("rl.data.row_readers.check_hub_access", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="'someone/things'.*cannot be loaded.*pass the path"):
        load_problems("someone/things")


# ----------------------------------------------------------------------------- mixtures and streams


def test_a_mixture_gives_each_set_its_share_and_all_its_rows(tmp_path):
    sets = [
        load_problems(write_rows(tmp_path / f"{name}.jsonl", *make_sum_rows(n)))
        for name, n in (("a", 7), ("b", 40), ("c", 13))
    ]
    mixed = Mixture(sets, [3, 1, 1])
    requests = [p for step in range(125) for p in mixed.batch(step, 16, seed=4)]  # 2000 rows
    assert Counter(p.tag for p in requests) == {"a": 1200, "b": 400, "c": 400}
    # a function of the position alone
    assert [p.index for p in requests[32:64]] == [p.index for p in mixed.batch(1, 32, seed=4)]
    for tag, part in zip("abc", sets, strict=True):  # every set in separate epochs
        drawn, n = [p.messages[0]["content"] for p in requests if p.tag == tag], len(part)
        for i in range(0, len(drawn) - n, n):
            assert sorted(drawn[i : i + n]) == sorted(get_contents(part)), tag
    assert mixed.batch(0, 16, seed=5) != mixed.batch(0, 16, seed=4)
    remaining = mixed.subset(range(7, 60))
    assert Counter(p.tag for p in remaining.batch(0, 1000, seed=0)) == {"b": 500, "c": 500}


def test_changed_rows_stay_changed_in_joined_sets_and_mixtures(tmp_path):
    sets = [load_problems(write_rows(tmp_path / f"{n}.jsonl", *make_sum_rows(3))) for n in "ab"]
    for whole in (concatenate_sets(sets), Mixture(sets, [1, 1])):
        other = whole[4].__class__(({"role": "user", "content": "new"},), tag="b", index=4)
        result = whole.with_rows({4: other})
        assert get_contents(result)[4] == "new"
        assert [p.index for p in result] == list(range(6))
        assert "new" in get_contents(result.batch(0, 100, seed=0))
    noisy = load_problems("addition:noise=0.5", limit=20).subset(range(10, 20))
    for whole in (concatenate_sets([sets[0], noisy]), Mixture([sets[0], noisy], [1, 1])):
        rows = range(3, 13)
        for epoch in range(3):  # the noise is that of the set, in every epoch
            responses = [whole.at(i, epoch).response for i in rows]
            assert responses == [noisy.at(i, epoch).response for i in range(10)]
        new = ({"role": "user", "content": "new"},)
        other = dataclasses.replace(load_problems("addition")[11], messages=new, index=4)
        result = whole.with_rows({4: other})
        assert get_contents(result)[4] == "new" and result[4].index == 4
        assert [result.at(i, 1).response for i in rows] == [whole.at(i, 1).response for i in rows]


@pytest.mark.parametrize("kind", ["a.jsonl", "e.parquet", "f.arrow"])
def test_a_stream_asks_what_a_set_in_memory_asks(tmp_path, kind):
    (path,) = [p for p in write_tables(tmp_path / "t") if p.name == kind]
    held, stream = load_problems(path), load_problems(path, stream=True)
    assert stream.is_lazy and get_contents(stream) == get_contents(held)
    assert [p.index for p in stream] == [p.index for p in held]
    epoch = [p for step in range(2) for p in stream.batch(step, 2, seed=1)]
    assert sorted(get_contents(epoch)) == sorted(get_contents(held))
    assert get_contents(stream.batch(1, 2, seed=1)) == get_contents(epoch[2:])
    if kind != "e.parquet":  # this format shuffles its row groups
        assert get_contents(epoch) == get_contents(held.batch(0, 4, seed=1))


def test_bad_rows_of_a_stream_are_named_when_met_and_the_next_stands_in(tmp_path, caplog):
    rows = make_sum_rows(6)
    rows[2] = {"prompt": 3}
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(UserError, match="rows.jsonl line 3: 'prompt' has the type int"):
        list(load_problems(path, stream=True))
    skipping = load_problems(path, stream=True, on_bad_row="skip")
    with caplog.at_level(logging.WARNING):
        assert get_contents(skipping)[2:4] == ["13+13=", "13+13="]
    assert "rows.jsonl line 3" in caplog.text
    with pytest.raises(UserError, match="leave out stream"):
        load_problems(write_rows(tmp_path / "x.json"), stream=True)


def test_a_stream_refuses_rows_that_name_their_split_unless_files_do(tmp_path, shared_data):
    lines = (shared_data / "mbpp" / "mbpp.jsonl").read_text().splitlines()[600:603]
    path = write_rows(tmp_path / "mbpp.jsonl", *lines)
    with pytest.raises(UserError, match="mbpp.jsonl: its rows name their split.*leave out stream"):
        load_problems(path, stream=True)
    write_rows(tmp_path / "folder" / "train.jsonl", *lines)
    assert len(load_problems(tmp_path / "folder", stream=True)) == 3


def test_a_stream_reads_an_only_instance_and_refuses_several(tmp_path):
    instances = [{"input": "1+1", "output": "2"}, {"input": "2+2", "output": "4"}]
    rows = [{"instruction": "Add.", "instances": instances[:n]} for n in (1, 2)]
    stream = load_problems(write_rows(tmp_path / "seed.jsonl", *rows), stream=True)
    assert (get_contents(stream[:1]), stream[0].response) == (["Add.\n\n1+1"], "2")
    with pytest.raises(UserError, match="line 2: it holds 2 instances.*leave out stream"):
        stream[1]


def test_a_stream_says_which_prompts_are_conversations(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": [USER]}, {"prompt": "hi"})
    for stream in (False, True):
        assert [p.chat for p in load_problems(path, stream=stream)] == [True, False]


# ------------------------------------------------------------------------------------------ prompts


def test_a_template_and_a_suffix_stand_around_the_prompt_and_give_no_answer_away(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": "2", "unit": "apples"})
    template = r"In {unit}: {prompt} Put \boxed{answer}. {none}"
    settings = {"prompt_template": template, "prompt_suffix": " !", "system_prompt": "s"}
    (problem,) = load_problems(path, **settings)
    text = r"In apples: 1+1= Put \boxed{answer}. {none} !"
    assert [message["content"] for message in problem.messages] == ["s", text]


def test_a_suffix_leaves_the_noise_of_generated_rows():
    plain, wrapped = (
        load_problems("addition:noise=0.5", limit=50, prompt_suffix=suffix)
        for suffix in (None, "!")
    )
    for epoch in range(3):
        for i in range(50):
            assert wrapped.at(i, epoch).response == plain.at(i, epoch).response
            assert wrapped.at(i, epoch).messages[-1]["content"].endswith("=!")


def test_the_system_message_of_a_stored_prompt_replaces_the_system_prompt(tmp_path):
    rows = [{"prompt": p, "response": "b", "reward": 1} for p in ([SYSTEM, USER], [USER])]
    problems = load_rollouts(write_rows(tmp_path / "rows.jsonl", *rows), system_prompt="given")
    assert [p.messages[0]["content"] for p in problems] == ["s", "given"]
    assert [len(p.messages) for p in problems] == [2, 2]
