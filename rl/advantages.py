"""From rewards to advantages: pure functions on one group's rewards (G numbers in, G numbers out)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def centred(rewards_G: Sequence[float]) -> np.ndarray:
    """A_i = r_i - mean(r) (Dr. GRPO, arXiv 2503.20783: no division by the standard deviation).

    A group whose rewards are all equal gives exact zeros (not the rounding error of the mean); so does a group of one.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not has_signal(rewards_G):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def centred_by_std(rewards_G: Sequence[float], eps: float = 1e-6) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), population standard deviation (GRPO, arXiv 2402.03300, section 4.1.2)."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return centred(rewards_G) / (rewards.std() + eps)


def leave_one_out(rewards_G: Sequence[float]) -> np.ndarray:
    """A_i = r_i - mean of the others = G/(G-1) (r_i - mean(r)) (RLOO, arXiv 2402.14740). A group of one gives zero."""
    n = len(rewards_G)
    return centred(rewards_G) * (n / (n - 1)) if n > 1 else np.zeros(n)


def without_baseline(rewards_G: Sequence[float]) -> np.ndarray:
    """A_i = r_i: plain REINFORCE."""
    return np.asarray(rewards_G, dtype=np.float64)


class RunningMean:
    """A_i = r_i - b, where b is the exponential moving average of earlier batches' mean reward.

    b starts at the first batch's own mean; it is updated after the batch is credited, so a batch's rewards do not
    enter their own baseline (which would bias the gradient) from the second batch on.
    """

    def __init__(self, decay: float = 0.9, value: float | None = None):
        self.decay = decay
        self.value = value

    def __call__(self, rewards_P_G: Sequence[Sequence[float]]) -> list[np.ndarray]:
        mean = float(np.mean([r for rewards in rewards_P_G for r in rewards]))
        baseline = mean if self.value is None else self.value
        self.value = self.decay * baseline + (1 - self.decay) * mean
        return [np.asarray(rewards, dtype=np.float64) - baseline for rewards in rewards_P_G]


def has_signal(rewards_G: Sequence[float]) -> bool:
    """Whether the group tells its members apart: exact inequality, on the whole group."""
    return any(r != rewards_G[0] for r in rewards_G[1:])


WITHIN_GROUP: dict[str, Callable[[Sequence[float]], np.ndarray]] = {
    "mean": centred,
    "mean_std": centred_by_std,
    "leave_one_out": leave_one_out,
    "none": without_baseline,
}
