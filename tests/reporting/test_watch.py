"""Test watch.py: it shows the contents of the run's files in any terminal and at any time of a run."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl.jsonl import read_jsonl
from rl.reporting import Logbook, RunFollower, claim_folder, load_saved_config, render_runs
from rl.reporting.run_follower import choose_answers
from rl.reporting.terminal_chart import ChartCurve, TerminalChart, format_axis_value

REPO = Path(__file__).resolve().parents[2]
SGR = re.compile(r"\x1b\[[\d;]*m")


def write_run(folder: Path, steps: int, total: int, *, running: bool = False) -> None:
    """Write a run with a rising reward, an alarm in steps 3 to 5, and answers."""
    folder.mkdir(parents=True)
    stage = {"name": "grpo", "method": "grpo", "settings": {"steps": total}}
    config = {"name": "x", "options": {}, "stages": [stage]}
    (folder / "config.json").write_text(json.dumps(config))
    logbook = Logbook(folder)  # not closed, because closing draws curves.png
    for step in range(steps + 1):
        row: dict[str, Any] = {"stage": "grpo", "alarm/length": float(3 <= step <= 5)}
        if step % 5 == 0:
            row["test/env/all/correct"] = step / 100
        if step:
            row |= {"reward/total": step / 50, "time/step": 2.0, "optim/grad_norm": 0.5}
        logbook.log(step, row)
    answers = [
        {"prompt": "6*7=", "response": f"it is {i}", "reward": i / 10, "answer": "42"}
        for i in range(8)
    ]
    logbook.write_rollouts(steps, answers)
    if running:
        (folder / "run.lock").write_text("{}")


def print_plain(what: Any, width: int) -> str:
    """Return what rich prints, as plain text."""
    console = Console(file=(file := io.StringIO()), width=width, color_system=None)
    console.print(what)
    return file.getvalue()


def render_text(*folders: Path, width: int = 120, height: int | None = None, **options: Any) -> str:
    """Return the screen of some runs as plain text."""
    runs = [RunFollower(folder) for folder in folders]
    for run in runs:
        run.refresh()
    return print_plain(render_runs(runs, width=width, height=height, **options), width)


# -------------------------------------------------------------------------------------- the screen


def test_a_finished_run(tmp_path: Path) -> None:
    write_run(tmp_path / "sorting", 20, 20)
    text = render_text(tmp_path / "sorting")
    last = read_jsonl(tmp_path / "sorting" / "metrics.jsonl")[-1]
    assert "sorting  finished  grpo 20/20" in text
    assert f"reward {last['reward/total']:.3f}" in text
    assert "held-out accuracy 0.200  (first: accuracy 0.000)" in text
    assert "earlier alarms: length 3-5" in text and "▲" not in text
    assert "8 answers of step 20, best to worst" in text
    assert text.index("0.700 it is 7") < text.index("0.000 it is 0")
    assert text.count("6*7=") == 1 and "(expected 42)" in text


def test_a_running_run_and_one_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 5, 20, running=True)
    text = render_text(folder)
    assert "running  grpo 5/20" in text and "about 0:30 left" in text
    assert "alarm: length since step 3" in text
    os.utime(folder / "run.lock", (time.time() - 90, time.time() - 90))
    assert "killed" in render_text(folder)
    (folder / "run.lock").unlink()
    assert "stopped" in render_text(folder)


def test_a_run_whose_process_has_just_been_killed_on_this_host(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 5, 20)
    code = (
        "import sys, pathlib, time; from rl.processes import RunLock; "
        f"RunLock(pathlib.Path({str(folder)!r})).acquire(); print(); sys.stdout.flush(); "
        "time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    assert "running  grpo 5/20" in render_text(folder)
    process.kill()
    process.wait()
    process.stdout.close()
    text = render_text(folder)
    assert "killed" in text and "running" not in text


def test_a_run_on_a_host_with_another_clock(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "run"
    write_run(folder, 5, 20, running=True)
    run, now = RunFollower(folder), time.time()
    lock, states = folder / "run.lock", []
    for beat in (now - 300, now - 295):  # a clock that is late
        os.utime(lock, (beat, beat))
        run.refresh()
        states.append(run.get_state())
    os.utime(lock, (now + 1000, now + 1000))  # one that is early
    run.refresh()
    states.append(run.get_state())
    clock = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: clock + 90)  # without another heartbeat
    run.refresh()
    assert [*states, run.get_state()] == ["killed", "running", "running", "killed"]


def test_new_rows_and_a_resumed_file_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 5, 20, running=True)
    run = RunFollower(folder)
    run.refresh()
    assert run.step == 5
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward/total": 0.5}\n{"step": 7, "rew')
        file.flush()
        run.refresh()
        assert run.step == 6
        file.write('ard/total": 0.6}\n')
        file.flush()
        run.refresh()
        assert run.rows[-1] == {"step": 7, "reward/total": 0.6}
    Logbook(folder, resume_step=4).log(5, {"reward/total": 0.9})
    run.refresh()
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4, 5]
    assert run.rows[-1]["reward/total"] == 0.9


def test_a_run_that_is_overwritten_begins_without_rows_and_answers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 5, 20, running=True)
    run = RunFollower(folder)
    run.refresh()
    assert run.step == 5 and run.alarms and run.evaluations and run.answers
    claim_folder(folder, load_saved_config(folder), overwrite=True)
    run.refresh()
    assert run.step is None and not (run.alarms or run.evaluations or run.answers)


@pytest.mark.parametrize("missing", [None, 11], ids=["all rows", "no row before the first step"])
def test_the_time_of_a_stage_is_not_estimated_from_an_earlier_one(
    tmp_path: Path, missing: int | None
) -> None:
    names = ("sft", "grpo")
    stages = [{"name": name, "method": name, "settings": {"steps": 10}} for name in names]
    (tmp_path / "config.json").write_text(json.dumps({"stages": stages}))
    logbook, run, estimates = Logbook(tmp_path), RunFollower(tmp_path), []
    for step in range(14):
        first = step in (0, 11)  # the rows before the first step of a stage
        if step != missing:
            logbook.log(step, {} if first else {"time/step": 0.1 if step < 11 else 10.0})
        run.refresh()
        estimates.append(run.estimate_seconds())
    assert estimates[0] is None and estimates[11] == (None if missing is None else 0.0)
    assert estimates[9:11] == pytest.approx([0.1, 0.0]) and estimates[12:] == [90.0, 80.0]


def test_several_runs_and_an_empty_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 20, 20)
    write_run(tmp_path / "b", 10, 20)
    (tmp_path / "c").mkdir()
    text = render_text(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert "a  finished" in text and "b  stopped" in text and "c  waiting" in text
    assert "reward  0.4  0.2" in text  # the last value of each run
    assert "a: 8 answers of step 20" in text and "b: 8 answers of step 10" in text
    assert "c  waiting" in render_text(tmp_path / "c", height=24)


@pytest.mark.parametrize("width, height", [(40, 10), (80, 24), (130, 45), (220, 60), (80, 3)])
def test_the_screen_fits_the_terminal(width: int, height: int, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        write_run(folder, 20, 20)
    for count in (1, 2):
        text = render_text(*folders[:count], width=width, height=height, keys="q quit")
        lines = text.splitlines()
        assert all(len(line) <= width for line in lines)
        assert height < 20 or len(lines) <= height


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m[red]\u202ebold[/red]\x00\x08\r日本\ud800" + "long " * 99


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    folder = tmp_path / "na\x1b[2Jme[bold]"
    write_run(folder, 5, 5)
    config = {"stages": [{"name": HOSTILE, "settings": {"steps": 9}}]}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('no json\n[1]\n{"step": "x"}\n{"step": 6, "reward/total": 1' + "0" * 400 + "}\n")
        file.write('{"step": true}\n')
        row = {f"env/all/{HOSTILE}": 1.0, f"alarm/{HOSTILE}": 1.0, "reward/total": HOSTILE}
        file.write(json.dumps({"step": 7, "stage": HOSTILE, **row}) + "\n")
    answers = [
        {"prompt": HOSTILE, "response": HOSTILE, "reward": HOSTILE, "answer": HOSTILE},
        {"prompt": None, "response": None, "reward": None},
        {"prompt": ["x"], "turns": [{"text": HOSTILE, "tokens": ["x"]}] * 2, "reward": True},
        {"prompt": "\n\n", "turns": 3, "reward": float("inf")},
        {"prompt": "x", "turns": [{"text": "x", "tokens": ["x"], "metrics": [1], "messages": 5}],
         "reward": 10**400},
    ]  # fmt: skip
    path = folder / "rollouts" / "step_000007.jsonl"
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers) + "{}\n[]\n")
    run = RunFollower(folder)
    run.refresh()
    for page in range(3):
        file = io.StringIO()
        console = Console(file=file, width=100, force_terminal=True, color_system="truecolor")
        console.print(render_runs([run], width=100, page=page))
        text = SGR.sub("", file.getvalue())
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
        text.encode()
    assert "[red]" in text or page  # markup in a name is shown as text


# -------------------------------------------------------------------------------------- the curves


def read_dots(text: str) -> set[tuple[int, int]]:
    """Return the dots (column, row from the bottom) of the Braille characters of a chart."""
    rows = [line[9:] for line in text.splitlines()[1:] if line[8:9] in ("│", "┤")]
    bits = {0: (0, 3), 1: (0, 2), 2: (0, 1), 6: (0, 0), 3: (1, 3), 4: (1, 2), 5: (1, 1), 7: (1, 0)}
    return {
        (2 * x + bits[bit][0], 4 * (len(rows) - 1 - y) + bits[bit][1])
        for y, row in enumerate(rows)
        for x, mark in enumerate(row)
        if mark >= "\u2800"
        for bit in range(8)
        if (ord(mark) - 0x2800) >> bit & 1
    }


@pytest.mark.parametrize("steps", [3, 40, 5000])
def test_a_curve_is_drawn_where_its_values_are(steps: int) -> None:
    points = [i / (steps - 1) for i in range(steps)]
    curve = ChartCurve(points, [x * x for x in points], "cyan")
    dots = read_dots(print_plain(TerminalChart("squares", [curve], height=13), 60))
    columns, rows = 2 * 50, 4 * 10
    assert (0, 0) in dots and (columns - 1, rows - 1) in dots
    for x, y in dots:
        value = x / (columns - 1)
        # a short curve has straight lines between its points
        segment = min(int(value * (steps - 1)), steps - 2) / (steps - 1)
        end = segment + 1 / (steps - 1)
        expected = segment**2 + (value - segment) * (end + segment)
        slope = 2 * (rows - 1) / (columns - 1)
        assert abs(y - expected * (rows - 1)) <= 1.5 + slope


def test_charts_of_few_values_and_of_terminals_without_unicode() -> None:
    for lines in ([], [ChartCurve([3], [0.5], "cyan")], [ChartCurve([1, 2], [-1.0, 0.0], "cyan")]):
        for log in (False, True):
            print_plain(TerminalChart("x", lines, log=log, bands=[(1, 2)]), 40)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=40).print(TerminalChart("x", [ChartCurve([1, 2, 3], [1, 2, 3], "")]))
    file.seek(0)
    assert "*" in file.read()


def test_files_with_numbers_beyond_floats_are_read(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 2, 5)
    (tmp_path / "run" / "config.json").write_text(
        '{"stages": [{"name": "grpo", "settings": {"steps": Infinity}}]}'
    )
    assert "it is 7" in render_text(tmp_path / "run")
    for xs, ys in (
        ([1, 2], [1e308, -1e308]),
        ([1, 1, 2], [1e308, 1e308, 3.0]),
        ([1, 2], [0, 5e-324]),
    ):
        print_plain(TerminalChart("a", [ChartCurve(xs, ys, "cyan")]), 40)


def test_values_beside_an_axis_are_short() -> None:
    values = [0, -0.0, 1e-9, -1.234e-7, 0.5, 999.9, 1000, -12345, 4.5e9, 1e300, -1e-300, 123456789]
    assert all(len(format_axis_value(value)) <= 8 for value in values)
    assert [format_axis_value(value) for value in (0.5, 999.7, 12345, -0.0)] == [
        "0.5",
        "1k",
        "12.3k",
        "0",
    ]


def test_pages_of_answers() -> None:
    rows = [{"reward": i % 5, "n": i} for i in range(10)]
    assert [row["reward"] for row in choose_answers(rows, 3, 0)] == [4, 2, 0]
    assert [row["n"] for row in choose_answers(rows, 3, 1)] == [0, 1, 2]
    assert [row["n"] for row in choose_answers(rows, 3, 2)] == [3, 4, 5]
    assert choose_answers([], 3, 0) == [] and choose_answers(rows, 0, 1) == []


# ------------------------------------------------------------------------------------- the command


def test_without_a_terminal_it_prints_once(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5, 5)
    code = f"import sys, whetstone; sys.argv = ['whetstone', 'watch', {str(tmp_path / 'run')!r}]"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; whetstone.main()"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and "run  finished" in result.stdout and result.stderr == ""
    assert "\x1b" not in result.stdout
    command = [sys.executable, str(REPO / "watch.py"), str(tmp_path / "nothing")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "nothing is not a folder" in result.stderr
    result = subprocess.run(
        [*command[:2], str(tmp_path), "--once"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and f"has runs: {tmp_path / 'run'}" in result.stderr
    # metrics of an own loop, and an export beside them
    write_run(tmp_path / "run" / "export", 5, 5)
    (tmp_path / "run" / "config.json").unlink()
    result = subprocess.run(
        [*command[:2], str(tmp_path / "run"), "--once"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and "has runs" not in result.stderr


@pytest.mark.parametrize("end", ["q", "Ctrl-C"])
def test_a_terminal_is_left_as_it_was(end: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5, 20, running=True)
    main_end, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen(
        [sys.executable, str(REPO / "watch.py"), str(tmp_path / "run"), "--interval", "0.2"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        # SIGINT is ignored if a shell runs the tests in the background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    output = b""

    def read_until(text: bytes) -> None:
        nonlocal output
        deadline = time.monotonic() + 60
        while text not in output and time.monotonic() < deadline:
            if select.select([main_end], [], [], 0.1)[0]:
                output += os.read(main_end, 1 << 16)
        assert text in output, output[-2000:]

    read_until(b"grpo 5/20")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "stage": "grpo", "reward/total": 0.9}\n')
    read_until(b"grpo 6/20")
    os.write(main_end, b"n")
    read_until(b"page 1")
    if end == "q":
        os.write(main_end, b"q")
    else:
        process.send_signal(signal.SIGINT)
    read_until(b"\x1b[?1049l")  # back on the main screen
    read_until(b"best to worst")  # it shows the final state
    assert process.wait(60) == 0 and b"Traceback" not in output
    assert termios.tcgetattr(terminal) == before
    os.close(main_end)
    os.close(terminal)
