"""Test mistakes in the user's files, and in flags that scripts share with training."""

from pathlib import Path

import pytest

from rl.algorithms import METHODS
from rl.config import (
    DataSettings,
    RunSettings,
    SamplingSettings,
    SettingsError,
    override_settings,
    parse_run,
)
from rl.envs import resolve_environment
from rl.errors import UserError
from rl.rewards import resolve_reward
from rl.trainer.evaluator import HeldOutMetrics

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "addition.yaml"


@pytest.mark.parametrize(("name", "says"), [
    ("Nope", "has no class Nope; its classes: Method"),
    ("Method", "has no update"),
    ("nofile.py:Method", "nofile.py does not exist"),
])  # fmt: skip
def test_a_method_that_is_none(name, says, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("class Method:\n    pass\n")
    address = f"{tmp_path}/{name}" if ":" in name else f"{file}:{name}"
    with pytest.raises(SystemExit) as ended:
        parse_run([address, "--steps", "2"], METHODS, RECIPE, options=RunSettings)
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and says.split()[-1] in text and "Traceback" not in text, text


def test_what_a_file_imports_is_not_offered_as_its_own(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        "from functools import partial\nfrom math import sqrt\nfrom pathlib import Path\n"
        "from rl.envs import Environment, Game\n\n"
        "def good(prompt, response, meta):\n    return 1.0\n\nhalf = partial(good, meta=None)\n\n"
        "class Room(Environment):\n    pass\n"
    )
    with pytest.raises(UserError, match="it has Room, good, half$"):
        resolve_reward(f"{file}:absent")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="did you mean 'mine.py:good'[?]"):
        resolve_reward("mine.good")
    with pytest.raises(UserError, match="it has Room$"):
        resolve_environment(f"{file}:Absent")


def test_a_mistyped_flag_of_a_script_is_recognised():
    with pytest.raises(SettingsError) as error:
        override_settings(
            (DataSettings(dataset="addition"),),
            ["--limt", "5", "--evl-limit", "3"],
            {"limit": 1, "samples": 1},
        )
    meant = {"--limt": "--limit", "--evl-limit": "--eval-limit"}
    assert error.value.problems == [
        f"{typed}: no such setting; did you mean {flag}?" for typed, flag in meant.items()
    ]


def test_a_flag_of_a_script_in_another_spelling_is_not_ignored():
    script_flags = {"n": 1, "trust_run": False, "top_k": -1, "max_tokens": None, "weights": "w"}
    sections = (SamplingSettings(),)
    with pytest.raises(SettingsError) as error:
        words = ["--n", "4", "--trust_run", "--top_k", "5", "--weights", "x", "--no-max-tokens"]
        override_settings(sections, words, script_flags)
    meant = {"--n": "-n", "--trust_run": "--trust-run", "--top_k": "--top-k"}
    assert error.value.problems == [
        *(f"{typed}: no such setting; did you mean {flag}?" for typed, flag in meant.items()),
        "--weights: no such setting",
        "--no-max-tokens: no such setting; did you mean --max-tokens?",
    ]
    # the script reads this one from the settings
    assert override_settings(sections, ["--max_tokens", "5"], script_flags)[0].max_tokens == 5


def test_several_held_out_sets_are_told_each():
    rows = [
        {"test/loss": loss, "test/msgs/loss": loss + 1, "test/msgs/token_accuracy": 0.5,
         "test/env/all/loss": 5.0, "time/loss": 9.0} for loss in (2.0, 1.0)
    ]  # fmt: skip
    result = HeldOutMetrics.from_rows([{"optim/loss": 7.0}, *rows], "test/loss")
    assert result.headline == "loss" and result.rows == {"": (2.0, 1.0), "msgs": (3.0, 2.0)}
    result = HeldOutMetrics.from_rows(
        [{"test/rewards/accuracies": 0.5, "test/a/rewards/accuracies": 0.25}],
        "test/rewards/accuracies",
    )
    assert result.headline == "rewards/accuracies"
    assert result.rows == {"": (0.5, 0.5), "a": (0.25, 0.25)}


def test_held_out_figures_are_the_first_and_last_of_the_log():
    reward, correct = "env/all/reward/total", "env/all/correct"
    rows = [
        {"step": 0, f"test/{reward}": 0.25, f"test/{reward.replace('env', 'greedy')}": 0.5},
        {"step": 1, reward: 9.0},
        {"step": 2, f"test/{reward}": None},
        {"step": 3, f"test/{reward}": 0.75},
    ]
    assert HeldOutMetrics.from_rows(rows) == HeldOutMetrics(0.25, 0.75, 0.5, 0.5, "reward")
    rows += [{f"test/{correct}": 0.125}]
    assert HeldOutMetrics.from_rows(rows) == HeldOutMetrics(0.125, 0.125, what="accuracy")
    assert HeldOutMetrics.from_rows([]) == HeldOutMetrics(what="reward")
