"""Test that failed reports never end a run, and that foreign text never controls a terminal."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from listener import MessageRecorder

from rl.algorithms import METHODS
from rl.config import RunSettings, SettingsError, parse_run, read_run
from rl.config.format_help import exit_with_problems
from rl.reporting import Console, Logbook, metric_plots, rollout_html

RECIPE = Path(__file__).parents[2] / "recipes" / "addition.yaml"


# --------------------------------------------------------------------------------- reports of a run


@pytest.mark.parametrize(("module", "drawn", "name"), [
    (rollout_html, "render_page", "page of rollouts"),
    (metric_plots, "draw_curves", "curves.png (ZeroDivisionError"),
])  # fmt: skip
def test_a_page_or_picture_that_cannot_be_drawn_costs_a_single_warning(
    module: Any, drawn: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear, rollouts = MessageRecorder(), tmp_path / "run" / "rollouts"
    monkeypatch.setattr(module, drawn, lambda *_, **__: 1 / 0)
    with Logbook(tmp_path / "run", console=ear) as logbook:
        for step in (1, 2):
            logbook.log(step, {"stage": "sft", "optim/loss": 1.0})
            logbook.write_rollouts(step, [{"prompt": "a", "response": "b", "reward": 1.0}])
    stored = sorted(path.name for path in rollouts.glob("*.jsonl"))
    assert stored == ["step_000001.jsonl", "step_000002.jsonl"]
    assert len(ear.warnings) == 1 and name in ear.warnings[0]


@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize("name", ["a$b", "$", "price $5 $x^", "$$", r"\$", "$\\frac$"])
def test_a_folders_name_with_dollars_is_drawn_as_it_stands(tmp_path: Path, name: str) -> None:
    ear = MessageRecorder()
    with Logbook(tmp_path / name, console=ear) as logbook:
        for step, stage in enumerate(("sft", "sft", "$x_$", "$x_$")):
            logbook.log(step, {"stage": stage, "optim/loss": 1.0 / (1 + step)})
    assert not ear.warnings and (tmp_path / name / "curves.png").stat().st_size > 1000
    metric_plots.draw_curves([tmp_path / name, tmp_path / name], tmp_path / "both.png")


def test_a_metrics_name_that_cannot_be_encoded_is_written_all_the_same(tmp_path: Path) -> None:
    with Logbook(tmp_path / "run") as logbook:
        logbook.log(1, {"stage": "sft", "env/\ud800/reward": 1.0, "optim/loss": 2.0})
        logbook.write_rollouts(1, [{"prompt": "\ud800", "response": "\udfff", "reward": 1.0}])
    (row,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["optim/loss"] == 2.0


# ------------------------------------------------------------------------------------- foreign text


def test_a_box_shows_no_control_sequences_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    problems = ["\x1b[2Jspoilt \ud800" + "y" * 100_000, *(f"problem {i}" for i in range(500))]
    with pytest.raises(SystemExit):
        exit_with_problems(problems, see="\x1b[5mhelp")
    text = capsys.readouterr().err
    assert "\x1b[2J" not in text and "\x1b[5m" not in text
    assert len(text) < 30_000 and "and 461 more" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_warning_that_cannot_be_encoded_is_shown_all_the_same(terminal: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Console(stream=stream, terminal=terminal, width=80) as console:
        console.warn("a reward said é \ud800 \x1b[2J")
        console.note("日本")
        console.end("done é", facts={"folder": "日\ud800"}, remarks=["é"], commands=["é"])
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "a reward said" in text and "\x1b[2J" not in text


# ------------------------------------------------------------------------------------------ recipes


def make_yaml_bomb() -> str:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for last, name in zip("abcdefghi", "bcdefghij", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]")
    return "method: grpo\n" + "\n".join(lines) + "\n"


RECIPES: dict[str, tuple[bytes, str]] = {
    "recursion": (b"method: grpo\nrewards: &a [*a]\n", "contains itself"),
    "recursion in a mapping": (b"method: grpo\nrewards: &a {x: *a}\n", "contains itself"),
    "recursion of stages": (b"stages: &a\n  - *a\n", "contains itself"),
    "a bomb": (make_yaml_bomb().encode(), "more than 20000 values"),
    "deep": (b"method: grpo\nrewards: " + b"[" * 5000 + b"]" * 5000, "deep"),
    "deep blocks": (b"a:\n" + b"".join(b" " * i + b"a:\n" for i in range(1, 600)), "deep"),
    "huge": (b"# " + b"x" * (1 << 20), "bytes are too large for a recipe"),
    "several documents": (b"method: grpo\n---\nmethod: sft\n", "but found another document"),
    "twice": (b"method: grpo\nsteps: 3\nsteps: 4\n", "steps occurs twice"),
    "a list": (b"- method: grpo\n", "a recipe is a mapping"),
    "a text": (b"grpo\n", "a recipe is a mapping"),
    "empty": (b"", "a recipe is a mapping"),
    "comments": (b"# nothing\n", "a recipe is a mapping"),
    "null": (b"null\n", "a recipe is a mapping"),
    "tabs": (b"method: grpo\n\tsteps: 3\n", "not YAML"),
    "binary": (bytes(range(256)), "cannot be read"),
    "nul": (b"method: grpo\nsteps: \x00\n", "not YAML"),
    "escape": (b"method: grpo\n\x1b[2Jsteps: 1\n", "not YAML"),
    "utf-16": ("method: grpo\n".encode("utf-16"), "cannot be read"),
    "a tag": (b"method: !!python/object/apply:os.system [true]\n", "method takes one word"),
    "a merge": (b"x: &x {steps: 1}\nmethod: grpo\n<<: *x\n", "no setting of grpo"),
    "a key that is a list": (b"method: grpo\n? [a, b]\n: 3\n", "a key is a setting's name"),
    "a stage that is none": (b"stages: [grpo]\n", "a stage is a mapping"),
    "an undefined alias": (b"method: grpo\nsteps: *x\n", "not YAML"),
    "half a character": (b'method: grpo\nanswer_column: "\\ud83e"\n', "half a character"),
    "a number of many digits": (b"method: grpo\nsteps: " + b"9" * 10_000, "..."),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_none_is_told_in_words(name: str, tmp_path: Path) -> None:
    data, words = RECIPES[name]
    path = tmp_path / "r.yaml"
    path.write_bytes(data)
    with pytest.raises(SettingsError) as caught:
        read_run([str(path)], METHODS, RECIPE, RunSettings)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
    assert len(str(caught.value)) < 20_000


def test_byte_order_marks_aliases_and_escapes_of_json_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    text = b'method: grpo\nsteps: &n 7\nwarmup_steps: *n\nanswer_column: "\\ud83e\\udd8a"\n'
    path.write_bytes(b"\xef\xbb\xbf" + text)
    settings = read_run([str(path)], METHODS, RECIPE, RunSettings).stages[0].settings
    assert settings.loop.steps == settings.optim.warmup_steps == 7
    assert settings.data.answer_column == "🦊"


def test_a_recipe_that_is_no_file_keeps_nobody_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use a named pipe without a writer, as the recipe and among the recipes that --help lists."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "broken.yaml").symlink_to(tmp_path / "nowhere")
    default = tmp_path / "addition.yaml"
    with pytest.raises(SettingsError, match="no recipe file"):
        read_run([str(tmp_path / "pipe.yaml")], METHODS, default, RunSettings)
    with pytest.raises(SystemExit) as ended:
        parse_run(["--help"], METHODS, default, options=RunSettings)
    assert ended.value.code == 0 and "pipe.yaml" not in capsys.readouterr().out
