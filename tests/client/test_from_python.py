"""Test runs from Python, user-defined methods, the installed command."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import rl
from rl.algorithms import METHODS
from rl.config import SettingsError
from rl.errors import UserError
from rl.rewards import resolve_reward
from rl.trainer import open_weights
from rl.trainer.entry_point import resolve_run

REPO = Path(__file__).resolve().parents[2]
SMALL = {
    "steps": 1, "batch_size": 4, "group_size": 2, "max_tokens": 4, "eval_every": 0, "quiet": True,
}  # fmt: skip
OWN = '''
from dataclasses import dataclass, field, replace
from rl.algorithms import GrpoSettings, GRPO, PolicyGradientSettings

@dataclass(frozen=True, kw_only=True)
class Settings(GrpoSettings):
    """GRPO that looks twice."""
    looks: int = 2

class Twice(GRPO):
    """Learns from the same answers, and says how often it looked."""
    Settings = Settings

    def update(self, models, datums, progress):
        return {**super().update(models, datums, progress), "own/looks": float(self.settings.looks)}

class Broken:
    Settings = Settings
    online = True
'''


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """Train with the method of `OWN` and a function as reward, and resume the run without naming
    it; return its folder and both results.
    """

    def ten_and_more(prompt, response, meta):
        return 10.0 + len(response)

    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings = {"output_dir": folder / "run", "looks": 5, **SMALL}
        done = rl.train("mine.py:Twice", reward=ten_and_more, **settings)
        again = rl.train(resume=True, output_dir=folder / "run", steps=2)
    return folder, done, again


def test_a_run_from_python_with_a_function_as_reward(run_folder):
    requests, folder = [], run_folder / "run"

    def long_ones(prompt, response, meta):
        requests.append(response)
        return float(len(response))

    done = rl.train("grpo", reward=long_ones, output_dir=folder, **SMALL)
    assert done.folder == folder and [row["step"] for row in done.metrics] == [1]
    assert len(requests) == 8 + 8
    # the first eight requests are the check of the reward before the run
    assert done.metrics[-1]["reward/total"] == pytest.approx(sum(map(len, requests[8:])) / 8)
    assert done.weights.path == folder / "checkpoints" / "grpo-final"


def test_a_function_does_not_replace_a_built_in_reward(run_folder):
    def gsm8k(prompt, response, meta):
        return 0.0

    with pytest.raises(UserError, match="built-in reward 'gsm8k': rename the"):
        rl.train("grpo", reward=gsm8k, output_dir=run_folder / "run", **SMALL)
    assert resolve_reward("gsm8k").builtin and not (run_folder / "run").exists()


def test_the_results_of_a_run_are_read_in_python(run_folder, curves):
    """The expected values are the files of the run's folder and the samples of the clients."""
    run = run_folder / "run"
    settings = {**SMALL, "steps": 2, "rollouts_every": 1, "output_dir": run}
    trained = rl.train("grpo", base_model="tiny:addition", dataset="addition", **settings)
    opened = rl.open_run("run")
    assert opened.metrics == trained.metrics
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert opened.series("reward/total") == {row["step"]: row["reward/total"] for row in lines}
    assert opened.series("reward/total", "grpo") == opened.series("reward/total")
    message = "no values of 'reward/totl'; similar metrics: reward/total"
    with pytest.raises(UserError, match=message):
        opened.series("reward/totl")
    files = sorted((run / "rollouts").glob("*.jsonl"))
    stored = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [row["response"] for row in opened.rollouts] == [row["response"] for row in stored]
    assert [row["step"] for row in opened.rollouts] == [1] * 8 + [2] * 8
    assert opened._repr_png_() == (run / "curves.png").read_bytes()
    with pytest.raises(UserError, match="rollouts holds no run"):
        rl.open_run(run / "rollouts")

    prompts = ["12+34=", "56+78="]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    sampled = rl.sample(run, prompts, temperature=0)
    with rl.ServiceClient() as service:
        client = service.create_sampling_client(model_path=str(trained.weights.path))
        renderer = rl.renderers.get_renderer("plain", client.get_tokenizer())
        params = rl.types.SamplingParams(4, None, renderer.get_stop_sequences(), 0.0)
        for conversation, answers in zip(conversations, sampled, strict=True):
            tokens = renderer.build_generation_prompt(conversation)
            [sequence] = client.sample(tokens, 1, params).result().sequences
            assert answers == [renderer.parse_response(sequence.tokens)[0]["content"]]
    assert rl.sample(run, conversations, temperature=0) == sampled
    arrays = [np.array(messages, dtype=object) for messages in conversations]  # as pandas has them
    assert rl.sample(run, arrays, temperature=0) == sampled
    assert [len(answers) for answers in rl.sample(run, prompts, 3)] == [3, 3]
    for single, shown in ((prompts[0], r"\['12\+34='\]"), (conversations[0], r"\[\[\{'role'")):
        with pytest.raises(UserError, match=f"expected a list of prompts: pass {shown}"):
            rl.sample(run, single)
    with pytest.raises(UserError, match="a prompt is a text or a list of messages, got 3"):
        rl.sample(run, [3])


