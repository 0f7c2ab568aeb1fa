"""Test advantages against hand-computed values and identities."""

import math

import numpy as np
import pytest
import torch

from rl.algorithms import AdvantageEstimator, RunningMeanBaseline, has_signal
from rl.algorithms.advantages import leave_one_out, normalize_by_std, subtract_mean, use_raw_rewards
from rl.errors import UserError


def test_equal_rewards_are_exactly_zero_even_where_the_mean_rounds():
    rewards = [0.1] * 7  # their floating-point mean is not 0.1
    assert (np.asarray(rewards) - np.asarray(rewards).mean()).any()
    assert subtract_mean(rewards).tolist() == [0.0] * 7
    assert normalize_by_std(rewards).tolist() == [0.0] * 7  # and no 0/0
    assert not has_signal(rewards) and has_signal([0.1, 0.1, 0.1 + 1e-17, 0.2])


def test_a_group_of_one_is_defined():
    for function in (subtract_mean, normalize_by_std, leave_one_out):
        assert function([3.0]).tolist() == [0.0]
    assert use_raw_rewards([3.0]).tolist() == [3.0]


def test_std_normalised_has_unit_std():
    assert normalize_by_std([0.0, 1.0, 2.0, 5.0]).std() == pytest.approx(1.0, rel=1e-5)


def test_running_mean_by_hand():
    baseline = RunningMeanBaseline(decay=0.5)
    # the first batch is compared with its mean
    assert [a.tolist() for a in baseline([[1.0, 0.0], [1.0, 0.0]])] == [[0.5, -0.5], [0.5, -0.5]]
    assert baseline.value == 0.5
    # the second batch is compared with the mean before it
    assert [a.tolist() for a in baseline([[1.0], [1.0]])] == [[0.5], [0.5]]
    assert baseline.value == 0.75


@pytest.mark.parametrize("scope, advantages, message", [
    ("group", [0.0], r"estimator fn returned \[0.0\] for the rewards \[1.0, 0.0\]"),
    ("group", [0.0, math.nan], "expected a finite number for each reward"),
    ("group", None, "estimator fn returned None for the rewards"),
    ("batch", [[0.0, 0.0]], r"returned \[\[0.0, 0.0\]\] for 2 groups"),
    ("batch", None, "returned None for 2 groups"),
    ("batch", [[0.0, 0.0], [0.0]], "for the rewards .*a finite number for each reward"),
    ("group", ["a", "1"], r"returned \['a', '1'\] for the rewards"),
    ("group", [[0.0], [0.0, 1.0]], "a finite number for each reward"),
    ("group", {0: 0.5, 1: -0.5}, r"returned \{0: 0.5, 1: -0.5\} for the rewards"),
    ("batch", np.array(0.0), r"returned array\(0.\) for 2 groups"),
])  # fmt: skip
def test_an_estimator_that_does_not_fit_the_rewards_is_named(scope, advantages, message):
    def fn(rewards):
        return advantages

    estimator = AdvantageEstimator(fn, scope=scope, compares_members=False)
    with pytest.raises(UserError, match=message):
        estimator.estimate([[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize("convert", [
    list,
    iter,
    np.asarray,
    lambda values: torch.tensor(values, dtype=torch.bfloat16),
    lambda values: [torch.tensor(value) for value in values],
])  # fmt: skip
def test_an_estimator_may_return_any_iterable_of_numbers(convert):
    def of_group(rewards):
        return convert([reward - 0.5 for reward in rewards])

    def of_batch(groups):
        return (of_group(rewards) for rewards in groups)

    for fn, scope in ((of_group, "group"), (of_batch, "batch")):
        estimator = AdvantageEstimator(fn, scope=scope, compares_members=False)
        advantages = estimator.estimate([[1.0, 0.0], [0.0, 1.0]])
        assert [a.tolist() for a in advantages] == [[0.5, -0.5], [-0.5, 0.5]]


def test_a_misspelled_scope_is_refused():
    with pytest.raises(UserError, match="scope is 'group' or 'batch', got 'groups'"):
        AdvantageEstimator(subtract_mean, scope="groups", compares_members=True)
