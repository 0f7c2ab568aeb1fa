"""Test a loss that becomes non-finite in a run's third step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_runs import RECIPE, read_metrics

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.learner import Learner
from rl.trainer import main

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
    return main(parse_run(words, METHODS, RECIPE, options=RunSettings))


@pytest.fixture
def spoil(monkeypatch):
    """Return a function that multiplies the loss by a factor from an update on."""
    sound = Learner._forward

    def spoil_losses(factor: float, first: int) -> None:
        def spoilt(self: Learner, *args: Any) -> Any:
            value, result, metrics = sound(self, *args)
            return value * (factor if self.version >= first else 1.0), result, metrics

        monkeypatch.setattr(Learner, "_forward", spoilt)

    return spoil_losses


def fail(capsys, method: str, folder: Path) -> str:
    """Return the box of a run that ends with an error."""
    with pytest.raises(SystemExit) as ended:
        run(method, folder)
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and "Traceback" not in text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHOD_WORDS))
def test_a_loss_that_is_nan_is_one_box_and_the_run_can_be_resumed(method, tmp_path, spoil, capsys):
    assert run(method, tmp_path / "whole") == 0
    spoil(float("nan"), SPOILT_FROM[method])
    text = fail(capsys, method, tmp_path / "cut")
    assert "1 problem: the run stopped" in text and f"step 3 of 4 of stage {method}" in text
    assert "is nan" in text and f"{method}-000002" in text and "Lower --learning-rate" in text
    spoil(1.0, 0)
    assert run(method, tmp_path / "cut", "--resume") == 0
    rows = [read_metrics(tmp_path / name) for name in ("cut", "whole")]
    assert rows[0] == rows[1], "nothing of the spoilt step stayed"


@pytest.mark.slow
def test_without_a_checkpoint_it_says_so(tmp_path, spoil, capsys):
    spoil(float("inf"), 0)
    text = fail(capsys, "sft", tmp_path / "run")
    assert "step 1 of 4" in text and "cross_entropy" in text
    assert "No checkpoint was written yet" in text
