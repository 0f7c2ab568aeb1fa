"""The settings that evaluate.py resolves for a data set, and the files that it writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import evaluate
from rl.config import DataSettings, SamplingSettings


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
