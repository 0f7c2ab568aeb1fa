"""Test runs that are requested by their folder, former names of settings, and parts of settings."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from rl.algorithms import METHODS
from rl.config import (
    DataSettings,
    RunConfig,
    RunSettings,
    SettingsError,
    list_changed_settings,
    override_settings,
    read_run,
    resolve_config,
)
from rl.errors import UserError
from rl.trainer import load_run, open_weights
from rl.trainer.resume import check_changes

REPO = Path(__file__).resolve().parents[2]
RECIPE = REPO / "recipes" / "addition.yaml"
METHOD = """
from dataclasses import dataclass

from rl.algorithms import GRPO, GrpoSettings


@dataclass(frozen=True, kw_only=True)
class MySettings(GrpoSettings):
    episodes: int = 3


class Mine(GRPO):
    Settings = MySettings
"""


def read(*words: object) -> RunConfig:
    return read_run([str(word) for word in words], METHODS, RECIPE, RunSettings)


def write_config(folder: Path, run: RunConfig, **record: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**resolve_config(run), **record}))
    return folder


@pytest.mark.parametrize("switch", ["resume", "auto-resume"])
@pytest.mark.parametrize("word", ["", "true", "YES", "on", "True"])
def test_every_way_to_turn_resume_on_reads_the_run_of_the_folder(tmp_path, switch, word):
    folder = write_config(tmp_path / "run", read("sft", "--steps", 7))
    run = read(f"--{switch}", *word.split(), "--output-dir", folder)
    assert [(stage.method, stage.settings.loop.steps) for stage in run.stages] == [("sft", 7)]
    # off: the default recipe
    assert read(f"--{switch}", "off", "--output-dir", folder).stages[0].settings.loop.steps != 7


def test_every_way_to_trust_a_run_is_read(tmp_path):
    (tmp_path / "other").mkdir()
    reward = tmp_path / "other" / "mine.py"
    reward.write_text("def score(prompt, response, meta):\n    return 1.0\n")
    run = read("grpo", "--reward", f"{reward}:score")
    folder = write_config(tmp_path / "run", run, launched_from=str(reward.parent))
    words = ("--resume", "--output-dir", folder)
    for untrusted in ((), ("--trust-run", "no")):
        with pytest.raises(SettingsError, match="not in the current folder"):
            read(*words, *untrusted)
    assert read(*words, "--trust-run", "yes").stages == run.stages


def test_a_change_may_unset_a_setting_and_replace_the_rewards(tmp_path):
    run = read("grpo", "--eval-temperature", 0.5, "--renderer", "plain", "--rewards", "gsm8k", 1)
    folder = write_config(tmp_path / "run", run)
    saved = json.loads((folder / "config.json").read_text())
    words = ("eval_temperature=null", "renderer=None", "reward=exact_match")
    changed = read("--resume", "--output-dir", folder, "--change", *words)
    settings = changed.stages[0].settings
    assert (settings.sampling.eval_temperature, settings.data.renderer) == (None, None)
    assert (settings.data.reward, settings.data.rewards) == ("exact_match", ())
    notes = {note["setting"]: note["to"] for note in check_changes(saved, changed, 0, 1, 1).notes}
    # reward had this value as its default
    assert notes == {"eval_temperature": None, "renderer": None, "rewards": []}


def test_the_home_of_an_unknown_user_is_a_problem_of_the_setting():
    with pytest.raises(SettingsError, match="--output-dir ~nosuchuser/run"):
        read("--resume", "--output-dir", "~nosuchuser/run")
    with pytest.raises(UserError, match="no folder ~nosuchuser/run"):
        open_weights("~nosuchuser/run")
    prompt = "a prompt without its flag " * 20
    assert open_weights(prompt).name == prompt  # a hub name, which loading refuses


def test_a_method_may_have_a_setting_with_a_former_name(tmp_path):
    (tmp_path / "mine.py").write_text(METHOD)
    method = f"{tmp_path / 'mine.py'}:Mine"
    run = read(method, "--episodes", 4, "--Mine.kl-in", "loss")
    settings = run.stages[0].settings
    assert (settings.episodes, settings.kl.kl_placement) == (4, "loss")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"stages:\n- {{method: '{method}', episodes: 4, kl_in: loss}}\n")
    assert read(recipe).stages == run.stages

    folder = write_config(tmp_path / "run", run)
    assert load_run(folder, trusted=True).stages == run.stages
    saved = json.loads((folder / "config.json").read_text())
    stage = saved["stages"][0]["settings"]
    stage["kl_in"] = stage.pop("kl_placement")  # as an older run
    changed = read(
        *(method, "--episodes", 5, "--kl-placement", "loss", "--resume"), "--change", "episodes=5"
    )
    notes = check_changes(saved, changed, 0, 1, 1).notes
    assert [(note["setting"], note["from"], note["to"]) for note in notes] == [("episodes", 4, 5)]
    assert list_changed_settings(["episodes=5"]) == {"rollout_mode"}


def test_a_part_of_the_template_keeps_the_others(tmp_path):
    recipe = tmp_path / "thinking.yaml"
    recipe.write_text("method: grpo\ntemplate: {enable_thinking: false, a: 1}\n")

    def template(*words: object) -> tuple[tuple[str, str], ...]:
        return read(recipe, *words).stages[0].settings.data.template

    saved = (("enable_thinking", "false"), ("a", "1"))
    assert template("--template.foo", "bar") == (*saved, ("foo", "bar"))
    assert template("--template.enable_thinking") == (("a", "1"), ("enable_thinking", "true"))
    assert template("--template", "b", "2") == (("b", "2"),)
    changed = ("--resume", "--change", "template.foo=bar")
    assert template(*changed) == (*saved, ("foo", "bar"))
    (data,) = override_settings((DataSettings(template=saved),), ["--template.foo", "bar"])
    assert data.template == (*saved, ("foo", "bar"))


def test_numbers_of_stages_skip_the_names_of_others(tmp_path):
    recipe = tmp_path / "three.yaml"
    recipe.write_text(
        "stages:\n- {method: sft, steps: 1}\n- {method: sft, steps: 2}\n"
        "- {method: sft, name: sft-1, steps: 3}\n"
    )
    stages = {stage.name: stage.settings.loop.steps for stage in read(recipe).stages}
    assert stages == {"sft-2": 1, "sft-3": 2, "sft-1": 3}


@pytest.mark.parametrize(("words", "expected"), [
    ("sample.py --prompt-suffix k tiny:ascii --prompt x", "put WEIGHTS before --prompt-suffix"),
    ("evaluate.py --prompt-column question runs/x", "put WEIGHTS before --prompt-column"),
    ("sample.py tiny:ascii --dataset rows.jsonl --prompt x", "leave out one of them"),
    ("sample.py tiny:addition -n 0", "n is at least 1, got 0"),
    ("evaluate.py tiny:ascii --seeds 1 1", "seeds has a value twice: 1 1"),
    ("evaluate.py tiny:ascii --seeds -1", "seed is at least 0, got -1"),
    ("evaluate.py tiny:ascii --output table.md", "output is a .json file"),
])  # fmt: skip
def test_arguments_that_would_be_misread_are_refused(words, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / words.split()[0]), run_name="__main__")
    assert ended.value.code == 2 and expected in capsys.readouterr().err
