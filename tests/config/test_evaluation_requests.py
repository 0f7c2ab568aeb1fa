"""Test the settings that evaluate.py resolves for a data set, and the files that it writes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import evaluate
from rl.algorithms import RolloutDataSettings
from rl.config import (
    DataSettings,
    PreferenceDataSettings,
    SamplingSettings,
    SettingsError,
    locate_recorded_files,
    match_recorded_files,
    override_settings,
    record_resumed_files,
)
from rl.errors import UserError
from rl.trainer import iterate_prompts, load_held_out_problems


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


@pytest.mark.parametrize("data_format", ["preferences", "unpaired"])
def test_prompts_without_the_answers_that_a_run_learns_from_are_evaluated(tmp_path, data_format):
    run = PreferenceDataSettings(data_format=data_format, reward="exact_match")
    label = {"input": "1+1=", "output_1": "2", "output_2": "3", "label": 1}
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    for row in ({"prompt": "1+1=", "answer": "2"}, pair, label):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        (problem,) = load_held_out_problems(resolve(str(file), run))
        assert [message["content"] for message in problem.messages] == ["1+1="]
    words = ["--data-format", "preferences"]
    assert resolve(str(file), run, others=words).data_format == "preferences"
    assert resolve(None, run).data_format == data_format  # the held-out rows of the run


def test_the_prompts_of_a_data_set_are_not_in_the_columns_of_stored_answers(tmp_path):
    run = RolloutDataSettings(dataset="stored", prompt_column="task", response_column="answers")
    file = tmp_path / "rows.jsonl"

    def read_prompt(row: dict[str, str], *words: str) -> str:
        file.write_text(json.dumps(row) + "\n")
        (problem,) = load_held_out_problems(
            resolve(str(file), run, reward="exact_match", others=[*words])
        )
        return problem.messages[-1]["content"]

    assert read_prompt({"prompt": "1+1=", "answer": "2"}) == "1+1="
    words = ("--prompt-column", "question", "--prompt-suffix", "?")
    assert read_prompt({"question": "2+2=", "answer": "4"}, *words) == "2+2=?"


def test_settings_of_the_run_that_another_reward_does_not_use_are_left_out():
    """The rewards of recipes/oneliners.yaml run programs, and a requested reward runs none."""
    run = DataSettings(
        reward="code_tests", code_block="any", code_score="fraction", sandbox_packages=("sympy",)
    )
    for data in (resolve("openai/gsm8k", run), resolve(None, run, reward="gsm8k")):
        assert data.reward == "gsm8k"
        assert (data.code_block, data.code_score) == ("fenced", "all")
        assert data.sandbox_packages == DataSettings().sandbox_packages
    assert resolve(None, run, limit=3).code_score == "fraction"
    assert override_settings((run,), ["--reward", "gsm8k"])[0].code_block == "fenced"
    with pytest.raises(SettingsError, match="no reward runs programs"):  # a requested value
        override_settings((run,), ["--reward", "gsm8k", "--code-block", "any"])
    weighted = DataSettings(rewards=(("gsm8k", 1.0),))
    (data,) = override_settings((weighted,), ["--reward", "exact_match"])
    assert (data.reward, data.rewards) == ("exact_match", ())
    words = ["--sampler", "vllm", "--sampler-url", "http://localhost:8000"]
    (sampling,) = override_settings((SamplingSettings(sampler_cache="plain"),), words)
    assert (sampling.sampler, sampling.sampler_cache) == ("vllm", "auto")
    (sampling,) = override_settings((SamplingSettings(sampler_cache="paged"),), ["--sampler", "hf"])
    assert (sampling.sampler, sampling.sampler_cache) == ("hf", "auto")


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch, capsys):
    def read(output: Path) -> None:
        monkeypatch.setattr("sys.argv", ["evaluate.py", "runs/x", "--output", str(output)])
        evaluate.read_arguments()

    (tmp_path / "file").write_text("")
    (tmp_path / "b.md").mkdir()
    for output, problem in {
        tmp_path: "is a folder",
        tmp_path / "b.json": "b.md is a folder",
        tmp_path / "file" / "a.json": "cannot be created",
    }.items():
        with pytest.raises(SystemExit):
            read(output)
        assert problem in capsys.readouterr().err
    read(tmp_path / "new" / "a.json")
    assert (tmp_path / "new").is_dir()


def test_finished_data_sets_are_kept_if_a_later_one_fails(tmp_path: Path, monkeypatch):
    def score(args: Any, weights: Any, service: Any, sampler: Any, evaluation: Any, *_: Any) -> Any:
        if evaluation.label == "c":
            raise UserError("c fails")
        row = {"dataset": evaluation.label, "metric": "correct", "mean": 0.5}
        common = {"weights": "w", "temperature": 1.0, "samples": 1, "rows": [{"problem": 0}]}
        return {**common, "dataset": evaluation.label, "table": [row]}

    def prepare(args: Any, weights: Any, name: str, _: Any) -> SimpleNamespace:
        return SimpleNamespace(label=name, sampling=None)

    weights = SimpleNamespace(run_folder=None, create_sampler=lambda *_, **__: None)
    weights.create_service = lambda **_: nullcontext()
    monkeypatch.setattr("rl.trainer.open_weights", lambda *_, **__: weights)
    monkeypatch.setattr(evaluate, "prepare_evaluation", prepare)
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

    def make_config(*names: str) -> dict[str, Any]:
        settings = {"dataset": "addition:noise=0.7", "eval_dataset": names[0]}
        stage = {"method": "grpo", "settings": settings | {"more_eval_datasets": [*names[1:]]}}
        return {"launched_from": str(started), "stages": [stage]}

    recorded = make_config("aime:rows.jsonl", "openai/gsm8k:more.jsonl", "gpqa:odd.jsonl")
    places = ("aime:{}/rows.jsonl", "openai/gsm8k:{}/more.jsonl", "{}/gpqa:odd.jsonl")
    absolute = make_config(*(place.format(started) for place in places))
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
