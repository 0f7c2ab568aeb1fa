"""Tokens drawn by another policy than the learner's: how much each still counts.

q = logprob under what drew a token (the sampler, older weights), p = under the learner before its
step; g = p - q at actions. A ratio stands for each token, by `level`:

    token       e^g                                 of the token alone (truncated: TIS, Yao et al. 2025, "Your efficient RL framework
                                                    secretly brings you off-policy RL training"; within bounds: IcePop, arXiv 2510.18855)
    sequence    e^(sum of g over the episode)       of the whole answer: unbiased, and of a variance that grows with its length
    geometric   e^(mean of g over the episode)      the same, scaled to a token (GSPO's ratio, arXiv 2507.18071, equation 7): no importance
                                                    weight, so it may leave answers out but weighs none

and by `kind` it becomes

    truncate    a weight min(max(ratio, low), high)
    icepop      a weight: the ratio where low <= ratio <= high, 0 elsewhere; what has weight 0 still counts in the mean
    mask        no weight: where the ratio lies outside low to high the token is no action any more, for the mean neither

An episode that makes several datums is one sequence (`episodes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl.types import Datum

KINDS = ("none", "truncate", "icepop", "mask")
LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class Correction:
    """What is done about it; `low` and `high` are ratios. ValueError where they are none."""

    kind: str = "none"
    level: str = "token"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.level not in LEVELS:
            raise ValueError(
                f"a correction is one of {', '.join(KINDS)} at a level of {', '.join(LEVELS)}, got {self.kind}, {self.level}"
            )
        if not 0 <= self.low < self.high < np.inf:
            raise ValueError(
                f"the bounds of a correction are ratios, low below high: got {self.low} to {self.high}"
            )
        if self.weighs and self.level == "geometric":
            raise ValueError(
                "a geometric mean is no importance weight: kind mask leaves answers out by it, truncate and icepop weigh"
            )

    @property
    def weighs(self) -> bool:
        return self.kind in ("truncate", "icepop")


def episodes(datums: Sequence[Datum]) -> list[int]:
    """The episode of each datum, counted from 0: neighbours whose shares of one add up to it."""
    found, episode, share = [], 0, 0.0
    for datum in datums:
        found.append(episode)
        share += datum.episode_share
        if share > 1 - 1e-9:
            episode, share = episode + 1, 0.0
    return found


def ratios(
    gaps_D: Sequence[np.ndarray],
    masks_D: Sequence[np.ndarray],
    episode_D: Sequence[int],
    level: str,
) -> list[np.ndarray]:
    """float64 [T] for each datum, the ratio that each token is judged by; 1 off the mask. Infinite
    where e^g is.
    """
    gaps_D = [np.where(mask, gap, 0.0) for gap, mask in zip(gaps_D, masks_D, strict=True)]
    if level != "token":
        sums, counts = (
            np.zeros(max(episode_D, default=-1) + 1),
            np.zeros(max(episode_D, default=-1) + 1),
        )
        for gap, mask, episode in zip(gaps_D, masks_D, episode_D, strict=True):
            sums[episode] += gap.sum()
            counts[episode] += np.count_nonzero(mask)
        whole = sums if level == "sequence" else sums / np.maximum(counts, 1)
        gaps_D = [
            np.where(mask, whole[episode], 0.0)
            for mask, episode in zip(masks_D, episode_D, strict=True)
        ]
    with np.errstate(over="ignore"):
        return [np.exp(gap) for gap in gaps_D]


def corrected(
    gaps_D: Sequence[np.ndarray],
    masks_D: Sequence[np.ndarray],
    episode_D: Sequence[int],
    how: Correction,
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, float]]:
    """(weights, what stays an action, metrics): float64 [T] and bool [T] for each datum; weights
    are 1 where nothing is weighed.

    Metrics over the actions that were drawn: `optim/correction_low`, `_high`, the shares whose
    ratio lies outside the bounds; `_weight`, the mean weight (left out: 0); `_ess`, the effective
    share of the sample, (sum w)^2 / (n sum w^2).
    """
    ratio_D = ratios(gaps_D, masks_D, episode_D, how.level)
    weights_D, kept_D = [], []
    for ratio, mask in zip(ratio_D, masks_D, strict=True):
        inside = (ratio >= how.low) & (ratio <= how.high)
        weight = np.ones_like(ratio)
        if how.kind == "truncate":
            weight = np.clip(ratio, how.low, how.high)
        elif how.kind == "icepop":
            weight = np.where(inside, ratio, 0.0)
        weights_D.append(np.where(mask, weight, 1.0))
        kept_D.append(mask & inside if how.kind == "mask" else mask)
    return weights_D, kept_D, _metrics(ratio_D, masks_D, weights_D, kept_D, how)


Arrays = Sequence[np.ndarray]


def _metrics(
    ratio_D: Arrays, masks_D: Arrays, weights_D: Arrays, kept_D: Arrays, how: Correction
) -> dict[str, float]:
    if how.kind == "none" or not any(mask.any() for mask in masks_D):
        return {}
    mask = np.concatenate(masks_D)
    ratio, weight = (
        np.concatenate(ratio_D)[mask],
        (np.concatenate(weights_D) * np.concatenate(kept_D))[mask],
    )
    squares = float((weight * weight).sum())
    return {
        "optim/correction_low": float((ratio < how.low).mean()),
        "optim/correction_high": float((ratio > how.high).mean()),
        "optim/correction_weight": float(weight.mean()),
        "optim/correction_ess": float(weight.sum()) ** 2 / (len(weight) * squares)
        if squares
        else 0.0,
    }


def merged_sample_size(parts: Sequence[tuple[int, Mapping[str, float]]]) -> float:
    """Return `optim/correction_ess` of a batch from (drawn tokens, metrics) of its parts: (sum w)^2
    / (n sum w^2) over all of them.

    Of a part of n tokens with mean weight m and effective share e, sum w = n m and sum w^2 = n m^2
    / e.
    """
    tokens, total, squares = 0, 0.0, 0.0
    for count, metrics in parts:
        if metrics.get("optim/correction_ess"):
            mean = metrics["optim/correction_weight"]
            total += count * mean
            squares += count * mean * mean / metrics["optim/correction_ess"]
        tokens += count
    return total * total / (tokens * squares) if squares else 0.0
