"""Test runs from Python, user-defined methods, the installed command."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_a_run_from_python_with_a_function_as_reward(run_folder):
    requests = []

    def long_ones(prompt, response, meta):
        requests.append(response)
        return float(len(response))

    done = rl.train("grpo", reward=long_ones, output_dir=run_folder / "run", **SMALL)
    assert done.folder == run_folder / "run" and done.metrics[-1]["step"] == 1
    assert len(requests) == 8 + 8
    # the first eight requests are the check of the reward before the run
    assert done.metrics[-1]["reward/total"] == pytest.approx(sum(map(len, requests[8:])) / 8)
    assert done.weights.path == run_folder / "run" / "checkpoints" / "grpo-final"
    again = rl.train(resume=True, output_dir=run_folder / "run", steps=2)
    assert [row["step"] for row in again.metrics] == [1, 2]


def test_a_function_does_not_replace_a_built_in_reward(run_folder):
    def gsm8k(prompt, response, meta):
        return 0.0

    with pytest.raises(UserError, match="built-in reward 'gsm8k': rename the"):
        rl.train("grpo", reward=gsm8k, output_dir=run_folder / "run", **SMALL)
    assert resolve_reward("gsm8k").builtin and not (run_folder / "run").exists()


def test_the_results_of_a_run_are_read_in_python(run_folder):
    """The expected values are the files of the run's folder and the samples of the clients."""
    settings = {**SMALL, "steps": 2, "rollouts_every": 1}
    trained = rl.train(
        "grpo",
        base_model="tiny:addition",
        dataset="addition",
        output_dir=run_folder / "run",
        **settings,
    )
    opened = rl.open_run("run")
    assert opened.metrics == trained.metrics
    lines = [
        json.loads(line) for line in (run_folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert opened.series("reward/total") == {row["step"]: row["reward/total"] for row in lines}
    assert opened.series("reward/total", "grpo") == opened.series("reward/total")
    with pytest.raises(
        UserError, match="no values of 'reward/totl'; similar metrics: reward/total"
    ):
        opened.series("reward/totl")
    files = sorted((run_folder / "run/rollouts").glob("*.jsonl"))
    stored = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [row["response"] for row in opened.rollouts] == [row["response"] for row in stored]
    assert [row["step"] for row in opened.rollouts] == [1] * 8 + [2] * 8
    assert opened._repr_png_() == (run_folder / "run/curves.png").read_bytes()
    with pytest.raises(UserError, match="rollouts holds no run"):
        rl.open_run(run_folder / "run" / "rollouts")

    prompts = ["12+34=", "56+78="]
    sampled = rl.sample(run_folder / "run", prompts, temperature=0)
    with rl.ServiceClient() as service:
        client = service.create_sampling_client(model_path=str(trained.weights.path))
        renderer = rl.renderers.get_renderer("plain", client.get_tokenizer())
        params = rl.types.SamplingParams(4, None, renderer.get_stop_sequences(), 0.0)
        for prompt, answers in zip(prompts, sampled, strict=True):
            tokens = renderer.build_generation_prompt([{"role": "user", "content": prompt}])
            [sequence] = client.sample(tokens, 1, params).result().sequences
            assert answers == [renderer.parse_response(sequence.tokens)[0]["content"]]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    assert rl.sample(run_folder / "run", conversations, temperature=0) == sampled
    assert [len(answers) for answers in rl.sample(run_folder / "run", prompts, 3)] == [3, 3]
    with pytest.raises(UserError, match=r"expected a list of prompts: pass \['12\+34='\]"):
        rl.sample(run_folder / "run", "12+34=")
    with pytest.raises(UserError, match=r"expected a list of prompts: pass \[\[\{'role'"):
        rl.sample(run_folder / "run", conversations[0])


def test_a_call_says_what_a_line_would():
    rewards = {"gsm8k": 1, "exact_match": 0.5}
    run = resolve_run(
        "grpo",
        {"learning_rate": 1e-3, "system_prompt": "--no", "rewards": rewards, "train_limit": None},
    )
    settings = run.stages[0].settings
    assert settings.data.rewards == (("gsm8k", 1.0), ("exact_match", 0.5))
    assert settings.data.system_prompt == "--no"
    assert settings.optim.learning_rate == 1e-3 and settings.data.train_limit is None
    assert [stage.settings.loop.steps for stage in resolve_run("", {"grpo.steps": 3}).stages] == [
        120,
        3,
    ]
    with pytest.raises(
        UserError, match="learning_rte: no such setting; did you mean --learning-rate"
    ):
        resolve_run("grpo", {"learning_rte": 1})
    packages = {"reward": "code_tests", "sandbox_packages": ("numpy", "--b")}
    assert resolve_run("grpo", packages).stages[0].settings.data.sandbox_packages[1] == "--b"
    with pytest.raises(SettingsError, match="--dataset: None is not STR"):
        resolve_run("grpo", {"dataset": None})  # as null in a recipe
    keys = {"environment": "tic_tac_toe", "environment.opponent": "perfect"}
    mapping = {"environment": {"name": "tic_tac_toe", "opponent": "perfect"}}
    by_mapping, by_keys = resolve_run("grpo", mapping), resolve_run("grpo", keys)
    assert by_mapping.stages == by_keys.stages and "perfect" in repr(by_mapping.stages)
    with pytest.raises(UserError, match="environment has the keys digits, expected also 'name'"):
        resolve_run("grpo", {"environment": {"digits": 4}})
    with pytest.raises(UserError, match="dataset is a list of 1 rows, expected the name of a file"):
        resolve_run("grpo", {"dataset": [{"prompt": "1+2=", "answer": "3"}]})


def test_a_method_of_ones_own(run_folder):
    done = rl.train("mine.py:Twice", output_dir=run_folder / "run", looks=5, **SMALL)
    assert done.metrics[-1]["own/looks"] == 5.0
    assert (
        json.loads((run_folder / "run/config.json").read_text())["stages"][0]["method"]
        == "mine.py:Twice"
    )
    assert (run_folder / "run/checkpoints/Twice-final").is_dir()
    again = rl.train(resume=True, output_dir=run_folder / "run", steps=2)
    assert again.metrics[-1]["own/looks"] == 5.0


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


def test_a_run_of_anothers_method_is_opened_in_its_folder_alone(run_folder, monkeypatch):
    trained = rl.train("mine.py:Twice", output_dir=run_folder / "run", **SMALL)
    (run_folder / "other").mkdir()
    monkeypatch.chdir(run_folder / "other")
    with pytest.raises(UserError, match="only code in the current folder is imported"):
        open_weights(str(run_folder / "run"))
    with pytest.raises(UserError, match=r"or trusted=True \(rl.sample, rl.open_run\)"):
        rl.sample(run_folder / "run", ["12+34="])
    assert [
        len(answers) for answers in rl.sample(run_folder / "run", ["12+34="], trusted=True)
    ] == [1]
    with pytest.raises(UserError, match="trusted=True"):
        _ = rl.open_run(run_folder / "run").weights
    opened = rl.open_run(run_folder / "run", trusted=True)
    assert opened.weights.path == trained.weights.path


def test_methods_are_those_here_and_addresses():
    assert "grpo" in METHODS and "grop" not in METHODS and METHODS.get("grop") is None
    with pytest.raises(KeyError):
        METHODS["grop"]


@pytest.mark.parametrize(
    "words,code,output", [([], 0, "usage: whetstone"), (["trian"], 2, "unknown command 'trian'")]
)
def test_the_installed_command(words, code, output):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["whetstone"].split(":")
    line = (
        f"import sys; sys.argv[0] = 'whetstone'; from {module} import {function}; "
        f"sys.exit({function}())"
    )
    done = subprocess.run(
        [sys.executable, "-c", line, *words], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code and output in done.stdout + done.stderr


@pytest.mark.slow
def test_the_installed_command_from_another_folder(tmp_path):
    line = (
        f"import sys; sys.path.insert(0, {str(REPO)!r}); from whetstone import main; "
        f"sys.exit(main())"
    )
    words = [sys.executable, "-c", line, "train", "grpo", "--lr", "1"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--learning-rate here" in " ".join(done.stderr.split())
