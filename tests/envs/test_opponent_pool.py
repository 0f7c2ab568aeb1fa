"""Test the pool of older policy versions: which versions it keeps, how often it chooses each, their
ratings, and its state.
"""

import json
import math
from collections import Counter

import pytest

from rl.envs import OpponentPool
from rl.envs.opponent_pool import compute_expected_score


def fill_pool(by, size=4, steps=range(0, 60, 10)):
    pool = OpponentPool(size, by)
    for step in steps:
        pool.add(step)
        # the policy improves: it beats the newest version and gains rating
        pool.record_results([(pool.opponents[-1].name, 1.0)] * 3)
    return pool


def test_ratings_are_elos_by_hand():
    assert compute_expected_score(1000, 1000) == 0.5
    assert compute_expected_score(1400, 1000) == pytest.approx(10 / 11)
    pool = OpponentPool(3, k=32)
    pool.add(0)
    pool.record_results([("step-000000", 1.0), ("step-000000", 0.5), ("unknown", 0.0)])
    # 1016 against 984 after the win; then expected 0.5459 and half a point
    expected = 1 / (1 + 10 ** (-32 / 400))
    assert pool.rating == pytest.approx(1016 + 32 * (0.5 - expected))
    assert pool.opponents[0].rating == pytest.approx(984 - 32 * (0.5 - expected))
    assert pool.opponents[0].games == 2
    # ratings are zero-sum
    assert pool.rating + pool.opponents[0].rating == pytest.approx(2000)


@pytest.mark.parametrize("by", ["elo", "age", "any"])
def test_it_never_holds_more_than_its_size_nor_loses_its_newest(by):
    pool, gone = OpponentPool(3, by), []
    for step in range(20):
        gone += pool.add(step)
        assert len(pool.opponents) == min(3, step + 1) and pool.opponents[-1].step == step
        pool.record_results([(pool.opponents[step % len(pool.opponents)].name, step % 2)])
    assert {item.step for item in gone} | {item.step for item in pool.opponents} == set(range(20))
    assert len(gone) == 17
    if by != "elo":
        assert [item.step for item in gone] == list(range(17))


def test_the_weakest_goes_by_elo():
    pool = OpponentPool(3, "elo")
    for step in (1, 2, 3):
        pool.add(step)
    pool.record_results([("step-000002", 1.0)] * 5)
    assert [item.step for item in pool.add(4)] == [2]


@pytest.mark.parametrize("by", ["elo", "age", "any"])
def test_it_is_chosen_as_often_as_its_weight_says(by):
    pool = fill_pool(by)
    draws = Counter(pool.sample(seed).step for seed in range(4000))
    weights = pool.weights()
    if by == "age":
        assert weights == [0.125, 0.25, 0.5, 1.0]
    if by == "elo":  # the closest in rating is the most likely
        gaps = [abs(item.rating - pool.rating) for item in pool.opponents]
        assert sorted(range(4), key=lambda i: -weights[i]) == sorted(
            range(4), key=lambda i: gaps[i]
        )
    for item, weight in zip(pool.opponents, weights, strict=True):
        share = weight / sum(weights)
        assert abs(draws[item.step] / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)


@pytest.mark.parametrize("by", ["elo", "age", "any"])
def test_what_its_state_says_goes_on_bit_for_bit(by):
    whole, first = fill_pool(by), fill_pool(by)
    again = OpponentPool(4, by)
    again.load_state(json.loads(json.dumps(first.state())))
    for pool in (whole, again):
        pool.record_results([(pool.opponents[1].name, 0.5)])
        pool.add(99)
    assert again.state() == whole.state()
    assert [again.sample(s) for s in range(50)] == [whole.sample(s) for s in range(50)]


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="by is one of elo, age, any; got 'Elo'"):
        OpponentPool(by="Elo")
    with pytest.raises(ValueError, match="at least 1 older version, got 0"):
        OpponentPool(0)
    pool = OpponentPool()
    with pytest.raises(ValueError, match="the pool is empty"):
        pool.sample(0)
    pool.add(5)
    with pytest.raises(ValueError, match="newest is of step 5; 5 is not after it"):
        pool.add(5)
