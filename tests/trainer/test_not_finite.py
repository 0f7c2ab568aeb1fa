"""Test a loss that becomes non-finite in a run's third step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.learner import Learner
from rl.trainer import main

REPO = Path(__file__).resolve().parents[2]
COMMON = """--base-model tiny:addition --dataset addition --max-tokens 4 --batch-size 4 --eval-every 0 --rollouts-every 0 --save-every 2
    --steps 4"""
# number of the first non-finite update: after two steps; within the third step of ppo, whose steps
# have two updates
SPOILT_FROM = {"sft": 2, "grpo": 2, "ppo": 5}
METHOD_WORDS = {
    "sft": "", "grpo": "--group-size 2 --temperature 1", "ppo": "--epochs 2 --target-kl 1e6",
}  # fmt: skip


def run(method: str, folder: Path, *more: str) -> int:
    words = [
        method, *COMMON.split(), *METHOD_WORDS[method].split(), "--output-dir", str(folder),
        "--quiet", *more,
    ]  # fmt: skip
    return main(parse_run(words, METHODS, REPO / "recipes" / "addition.yaml", options=RunSettings))


def rows(folder: Path) -> list[dict[str, Any]]:
    results = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")} for row in results
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHOD_WORDS))
def test_a_loss_that_is_nan_is_one_box_and_the_run_can_be_resumed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(method, tmp_path / "whole") == 0
    sound = Learner._forward

    def spoilt(self: Learner, *args: Any) -> Any:
        value, result, metrics = sound(self, *args)
        return (
            (value * float("nan") if self.version >= SPOILT_FROM[method] else value),
            result,
            metrics,
        )

    monkeypatch.setattr(Learner, "_forward", spoilt)
    with pytest.raises(SystemExit) as ended:
        run(method, tmp_path / "cut")
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and "Traceback" not in text
    assert "1 problem: the run stopped" in text and f"step 3 of 4 of stage {method}" in text
    assert "is nan" in text and f"{method}-000002" in text and "Lower --learning-rate" in text
    monkeypatch.setattr(Learner, "_forward", sound)
    assert run(method, tmp_path / "cut", "--resume") == 0
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole"), "nothing of the spoilt step stayed"


@pytest.mark.slow
def test_without_a_checkpoint_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = Learner._forward

    def spoilt(self: Learner, *args: Any) -> Any:
        value, result, metrics = sound(self, *args)
        return value * float("inf"), result, metrics

    monkeypatch.setattr(Learner, "_forward", spoilt)
    with pytest.raises(SystemExit) as ended:
        run("sft", tmp_path / "run")
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert (
        ended.value.code == 2
        and "step 1 of 4" in text
        and "cross_entropy" in text
        and "No checkpoint was written yet" in text
    )
