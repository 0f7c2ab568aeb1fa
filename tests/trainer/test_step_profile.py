"""Test --profile: its trace and table hold every part of a step, and it changes no result."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from whole_runs import RECIPE, read_metrics, same_weights

from bench import gpu_runs
from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.trainer.execute import execute
from rl.trainer.step_profile import format_parts

SMALL = "--base-model tiny:addition --batch-size 4 --group-size 4 --max-tokens 4 --eval-limit 4"


def train(folder: Path, words: str) -> None:
    words = [*words.split(), "--output-dir", str(folder)]
    execute(parse_run(words, METHODS, RECIPE, options=RunSettings))


@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_a_profile_holds_the_parts_of_a_step_and_changes_no_result(tmp_path, capsys, mode):
    words = f"grpo {SMALL} --steps 4 --rollout-mode {mode}"
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    train(plain, words)
    capsys.readouterr()
    train(profiled, f"{words} --profile 2")
    printed = capsys.readouterr().out
    assert read_metrics(plain) == read_metrics(profiled) and same_weights(plain, profiled)

    folder = profiled / "profile"
    assert not (plain / "profile").exists()
    table = (folder / "grpo.txt").read_text()
    assert "aten::mm" in table  # the operators, below the parts
    parts = table.split("\n\n")[0].splitlines()
    assert all(f"  {line}" in printed for line in parts)
    figures = {line[:34].strip(): float(line[34:44]) for line in parts[1:]}
    for part in ("sample", "collate", "forward", "backward", "update", "weight transfer"):
        assert figures[part] > 0, part
    updates = [event for event in read_events(folder) if event["name"] == "whetstone/update"]
    assert len(updates) == 2  # a single update in each of the two steps
    seconds = sum(event["dur"] for event in updates) / 1e3
    assert figures["update"] == pytest.approx(seconds / 2, abs=0.06)

    # bench/gpu.py reads the same table
    rows = {}
    table = SimpleNamespace(
        path=tmp_path / "step.csv", row=lambda case, *cells: rows.update({cells[:2]: cells[2:]})
    )
    gpu_runs._record_profile(table, "LoRA, tiny", profiled)
    assert rows == {(part, "host_ms"): (value, "ms") for part, value in figures.items()}
    assert (tmp_path / "profile_LoRA_grpo.json.gz").is_file()


def read_events(folder: Path) -> list[dict]:
    """Return the events of a trace that have a name."""
    with gzip.open(folder / "grpo.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if "name" in event]


def test_an_evaluation_ends_the_profile(tmp_path):
    """An evaluation samples too, but is not part of a step."""
    train(tmp_path / "run", f"grpo {SMALL} --steps 5 --eval-every 3 --profile 4")
    names = [event["name"] for event in read_events(tmp_path / "run" / "profile")]
    assert names.count("whetstone/update") == 2  # of the steps 2 and 3
    assert names.count("whetstone/sample") == 2


def test_the_table_against_hand_made_events():
    def event(name: str, host: float, device: float) -> SimpleNamespace:
        return SimpleNamespace(
            key=f"whetstone/{name}", cpu_time_total=host, device_time_total=device
        )

    events = [
        event("sample", 200_000, 150_000),
        event("run_steps", 100_000, 50_000),
        event("forward", 50_000, 60_000),
        SimpleNamespace(key="aten::mm", cpu_time_total=9e9, device_time_total=9e9),
    ]
    text = format_parts(events, seconds=1.0, score_seconds=0.25, steps=2, cuda=True)
    rows = {line[:34].strip(): line[34:].split() for line in text.splitlines()}
    assert rows["part of a step"] == ["host", "ms", "device", "ms", "share"]
    assert rows["sample"] == ["150.0", "100.0", "30.0%"]
    assert rows["wait for rewards and environments"] == ["125.0", "0.0", "25.0%"]
    assert rows["forward"] == ["25.0", "30.0", "5.0%"]
    assert rows["rest of the step"] == ["200.0", "0.0", "40.0%"]
    assert rows["wall time of the step"] == ["500.0", "130.0", "100.0%"]


def test_a_run_of_a_single_step_is_profiled(tmp_path, capsys):
    words = SMALL.replace("--group-size 4 --max-tokens 4", "")
    train(tmp_path / "run", f"sft {words} --steps 1 --profile 3")
    assert "backward" in capsys.readouterr().out
    assert (tmp_path / "run" / "profile" / "sft.json.gz").is_file()
