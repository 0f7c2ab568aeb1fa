"""Test --profile: its trace and table hold every part of a step, and it changes no result."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.trainer.execute import execute
from rl.trainer.step_profile import format_parts

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "addition.yaml"
SMALL = "--base-model tiny:addition --batch-size 4 --group-size 4 --max-tokens 4 --eval-limit 4"


def train(folder: Path, words: str) -> list[dict]:
    run = parse_run(
        [*words.split(), "--output-dir", str(folder)], METHODS, RECIPE, options=RunSettings
    )
    execute(run)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_a_profile_holds_the_parts_of_a_step_and_changes_no_result(tmp_path, capsys, mode):
    words = f"grpo {SMALL} --steps 4 --rollout-mode {mode}"
    plain = train(tmp_path / "plain", words)
    capsys.readouterr()
    profiled = train(tmp_path / "profiled", f"{words} --profile 2")
    printed = capsys.readouterr().out
    for a, b in zip(plain, profiled, strict=True):
        untimed = [
            {name: value for name, value in row.items() if not name.startswith("time/")}
            for row in (a, b)
        ]
        assert untimed[0] == untimed[1]
    weights = "checkpoints/grpo-final/model/model.safetensors"
    first, second = (
        load_file(tmp_path / "plain" / weights),
        load_file(tmp_path / "profiled" / weights),
    )
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)

    folder = tmp_path / "profiled" / "profile"
    assert not (tmp_path / "plain" / "profile").exists()
    table = (folder / "grpo.txt").read_text()
    assert "aten::mm" in table  # the operators, below the parts
    parts = table.split("\n\n")[0].splitlines()
    assert all(f"  {line}" in printed for line in parts)
    figures = {line[:34].strip(): float(line[34:44]) for line in parts[1:]}
    for part in ("sample", "collate", "forward", "backward", "update", "weight transfer"):
        assert figures[part] > 0, part
    with gzip.open(folder / "grpo.json.gz") as file:
        events = json.load(file)["traceEvents"]
    updates = [event for event in events if event.get("name") == "whetstone/update"]
    assert len(updates) == 2  # a single update in each of the two steps
    seconds = sum(event["dur"] for event in updates) / 1e3
    assert figures["update"] == pytest.approx(seconds / 2, abs=0.06)


def test_an_evaluation_ends_the_profile(tmp_path):
    """An evaluation samples too, but is not part of a step."""
    train(tmp_path / "run", f"grpo {SMALL} --steps 5 --eval-every 3 --profile 4")
    with gzip.open(tmp_path / "run" / "profile" / "grpo.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
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
    train(
        tmp_path / "run",
        f"sft {SMALL.replace('--group-size 4 --max-tokens 4', '')} --steps 1 --profile 3",
    )
    assert "backward" in capsys.readouterr().out
    assert (tmp_path / "run" / "profile" / "sft.json.gz").is_file()
