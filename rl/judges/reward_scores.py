"""Score batches of sequences with a judge's client, and return scores by group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from rl.errors import UserError
from rl.rollout import TrajectoryGroup
from rl.types import ModelInput

if TYPE_CHECKING:
    from rl.client import ClassifierClient, SamplingClient, TrainingClient

T = TypeVar("T")
JUDGE_BATCH_SIZE = 512  # sequences per call


def iter_batches(items: Iterable[T]) -> Iterator[Sequence[T]]:
    """Iterate over batches of JUDGE_BATCH_SIZE items."""
    remaining = iter(items)
    while batch := list(islice(remaining, JUDGE_BATCH_SIZE)):
        yield batch


def compute_reward_scores(client: TrainingClient, inputs: Sequence[ModelInput]) -> list[float]:
    """Return the score of each input (`Renderer.reward_model_input`): the value at its last
    position, which the Bradley-Terry loss reads too.
    """
    return [
        float(values[-1])
        for batch in iter_batches(inputs)
        for values in client.compute_values(batch).result()
    ]


def compute_answer_logprobs(
    client: SamplingClient, examples: Iterable[tuple[ModelInput, Any]], **length_error: str
) -> list[float]:
    """Return log p of the answer in each example (tokens, weights of `build_supervised_example`),
    its end token included.

    `length_error`: the texts of `check_length`, which raises UserError for an example that exceeds
    the judge's context.
    """
    logprobs: list[float] = []
    for batch in iter_batches(examples):
        check_length(client, max(tokens.length for tokens, _ in batch), **length_error)
        results = client.compute_logprobs_many([tokens for tokens, _ in batch]).result()
        # The first token's logprob is None; it is never part of an answer.
        logprobs += [
            sum(lp for lp, w in zip(lps[1:], weights[1:], strict=True) if w and lp is not None)
            for lps, (_, weights) in zip(results, batch, strict=True)
        ]
    return logprobs


def check_length(
    client: SamplingClient | TrainingClient | ClassifierClient,
    length: int,
    *,
    judge: str,
    text: str,
    remedy: str,
) -> None:
    """Raise UserError if a text of this length exceeds the judge's context."""
    limit = client.info["max_context"]
    if limit is not None and length > limit:
        raise UserError(
            f"{judge} reads at most {limit} tokens, {text} has {length}: {remedy} with a longer "
            "context"
        )


def check_finite(name: str, scores: Sequence[float]) -> None:
    """Raise UserError if a score of the reward model `name` is not finite."""
    count = sum(not math.isfinite(score) for score in scores)
    if count:
        raise UserError(f"the reward model {name} returned {count} scores that are not finite")


def split_by_group(groups: Sequence[TrajectoryGroup], scores: Iterable[T]) -> list[list[T]]:
    """Return the scores of all episodes in order as [P][G]."""
    remaining = iter(scores)
    return [[next(remaining) for _ in group.trajectories_G] for group in groups]
