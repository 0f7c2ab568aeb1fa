"""Test that files written before the current package layout are still read: a checkpoint is
resumed, stored answers are loaded.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import train

from rl.errors import RunFolderError

BEFORE = Path(__file__).resolve().parents[1] / "before_rooms"
WORDS = (
    "grpo --base-model tiny:addition-small --lora-rank 1 --lora-alpha 4 --steps 4 --save-every 2 "
    "--keep-last 9 --batch-size 4 --group-size 4 --max-tokens 4 --rollouts-every 1 --eval-every 0 "
    "--learning-rate 1e-2 --kl-coef 0.1 --kl-in reward --kl-target 0.01"
)


def test_a_checkpoint_of_then_goes_on_as_it_did_then(tmp_path, monkeypatch):
    """Samples are equal; figures and weights agree up to the rounding of another processor (the run
    was two steps of 16 short answers).

    Two steps of Adam at 1e-2 turn a relative error of 1e-6 in a gradient into at most 2e-8 in a
    weight, unless the gradient itself is rounding; 1e-3 tolerates only those. A resume that lost
    the optimizer's moments differs by 1e-2.
    """
    monkeypatch.chdir(BEFORE.parent.parent)  # the reward's path is relative to the repository
    folder = tmp_path / "run"
    shutil.copytree(BEFORE / "run", folder)
    rows = train(f"{WORDS} --reward tests/before_rooms/reward.py:even_digits --resume", folder)
    expected = [json.loads(line) for line in (BEFORE / "after.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for now, then in zip(rows[2:], expected, strict=True):
        assert then.keys() <= now.keys(), "a metric of then has another name now"
        assert now.pop("stage") == then.pop("stage")
        assert {name: now[name] for name in then} == pytest.approx(then, rel=1e-3, abs=1e-6)
    now = load_file(folder / "checkpoints" / "grpo-final" / "model" / "adapter_model.safetensors")
    then = load_file(BEFORE / "after.safetensors")
    assert now.keys() == then.keys()
    for name in then:
        torch.testing.assert_close(now[name], then[name], rtol=0, atol=1e-3)


def test_a_setting_of_the_stage_at_hand_may_not_change(tmp_path, monkeypatch):
    monkeypatch.chdir(BEFORE.parent.parent)
    shutil.copytree(BEFORE / "run", tmp_path / "run")
    with pytest.raises(RunFolderError, match="group_size 4 -> 8"):
        train(
            f"{WORDS} --reward tests/before_rooms/reward.py:even_digits --resume --group-size 8",
            tmp_path / "run",
        )


def test_rollouts_of_then_are_stored_answers():
    from rl.data import load_rollouts

    lines = [
        json.loads(line)
        for line in (BEFORE / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    ]
    problems = load_rollouts(BEFORE / "run" / "rollouts")
    answers = [answer for problem in problems for answer in problem.answers]
    assert len(answers) == 2 * len(lines)
    assert sum(answer.reward for answer in answers) == pytest.approx(16 * (0.390625 + 0.3125))
