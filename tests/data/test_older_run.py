"""Test that files written by an older version are still read: a checkpoint is resumed, stored
answers are loaded.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import train

from rl.data import load_rollouts
from rl.errors import RunFolderError
from rl.jsonl import read_jsonl

OLDER = Path(__file__).resolve().parent / "older_run"
WORDS = (
    "grpo --base-model tiny:addition-small --lora-rank 1 --lora-alpha 4 --steps 4 --save-every 2 "
    "--keep-last 9 --batch-size 4 --group-size 4 --max-tokens 4 --rollouts-every 1 --eval-every 0 "
    "--learning-rate 1e-2 --kl-coef 0.1 --kl-in reward --kl-target 0.01 --resume "
    "--reward tests/data/older_run/reward.py:even_digits"
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(OLDER.parents[2])  # the reward's path is relative to the repository
    return shutil.copytree(OLDER / "run", tmp_path / "run")


def test_a_checkpoint_of_then_goes_on_as_it_did_then(folder):
    """Samples are equal; figures and weights agree up to the rounding of another processor (the run
    was two steps of 16 short answers).

    Two steps of Adam at 1e-2 turn a relative error of 1e-6 in a gradient into at most 2e-8 in a
    weight, unless the gradient itself is rounding; 1e-3 tolerates only those. A resume that lost
    the optimizer's moments differs by 1e-2.
    """
    rows = train(WORDS, folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for now, then in zip(rows[2:], read_jsonl(OLDER / "after.jsonl"), strict=True):
        assert then.keys() <= now.keys(), "a metric of then has another name now"
        assert now.pop("stage") == then.pop("stage")
        assert {name: now[name] for name in then} == pytest.approx(then, rel=1e-3, abs=1e-6)
    now = load_file(folder / "checkpoints" / "grpo-final" / "model" / "adapter_model.safetensors")
    then = load_file(OLDER / "after.safetensors")
    assert now.keys() == then.keys()
    for name in then:
        torch.testing.assert_close(now[name], then[name], rtol=0, atol=1e-3)


def test_a_setting_of_the_stage_at_hand_may_not_change(folder):
    with pytest.raises(RunFolderError, match="group_size 4 -> 8"):
        train(f"{WORDS} --group-size 8", folder)


def test_rollouts_of_then_are_stored_answers():
    count = len(read_jsonl(OLDER / "run/rollouts/step_000001.jsonl"))
    problems = load_rollouts(OLDER / "run" / "rollouts")
    answers = [answer for problem in problems for answer in problem.answers]
    assert len(answers) == 2 * count
    assert sum(answer.reward for answer in answers) == pytest.approx(16 * (0.390625 + 0.3125))
