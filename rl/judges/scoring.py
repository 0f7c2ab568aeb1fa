"""Logprobs of a datum's targets under another model than the one that is trained: a reference, a
teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rl.errors import UserError
from rl.types import Datum, ModelInput

if TYPE_CHECKING:
    from rl.clients import SamplingClient, TrainingClient


def full_tokens(datum: Datum) -> list[int]:
    """The sequence that a datum was shifted from: its input, and the last target. Of text alone:
    see `full_input`.
    """
    return full_input(datum).to_ints()


def full_input(datum: Datum) -> ModelInput:
    """The same, with its images."""
    targets = datum.loss_fn_inputs["target_tokens"].array
    if targets.ndim != 1:
        raise ValueError(f"soft targets of shape {targets.shape} are no sequence")
    return ModelInput.of([*datum.model_input.flat(), int(targets[-1])], datum.model_input.placed())


class TokenScorer(Protocol):
    """What scores given tokens: a reference, a teacher."""

    def logprobs(self, datums: Sequence[Datum], temperature: float = 1.0) -> list[np.ndarray]:
        """log p of each datum's target tokens under softmax(logits / temperature), float32 [T]
        each.
        """
        ...

    def release(self) -> None:
        """Gives its memory back."""


class FrozenScorer:
    """Another model's weights, or earlier ones of the policy, held by a sampling client."""

    def __init__(self, client: SamplingClient):
        self.client = client

    def logprobs(self, datums: Sequence[Datum], temperature: float = 1.0) -> list[np.ndarray]:
        values = self.client.compute_logprobs_many(
            [full_input(d) for d in datums], temperature
        ).result()
        return [np.asarray(logprobs[1:], dtype=np.float32) for logprobs in values]

    def release(self) -> None:
        self.client.release()


class BaseScorer:
    """The base model under the policy's LoRA adapter: no weights of its own, the arithmetic of the
    learner itself.
    """

    def __init__(self, policy: TrainingClient):
        self.policy = policy

    def logprobs(self, datums: Sequence[Datum], temperature: float = 1.0) -> list[np.ndarray]:
        bare = [
            Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]})
            for d in datums
        ]
        for datum, whole in zip(bare, datums, strict=True):
            # tells where the prompt ends, so that micro-batches are those of the policy
            if "mask" in whole.loss_fn_inputs:
                datum.loss_fn_inputs["weights"] = whole.loss_fn_inputs["mask"]
        output = self.policy.forward(
            bare, "cross_entropy", {"temperature": temperature}, adapters=False
        ).result()
        return [one["logprobs"].array for one in output.loss_fn_outputs]

    def release(self) -> None:
        """Nothing is its own."""


def check_vocabulary(
    student: TrainingClient, other: SamplingClient | TrainingClient, name: str
) -> None:
    """Raises UserError, naming tokens, unless both give every token the same id: logprobs are
    compared id by id.

    Without tokenizers the sizes of the vocabularies must agree; with them they may not (rows of
    padding).
    """
    tokenizers = student.info["tokenizer"], other.info["tokenizer"]
    if tokenizers[0] is None or tokenizers[1] is None:
        sizes = student.info["vocab_size"], other.info["vocab_size"]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"the {name} has {sizes[1]} tokens, the policy {sizes[0]}: logprobs are compared token by token"
            )
        return
    difference = vocabulary_difference(*(tokenizer.get_vocab() for tokenizer in tokenizers))
    if difference:
        raise UserError(
            f"the {name} has another vocabulary than the policy: {difference}. Choose one of the policy's family"
        )


def shares_vocabulary(
    student: TrainingClient, other: SamplingClient | TrainingClient, name: str
) -> bool:
    """Return whether both give every token the same id. Raises UserError if a tokenizer is missing
    and the sizes differ.
    """
    tokenizers = student.info["tokenizer"], other.info["tokenizer"]
    if tokenizers[0] is None or tokenizers[1] is None:
        check_vocabulary(student, other, name)
        return True
    return not vocabulary_difference(*(tokenizer.get_vocab() for tokenizer in tokenizers))


def vocabulary_difference(mine: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """In words, which tokens differ; "" where none does."""
    mine, theirs = (
        dict(sorted(vocabulary.items(), key=lambda item: item[1])) for vocabulary in (mine, theirs)
    )
    moved = [
        f"{token!r} is {i} here and {theirs[token]} there"
        for token, i in mine.items()
        if theirs.get(token, i) != i
    ]
    only_here = [repr(token) for token in mine if token not in theirs]
    only_there = [repr(token) for token in theirs if token not in mine]
    found = (
        (moved, "have other ids"),
        (only_here, "are the policy's alone"),
        (only_there, "are the other's alone"),
    )
    return "; ".join(
        f"{len(tokens)} tokens {what} ({', '.join(tokens[:4])})" for tokens, what in found if tokens
    )
