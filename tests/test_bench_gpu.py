"""The GPU campaign without a GPU: what fails is a row, the rest goes on, and its parts run dry."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu, gpu_models, gpu_steps

REPO = Path(__file__).resolve().parent.parent


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_fails_is_a_row_and_the_rest_is_there(tmp_path):
    table = gpu.Table("any", tmp_path / "any.csv")

    def half():
        table.row("first", "ours", "time", 1.5, "ms")
        raise MemoryError("no room\nand much more")

    assert table.attempt("first", "ours", half) is None
    assert table.attempt("second", "ours", lambda: 7) == 7
    table.row("third", "ours", "time", 2.0)
    first, failed, third = rows_of(table.path)
    assert (first["value"], failed["metric"], failed["value"], failed["note"]) == ("1.5", "failed", "MemoryError", "no room")
    assert third["case"] == "third"


@pytest.mark.parametrize("part", [gpu_models.part_decode, gpu_steps.part_steps])
def test_a_model_that_cannot_be_made_costs_its_own_rows(tmp_path, monkeypatch, part):
    """The second of three: those before and after it are measured."""
    made, module = [], sys.modules[part.__module__]
    make = module.make_model

    def make_model(size, device):
        made.append(size)
        if size == "1.7B":
            raise MemoryError("no room")
        return make("tiny", device)

    monkeypatch.setattr(module, "make_model", make_model)
    monkeypatch.setattr(module, "device_of", lambda dry: "cpu")
    monkeypatch.setattr(gpu_models, "SIZES", dict.fromkeys(("tiny", "0.5B", "1.7B", "8B"), gpu_models.SIZES["tiny"]))
    for name in ("decode_speed", "peer_speed", "speed"):
        if hasattr(module, name):
            seen = {"decode_speed": 1, "peer_speed": 4, "speed": 1}[name]
            monkeypatch.setattr(module, name, lambda table, *given, seen=seen: table.row(str(given[seen - 1]), "", "done", 1))
    if hasattr(module, "difference"):
        monkeypatch.setattr(module, "difference", lambda decoder: "")
    table = gpu.Table("part", tmp_path / "part.csv")
    part(table, False)
    found = rows_of(table.path)
    assert {"0.5B", "1.7B", "8B"} == set(made)
    assert any(row["case"] == "1.7B" and row["metric"] == "failed" for row in found)
    done = [row["case"] for row in found if row["metric"] == "done"]
    assert any("0.5B" in case for case in done) and any("8B" in case for case in done) and not any("1.7B" in case for case in done)


@pytest.mark.slow
@pytest.mark.campaign
def test_parts_run_dry(tmp_path):
    """As the command that a GPU gets, on a CPU with the smallest sizes: these parts end, and table and plot are there."""
    parts = ["draw", "group", "steps", "trace"]
    words = [sys.executable, str(REPO / "bench" / "gpu.py"), "--dry", "--output", str(tmp_path), "--part", *parts]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = rows_of(tmp_path / "gpu.csv")
    assert {row["part"] for row in found} == set(parts) and (tmp_path / "gpu.png").stat().st_size > 1000
    assert [row["value"] for row in found if row["metric"] == "status"] == ["done"] * 4
    assert not [row for row in found if row["metric"] == "failed"]
