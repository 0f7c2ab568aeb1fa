"""The settings that evaluate.py resolves for a data set, and the files that it writes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import evaluate
from rl.config import DataSettings, SamplingSettings
from rl.errors import UserError


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


def test_finished_data_sets_are_kept_if_a_later_one_fails(tmp_path: Path, monkeypatch):
    def score(args: Any, weights: Any, service: Any, sampler: Any, evaluation: Any, *_: Any) -> Any:
        if evaluation.label == "c":
            raise UserError("c fails")
        row = {"dataset": evaluation.label, "metric": "correct", "mean": 0.5}
        common = {"weights": "w", "temperature": 1.0, "samples": 1, "rows": [{"problem": 0}]}
        return {**common, "dataset": evaluation.label, "table": [row]}

    weights = SimpleNamespace(
        create_service=lambda **_: nullcontext(), create_sampler=lambda _: None, run_folder=None
    )
    monkeypatch.setattr("rl.trainer.open_weights", lambda *_, **__: weights)
    monkeypatch.setattr(
        evaluate, "prepare_evaluation", lambda _, __, name, ___: SimpleNamespace(label=name)
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
