"""Test that failed reports never end a run, and that foreign text never controls a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from listener import MessageRecorder

from rl.algorithms import METHODS
from rl.config import RunSettings, SettingsError, read_run
from rl.config.format_help import exit_with_problems
from rl.reporting import Console, Logbook, metric_plots, rollout_html
from rl.sanitize import sanitize_message

RECIPE = Path(__file__).parents[2] / "recipes" / "addition.yaml"


# --------------------------------------------------------------------------------- reports of a run


def test_a_page_that_cannot_be_written_costs_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = MessageRecorder()
    monkeypatch.setattr(rollout_html, "render_page", lambda *_, **__: 1 / 0)
    with Logbook(tmp_path / "run", console=ear) as logbook:
        logbook.write_rollouts(1, [{"prompt": "a", "response": "b", "reward": 1.0}])
        logbook.write_rollouts(2, [{"prompt": "a", "response": "b", "reward": 1.0}])
    assert [path.name for path in sorted((tmp_path / "run" / "rollouts").iterdir())] == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    assert len(ear.warnings) == 1 and "page of rollouts" in ear.warnings[0]


def test_a_broken_plot_backend_never_fails_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = MessageRecorder()

    def broken(*_: Any) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(metric_plots, "draw_curves", broken)
    with Logbook(tmp_path / "run", console=ear) as logbook:
        logbook.log(1, {"stage": "sft", "optim/loss": 1.0})
    assert len(ear.warnings) == 1 and "curves.png" in ear.warnings[0]


@pytest.mark.parametrize("name", ["a$b", "$", "price $5 $x^", "$$", r"\$", "$\\frac$"])
def test_a_folders_name_with_dollars_is_drawn_as_it_stands(tmp_path: Path, name: str) -> None:
    ear = MessageRecorder()
    with Logbook(tmp_path / name, console=ear) as logbook:
        for stage in ("sft", "$x_$"):
            for step in range(3):
                logbook.log(
                    step + 10 * (stage != "sft"), {"stage": stage, "optim/loss": 1.0 / (1 + step)}
                )
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


@pytest.mark.parametrize(("text", "shown"), [
    ("plain, ünïcode 日本 🦊\n\ttab", "plain, ünïcode 日本 🦊\n\ttab"),
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b]0;title\x07x\x1b]8;;http://e\x1b\\link", "xlink"),
    ("\x1b[2J\x1b[H\x1bc\x1b(Bgone", "gone"),
    ("\x9b31mc1\x9d", "c1"),
    ("\x1bPq#0\x1b\\dcs", "dcs"),
    ("a\x00\x07\x08\x7f\rb", "ab"),
    ("over\u202egnp.exe\u2066", "overgnp.exe"),
    ("half \ud83d of it", "half \ufffd of it"),
    ("ends in \x1b", "ends in "),
])  # fmt: skip
def test_printable(text: str, shown: str) -> None:
    assert sanitize_message(text) == shown


def test_printable_bounds_and_encodes() -> None:
    long = sanitize_message("x" * 10_000_000)
    assert len(long) < 4100 and "9996000 characters omitted" in long
    assert sanitize_message("é日", encoding="ascii") == "\\xe9\\u65e5"


def test_a_box_shows_no_control_sequences_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exit_with_problems(
            ["\x1b[2Jspoilt \ud800" + "y" * 100_000, *(f"problem {i}" for i in range(500))],
            see="\x1b[5mhelp",
        )
    text = capsys.readouterr().err
    assert "\x1b[2J" not in text
    assert "\x1b[5m" not in text
    assert len(text) < 30_000
    assert "and 461 more" in text


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


def test_the_kl_to_a_reference_is_on_the_console_when_there_is_one() -> None:
    stream = io.StringIO()
    with Console(stream=stream, terminal=False, every=1) as console:
        console.stage("grpo", 2)
        console.update(1, {"reward/total": 0.5, "optim/kl_sample_train_v1": 1e-5})
        console.update(
            2, {"reward/total": 0.5, "optim/kl_sample_train_v1": 1e-5, "optim/kl_ref_k3": 0.0123}
        )
    first, second = stream.getvalue().splitlines()
    assert "KL to reference" not in first and "KL to reference 1.2e-02" in second


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


def test_a_recipe_with_a_byte_order_mark_and_aliases_is_one(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfmethod: grpo\nsteps: &n 7\nwarmup_steps: *n\n")
    (stage,) = read_run([str(path)], METHODS, RECIPE, RunSettings).stages
    assert stage.settings.loop.steps == stage.settings.optim.warmup_steps == 7


def test_a_recipe_may_escape_what_lies_beyond_16_bits_as_json_does(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text('method: grpo\nanswer_column: "\\ud83e\\udd8a"\n')
    assert (
        read_run([str(path)], METHODS, RECIPE, RunSettings).stages[0].settings.data.answer_column
        == "🦊"
    )


def test_a_recipe_that_is_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Use a named pipe without a writer, as the recipe and among the recipes that --help lists."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    os.mkfifo(recipes / "pipe.yaml")
    (recipes / "broken.yaml").symlink_to(recipes / "nowhere")
    with pytest.raises(SettingsError, match="no recipe file"):
        read_run([str(recipes / "pipe.yaml")], METHODS, recipes / "addition.yaml", RunSettings)
    code = (
        "from pathlib import Path; from rl.config.cli import parse_run; from rl.algorithms import "
        "METHODS; from rl.config import RunSettings; "
        f"parse_run(['--help'], METHODS, Path({str(recipes / 'addition.yaml')!r}), options=RunSettings)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120, cwd=RECIPE.parent.parent
    )
    assert done.returncode == 0 and b"pipe.yaml" not in done.stdout
