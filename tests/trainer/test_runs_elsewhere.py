"""Test runs with user code that are opened from another folder than they were started in."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from rank_server import run_script
from whole_runs import train

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run, read_run
from rl.errors import UserError
from rl.jsonl import read_jsonl
from rl.reporting import Console
from rl.trainer import open_weights
from rl.trainer.execute import execute
from rl.trainer.run_summary import format_resume_command

REPO = Path(__file__).resolve().parents[2]
WORDS = (
    "--reward scores.py:score --dataset rows.jsonl --eval-dataset rows.jsonl --steps 1 "
    "--batch-size 2 --max-tokens 4 --base-model tiny:addition --reward-workers 1"
)
CODE = """from rl.algorithms import GRPO, GrpoSettings


def score(prompt, response, meta):
    return float(response.strip() == meta["answer"])


class Mine(GRPO):
    Settings = GrpoSettings
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """Return a user's folder with a reward, a method and data."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "scores.py").write_text(CODE)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(folder)
    return folder


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `python SCRIPT WORDS` in a folder."""
    return run_script(*shlex.split(command)[1:], cwd=folder)


@pytest.mark.slow
def test_printed_commands_work_as_printed(project, tmp_path, monkeypatch):
    """Start a run in the user's folder, and another in a third folder with a path to the user's
    code.
    """
    third = tmp_path / "third folder"
    third.mkdir()
    local = WORDS.replace("rows.jsonl", str(project / "rows.jsonl"))
    for name, folder, words in (
        ("here", project, local),
        ("there", third, local.replace("scores.py", "../project/scores.py")),
    ):
        command = f"python {REPO / 'train.py'} grpo {words} --group-size 2 --output-dir {name}"
        done = run_command(command, folder)
        assert done.returncode == 0, done.stderr
        lines = [line.strip() for line in done.stdout.splitlines()]
        (printed,) = [line for line in lines if "evaluate.py" in line]
        done = run_command(f"{printed} --limit 2", folder)
        assert done.returncode == 0 and "reward" in done.stdout, done.stderr


