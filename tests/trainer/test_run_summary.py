"""Test the lines at the start and end of a run: its data, and its best checkpoint."""

import json
import re

import pytest
from whole_runs import train

from rl.reporting import Console
from rl.trainer.evaluator import HeldOutMetrics


@pytest.fixture
def printed_facts(monkeypatch) -> dict[str, dict]:
    """Record the console's lines at the start and end of a run."""
    calls: dict[str, dict] = {}
    monkeypatch.setattr(Console, "start", lambda self, title, facts: calls.update(start=facts))
    monkeypatch.setattr(Console, "end", lambda self, title, **words: calls.update(end=words))
    return calls


def test_the_data_line_names_held_out_rows_and_the_end_the_best_weights(
    printed_facts, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # At this rate the loss of held-out rows rises again.
    metrics = train(
        "sft --base-model tiny:addition --dataset rows.jsonl --learning-rate 1e-2 --steps 9 "
        "--batch-size 8 --eval-every 3",
        tmp_path / "run",
    )
    assert printed_facts["start"]["data"] == (
        "36 training rows of rows.jsonl, its last 4 rows held out"
    )
    measured = {
        row["step"]: row["test/loss"] for row in metrics if row["step"] and "test/loss" in row
    }
    best = min(measured, key=measured.__getitem__)
    assert best < max(measured)
    (remark,) = [text for text in printed_facts["end"]["remarks"] if "--checkpoint best" in text]
    assert [int(step) for step in re.findall(r"step (\d+)", remark)] == [best]
    assert [float(value) for value in re.findall(r"\d\.\d+", remark)] == pytest.approx(
        [measured[best], measured[max(measured)]], abs=1e-3
    )
    assert any(
        command.endswith("run") and "report" in command for command in _commands(printed_facts)
    )


def _commands(printed_facts: dict[str, dict]) -> list[str]:
    return [command.partition("  #")[0] for command in printed_facts["end"]["commands"]]


@pytest.mark.parametrize(
    ("before", "after", "remarked"),
    [(0.5, 0.5, True), (0.5, 0.4, True), (0.5, 0.6, False), (1.0, 1.0, False), (None, 1.0, False)],
)
def test_held_out_accuracy_that_did_not_rise_is_remarked(before, after, remarked):
    assert (HeldOutMetrics(before, after).describe_no_gain() is not None) == remarked
