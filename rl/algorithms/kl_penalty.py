"""Apply the KL to a reference as part of the reward, with a coefficient that can follow a target.

q = logprob under the sampling policy, ref = logprob under the reference, both at the sampling
temperature; g = q - ref at each action. As part of the reward the penalty has the gradient of the
KL of whole answers, which no term in the loss has: a token also pays for the divergence that
follows it (pitfalls of the alternatives: arXiv 2512.21852).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.algorithms.advantages import compute_returns_to_go
from rl.types import Datum


def compute_logprob_gaps(
    datums: Sequence[Datum], ref_logprobs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return g = q - ref at actions, 0 elsewhere, float64 [T] for each datum (fields `logprobs`,
    `mask`).
    """
    gaps_D = []
    for datum, ref_T in zip(datums, ref_logprobs, strict=True):
        gap_T = datum.loss_fn_inputs["logprobs"].array.astype(np.float64) - ref_T
        gaps_D.append(np.where(datum.action_mask, gap_T, 0.0))
    return gaps_D


def compute_kl_metrics(
    datums: Sequence[Datum], gaps_D: Sequence[np.ndarray], name: str = "optim/kl_ref"
) -> dict[str, float]:
    """Return two estimates of the KL from the sampling policy, means over actions: `<name>_k1` of
    g, `<name>_k3` of e^-g - 1 + g.

    The result is empty without actions.
    """
    mask = np.concatenate([d.action_mask for d in datums])
    g = np.concatenate(list(gaps_D))[mask]
    if not len(g):
        return {}
    return {f"{name}_k1": float(g.mean()), f"{name}_k3": float((np.expm1(-g) + g).mean())}


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
) -> tuple[list[Datum], dict[str, float]]:
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
    charges = np.concatenate(charges_D)[np.concatenate(masks_D)]
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
