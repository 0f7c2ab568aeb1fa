"""Test that 2 + 2 steps equal 4 steps, bit for bit, for every method."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_offline import mixed_answers
from whole_runs import train, two_and_two

from rl.algorithms import METHODS

pytestmark = pytest.mark.slow

# Resumes in the middle of changes: the level changes after three batches, a coefficient and
# statistics after every batch.
CURRICULUM = "--curriculum success --curriculum-up 0.01 --curriculum-down 0 --curriculum-window 3"
REWARDED = f"{CURRICULUM} --reward FOLDER/rewards.py:digits"
CHANGING = f"{CURRICULUM} --normalise-rewards --kl-target 1e-4 --reward FOLDER/rewards.py:digits"
MOVING = ("optim/kl_coef", "reward/running_std", "curriculum/level")
SAMPLED = "--batch-size 8 --max-tokens 4 --eval-every 0 --rollouts-every 0 --reward-workers 1"
LEVELS = "--curriculum steps --curriculum-steps 1 3"
STUDENT = "--teacher FOLDER/teacher --base-model tiny:addition-small"
HELD_OUT = "--batch-size 8 --eval-every 2 --eval-limit 16"

# Reward the number of digits: an untrained model's answers are never right, but contain digits.
REWARDS = """
from rl.rewards import RewardResult


def digits(prompt, response, meta):
    share = sum(c.isdigit() for c in response) / 4
    return RewardResult(share + (response[:1] == "1"), {"correct": share})
