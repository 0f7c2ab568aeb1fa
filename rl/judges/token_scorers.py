"""Compute logprobs of a datum's targets under a model other than the trained model, such as a
reference model or a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rl.errors import UserError
from rl.types import Datum, ModelInput

if TYPE_CHECKING:
    from rl.client import SamplingClient, TrainingClient


def restore_full_input(datum: Datum) -> ModelInput:
    """Return the sequence from which a datum was shifted: its input plus the last target. Raises
    ValueError for soft targets.
    """
    targets = datum.loss_fn_inputs["target_tokens"].array
    if targets.ndim != 1:
        raise ValueError(
            f"expected targets of shape [T], got soft targets of shape {targets.shape}"
        )
    return ModelInput.of(
        [*datum.model_input.token_ids(), int(targets[-1])],
        datum.model_input.images_with_positions(),
    )


class TokenScorer(Protocol):
    """Score fixed tokens: a reference model or a teacher."""

    def logprobs(self, datums: Sequence[Datum], temperature: float = 1.0) -> list[np.ndarray]:
        """Return log p of each datum's target tokens under softmax(logits / temperature), float32
        [T] each.
        """
        ...

    def release(self) -> None:
        """Free the scorer's memory."""


class FrozenScorer:
    """Score with another model's weights, or earlier weights of the policy, held by a sampling
    client.
    """

    def __init__(self, client: SamplingClient):
        self.client = client

    def logprobs(self, datums: Sequence[Datum], temperature: float = 1.0) -> list[np.ndarray]:
        """Return log p of each datum's target tokens."""
        values = self.client.compute_logprobs_many(
            [restore_full_input(d) for d in datums], temperature
        ).result()
        return [np.asarray(logprobs[1:], dtype=np.float32) for logprobs in values]

    def release(self) -> None:
        """Free the sampling client's memory."""
        self.client.release()


class BaseModelScorer:
    """Score with the base model under the policy's LoRA adapter: no further weights, and exactly
    the learner's arithmetic.
    """

    def __init__(self, policy: TrainingClient):
        self.policy = policy

    def logprobs(self, datums: Sequence[Datum], temperature: float = 1.0) -> list[np.ndarray]:
        """Return log p of each datum's target tokens with the adapter disabled."""
        bare = [
            Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]})
            for d in datums
        ]
        for datum, whole in zip(bare, datums, strict=True):
            # marks the end of the prompt, so that micro-batches equal those of the policy
            if "mask" in whole.loss_fn_inputs:
                datum.loss_fn_inputs["weights"] = whole.loss_fn_inputs["mask"]
        output = self.policy.forward(
            bare, "cross_entropy", {"temperature": temperature}, adapters=False
        ).result()
        return [row["logprobs"].array for row in output.loss_fn_outputs]

    def release(self) -> None:
        """Do nothing: the weights belong to the policy."""


def check_vocabulary(
    student: TrainingClient, other: SamplingClient | TrainingClient, name: str
) -> None:
    """Raise UserError, with the tokens, unless both models give every token the same id: logprobs
    are compared id by id.

    Without tokenizers the sizes of the vocabularies must agree; with tokenizers the sizes may
    differ (padding rows).
    """
    if difference := _compare_vocabularies(student, other, name):
        raise UserError(
            f"the {name} has another vocabulary than the policy: {difference}. Choose a model of "
            "the policy's family"
        )


def shares_vocabulary(
    student: TrainingClient, other: SamplingClient | TrainingClient, name: str
) -> bool:
    """Return whether both models give every token the same id. Raises UserError if a tokenizer is
    missing and the sizes differ.
    """
    return not _compare_vocabularies(student, other, name)


def _compare_vocabularies(
    student: TrainingClient, other: SamplingClient | TrainingClient, name: str
) -> str:
    tokenizers = student.info["tokenizer"], other.info["tokenizer"]
    if None not in tokenizers:
        return describe_vocabulary_difference(*(each.get_vocab() for each in tokenizers))
    sizes = student.info["vocab_size"], other.info["vocab_size"]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the {name} has {sizes[1]} tokens, the policy {sizes[0]}: logprobs are compared "
            "token by token"
        )
    return ""


def describe_vocabulary_difference(
    policy_vocabulary: Mapping[str, int], other_vocabulary: Mapping[str, int]
) -> str:
    """Describe the tokens that differ; "" if none does."""
    policy_vocabulary, other_vocabulary = (
        dict(sorted(vocabulary.items(), key=lambda item: item[1]))
        for vocabulary in (policy_vocabulary, other_vocabulary)
    )
    moved = [
        f"{token!r} is {i} in the policy's and {other_vocabulary[token]} in the other"
        for token, i in policy_vocabulary.items()
        if other_vocabulary.get(token, i) != i
    ]
    only_policy = [repr(token) for token in policy_vocabulary if token not in other_vocabulary]
    only_other = [repr(token) for token in other_vocabulary if token not in policy_vocabulary]
    differences = (
        (moved, "have other ids"),
        (only_policy, "are only in the policy's"),
        (only_other, "are only in the other"),
    )
    return "; ".join(
        f"{len(tokens)} tokens {description} ({', '.join(tokens[:4])})"
        for tokens, description in differences
        if tokens
    )
