"""Run the tests that train until the model has learnt with two more seeds than their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
LEARNING = (
    "trainer/test_minimal_loop.py::test_it_learns",
    "client/test_rlvr.py::test_a_script_learns",
    "judges/test_reward_model.py::test_the_comparison_form_learns_the_same_preferences",
    "judges/test_reward_model.py::test_rlhf_raises_the_learned_reward_and_the_true_one",
    "algorithms/test_offline.py::test_it_improves_on_the_behaviour_policy_from_mixed_rollouts",
    "algorithms/test_null_controls.py::test_only_true_rewards_raise_accuracy",
    "algorithms/test_own_answers.py::test_addition_is_learnt_from_ones_own_answers",
    "envs/test_games_learn.py::test_guess_number_is_learnt",
)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("test", LEARNING)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_it_is_learnt_with_another_seed(test, seed, tmp_path):
    words = ["-m", "pytest", "-q", f"--basetemp={tmp_path / 'base'}", str(TESTS / test)]
    env = {**os.environ, "WHETSTONE_LEARNING_SEED": seed}
    done = subprocess.run([sys.executable, *words], env=env, cwd=TESTS.parent, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()[-3000:]
