"""Test credit over episodes of 1 to 12 turns, some of which drop the earlier text."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from algorithm_helpers import make_method

from rl.algorithms import Models, has_signal
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence


def random_episode(rng, *, forgets: bool) -> Trajectory:
    """Return an episode; its prompts continue the earlier text, except for those that restart."""
    turns, read = [], rng.integers(1, 50, rng.integers(1, 4)).tolist()
    for _ in range(rng.integers(1, 13)):
        tokens = rng.integers(1, 50, rng.integers(1, 5)).tolist()
        logprobs = (-rng.random(len(tokens))).tolist()
        action = SampledSequence(tokens, logprobs)
        turns.append(Transition(ModelInput.from_ints(read), action, float(rng.normal()), False))
        hole = rng.integers(1, 50, rng.integers(0, 4)).tolist()
        restarted = forgets and rng.random() < 0.3
        read = [60, *hole] if restarted else [*read, *tokens, *hole]
    turns[-1].episode_done = True
    turns[-1].truncated = bool(rng.random() < 0.3)
    return Trajectory(turns)


def random_groups(seed: int, count: int, size: int):
    rng = np.random.default_rng(seed)
    groups = []
    for p in range(count):
        episodes = [random_episode(rng, forgets=p % 2 == 1) for _ in range(size)]
        final = rng.normal(size=size).tolist()
        groups.append(TrajectoryGroup(episodes, final, [{}] * size, "t", p))
    return groups


def trained(datums) -> np.ndarray:
    """Return the advantages of the trained tokens in order; check that all others are 0."""
    advantages, masks = (
        np.concatenate([datum.loss_fn_inputs[name].array for datum in datums])
        for name in ("advantages", "mask")
    )
    assert not advantages[masks == 0].any()
    return advantages[masks != 0]


def sum_discounted(terms, discount: float) -> float:
    return math.fsum(discount**k * term for k, term in enumerate(terms))


def compute_deviation(r):
    return math.sqrt(math.fsum((x - math.fsum(r) / len(r)) ** 2 for x in r) / len(r))


COMPARED = {
    "mean": lambda r, i: r[i] - math.fsum(r) / len(r),
    "mean_std": lambda r, i: (r[i] - math.fsum(r) / len(r)) / (compute_deviation(r) + 1e-6),
    "leave_one_out": lambda r, i: (
        r[i] - math.fsum(x for k, x in enumerate(r) if k != i) / (len(r) - 1)
    ),
    "none": lambda r, i: r[i],
}


@pytest.mark.parametrize("advantage", COMPARED)
@pytest.mark.parametrize(("step_rewards", "discount"), [
    ("sum", 1.0), *itertools.product(("to_go", "process_supervision"), (1.0, 0.7, 0.0)),
])  # fmt: skip
def test_groups_are_compared_and_turns_discounted(advantage, step_rewards, discount):
    groups = random_groups(3, 8, 4)
    options = {"step_rewards": step_rewards, "reward_discount": discount, "group_size": 4}
    method = make_method(advantage=advantage, **options)
    result = trained(method.compute_advantages(groups, Models(SimpleNamespace())))
    expected: list[float] = []
    for group in groups:
        rewards_G_N = [[t.reward for t in e.transitions] for e in group.trajectories_G]
        for steps, final in zip(rewards_G_N, group.final_rewards_G, strict=True):
            steps[-1] += final
        # A total is compared with the totals of the group. A turn's remaining reward is compared
        # with the other members' remaining reward at that turn, if they reach it. Otherwise each
        # single reward is compared with all rewards of the group, and each turn sums what follows
        # it.
        pool = [r for steps in rewards_G_N for r in steps]
        if step_rewards == "sum":
            pool = [math.fsum(steps) for steps in rewards_G_N]
        assert has_signal(pool)
        compared = [COMPARED[advantage](pool, i) for i in range(len(pool))]
        at = 0
        for g, episode in enumerate(group.trajectories_G):
            count = len(episode.transitions)
            for t, turn in enumerate(episode.transitions):
                if step_rewards == "sum":
                    value = compared[g]
                elif step_rewards == "to_go":
                    alive = [i for i, steps in enumerate(rewards_G_N) if len(steps) > t]
                    rest = [sum_discounted(rewards_G_N[i][t:], discount) for i in alive]
                    single = len(alive) == 1 and advantage != "none"
                    value = 0.0 if single else COMPARED[advantage](rest, alive.index(g))
                else:
                    value = sum_discounted(compared[at + t : at + count], discount)
                expected += [value] * len(turn.ac.tokens)
            at += count
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
