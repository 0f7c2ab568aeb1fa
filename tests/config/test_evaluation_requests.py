"""Test the settings that evaluate.py resolves for a data set, and the files that it writes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import evaluate
from rl.config import (
    DataSettings,
    SamplingSettings,
    locate_recorded_files,
    match_recorded_files,
    record_resumed_files,
)
from rl.errors import UserError
from rl.trainer import iterate_prompts


def make_arguments(**changes: Any) -> SimpleNamespace:
    names = "reward environment sandbox limit temperature max_tokens renderer output baseline"
    values = {**dict.fromkeys(names.split()), "top_k": -1, "top_p": 1.0, "samples": 1, "others": []}
    return SimpleNamespace(**{**values, **changes})


def resolve(dataset: str | None, data: DataSettings, **changes: Any) -> DataSettings:
    weights = SimpleNamespace(stage="a stage", prompt_settings=(data, SamplingSettings()))
    return evaluate.resolve_settings(make_arguments(**changes), weights, dataset)[0]


def test_a_requested_data_set_replaces_all_of_the_run():
    lists = {"more_datasets": ("b",), "more_eval_datasets": ("c",), "dataset_weights": (1.0, 2.0)}
    data = DataSettings(dataset="a", reward="gsm8k", **lists)
    assert resolve(None, data).more_eval_datasets == ("c",)
    requested = resolve("openai/gsm8k", data)
    assert requested.eval_dataset == "openai/gsm8k"
    assert requested.more_eval_datasets == requested.more_datasets == ()
    words = ["--more-eval-datasets", "d"]
    assert resolve("openai/gsm8k", data, others=words).more_eval_datasets == ("d",)


def test_prompts_of_a_data_set_replace_the_mixture_of_the_run():
    mixture = {"more_datasets": ("countdown",), "dataset_weights": (3.0, 1.0)}
    data = DataSettings(dataset="addition", **mixture)
    prompts = list(iterate_prompts(data, (), "addition", 4))
    assert prompts == list(iterate_prompts(DataSettings(dataset="addition"), (), "addition", 4))
    assert len(prompts) == 4


def test_the_columns_of_a_file_override_no_setting_of_the_run(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    row = {"question": "Even?", "choices": ["1", "2"], "key": "2", "answer": "B"}
    file.write_text(json.dumps(row) + "\n")
    columns = {"prompt_column": "question", "answer_column": "key"}
    data = resolve(str(file), DataSettings(reward="gsm8k", **columns))
    assert (data.reward, data.prompt_column, data.answer_column) == ("gsm8k", "question", "key")
    assert resolve(str(file), DataSettings(**columns), reward="gsm8k").answer_column == "key"
    # without a reward, or with the reward of the columns, the file is read by its columns
    assert resolve(str(file), DataSettings(reward=None)).reward == "multiple_choice"
    requested = resolve(
        str(file), DataSettings(reward="gsm8k", **columns), reward="multiple_choice"
    )
    assert (requested.reward, requested.prompt_column) == ("multiple_choice", "prompt")
    # a short name selects its reward
    named = resolve(f"gpqa:{file}", DataSettings(reward="gsm8k", **columns))
    assert (named.reward, named.answer_column) == ("multiple_choice", "answer")


def test_finished_data_sets_are_kept_if_a_later_one_fails(tmp_path: Path, monkeypatch):
    def score(args: Any, weights: Any, service: Any, sampler: Any, evaluation: Any, *_: Any) -> Any:
        if evaluation.label == "c":
            raise UserError("c fails")
        row = {"dataset": evaluation.label, "metric": "correct", "mean": 0.5}
        common = {"weights": "w", "temperature": 1.0, "samples": 1, "rows": [{"problem": 0}]}
        return {**common, "dataset": evaluation.label, "table": [row]}

    weights = SimpleNamespace(
        create_service=lambda **_: nullcontext(),
        create_sampler=lambda *_, **__: None,
        run_folder=None,
    )
    monkeypatch.setattr("rl.trainer.open_weights", lambda *_, **__: weights)
    monkeypatch.setattr(
        evaluate,
        "prepare_evaluation",
        lambda _, __, name, ___: SimpleNamespace(label=name, sampling=None),
    )
    monkeypatch.setattr(evaluate, "evaluate_dataset", score)
    output, parts = tmp_path / "all.json", []
    words = {"weights": "w", "checkpoint": None, "trust_run": False, "seeds": [0], "sampler_tp": 1}
    args = make_arguments(**words, output=output, dataset=["a", "b", "c"])
    with pytest.raises(UserError, match="c fails"):
        evaluate.main(args, parts)
    content = json.loads(output.read_text())
    assert [part["dataset"] for part in content["datasets"]] == ["a", "b"]
    assert [row["dataset"] for row in content["table"]] == ["a", "b"] and len(parts) == 2
    assert content["unfinished"] == ["c"] and "| b |" in output.with_suffix(".md").read_text()

    args.dataset = ["a", "b"]
    evaluate.main(args, [])
    content = json.loads(output.read_text())
    assert "unfinished" not in content and len(content["datasets"]) == 2


def test_a_named_file_is_located_from_another_folder(tmp_path: Path, monkeypatch):
    started, elsewhere = tmp_path / "started", tmp_path / "elsewhere"
    for folder in (started, elsewhere):
        folder.mkdir()
    for name in ("rows.jsonl", "more.jsonl", "gpqa:odd.jsonl"):
        (started / name).write_text("{}\n")

    def make_config(eval_dataset: str, *more: str) -> dict[str, Any]:
        settings = {
            "dataset": "addition:noise=0.7",
            "eval_dataset": eval_dataset,
            "more_eval_datasets": list(more),
        }
        stage = {"method": "grpo", "settings": settings}
        return {"launched_from": str(started), "stages": [stage]}

    recorded = make_config("aime:rows.jsonl", "openai/gsm8k:more.jsonl", "gpqa:odd.jsonl")
    absolute = make_config(
        f"aime:{started}/rows.jsonl",
        f"openai/gsm8k:{started}/more.jsonl",
        f"{started}/gpqa:odd.jsonl",
    )
    monkeypatch.chdir(elsewhere)
    assert locate_recorded_files(recorded) == absolute
    assert match_recorded_files(recorded, absolute) == absolute
    assert record_resumed_files(recorded, absolute) == recorded
    # the same file under another name, and another file, are recorded as requested
    renamed = make_config(f"math:{started}/rows.jsonl")
    assert record_resumed_files(recorded, renamed) == renamed
    (elsewhere / "rows.jsonl").write_text("{}\n{}\n")
    resumed = record_resumed_files(recorded, make_config("aime:rows.jsonl"))
    assert resumed["stages"][0]["settings"]["eval_dataset"] == f"aime:{elsewhere}/rows.jsonl"
