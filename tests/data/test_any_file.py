"""Test any user's file: row formats, kinds of files and folders, mixtures, streams, prompts."""

import csv
import json
import logging
import time
from collections import Counter

import pytest

from rl.data import MissingSplit, Mixture, concatenate_sets, load_problems, load_rollouts
from rl.errors import UserError


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def get_contents(problems):
    return [problem.messages[-1]["content"] for problem in problems]


def make_sum_rows(count, start=10):
    return [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(start, start + count)]


# ----------------------------------------------------------------------------------- shapes of rows

USER, SAID = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
SHAPES = {
    "completion": ({"prompt": "a?", "completion": "b"}, [USER], "b"),
    "completion as messages": ({"prompt": [USER], "completion": [SAID]}, [USER], "b"),
    "text": ({"text": "a? b"}, [], "a? b"),
    "messages": ({"messages": [USER, SAID]}, [USER], "b"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
        [USER],
        "b",
    ),
    "sharegpt with system": (
        {
            "system": "s",
            "conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}],
        },
        [{"role": "system", "content": "s"}, USER],
        "b",
    ),
    "roles under conversations": ({"conversations": [USER, SAID]}, [USER], "b"),
    "alpaca": ({"instruction": "a?", "input": "", "output": "b"}, [USER], "b"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_usual_shape_is_known_by_its_columns(tmp_path, shape):
    row, request, response = SHAPES[shape]
    (problem,) = load_problems(write(tmp_path / "rows.jsonl", [row]))
    assert (list(problem.messages), problem.response) == (request, response)


def test_instances_of_one_instruction_are_problems_of_their_own(tmp_path, shared_data):
    row = {
        "instruction": "Add.",
        "instances": [{"input": "1+1", "output": "2"}, {"input": "", "output": "?"}],
        "id": "seed",
    }
    problems = load_problems(
        write(tmp_path / "seed.jsonl", [row, {**row, "instances": [{"input": "x"}]}]),
        on_bad_row="skip",
    )
    assert [(p.messages[0]["content"], p.response, p.place, p.index) for p in problems] == [
        ("Add.\n\n1+1", "2", "seed.jsonl line 1, instance 1", 0),
        ("Add.", "?", "seed.jsonl line 1, instance 2", 1),
    ]
    with pytest.raises(UserError, match="line 2: instance 1: no column 'output'"):
        load_problems(tmp_path / "seed.jsonl")
    result = shared_data / "sft" / "self_instruct_seed" / "seed_tasks.jsonl"
    raw = [json.loads(line) for line in result.open()]
    assert len(load_problems(result)) == sum(len(row["instances"]) for row in raw) >= 175


def test_a_label_says_whether_an_answer_is_good(tmp_path):
    rows = [
        {"prompt": "a?", "completion": "b", "label": label} for label in (True, 0, "false", "1")
    ]
    result = load_problems(write(tmp_path / "rows.jsonl", rows), format="unpaired")
    assert [problem.meta["label"] for problem in result] == [True, False, False, True]
    with pytest.raises(UserError, match="'label' is true or false"):
        load_problems(
            write(tmp_path / "rows.jsonl", [{"prompt": "a?", "completion": "b", "label": "good"}]),
            format="unpaired",
        )


# -------------------------------------------------------------------------------- files and folders


def write_tables(folder):
    """Return the same four rows in every kind of file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = make_sum_rows(4)
    folder.mkdir()
    write(folder / "a.jsonl", rows)
    (folder / "b.json").write_text(json.dumps(rows))
    for name, delimiter in (("c.csv", ","), ("d.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8-sig") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "e.parquet", row_group_size=3)
    with (
        pa.OSFile(str(folder / "f.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, pa.Table.from_pylist(rows).schema) as writer,
    ):
        writer.write_table(pa.Table.from_pylist(rows))
    return sorted(folder.iterdir())


def test_every_kind_of_file_has_the_same_rows(tmp_path):
    files = write_tables(tmp_path / "t")
    assert len(files) == 6
    for path in files:
        result = load_problems(path)
        assert get_contents(result) == [row["prompt"] for row in make_sum_rows(4)], path
        assert [problem.meta["answer"] for problem in result] == [
            row["answer"] for row in make_sum_rows(4)
        ]
        assert result[1].place.startswith(path.name)


def test_a_table_names_its_bad_rows_and_what_is_no_table(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('prompt,answer\n"1+1=",2\n"2+2="\n"3+3\n=",6\n')
    with pytest.raises(
        UserError, match="x.csv line 3: it has 1 cells, the first line names 2 columns"
    ):
        load_problems(path)
    assert get_contents(load_problems(path, on_bad_row="skip")) == ["1+1=", "3+3\n="]
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(UserError, match="names the columns, each once"):
        load_problems(path)
    path.write_text(",prompt,answer\n0,a,b\n")  # as pandas writes a table by default
    with pytest.raises(UserError, match="without its index"):
        load_problems(path)
    path.write_text("prompt;answer\na;b\n")  # as spreadsheets write it in many countries
    with pytest.raises(UserError, match="separated by ';'.*by ','"):
        load_problems(path)
    for name in ("y.parquet", "y.arrow"):
        (tmp_path / name).write_bytes(b"no table at all")
        with pytest.raises(UserError, match=f"{name} is no"):
            load_problems(tmp_path / name)
    cells = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    with (tmp_path / "chat.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], [json.dumps(cells)]])
    assert load_problems(tmp_path / "chat.csv")[0].response == "b"


def test_what_datasets_saved_and_a_downloaded_repository(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    train_rows, test_rows = make_sum_rows(5), make_sum_rows(3, 50)
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(train_rows), test=datasets.Dataset.from_list(test_rows)
    )
    both.save_to_disk(str(tmp_path / "saved"))
    both["train"].save_to_disk(str(tmp_path / "one"))
    assert get_contents(load_problems(tmp_path / "saved", split="test")) == [
        row["prompt"] for row in test_rows
    ]
    assert len(load_problems(tmp_path / "saved")) == len(load_problems(tmp_path / "one")) == 5
    with pytest.raises(MissingSplit):
        load_problems(tmp_path / "one", split="test")
    repo = tmp_path / "repo"
    (repo / "data").mkdir(parents=True)
    both["train"].select(range(2)).to_parquet(str(repo / "data" / "train-00000-of-00002.parquet"))
    both["train"].select(range(2, 5)).to_parquet(
        str(repo / "data" / "train-00001-of-00002.parquet")
    )
    both["test"].to_parquet(str(repo / "data" / "validation-00000-of-00001.parquet"))
    (repo / "README.md").write_text("# no front matter\n")
    assert get_contents(load_problems(repo)) == [row["prompt"] for row in train_rows]
    assert len(load_problems(repo, split="test")) == 3  # the validation split replaces it
    write(repo / "hard" / "a.jsonl", make_sum_rows(1))
    (repo / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files:\n  - split: train\n    path: "
        "[data/train-*, data/*-of-00002.parquet]\n"  # both match the two files
        "- config_name: hard\n  data_files: hard/*.jsonl\n---\n# words\n"
    )
    assert (
        len(load_problems(repo, config="easy")) == 5
        and len(load_problems(repo, config="hard")) == 1
    )
    with pytest.raises(
        UserError, match="configurations easy, hard: choose one with --dataset-config"
    ):
        load_problems(repo)
    with pytest.raises(UserError, match="no configuration 'hrd'"):
        load_problems(repo, config="hrd")
    cache = tmp_path / "datasets--me--it"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc\n")
    write(cache / "snapshots" / "abc" / "train.jsonl", make_sum_rows(2))
    write(cache / "snapshots" / "old" / "train.jsonl", make_sum_rows(1))
    assert len(load_problems(cache)) == 2


# ----------------------------------------------------------------------------- mixtures and streams


def test_a_mixture_gives_each_set_its_share_and_all_its_rows(tmp_path):
    sets = [
        load_problems(write(tmp_path / f"{name}.jsonl", make_sum_rows(n)))
        for name, n in (("a", 7), ("b", 40), ("c", 13))
    ]
    mixed = Mixture(sets, [3, 1, 1])
    requests = [p for step in range(125) for p in mixed.batch(step, 16, seed=4)]  # 2000 rows
    assert Counter(p.tag for p in requests) == {"a": 1200, "b": 400, "c": 400}
    assert [p.index for p in requests[32:64]] == [p.index for p in mixed.batch(1, 32, seed=4)], (
        "a function of the position alone"
    )
    for tag, part in zip("abc", sets, strict=True):  # every set in separate epochs
        reference = [p.messages[0]["content"] for p in requests if p.tag == tag]
        assert all(
            sorted(reference[i : i + len(part)]) == sorted(get_contents(part))
            for i in range(0, len(reference) - len(part), len(part))
        )
    assert mixed.batch(0, 16, seed=5) != mixed.batch(0, 16, seed=4)
    remaining = mixed.subset(range(7, 60))
    assert Counter(p.tag for p in remaining.batch(0, 1000, seed=0)) == {"b": 500, "c": 500}


def test_changed_rows_stay_changed_in_joined_sets_and_mixtures(tmp_path):
    sets = [load_problems(write(tmp_path / f"{name}.jsonl", make_sum_rows(3))) for name in "ab"]
    for whole in (concatenate_sets(sets), Mixture(sets, [1, 1])):
        other = whole[4].__class__(({"role": "user", "content": "new"},), tag="b", index=4)
        result = whole.with_rows({4: other})
        assert (
            get_contents(result)[4] == "new"
            and result[4].index == 4
            and [p.index for p in result] == list(range(6))
        )
        assert "new" in get_contents(result.batch(0, 100, seed=0))


@pytest.mark.parametrize("kind", ["a.jsonl", "e.parquet", "f.arrow"])
def test_a_stream_asks_what_a_set_in_memory_asks(tmp_path, kind):
    (path,) = [p for p in write_tables(tmp_path / "t") if p.name == kind]
    held, stream = load_problems(path), load_problems(path, stream=True)
    assert (
        stream.is_lazy
        and get_contents(stream) == get_contents(held)
        and [p.index for p in stream] == [p.index for p in held]
    )
    epoch = [p for step in range(2) for p in stream.batch(step, 2, seed=1)]
    assert sorted(get_contents(epoch)) == sorted(get_contents(held)) and get_contents(
        stream.batch(1, 2, seed=1)
    ) == get_contents(epoch[2:])
    if kind != "e.parquet":  # this format shuffles its row groups
        assert get_contents(epoch) == get_contents(held.batch(0, 4, seed=1))


def test_bad_rows_of_a_stream_are_named_when_met_and_the_next_stands_in(tmp_path, caplog):
    rows = make_sum_rows(6)
    rows[2] = {"prompt": 3}
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match="rows.jsonl line 3: 'prompt' is a int"):
        list(load_problems(path, stream=True))
    skipping = load_problems(path, stream=True, on_bad_row="skip")
    with caplog.at_level(logging.WARNING):
        assert (
            get_contents(skipping)[2:4] == ["13+13=", "13+13="]
            and "rows.jsonl line 3" in caplog.text
        )
    with pytest.raises(UserError, match="leave out stream"):
        load_problems(write(tmp_path / "x.json", []), stream=True)


def test_a_stream_refuses_rows_that_name_their_split_unless_files_do(tmp_path, shared_data):
    lines = (shared_data / "mbpp" / "mbpp.jsonl").read_text().splitlines()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "mbpp.jsonl", tmp_path / "folder" / "train.jsonl"):
        path.write_text("\n".join(lines[600:603]))
    with pytest.raises(UserError, match="mbpp.jsonl: its rows name their split.*leave out stream"):
        load_problems(tmp_path / "mbpp.jsonl", stream=True)
    assert len(load_problems(tmp_path / "folder", stream=True)) == 3


def test_a_stream_reads_an_only_instance_and_refuses_several(tmp_path):
    instances = [{"input": "1+1", "output": "2"}, {"input": "2+2", "output": "4"}]
    rows = [{"instruction": "Add.", "instances": instances[:n]} for n in (1, 2)]
    stream = load_problems(write(tmp_path / "seed.jsonl", rows), stream=True)
    assert (get_contents(stream[:1]), stream[0].response) == (["Add.\n\n1+1"], "2")
    with pytest.raises(UserError, match="line 2: it holds 2 instances.*leave out stream"):
        stream[1]


def test_a_stream_says_which_prompts_are_conversations(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}]
    path = write(tmp_path / "rows.jsonl", rows)
    for stream in (False, True):
        assert [p.chat for p in load_problems(path, stream=stream)] == [True, False]


# ------------------------------------------------------------------------------------------ prompts


def test_a_template_and_a_suffix_stand_around_the_prompt_and_give_no_answer_away(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": "2", "unit": "apples"}])
    result = load_problems(
        path,
        prompt_template=r"In {unit}: {prompt} Put \boxed{answer}. {none}",
        prompt_suffix=" !",
        system_prompt="s",
    )
    assert [m["content"] for m in result[0].messages] == [
        "s",
        r"In apples: 1+1= Put \boxed{answer}. {none} !",
    ]
    assert (
        load_problems("addition", limit=2, prompt_suffix="?")[1]
        .messages[-1]["content"]
        .endswith("=?")
    )


def test_splits_of_other_names_are_not_mixed(tmp_path):
    """A repository with train_sft and train_gen has no split train."""
    for name in ("train_sft", "train_gen", "test_sft"):
        write(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", make_sum_rows(1))
    assert len(load_problems(tmp_path)) == 2  # without a README all of them are shards of train
    listed = "".join(
        f"  - split: {name}\n    path: data/{name}-*\n"
        for name in ("train_sft", "train_gen", "test_sft")
    )
    head = f"---\nconfigs:\n- config_name: default\n  data_files:\n{listed}---\n"
    (tmp_path / "README.md").write_text(head)
    with pytest.raises(UserError, match="could be 'train': train_sft, train_gen; pass a file"):
        load_problems(tmp_path)
    assert len(load_problems(tmp_path, split="test")) == 1


def test_the_time_to_read_a_json_file_is_linear(tmp_path):
    """Each row once scanned the whole file. The time is compared with that of the same rows in a
    .jsonl file.
    """
    rows = [{"prompt": f"{i} [" + "x" * 400, "answer": "[1]"} for i in range(6000)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    seconds = []
    for path in (write(tmp_path / "rows.jsonl", rows), tmp_path / "rows.json"):
        begin = time.process_time()
        assert len(load_problems(path)) == 6000
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 5 * seconds[0]


def test_gsm8k_rows_keep_their_other_columns(tmp_path):
    row = {"question": "1+1?", "answer": "#### 2", "level": 3}
    (problem,) = load_problems(write(tmp_path / "rows.jsonl", [row]))
    assert problem.meta == {"answer": "2", "level": 3}


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


def test_the_system_message_of_a_stored_prompt_replaces_the_system_prompt(tmp_path):
    prompts = [[{"role": "system", "content": "own"}, USER], [USER]]
    rows = [{"prompt": prompt, "response": "b", "reward": 1} for prompt in prompts]
    problems = load_rollouts(write(tmp_path / "rows.jsonl", rows), system_prompt="given")
    assert [p.messages[0]["content"] for p in problems] == ["own", "given"]
    assert [len(p.messages) for p in problems] == [2, 2]
