"""Correct for tokens that another policy than the current learner sampled (importance correction).

q = behavior logprob of a token (of the sampler, or of older weights), p = logprob under the learner
before its step; g = p - q at actions. `level` defines the ratio of each token:

    token       e^g                                 of a single token (truncated: TIS, Yao et al.
                                                    2025, "Your efficient RL framework secretly
                                                    brings you off-policy RL training"; within
                                                    bounds: IcePop, arXiv 2510.18855)
    sequence    e^(sum of g over the episode)       of the whole answer: unbiased, with a variance
                                                    that grows with its length
    geometric   e^(mean of g over the episode)      the same, scaled to a token (GSPO's ratio, arXiv
                                                    2507.18071, equation 7): no importance weight,
                                                    so it may mask answers but not weight them

`kind` defines the use of the ratio:

    truncate    a weight min(max(ratio, low), high)
    icepop      a weight: the ratio where low <= ratio <= high, 0 elsewhere; tokens of weight 0
                still count in the mean
    mask        no weight: a token with a ratio outside low to high is no longer an action, and does
                not count in the mean

An episode that consists of several datums is a single sequence (`index_episodes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.types import Datum

CORRECTION_KINDS = ("none", "truncate", "icepop", "mask")
CORRECTION_LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class ImportanceCorrection:
    """Hold the settings of the importance correction; `low` and `high` are ratios.

    Raises ValueError for an unknown kind or level, for bounds that are not ratios in order, and for
    a weight by a geometric mean.
    """

    kind: str = "none"
    level: str = "token"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in CORRECTION_KINDS or self.level not in CORRECTION_LEVELS:
            raise ValueError(
                f"a correction's kind must be {', '.join(CORRECTION_KINDS)} and its level "
                f"{', '.join(CORRECTION_LEVELS)}; got {self.kind}, {self.level}"
            )
        if not 0 <= self.low < self.high < np.inf:
            raise ValueError(
                f"the bounds of a correction must be ratios with 0 <= low < high; got {self.low} "
                f"to {self.high}"
            )
        if self.kind in ("truncate", "icepop") and self.level == "geometric":
            raise ValueError(
                "a geometric mean is no importance weight: use kind mask, as truncate and icepop "
                "weight the tokens"
            )


def index_episodes(datums: Sequence[Datum]) -> list[int]:
    """Return the episode index of each datum, from 0.

    Consecutive datums form an episode when their episode shares add up to 1.
    """
    episode_D, episode, share = [], 0, 0.0
    for datum in datums:
        episode_D.append(episode)
        share += datum.episode_share
        if share > 1 - 1e-9:
            episode, share = episode + 1, 0.0
    return episode_D


def sum_by_episode(episode_D: Sequence[int], values_D: Sequence[Any]) -> np.ndarray:
    """Return the sum of the datums' values over each episode, float64 [E]."""
    return np.bincount(np.asarray(episode_D, dtype=np.int64), weights=values_D)


def compute_ratios(
    gaps_D: Sequence[np.ndarray],
    masks_D: Sequence[np.ndarray],
    episode_D: Sequence[int],
    level: str,
) -> list[np.ndarray]:
    """Return the ratio of each token, float64 [T] for each datum; 1 outside the mask, infinite
    where e^g overflows.
    """
    gaps_D = [np.where(mask, gap, 0.0) for gap, mask in zip(gaps_D, masks_D, strict=True)]
    if level != "token":
        gaps_E = sum_by_episode(episode_D, [gap.sum() for gap in gaps_D])
        if level == "geometric":
            counts_E = sum_by_episode(episode_D, [np.count_nonzero(mask) for mask in masks_D])
            gaps_E = gaps_E / np.maximum(counts_E, 1)
        gaps_D = [
            np.where(mask, gaps_E[episode], 0.0)
            for mask, episode in zip(masks_D, episode_D, strict=True)
        ]
    with np.errstate(over="ignore"):
        return [np.exp(gap) for gap in gaps_D]


def apply_correction(
    gaps_D: Sequence[np.ndarray],
    masks_D: Sequence[np.ndarray],
    episode_D: Sequence[int],
    correction: ImportanceCorrection,
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, float]]:
    """Return (weights, remaining actions, metrics): float64 [T] and bool [T] for each datum.

    Weights are 1 if the correction does not weight. Without a correction or without actions there
    are no metrics. Metrics over the sampled actions:
    `optim/correction_low`, `_high`, the fractions with a ratio outside the bounds; `_weight`, the
    mean weight (masked: 0); `_ess`, the effective sample size as a fraction of the sample, (sum
    w)^2 / (n sum w^2).
    """
    ratio_D = compute_ratios(gaps_D, masks_D, episode_D, correction.level)
    weights_D, kept_D = [], []
    for ratio, mask in zip(ratio_D, masks_D, strict=True):
        inside = (ratio >= correction.low) & (ratio <= correction.high)
        weight = np.ones_like(ratio)
        if correction.kind == "truncate":
            weight = np.clip(ratio, correction.low, correction.high)
        elif correction.kind == "icepop":
            weight = np.where(inside, ratio, 0.0)
        weights_D.append(np.where(mask, weight, 1.0))
        kept_D.append(mask & inside if correction.kind == "mask" else mask)
    if correction.kind == "none" or not any(mask.any() for mask in masks_D):
        return weights_D, kept_D, {}
    mask, ratio = np.concatenate(masks_D), np.concatenate(ratio_D)
    weight = (np.concatenate(weights_D) * np.concatenate(kept_D))[mask]
    squares = float((weight * weight).sum())
    ess = float(weight.sum()) ** 2 / (len(weight) * squares) if squares else 0.0
    return (
        weights_D,
        kept_D,
        {
            "optim/correction_low": float((ratio[mask] < correction.low).mean()),
            "optim/correction_high": float((ratio[mask] > correction.high).mean()),
            "optim/correction_weight": float(weight.mean()),
            "optim/correction_ess": ess,
        },
    )


def merge_effective_sample_size(parts: Sequence[tuple[int, Mapping[str, float]]]) -> float:
    """Return `optim/correction_ess` of a batch from (sampled tokens, metrics) of its parts: (sum
    w)^2 / (n sum w^2) over all parts.

    For a part of n tokens with mean weight m and effective fraction e, sum w = n m and sum w^2 = n
    m^2 / e.
    """
    tokens, total, squares = 0, 0.0, 0.0
    for count, metrics in parts:
        if metrics.get("optim/correction_ess"):
            mean = metrics["optim/correction_weight"]
            total += count * mean
            squares += count * mean * mean / metrics["optim/correction_ess"]
        tokens += count
    return total * total / (tokens * squares) if squares else 0.0