"""


@dataclass(frozen=True)
class Case:
    """`words` of a run, in which FOLDER is the folder that `case_inputs` returns. `moving`: metrics
    that change at the resumed steps. `is_covered`: by another case of the method together with
    another case with LoRA.
    """

    words: str
    moving: tuple[str, ...] = ()
    holds: Callable[[list[dict]], bool] = bool
    is_covered: bool = False


def check_levels(rows: list[dict]) -> bool:
    return [row["curriculum/level"] for row in rows if "curriculum/level" in row] == [0, 1, 1, 2]


def learned_rewards(rows: list[dict]) -> bool:
    """Check that learned rewards are the whole reward, and differ at every step."""
    results = [row["env/all/reward/learned"] for row in rows]
    return len(set(results)) == 4 and results == pytest.approx(
        [row["env/all/reward/total"] for row in rows], abs=1e-6
    )


def check_drift(rows: list[dict]) -> bool:
    """Check that the answers come from the initial policy, before and after the resume."""
    drift = [abs(row["optim/kl_behaviour_v1"]) for row in rows]
    return drift[0] < 1e-5 < 1e-3 < drift[-1]


def add_rewards(rows: list[dict]) -> bool:
    """Check that the reward is the learned reward plus half of the given."""
    total, learned, given = (
        np.array([row[f"env/all/reward/{name}"] for row in rows])
        for name in ("total", "learned", "given")
    )
    return total == pytest.approx(learned + 0.5 * given, abs=1e-6)


def has_moved(rows: list[dict]) -> bool:
    return rows[-1]["rewards/margins"] != 0 and rows[-1]["test/loss"] != rows[0]["test/loss"]


CASES = {
    "grpo: dapo": Case(
        "--variant dapo --group-size 4 --dynamic-sampling 2 --num-substeps 2 --kl-coef 0.05 "
        f"--reward-clip 3 {CHANGING}", MOVING),
    "grpo: kl in the loss, lora": Case(
        "--variant gspo --group-size 4 --kl-placement loss --lora-rank 2 --kl-coef 0.05 "
        f"--entropy-coef 0.01 --truncated-is 2 {CHANGING}", MOVING),
    "grpo: reward model": Case(
        "--reward-model FOLDER/rm --reward FOLDER/rewards.py:digits --other-reward-weight 0.5 "
        "--group-size 4 --kl-coef 0.1", holds=add_rewards),
    "reinforce: per problem": Case(
        "--advantage per_problem --train-limit 90 --batch-size 32 --kl-coef 0.05 "
        f"--overlong-share 0.5 {CHANGING}", MOVING),
    "ppo: head, kl from zero": Case(
        f"--kl-coef 0 --num-substeps 2 --group-size 2 {CHANGING}", MOVING),
    "ppo: critic, lora, kl in the loss": Case(
        "--critic-model policy --critic-learning-rate 1e-3 --lora-rank 2 --kl-target 0.001 "
        "--kl-placement loss --reward FOLDER/rewards.py:digits", ("optim/kl_coef",)),
    "rlhf: head": Case(
        f"--reward-model FOLDER/rm --num-substeps 2 {CHANGING}", MOVING, learned_rewards),
    "sft: levels": Case(f"{HELD_OUT} {LEVELS} --reward exact_match", holds=check_levels),
    "sft: lora": Case(f"{HELD_OUT} --lora-rank 4", is_covered=True),
    "online_dpo: reference": Case(
        f"--group-size 3 --num-substeps 2 --normalise-rewards {REWARDED}",
        ("reward/running_std", "curriculum/level")),
    "online_dpo: lora, all pairs": Case(
        "--group-size 3 --pairs all --lora-rank 2 --loss ipo --reward FOLDER/rewards.py:digits",
        is_covered=True),
    "best_of_n: shaped": Case(
        f"--group-size 3 --keep 2 --normalise-rewards {REWARDED}",
        ("reward/running_std", "curriculum/level")),
    "kto: pairs": Case(HELD_OUT),
    "orpo: pairs": Case(HELD_OUT),
    "simpo: pairs": Case(HELD_OUT),
    "dpo: precomputed, levels": Case(
        f"{HELD_OUT} --precompute-reference {LEVELS}",
        holds=lambda rows: has_moved(rows) and check_levels(rows)),
    "dpo: reference": Case(HELD_OUT, holds=has_moved),
    "dpo: lora": Case(f"{HELD_OUT} --lora-rank 4", holds=has_moved, is_covered=True),
    "dpo: precomputed, lora": Case(
        f"{HELD_OUT} --lora-rank 4 --precompute-reference", holds=has_moved, is_covered=True),
    "reward_model: levels": Case(f"{HELD_OUT} {LEVELS}", holds=check_levels),
    "reward_model: lora": Case(f"{HELD_OUT} --lora-rank 4 --num-substeps 2", is_covered=True),
    "reward_model: comparison": Case(f"{HELD_OUT} --form comparison --base-model tiny:ascii"),
    "offline: lora": Case(
        "--dataset FOLDER/answers.jsonl --loss dro --lora-rank 4", holds=check_drift),
    "offline: learned baseline": Case(
        "--dataset FOLDER/answers.jsonl --loss dro --baseline learned", holds=check_drift),
    "offline: ilql": Case("--dataset FOLDER/answers.jsonl --loss ilql"),
    "offline: cloning": Case(
        "--dataset FOLDER/answers.jsonl --loss bc --top-fraction 0.5", is_covered=True),
    "distill: student": Case(
        f"{STUDENT} --learn-from student --group-size 2 {LEVELS}", holds=check_levels),
    "distill: teacher": Case(f"{STUDENT} --learn-from teacher --group-size 2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def case_inputs(tmp_path_factory) -> Path:
    """Return a folder with the inputs of the cases: a reward, answers, a reward model and a
    teacher.
    """
    folder = tmp_path_factory.mktemp("made")
    (folder / "rewards.py").write_text(REWARDS)
    mixed_answers(folder / "answers.jsonl", copies=4)
    short = "--steps 2 --batch-size 8 --learning-rate 1e-2 --eval-every 0 --save-every 0"
    train(f"reward_model {short}", folder / "rm")
    train(f"sft {short}", folder / "teacher")
    return folder


def test_no_method_is_left_out():
    assert {name.partition(":")[0] for name in CASES} == METHODS.keys()


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.campaign] * case.is_covered)
    for name, case in CASES.items()
])  # fmt: skip
def test_two_steps_and_two_resumed_are_four_to_the_bit(name, case_inputs, tmp_path):
    case, method, samples = CASES[name], name.partition(":")[0], ""
    if method in ("offline", "distill"):
        samples = "--batch-size 8 --max-tokens 4 --eval-every 0"
    elif "reward" in case.words and method not in ("sft", "reward_model"):
        samples = SAMPLED
    words = f"{method} --learning-rate 1e-2 {samples} {case.words}"
    rows = two_and_two(words.replace("FOLDER", str(case_inputs)), tmp_path)
    assert len([row for row in rows if "progress/batch" in row]) == 4 and case.holds(rows)
    for metric in case.moving:
        values = [row[metric] for row in rows[1:4]]
        assert len({*values}) > 1, f"{metric} was saved in the middle of a change"
    first, other = (
        next((tmp_path / run / "checkpoints").glob("*-final")) for run in ("whole", "cut")
    )
    files = sorted(path.relative_to(first) for path in first.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    for file in files:  # weights, heads, optimizers (also of a critic), generators
        a, b = load_file(str(first / file)), load_file(str(other / file))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), file
    whole, cut = (
        json.loads((folder / "state.json").read_text())["metadata"] for folder in (first, other)
    )
    assert whole["method"] == cut["method"] and whole.get("curriculum") == cut.get("curriculum")
