"""A language model as the judge of two answers: it is shown both, and the probabilities with which
it says A, B or tie are read.

Every pair is shown in both orders and the two readings are averaged, since models favour a place.
Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.renderers import split_thoughts, texts
from rl.types import Message, ModelInput

if TYPE_CHECKING:
    from rl.clients import SamplingClient

LABELS = ("A", "B", "tie")
_ROLES = {"user": "User", "assistant": "Assistant", "system": "System"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one conversation."""

    messages: Sequence[Message]
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Probabilities that the first answer is better, the second is, or neither, which add up to 1,
    over both orders.

    `consistent`: whether the likeliest label means the same in both orders.
    """

    first: float
    second: float
    tie: float
    consistent: bool


def comparison_of(first: Sequence[Message], second: Sequence[Message]) -> Comparison:
    """Make the comparison of two conversations that each end in an answer.

    What both begin with is the conversation, shown once; what follows is each one's answer: its
    last message, or several with their roles where either went on for more turns. Thoughts of
    earlier turns are left out, as those of an answer are.
    """
    shared = 0
    while shared < min(len(first), len(second)) - 1 and first[shared] == second[shared]:
        shared += 1
    rests = [texts(list(messages[shared:])) for messages in (first, second)]
    if max(map(len, rests)) == 1:
        answers = [str(rest[0]["content"]) for rest in rests]
    else:
        answers = ["\n\n".join(_with_role(message) for message in rest) for rest in rests]
    return Comparison(list(first[:shared]), answers[0], answers[1])


def _with_role(message: Message) -> str:
    content = str(message["content"])
    shown = split_thoughts(content)[0].strip() if message["role"] == "assistant" else content
    return f"{_ROLES.get(message['role'], message['role'])}: {shown}"


def swapped(one: Comparison) -> Comparison:
    return Comparison(one.messages, one.second, one.first)


def comparison_messages(one: Comparison) -> list[Message]:
    """The prompt to which a judge answers A, B or tie. A conversation of one message stands without
    its role.

    Answers stand without their thoughts and the space around them: so they come out of a sampler,
    and so rows are shown too.
    """
    asked = conversation_text(one.messages)
    first, second = (split_thoughts(answer)[0].strip() for answer in (one.first, one.second))
    text = (
        f"[Conversation]\n{asked}\n\n[Answer A]\n{first}\n\n[Answer B]\n{second}\n\n"
        "Which answer is better? Say A, B or tie.\n"
    )
    return [{"role": "user", "content": text}]


def conversation_text(messages: Sequence[Message]) -> str:
    """A conversation as a judge is shown it: of one message its text, else each with its role."""
    messages = texts(messages)
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{_ROLES.get(m['role'], m['role'])}: {m['content']}" for m in messages)


def verdict_examples(one: Comparison, renderer: Any) -> list[tuple[ModelInput, np.ndarray]]:
    """Tokens and weights (1 on the verdict) of each label in each order: A, B, tie; A, B, tie."""
    return [
        renderer.build_supervised_example(
            [*comparison_messages(shown), {"role": "assistant", "content": label}]
        )
        for shown in (one, swapped(one))
        for label in LABELS
    ]


class ComparisonModel:
    """A judge: `client` samples nothing, it scores the labels. `renderer`: the judge's own."""

    def __init__(self, client: SamplingClient, renderer: Any):
        self.client, self.renderer = client, renderer

    def verdicts(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """One for each comparison; six sequences are scored for it (two orders, three labels), all
        in one call.
        """
        examples = [
            example for one in comparisons for example in verdict_examples(one, self.renderer)
        ]
        found = self.client.compute_logprobs_many(
            [ModelInput.from_ints(tokens.to_ints()) for tokens, _ in examples]
        ).result()
        # log P of the label and its end mark; the first token's logprob is None, and it is never
        # part of a label
        logp = [
            sum(lp for lp, w in zip(lps[1:], weights[1:], strict=True) if w and lp is not None)
            for lps, (_, weights) in zip(found, examples, strict=True)
        ]
        return [
            _verdict(*np.asarray(logp[i : i + 6]).reshape(2, 3)) for i in range(0, len(logp), 6)
        ]


def _verdict(shown: np.ndarray, shown_swapped: np.ndarray) -> Verdict:
    """From log P of (A, B, tie) in each order, which are made to add up to 1 over the three."""
    p, q = (np.exp(x - np.logaddexp.reduce(x)) for x in (shown, shown_swapped))
    same = {0: 1, 1: 0, 2: 2}[int(p.argmax())] == int(q.argmax())
    return Verdict(float(p[0] + q[1]) / 2, float(p[1] + q[0]) / 2, float(p[2] + q[2]) / 2, same)
