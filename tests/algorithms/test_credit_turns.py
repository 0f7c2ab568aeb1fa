"""Test credit over episodes of 1 to 12 turns, some of which drop the earlier text."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rl.algorithms import (
    GRPO,
    PPO,
    GrpoSettings,
    Models,
    PolicyGradientSettings,
    PpoOptions,
    PpoSettings,
    has_signal,
)
from rl.config import KlSettings
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence


def random_episode(rng, *, forgets: bool) -> Trajectory:
    """Return an episode; its prompts continue the earlier text, except for those that restart."""
    turns, read = [], rng.integers(1, 50, rng.integers(1, 4)).tolist()
    for _ in range(rng.integers(1, 13)):
        tokens = rng.integers(1, 50, rng.integers(1, 5)).tolist()
        logprobs = (-rng.random(len(tokens))).tolist()
        turns.append(
            Transition(
                ModelInput.from_ints(read),
                SampledSequence(tokens, logprobs),
                float(rng.normal()),
                False,
            )
        )
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
        groups.append(
            TrajectoryGroup(episodes, rng.normal(size=size).tolist(), [{}] * size, "t", p)
        )
    return groups


def trained(datums) -> np.ndarray:
    """Return the advantages of the trained tokens in order; check that all others are 0."""
    for datum in datums:
        mask = datum.loss_fn_inputs["mask"].array != 0
        assert not datum.loss_fn_inputs["advantages"].array[~mask].any()
    return np.concatenate(
        [d.loss_fn_inputs["advantages"].array[d.loss_fn_inputs["mask"].array != 0] for d in datums]
    )


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
    ("sum", 1.0),
    *(
        (kind, discount)
        for kind in ("to_go", "process_supervision")
        for discount in (1.0, 0.7, 0.0)
    ),
])  # fmt: skip
def test_groups_are_compared_and_turns_discounted(advantage, step_rewards, discount):
    groups = random_groups(3, 8, 4)
    pg = PolicyGradientSettings(
        advantage=advantage, step_rewards=step_rewards, reward_discount=discount, group_size=4
    )
    result = trained(
        GRPO(GrpoSettings(policy_gradient=pg)).compute_advantages(groups, Models(SimpleNamespace()))
    )
    expected: list[float] = []
    for group in groups:
        rewards_G_N = [[t.reward for t in e.transitions] for e in group.trajectories_G]
        for steps, final in zip(rewards_G_N, group.final_rewards_G, strict=True):
            steps[-1] += final
        # A total is compared with the totals of the group. A turn's remaining reward is compared
        # with the other members' remaining reward at that turn, if they reach it. Otherwise each
        # single reward is compared with all rewards of the group, and each turn sums what follows
        # it.
        pool = (
            [math.fsum(steps) for steps in rewards_G_N]
            if step_rewards == "sum"
            else [r for steps in rewards_G_N for r in steps]
        )
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
                    rest = [
                        math.fsum(
                            discount ** (k - t) * rewards_G_N[i][k]
                            for k in range(t, len(rewards_G_N[i]))
                        )
                        for i in alive
                    ]
                    single = len(alive) == 1 and advantage != "none"
                    value = 0.0 if single else COMPARED[advantage](rest, alive.index(g))
                else:
                    value = math.fsum(
                        discount ** (k - t) * compared[at + k] for k in range(t, count)
                    )
                expected += [value] * len(turn.ac.tokens)
            at += count
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


class Values:
    """A value for each prefix, computed from its tokens only."""

    info = {"max_context": None}

    def compute_values(self, inputs):
        results = [
            np.cumsum(np.sin(np.asarray(item.to_ints(), dtype=np.float64))).astype(np.float32)
            for item in inputs
        ]
        return SimpleNamespace(result=lambda: results)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.95, 0.0)])
def test_generalised_advantages_run_over_actions_across_what_was_observed(gamma, lam):
    groups = random_groups(5, 6, 3)
    options = PpoOptions(
        normalise_advantages=False, gamma=gamma, gae_lambda=lam, truncated="bootstrap"
    )
    result = trained(
        PPO(PpoSettings(ppo=options, kl=KlSettings(kl_coef=0.0))).compute_advantages(
            groups, Models(Values())
        )
    )
    expected: list[float] = []
    for group in groups:
        for episode, final in zip(group.trajectories_G, group.final_rewards_G, strict=True):
            rewards, values, read = [], [], []
            for turn in episode.transitions:
                read = turn.ob.to_ints()
                for token in turn.ac.tokens:
                    values.append(math.fsum(math.sin(t) for t in read))
                    rewards.append(0.0)
                    read = [*read, token]
                rewards[-1] += turn.reward
            rewards[-1] += final
            ahead = [
                *values[1:],
                math.fsum(math.sin(t) for t in read) if episode.transitions[-1].truncated else 0.0,
            ]
            delta = [
                r + gamma * after - v for r, after, v in zip(rewards, ahead, values, strict=True)
            ]
            expected += [
                math.fsum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
                for t in range(len(delta))
            ]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
