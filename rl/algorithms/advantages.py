"""Compute advantages from rewards: pure functions on a group's rewards (G numbers in, G numbers
out) or on a batch's rewards (P groups). Apply the KL to a reference as part of the reward, with a
coefficient that can follow a target.

q = logprob under the sampling policy, ref = logprob under the reference, both at the sampling
temperature; g = q - ref at each action. As part of the reward the penalty has the gradient of the
KL of whole answers, which no term in the loss has: a token also pays for the divergence that
follows it (pitfalls of the alternatives: arXiv 2512.21852).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

import numpy as np

from rl.errors import UserError
from rl.rollout import Metrics, has_signal
from rl.types import Datum


def subtract_mean(rewards_G: Sequence[float]) -> np.ndarray:
    """Return A_i = r_i - mean(r) (Dr. GRPO, arXiv 2503.20783: no division by the standard
    deviation).

    A group with equal rewards gives exact zeros (not the rounding error of the mean); so does a
    group of size 1.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not has_signal(rewards_G):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def normalize_by_std(rewards_G: Sequence[float], eps: float = 1e-6) -> np.ndarray:
    """Return A_i = (r_i - mean(r)) / (std(r) + eps), with the population standard deviation (GRPO,
    arXiv 2402.03300, section 4.1.2).
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return subtract_mean(rewards_G) / (rewards.std() + eps)


def leave_one_out(rewards_G: Sequence[float]) -> np.ndarray:
    """Return A_i = r_i - mean of the others = G/(G-1) (r_i - mean(r)) (RLOO, arXiv 2402.14740).

    A group of size 1 gives zero.
    """
    n = len(rewards_G)
    return subtract_mean(rewards_G) * (n / (n - 1)) if n > 1 else np.zeros(n)


def use_raw_rewards(rewards_G: Sequence[float]) -> np.ndarray:
    """Return A_i = r_i: plain REINFORCE."""
    return np.asarray(rewards_G, dtype=np.float64)


@dataclass
class RunningMeanBaseline:
    """Compute A_i = r_i - b, where b is the exponential moving average of earlier batches' mean
    reward.

    b starts at the mean of the first batch. It is updated after the advantages of a batch, so from
    the second batch on the rewards of a batch do not enter its baseline (which would bias the
    gradient).
    """

    decay: float = 0.9
    value: float | None = None

    def __call__(
        self, rewards_P_G: Sequence[Sequence[float]], keys_P: Sequence[str] = ()
    ) -> list[np.ndarray]:
        """Return the advantages [P][G] and update the baseline."""
        mean = float(np.mean([r for rewards in rewards_P_G for r in rewards]))
        baseline = mean if self.value is None else self.value
        self.value = self.decay * baseline + (1 - self.decay) * mean
        return [np.asarray(rewards, dtype=np.float64) - baseline for rewards in rewards_P_G]

    def state(self) -> float | None:
        """Return the baseline, for a checkpoint."""
        return self.value

    def load_state(self, state: float | None) -> None:
        """Restore the baseline from a checkpoint."""
        self.value = state


class PerProblemBaseline:
    """Compute A_i = r_i - b(problem), where b is the exponential moving average of the problem's
    earlier mean rewards.

    A problem without earlier rewards is compared with a running mean over all problems. Baselines
    are updated after the advantages of the batch. Keys are texts, so that the state is JSON.
    """

    def __init__(self, decay: float = 0.5):
        self.decay = decay
        self.values: Metrics = {}
        self.overall = RunningMeanBaseline()

    def __call__(
        self, rewards_P_G: Sequence[Sequence[float]], keys_P: Sequence[str]
    ) -> list[np.ndarray]:
        """Return the advantages [P][G] and update the problems' baselines."""
        fresh_P_G = self.overall(rewards_P_G)
        known = self.values.copy()
        for rewards_G, key in zip(rewards_P_G, keys_P, strict=True):
            mean = float(np.mean(rewards_G))
            self.values[key] = (
                self.decay * self.values[key] + (1 - self.decay) * mean
                if key in self.values
                else mean
            )
        return [
            np.asarray(rewards_G, dtype=np.float64) - known[key] if key in known else fresh_G
            for rewards_G, fresh_G, key in zip(rewards_P_G, fresh_P_G, keys_P, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Return the baselines, for a checkpoint."""
        return {"values": self.values, "overall": self.overall.value}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the baselines from a checkpoint."""
        self.values = dict(state["values"])
        self.overall.value = state["overall"]


def normalize_by_batch(
    rewards_P_G: Sequence[Sequence[float]], eps: float = 1e-8
) -> list[np.ndarray]:
    """Return A_i = (r_i - mean) / (std + eps), both over the whole batch (REINFORCE++, arXiv
    2501.03262).
    """
    flat = np.concatenate([np.asarray(rewards_G, dtype=np.float64) for rewards_G in rewards_P_G])
    if not has_signal(flat.tolist()):
        return [np.zeros(len(rewards_G)) for rewards_G in rewards_P_G]
    return [(np.asarray(rewards_G) - flat.mean()) / (flat.std() + eps) for rewards_G in rewards_P_G]


def subtract_mean_divide_by_batch_std(
    rewards_P_G: Sequence[Sequence[float]], eps: float = 1e-8
) -> list[np.ndarray]:
    """Return rewards centered within each group, divided by the std of the centered rewards over
    the whole batch (REINFORCE++-baseline, arXiv 2501.03262).
    """
    centred_P_G = [subtract_mean(rewards_G) for rewards_G in rewards_P_G]
    std = np.concatenate(centred_P_G).std()
    return [advantages_G / (std + eps) for advantages_G in centred_P_G]


def compute_returns_to_go(
    rewards_N: Sequence[float] | np.ndarray, discount: float = 1.0
) -> list[float]:
    """Return sum_{k >= t} discount^(k - t) r_k for each step t of an episode."""
    total, backwards = 0.0, []
    for reward in reversed(rewards_N):
        total = float(reward) + discount * total
        backwards.append(total)
    return backwards[::-1]


def compute_gae(
    rewards_T: np.ndarray,
    values_T: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: float = 0.0,
) -> np.ndarray:
    """Compute generalized advantage estimation over the action tokens of an episode (arXiv
    1506.02438, equation 16), float64 [T].

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t. V_t is the value before
    action t. V_{T} is `bootstrap`: 0 if the episode ended, the value after its last token if it was
    truncated. The arrays omit the observations between actions, so observations discount nothing.
    The return for training the value is A_t + V_t.
    """
    advantages, running, ahead = np.zeros(len(rewards_T)), 0.0, bootstrap
    for t in reversed(range(len(rewards_T))):
        running = rewards_T[t] + gamma * ahead - values_T[t] + gamma * lam * running
        advantages[t], ahead = running, values_T[t]
    return advantages


@dataclass(frozen=True)
class AdvantageEstimator:
    """Describe an advantage estimator.

    fn                scope "group": maps the rewards of a group to advantages; scope "batch": maps
                      the rewards of all groups [P][G]
    scope             whether an advantage depends only on the answers of its group ("group") or
                      also on those of other groups ("batch")
    compares_members  whether advantages come only from differences within a group: equal rewards
                      then give 0
    state_key         for an estimator that remembers earlier batches: `fn` is its class, called
                      with rewards [P][G] and keys [P]; a checkpoint holds its `state` under this
                      name
    """

    fn: Callable[..., Any]
    scope: Literal["group", "batch"]
    compares_members: bool
    state_key: str | None = None

    def __post_init__(self) -> None:
        if self.scope not in ("group", "batch"):
            raise UserError(f"an estimator's scope is 'group' or 'batch', got {self.scope!r}")

    def estimate(self, rewards_P_G: Sequence[Sequence[float]]) -> list[np.ndarray]:
        """Return the advantages [P][G] of an estimator without state. `fn` may return iterables of
        any kind (lists, arrays, tensors, generators). Raises UserError unless they hold a finite
        number for each reward.
        """
        if self.scope == "batch":
            return self._check(rewards_P_G, self.fn(rewards_P_G))
        return self._check(rewards_P_G, [self.fn(rewards_G) for rewards_G in rewards_P_G])

    def _check(
        self, rewards_P_G: Sequence[Sequence[float]], advantages_P_G: Any
    ) -> list[np.ndarray]:
        """Return the advantages as arrays. Raises UserError if they do not fit the rewards."""
        name = getattr(self.fn, "__name__", repr(self.fn))
        groups = _list_items(advantages_P_G)
        if groups is None or len(groups) != len(rewards_P_G):
            received = advantages_P_G if groups is None else groups
            raise UserError(
                f"the advantage estimator {name} (scope {self.scope!r}) returned "
                f"{received!r:.200} for {len(rewards_P_G)} groups; expected the advantages of each "
                "group"
            )
        arrays = []
        for rewards_G, advantages_G in zip(rewards_P_G, groups, strict=True):
            items = _list_items(advantages_G)
            values_G = np.asarray([_to_float(item) for item in items or ()], dtype=np.float64)
            if len(values_G) != len(rewards_G) or not np.isfinite(values_G).all():
                raise UserError(
                    f"the advantage estimator {name} returned "
                    f"{advantages_G if items is None else items!r:.200} for the rewards "
                    f"{list(rewards_G)!r:.200}; expected a finite number for each reward"
                )
            arrays.append(values_G)
        return arrays


def _list_items(values: Any) -> list[Any] | None:
    """Return the items of an iterable. Return None for a mapping and for everything that cannot be
    iterated over, such as an array without dimensions.
    """
    try:
        items = iter(values)
    except TypeError:
        return None
    return None if isinstance(values, Mapping) else list(items)


def _to_float(value: Any) -> float:
    """Return a number of any library as a float; NaN for everything else, a text included."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, RuntimeError):  # an array with several numbers
        return math.nan


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "mean": AdvantageEstimator(subtract_mean, scope="group", compares_members=True),
    "mean_std": AdvantageEstimator(normalize_by_std, scope="group", compares_members=True),
    "leave_one_out": AdvantageEstimator(leave_one_out, scope="group", compares_members=True),
    "mean_batch_std": AdvantageEstimator(
        subtract_mean_divide_by_batch_std, scope="batch", compares_members=True
    ),
    "batch": AdvantageEstimator(normalize_by_batch, scope="batch", compares_members=False),
    "running_mean": AdvantageEstimator(
        RunningMeanBaseline, scope="batch", compares_members=False, state_key="baseline"
    ),
    "per_problem": AdvantageEstimator(
        PerProblemBaseline, scope="batch", compares_members=False, state_key="per_problem"
    ),
    "none": AdvantageEstimator(use_raw_rewards, scope="group", compares_members=False),
}


# ------------------------------------------------------------------ KL to a reference


def compute_logprob_gaps(
    datums: Sequence[Datum], ref_logprobs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return g = q - ref at actions, 0 elsewhere, float64 [T] for each datum (fields `logprobs`,
    `mask`).
    """
    sampled_D = (datum.loss_fn_inputs["logprobs"].array.astype(np.float64) for datum in datums)
    return [
        np.where(datum.action_mask, sampled_T - ref_T, 0.0)
        for datum, sampled_T, ref_T in zip(datums, sampled_D, ref_logprobs, strict=True)
    ]


def compute_kl_metrics(
    datums: Sequence[Datum], gaps_D: Sequence[np.ndarray], name: str = "optim/kl_ref"
) -> Metrics:
    """Return two estimates of the KL from the sampling policy, means over actions: `<name>_k1` of
    g, `<name>_k3` of e^-g - 1 + g.

    The result is empty without actions.
    """
    g = select_actions(datums, gaps_D)
    if not len(g):
        return {}
    return {f"{name}_k1": float(g.mean()), f"{name}_k3": float((np.expm1(-g) + g).mean())}


def select_actions(datums: Sequence[Datum], values_D: Iterable[Any]) -> np.ndarray:
    """Return the values [T] of each datum at the actions of all datums, float64."""
    masked_D = [v[d.action_mask] for d, v in zip(datums, values_D, strict=True)]
    return np.concatenate(masked_D).astype(np.float64)


def discounted_future_sums(values_T: np.ndarray, mask_T: np.ndarray, discount: float) -> np.ndarray:
    """Return the sum over actions k at or after action t of discount^(k - t) values_k, counted in
    actions; 0 outside the mask.
    """
    result = np.zeros(len(values_T))
    result[mask_T] = compute_returns_to_go(values_T[mask_T], discount)
    return result


def apply_kl_penalty(
    datums: Sequence[Datum],
    ref_logprobs: Sequence[np.ndarray],
    coefficient: float,
    discount: float = 0.0,
) -> tuple[list[Datum], Metrics]:
    """Return the datums with `coefficient` (mean c - c_t) added to the advantage of each action,
    and metrics of the KL.

    c_t = g_t. `discount` > 0 also charges a token with later actions, each action later multiplied
    by that factor again (1: the gradient of the whole answer's KL). The mean of c is over all
    actions of `datums`: a baseline, so that the penalty does not change the total. (A sum of mean g
    - g_k over later k would reward every further token, as the length of an answer is not
    constant.)
    """
    gaps_D = compute_logprob_gaps(datums, ref_logprobs)
    masks_D = [d.action_mask for d in datums]
    charges_D = [
        discounted_future_sums(gap_T, mask_T, discount)
        for gap_T, mask_T in zip(gaps_D, masks_D, strict=True)
    ]
    charges = select_actions(datums, charges_D)
    mean = float(charges.mean()) if len(charges) else 0.0
    result = []
    for datum, charge_T, mask_T in zip(datums, charges_D, masks_D, strict=True):
        penalty_T = coefficient * np.where(mask_T, mean - charge_T, 0.0)
        advantages_T = datum.loss_fn_inputs["advantages"].array + penalty_T
        result.append(datum.with_inputs({**datum.loss_fn_inputs, "advantages": advantages_T}))
    return result, compute_kl_metrics(datums, gaps_D)


class AdaptiveKL:
    """Adapt a coefficient: it rises while the KL is above `target` and falls while it is below
    (Ziegler et al., arXiv 1909.08593, 2.2).

    e = clip(KL / target - 1, -0.2, 0.2), coefficient <- coefficient (1 + rate e). The coefficient
    rises from at least `MIN_COEFFICIENT`, because a coefficient of 0 would stay 0. Without a target
    it is constant.
    """

    MIN_COEFFICIENT = 1e-3

    def __init__(self, coefficient: float, target: float | None, rate: float = 0.1):
        self.coefficient, self.target, self.rate = coefficient, target, rate

    @property
    def needs_reference(self) -> bool:
        """Return whether a reference model is needed."""
        return self.coefficient != 0 or self.target is not None

    def update(self, kl: float) -> None:
        """Update the coefficient from the KL of a batch; a no-op without a target."""
        if self.target is None:
            return
        error = min(0.2, max(-0.2, kl / self.target - 1))
        start = max(self.coefficient, self.MIN_COEFFICIENT) if error > 0 else self.coefficient
        self.coefficient = start * (1 + self.rate * error)
