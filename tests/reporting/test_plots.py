"""Test the plots: curves equal the logged metrics, and malformed values do not break a plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from listener import MessageRecorder

import plot
from rl.errors import UserError
from rl.reporting import Logbook, group_by_settings, metric_plots

pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
pytestmark = pytest.mark.usefixtures("curves")
REPO = Path(__file__).resolve().parents[2]


def write(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def two_stages() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(1, 101):
        row = {"stage": "sft", "optim/loss": 1 / i, "optim/grad_norm": 10.0}
        if i > 60:
            row = {"stage": "grpo", "optim/loss": 5.0, "optim/grad_norm": 1.0}
            row["reward/total"] = i / 100
        rows.append({"step": i, **row})
    for row in (rows[59], rows[99]):
        row["test/env/all/correct"] = row["step"] / 200
    return rows


def is_png(path: Path, least: int = 5_000) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n") and len(data) > least


def axes_by_title(curves: Sequence[metric_plots.RunCurve]) -> dict[str, Any]:
    panels = [
        panel for panel in metric_plots.PANELS if any(curve.series(panel)[0] for curve in curves)
    ]
    groups = metric_plots.group_curves(curves, range(len(curves)), "steps")
    figure = metric_plots._build_figure(groups, panels)
    return {axis.get_title(loc="left"): axis for axis in figure.axes if axis.get_title(loc="left")}


def get_line_data(axis: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]


def test_what_is_drawn_is_what_was_logged(tmp_path: Path) -> None:
    curve = metric_plots.read_curve(write(tmp_path / "a", two_stages()))
    axes = axes_by_title([curve])
    # the curve spans both stages and is not smoothed
    assert get_line_data(axes["held-out accuracy"]) == [([60, 100], [0.3, 0.5])]
    assert [
        text.get_text() for text in axes["held-out accuracy"].texts if "." in text.get_text()
    ] == ["0.30", "0.50"]
    raw, mean = get_line_data(axes["reward"])
    assert raw == (list(range(61, 101)), [i / 100 for i in range(61, 101)])
    # the running mean of a straight line equals the line in its middle
    assert mean[1][20] == pytest.approx(0.81)
    # The loss of the RL stage (5.0 throughout) is not a supervised loss and is not drawn.
    assert all(
        max(ys) <= 1 and max(xs) == 60
        for xs, ys in get_line_data(axes["loss, supervised (nats a token or pair)"])
    )


def test_the_axis_of_a_reward_between_0_and_1_begins_at_0_and_every_panel_names_its_axis(
    tmp_path: Path,
) -> None:
    rows = [{"step": i, "test/env/all/reward/total": 0.05, "reward/total": 5.0 + i} for i in (0, 9)]
    axes = axes_by_title([metric_plots.read_curve(write(tmp_path / "a", rows))])
    low, high = axes["held-out reward"].get_ylim()
    assert -0.01 < low <= 0 and high == 0.1
    assert axes["reward"].get_ylim()[0] > 4  # the y axis of other metrics is fitted to the data
    assert {axis.get_xlabel() for axis in axes.values()} == {"step of the run"}


def test_no_line_and_no_mean_runs_over_the_end_of_a_stage(tmp_path: Path) -> None:
    axes = axes_by_title([metric_plots.read_curve(write(tmp_path / "a", two_stages()))])
    lines = get_line_data(axes["gradient norm, before clipping"])
    assert sorted({(min(xs), max(xs)) for xs, _ in lines}) == [(1, 60), (61, 100)]
    # a mean across both stages would have intermediate values
    assert {value for _, ys in lines for value in ys} == {10.0, 1.0}
    assert {text.get_text() for text in axes["gradient norm, before clipping"].texts} == {
        "sft",
        "grpo",
    }


def test_smoothing_against_hand_values() -> None:
    assert metric_plots.moving_average([0, 3, 6, 0, 9], 3) == [1.5, 3, 3, 5, 4.5]
    assert metric_plots.moving_average([1, 2], 1) == [1, 2]


def test_null_and_missing_values_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "reward/total": None},
        {"step": 1, "reward/total": 0.5},
        {"step": 2, "optim/entropy": 1.0},
    ]
    axes = axes_by_title([metric_plots.read_curve(write(tmp_path / "a", rows))])
    assert set(axes) == {"reward", "entropy (nats a token)"}
    assert get_line_data(axes["reward"]) == [([1], [0.5])]


def test_odd_folders_draw(tmp_path: Path) -> None:
    rows = [{"step": 3, "test/env/all/correct": 0.5, "optim/grad_norm": 0.0, "env/all/$^$": 1.0}]
    rows += [{"step": step, "env/all/$^$": (-1) ** step * 1.7e308} for step in (4, 5)]
    first, second = write(tmp_path / "one", rows), write(tmp_path / "two", two_stages())
    metrics, picture = second / "metrics.jsonl", tmp_path / "x.png"
    assert is_png(metric_plots.draw_curves(first, tmp_path / "one.png"))
    assert is_png(metric_plots.draw_curves([first, metrics], picture, labels=["a", "b"]))
    none = write(tmp_path / "none", [{"step": 1, "something": 1.0}])
    with pytest.raises(UserError, match="none"):
        metric_plots.draw_curves(none, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    with pytest.raises(FileNotFoundError, match="expected a run's folder"):
        metric_plots.draw_curves(tmp_path / "absent", picture)
    with pytest.raises(ValueError, match="1 labels for 2 runs"):
        metric_plots.draw_curves([first, second], picture, labels=["a"])


def test_a_run_ends_with_its_curves_and_never_fails_for_want_of_them(tmp_path: Path) -> None:
    with Logbook(tmp_path / "run") as book:
        for row in two_stages():
            book.log(row["step"], row)
    assert is_png(tmp_path / "run/curves.png")
    ear = MessageRecorder()
    with Logbook(tmp_path / "bare", console=ear) as book:
        book.log(0, {"something": 1.0})
    assert len(ear.warnings) == 1 and ear.warnings[0].startswith("no curves.png")
    with Logbook(tmp_path / "empty", console=ear):
        pass
    assert len(ear.warnings) == 1  # no warning for a run that logged nothing


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Return a function that runs plot.py with words in this process: (exit code, output)."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, words)])
        try:
            code = plot.main()
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr()).strip()

    return run


def test_where_the_picture_goes(tmp_path: Path, monkeypatch, run_script) -> None:
    folder, other = (write(tmp_path / name, two_stages()) for name in ("a", "b"))
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, picture in (
        ([folder], folder / "curves.png"),
        ([folder, other], Path("curves.png")),
        ([folder, other, "-o", tmp_path / "out.png"], tmp_path / "out.png"),
        ([folder, tmp_path / "named.png"], tmp_path / "named.png"),  # positional
        ([folder, "-o", tmp_path / "pictures"], tmp_path / "pictures/curves.png"),
    ):
        assert run_script(*words) == (0, str(picture)) and is_png(picture), words
    assert run_script(folder, "-o", tmp_path / "a.svg")[0] == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    for words, error in (
        ([tmp_path / "absent"], "plot.py: no metrics at"),
        ([folder, "-o", tmp_path / "a.xyz"], "expected the suffix .png, .svg, .pdf"),
        ([folder, tmp_path / "x.png", "-o", tmp_path / "y.png"], "pass only one of them"),
    ):
        code, text = run_script(*words)
        assert code == 2 and error in text, text
    assert not (tmp_path / "a.xyz").exists() and not (tmp_path / "y.png").exists()


def test_a_backend_that_means_nothing_is_not_asked_for(tmp_path: Path) -> None:
    """MPLBACKEND may be mistyped or set for another machine; matplotlib could not be imported then."""
    folder = write(tmp_path / "a", two_stages())
    command = [sys.executable, str(REPO / "plot.py"), str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "MPLBACKEND": "nonsense"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and is_png(folder / "curves.png"), done.stderr


@pytest.fixture
def figures(monkeypatch) -> list[Any]:
    """Record the figures that are drawn."""
    drawn, build = [], metric_plots._build_figure
    monkeypatch.setattr(
        metric_plots, "_build_figure", lambda *args: drawn.append(build(*args)) or drawn[-1]
    )
    return drawn


def test_curves_over_tokens_and_hours_and_named_metrics(tmp_path, figures):
    rows = [
        {"step": i, "stage": "grpo", "reward/total": i / 10, "other/metric": 2.0 * i,
         "time/step": 1800.0, "time/tokens_per_second": 2.0}
        for i in range(1, 5)
    ]  # fmt: skip
    folder = write(tmp_path / "run", rows)
    expected = {"hours": [0.5, 1.0, 1.5, 2.0], "tokens": [3600, 7200, 10800, 14400]}
    for axis, places in expected.items():
        metric_plots.draw_curves(folder, tmp_path / "a.png", axis=axis, metrics=["other/metric"])
        (panel,) = [item for item in figures[-1].axes if item.get_title(loc="left")]
        assert panel.get_title(loc="left") == "other/metric" and panel.get_xlabel() == axis
        assert get_line_data(panel) == [(places, [2.0, 4.0, 6.0, 8.0])]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "reward/empty": null}\n')
    for name, hint in (
        ("reward/totl", "did you mean reward/total"),
        ("zz", "metrics.jsonl has"),
        ("reward/empty", "(metrics.jsonl has|did you mean reward/total)"),
    ):
        with pytest.raises(UserError, match=f"no row has a number for {name}.*{hint}"):
            metric_plots.draw_curves(folder, tmp_path / "a.png", metrics=[name])


def write_seeds(folder: Path) -> list[Path]:
    """Write three runs whose rewards differ by 1 between seeds, and a run of other settings."""
    folders = []
    for i, (seed, rate) in enumerate([(0, 1e-3), (1, 1e-3), (2, 1e-3), (0, 1e-2)]):
        rows = [
            {"step": step, "stage": "grpo", "reward/total": float(step + i), "time/step": 36.0 + i}
            for step in range(1, 21 + i)  # later runs have more steps
        ]
        path = write(folder / f"run{i}", rows)
        stage = {"name": "grpo", "method": "grpo", "settings": {"learning_rate": rate}}
        options = {"output_dir": f"runs/run{i}", "seed": seed}
        config = {"name": f"run{i}", "options": options, "stages": [stage]}
        (path / "config.json").write_text(json.dumps(config))
        folders.append(path)
    return folders


def test_runs_of_several_seeds_are_a_mean_and_a_band(tmp_path, figures):
    folders = write_seeds(tmp_path)

    def draw(runs, **settings) -> tuple[Any, Any]:
        metric_plots.draw_curves(runs, tmp_path / "a.png", metrics=["reward/total"], **settings)
        (panel,) = [item for item in figures[-1].axes if item.get_title(loc="left")]
        return panel, figures[-1]

    panel, figure = draw(folders)
    mean, other = get_line_data(panel)
    assert mean == (list(range(1, 21)), [step + 1 for step in range(1, 21)])  # the common steps
    assert other[0] == list(range(1, 24)) and other[1][0] == 4.0
    (band,) = panel.collections
    edges = band.get_paths()[0].vertices
    ends = [sorted({y for x, y in edges.tolist() if x == step}) for step in (5, 20)]
    assert ends == [[5.0, 7.0], [20.0, 22.0]]  # a standard deviation of 1
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["mean of 3: run0 ...", "run3"]
    assert any("standard deviation" in text.get_text() for text in figure.texts)

    panel, _ = draw(folders[:3], axis="hours")
    ((hours, values),) = get_line_data(panel)
    assert hours[4] == pytest.approx(5 * 37 / 3600, rel=1e-5) and values[4] == 6.0

    panel, figure = draw(folders, each_run=True)
    assert len(get_line_data(panel)) == 4 and not panel.collections
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["run0", "run1", "run2", "run3"]
    for path in folders:  # without them it is unknown that only the seed differs
        (path / "config.json").unlink()
    assert len(get_line_data(draw(folders)[0])) == 4


def test_runs_that_have_just_started_hide_no_curve(tmp_path):
    folders = write_seeds(tmp_path)
    for empty in (folders[0], folders[3]):  # of a group of seeds, and of a group of its own
        (empty / "metrics.jsonl").write_text("")
    assert is_png(metric_plots.draw_curves(folders, tmp_path / "a.png"))
    curves = [metric_plots.read_curve(folder) for folder in folders]
    mean, other = metric_plots.group_curves(curves, [0, 0, 0, 1], "steps")
    assert mean.label == "mean of 2: run1 ..." and len(mean.rows) == 21 and not other.rows
    first = {**curves[1].rows[0], "step": 0}
    evaluated = metric_plots.RunCurve("evaluated", [first])  # before its first step
    (mean,) = metric_plots.group_curves([evaluated, *curves[1:3]], [0, 0, 0], "steps")
    assert mean.label == "mean of 2: run1 ..." and len(mean.rows) == 21
    (alone,) = metric_plots.group_curves([curves[0], evaluated], [0, 0], "steps")
    assert alone.label == "evaluated" and alone.rows == [first]
    huge = metric_plots.RunCurve("huge", [{**curves[1].rows[0], "reward/total": 1.7e308}])
    (mean,) = metric_plots.group_curves([huge, huge], [0, 0], "steps")
    assert len(mean.rows) == 1 and "reward/total" not in mean.rows[0]


def make_config(options: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"options": options, "stages": [{"name": "a", "method": "grpo", "settings": settings}]}


def test_settings_that_change_no_result_do_not_separate_seeds():
    free, other = {"keep_last": 1, "token_budget": 1}, {"keep_last": 2, "token_budget": 2}
    configs = [
        make_config({"seed": 0, "trust_run": True}, learning_rate=0.1, **free),
        make_config({"seed": 1, "trust_run": False}, learning_rate=0.1, **other),
        make_config({"seed": 0}, learning_rate=0.2),
    ]
    assert group_by_settings(configs) == [0, 0, 1]


def test_runs_of_a_seed_that_differ_in_speed_are_compared():
    configs = [
        make_config({"seed": seed}, token_budget=budget) for budget in (1, 2) for seed in (0, 1, 1)
    ]
    assert group_by_settings([*configs, None, None]) == [0, 0, 0, 1, 1, 1, 2, 3]
    assert group_by_settings(configs[:1] + configs[4:]) == [0, 0, 0]


def test_a_band_of_a_long_run_is_smoothed_within_its_stage(tmp_path):
    rows = [two_stages(), two_stages()]
    for row in rows[1]:
        row["optim/grad_norm"] += 4.0
    curves = [metric_plots.read_curve(write(tmp_path / str(i), rows[i])) for i in range(2)]
    panels = [p for p in metric_plots.PANELS if p.names == ("optim/grad_norm",)]
    groups = metric_plots.group_curves(curves, [0, 0], "steps")
    axis = metric_plots._build_figure(groups, panels).axes[0]
    assert sorted({(min(xs), max(xs)) for xs, _ in get_line_data(axis)}) == [(1, 60), (61, 100)]
    assert {value for _, ys in get_line_data(axis) for value in ys} == {12.0, 3.0}
    assert len(axis.collections) == 2


def test_the_script_draws_each_run_if_told(tmp_path, run_script):
    folders, texts = write_seeds(tmp_path), []
    for words in ([], ["--each-run"]):
        assert run_script(*folders, *words, "-o", tmp_path / "a.svg")[0] == 0
        texts.append((tmp_path / "a.svg").read_text())
    assert "<!-- mean of 3: run0 ... -->" in texts[0] and "<!-- run1 -->" not in texts[0]
    assert "<!-- run1 -->" in texts[1] and "mean of 3" not in texts[1]


@pytest.mark.parametrize(("folders", "labels"), [
    (["x/grpo"], ["grpo"]),
    (["x/grpo", "x/sft"], ["grpo", "sft"]),
    (["x/a/grpo", "x/b/grpo"], ["a/grpo", "b/grpo"]),
    (["x/a/grpo", "y/a/grpo", "sft"], ["x/a/grpo", "y/a/grpo", "sft"]),
    (["x/grpo", "x/grpo"], ["grpo", "grpo"]),
])  # fmt: skip
def test_runs_are_named_by_what_tells_their_folders_apart(tmp_path, folders, labels):
    paths = [tmp_path / "z" / folder for folder in folders]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    assert metric_plots.label_runs(paths) == labels
    metrics = [path / "metrics.jsonl" for path in paths]
    for path in metrics:
        path.touch()
    assert metric_plots.label_runs(metrics) == labels