def test_a_call_says_what_a_line_would():
    def settings_of(method="grpo", **settings):
        return resolve_run(method, settings).stages[-1].settings

    rewards = {"gsm8k": 1, "exact_match": 0.5}
    options = {"learning_rate": 1e-3, "system_prompt": "--no", "train_limit": None}
    settings = settings_of(rewards=rewards, **options)
    assert settings.data.rewards == (("gsm8k", 1.0), ("exact_match", 0.5))
    assert settings.data.system_prompt == "--no"
    assert settings.optim.learning_rate == 1e-3 and settings.data.train_limit is None
    stages = resolve_run("", {"grpo.steps": 3}).stages
    assert [stage.settings.loop.steps for stage in stages] == [120, 3]
    packages = settings_of(reward="code_tests", sandbox_packages=("numpy", "--b"))
    assert packages.data.sandbox_packages[1] == "--b"
    keys = {"environment": "tic_tac_toe", "environment.opponent": "perfect"}
    by_keys = settings_of(**keys)
    by_mapping = settings_of(environment={"name": "tic_tac_toe", "opponent": "perfect"})
    assert by_mapping == by_keys and "perfect" in repr(by_mapping)


class Episodes:
    """Stand for the environment class of a script."""


@pytest.mark.parametrize("settings, message", [
    ({"learning_rte": 1}, "learning_rte: no such setting; did you mean --learning-rate"),
    ({"dataset": None}, "--dataset: None is not STR"),  # as null in a recipe
    ({"environment": {"digits": 4}}, "environment has the keys digits, expected also 'name'"),
    ({"dataset": [{"prompt": "1+2=", "answer": "3"}]},
     "dataset is a list of 1 rows, expected the name of a file"),
    ({"environment": Episodes},
     "environment is the class 'Episodes'.*environment='my_file.py:Episodes'"),
    ({"dataset": print}, "dataset is the function 'print'; only reward may be a function.*script$"),
    ({"base_model": torch.nn.Linear(1, 1)}, "base_model is an object of class Linear; only reward"),
])  # fmt: skip
def test_a_call_that_a_line_could_not_say_is_refused(settings, message):
    with pytest.raises((UserError, SettingsError), match=message):
        resolve_run("grpo", settings)


def test_a_method_of_ones_own(own_run):
    folder, *results = own_run
    assert [result.metrics[-1]["own/looks"] for result in results] == [5.0, 5.0]
    assert [row["step"] for row in results[1].metrics] == [1, 2]
    assert min(row["reward/total"] for row in results[1].metrics) >= 10.0
    config = json.loads((folder / "run/config.json").read_text())
    assert config["stages"][0]["method"] == "mine.py:Twice"
    assert (folder / "run/checkpoints/Twice-final").is_dir()


@pytest.mark.parametrize("method,problem", [
    ("mine.py:Twise", "has no class Twise; its classes: Settings, Twice, Broken"),
    ("mine.py:Broken", "has no update and no compute_advantages"),
    ("not_there.py:X", "not_there.py does not exist"),
    ("mine.py:Settings", "has no update"),
    ("no_such_module:X", "importing no_such_module failed"),
])  # fmt: skip
def test_what_is_no_method_is_said(run_folder, method, problem):
    with pytest.raises(SettingsError, match=problem):
        resolve_run(method, {})


def test_a_run_of_anothers_method_is_opened_in_its_folder_alone(own_run, tmp_path, monkeypatch):
    run = own_run[0] / "run"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="only code in the current folder is imported"):
        open_weights(str(run))
    with pytest.raises(UserError, match=r"or trusted=True \(rl.sample, rl.open_run\)"):
        rl.sample(run, ["12+34="])
    (answers,) = rl.sample(run, ["12+34="], trusted=True)
    assert len(answers) == 1
    with pytest.raises(UserError, match="trusted=True"):
        _ = rl.open_run(run).weights
    opened = rl.open_run(run, trusted=True)
    assert opened.weights.path == own_run[2].weights.path


def test_methods_are_those_here_and_addresses():
    assert "grpo" in METHODS and "grop" not in METHODS and METHODS.get("grop") is None
    with pytest.raises(KeyError):
        METHODS["grop"]


@pytest.mark.parametrize("words, code, output", [
    ("", 0, "usage: whetstone"),
    ("trian", 2, "unknown command 'trian'"),
    ("plot runs/a --each-rin", 2, "--each-rin: no such flag; did you mean --each-run?"),
    ("plot --each-rin --help", 0, "usage: plot"),
    ("plot -- --each-rin", 2, "no metrics at --each-rin"),
    pytest.param("train grpo --lr 1", 2, "--learning-rate here", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_installed_command(tmp_path, words, code, output):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["whetstone"].split(":")
    line = (
        f"import sys; sys.path.insert(0, {str(REPO)!r}); sys.argv[0] = 'whetstone'; "
        f"from {module} import {function}; sys.exit({function}())"
    )
    command, options = [sys.executable, "-c", line, *words.split()], {"cwd": tmp_path}
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert output in " ".join((done.stdout + done.stderr).split())