def test_a_run_finds_its_code_and_data_from_another_folder(project, tmp_path, monkeypatch):
    train(f"grpo {WORDS} --group-size 2", project / "run")
    monkeypatch.chdir(tmp_path)
    data = open_weights("project/run").stage.settings.data
    assert data.reward == f"{project / 'scores.py'}:score"
    assert data.dataset == data.eval_dataset == str(project / "rows.jsonl")
    # A file of the same name in the current folder takes precedence; a copy needs no warning.
    shutil.copy(project / "rows.jsonl", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_weights("project/run").stage.settings.data.dataset == "rows.jsonl"
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.warns(UserWarning, match=f"started with {project / 'rows.jsonl'}; the two differ"):
        assert open_weights("project/run").stage.settings.data.dataset == "rows.jsonl"


def test_folders_with_the_names_of_methods_and_data_sets_are_not_taken_for_them(
    project, tmp_path, monkeypatch
):
    for name in ("grpo", "addition", "exact_match", "calculator"):
        (project / name).mkdir()
    words = "--steps 1 --batch-size 2 --max-tokens 4 --base-model tiny:addition"
    train(f"grpo {words} --dataset addition --group-size 2", project / "run")
    monkeypatch.chdir(tmp_path)
    stage = open_weights("project/run").stage
    assert (stage.method, stage.settings.data.dataset) == ("grpo", "addition")
    assert stage.settings.data.reward == "exact_match"


def resume(folder: Path, *words: str) -> None:
    words = ("--resume", "--output-dir", str(folder), "--quiet", *words)
    execute(read_run(words, METHODS, folder / "none", RunSettings))


def test_a_run_resumed_from_another_folder_reads_its_own_files(project, tmp_path, monkeypatch):
    train(f"scores.py:Mine {WORDS} --group-size 2", project / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match=f"Change to {project}, .*--trust-run"):
        resume(project / "run", "--steps", "2")
    resume(project / "run", "--steps", "2", "--trust-run")
    config = json.loads((project / "run/config.json").read_text())
    assert config["launched_from"] == str(project)
    assert config["stages"][0]["method"] == "scores.py:Mine"
    settings = config["stages"][0]["settings"]
    assert (settings["reward"], settings["dataset"]) == ("scores.py:score", "rows.jsonl")
    # Another reward of the same name is used with a warning, and recorded by its path.
    (elsewhere / "scores.py").write_text(CODE.replace("==", "!="))
    with pytest.warns(UserWarning, match="the two differ"):
        resume(project / "run", "--steps", "3", "--trust-run")
    settings = json.loads((project / "run/config.json").read_text())["stages"][0]["settings"]
    assert settings["reward"] == f"{elsewhere / 'scores.py'}:score"


def test_a_script_of_the_user_prints_commands_that_exist(project, monkeypatch):
    """The user's script has the name train.py and calls rl.train."""
    shown = {}
    monkeypatch.setattr(Console, "end", lambda self, title, **what: shown.update(what))
    monkeypatch.setattr(sys, "argv", ["sub/train.py"])
    train(f"grpo {WORDS} --group-size 2", project / "run")
    scripts = [shlex.split(command)[1] for command in shown["commands"]]
    assert len(scripts) == 5 and all(Path(script).is_file() for script in scripts)
    assert format_resume_command(Path("runs/it")) == "rl.train(resume=True, output_dir='runs/it')"
    monkeypatch.setattr(sys, "argv", [str(REPO / "train.py")])
    assert shlex.split(format_resume_command(Path("runs/it")))[-3:] == [
        "--resume", "--output-dir", "runs/it",
    ]  # fmt: skip


def test_a_method_of_another_folder_is_imported_only_if_the_run_is_trusted(
    project, tmp_path, monkeypatch
):
    shown = {}
    monkeypatch.setattr(Console, "end", lambda self, title, **what: shown.update(what))
    train(f"scores.py:Mine {WORDS} --group-size 2", project / "run")
    assert not any("--trust-run" in command for command in shown["commands"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match="--trust-run"):
        open_weights("../project/run")
    (checkpoint,) = map(str, Path("../project/run/checkpoints").iterdir())
    with pytest.raises(UserError, match="--trust-run"):
        open_weights(checkpoint)
    for target in ("../project/run", checkpoint):
        assert open_weights(target, trusted=True).stage.method.endswith("scores.py:Mine")
    words = WORDS.replace("rows.jsonl", "../project/rows.jsonl").replace(
        "scores.py", "../project/scores.py"
    )
    train(f"../project/scores.py:Mine {words} --group-size 2", tmp_path / "run")
    commands = [shlex.split(command) for command in shown["commands"]]
    trusted = [Path(words[1]).name for words in commands if "--trust-run" in words]
    assert trusted == ["sample.py", "evaluate.py", "export.py"]


def test_the_last_step_and_every_evaluation_keep_their_answers(project):
    words = WORDS.replace("--steps 1", "--steps 3 --rollouts-every 2 --eval-every 2 --eval-limit 3")
    rows = train(f"grpo {words} --group-size 2", project / "run")
    folder = project / "run" / "rollouts"
    assert sorted(path.name for path in folder.glob("*.jsonl")) == [
        *(f"grpo-eval-{step:06d}.jsonl" for step in (0, 2, 3)),
        *(f"grpo-eval-greedy-{step:06d}.jsonl" for step in (0, 3)),
        *(f"step_{step:06d}.jsonl" for step in (1, 3)),
    ]
    for path in folder.glob("grpo-eval-0*.jsonl"):
        answers = read_jsonl(path)
        step = int(path.stem.rpartition("-")[2])
        (metrics,) = [row for row in rows if row["step"] == step]
        assert len(answers) == 3
        expected = sum(answer["reward"] for answer in answers) / 3
        assert metrics["test/env/all/reward/total"] == pytest.approx(expected)
        by_token = {"prompt_tokens", "response_tokens", "tokens", "logprobs"}
        keys = read_jsonl(folder / "step_000003.jsonl")[0].keys() - by_token
        assert answers[0].keys() == keys >= {"prompt", "response", "reward", "answer"}


def test_console_metrics_and_files_count_the_same_steps(project, capsys):
    """In a second stage, the console counts the same steps as the metrics and the file names."""
    (project / "recipe.yaml").write_text(
        "base_model: tiny:addition\ndataset: rows.jsonl\neval_dataset: rows.jsonl\nbatch_size: 2\n"
        "max_tokens: 4\nreward: scores.py:score\nstages:\n"
        "- {method: best_of_n, steps: 2, group_size: 2}\n"
        "- {method: grpo, steps: 2, group_size: 2, rollouts_every: 1, save_every: 1}\n"
    )
    run = parse_run(
        ["recipe.yaml", "--output-dir", "run"], METHODS, project / "none", options=RunSettings
    )
    execute(run)
    steps = re.findall(r"grpo (\d)/2 \(step (\d) of the run\)", capsys.readouterr().out)
    assert steps == [("1", "4"), ("2", "5")]
    rows = [row for row in read_jsonl(project / "run/metrics.jsonl") if row["stage"] == "grpo"]
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert [row.get("progress/batch") for row in rows] == [None, 0, 1]
    names = {path.name for path in (project / "run/rollouts").iterdir()}
    assert {f"step_{step:06d}_grpo.jsonl" for step in (4, 5)} <= names
    assert {f"grpo-eval-{step:06d}.jsonl" for step in (3, 5)} <= names
    saved = read_jsonl(project / "run/checkpoints.jsonl")
    assert {"grpo-000004": 4, "grpo-final": 5}.items() <= {
        row["name"]: row["batch"] for row in saved
    }.items()
