"""Judge two answers with a language model: it is shown both, and the probabilities of the labels A,
B and tie are read.

Every pair is shown in both orders and the two readings are averaged, since models favor a position.
Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.judges.reward_scores import compute_answer_logprobs
from rl.renderers import THOUGHT_BEGIN, normalize_messages, split_thoughts
from rl.types import Message, ModelInput

if TYPE_CHECKING:
    from rl.client import SamplingClient

VERDICT_LABELS = ("A", "B", "tie")
_ROLE_NAMES = {"user": "User", "assistant": "Assistant", "system": "System"}


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """Hold two answers to the same conversation."""

    messages: Sequence[Message]
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class ComparisonVerdict:
    """Hold the probabilities that the first answer is better, the second is, or neither. They sum
    to 1 and are averaged over both orders.

    `consistent` tells whether the most likely label means the same in both orders.
    """

    first: float
    second: float
    tie: float
    consistent: bool


def make_comparison(first: Sequence[Message], second: Sequence[Message]) -> AnswerComparison:
    """Return the comparison of two conversations that each end in an answer.

    Their common beginning is the conversation, shown once. The rest of each is its answer: its last
    message, or several messages with their roles if either continued for more turns. Thoughts of
    earlier turns are dropped, as are those of an answer.
    """
    shared = 0
    while shared < min(len(first), len(second)) - 1 and first[shared] == second[shared]:
        shared += 1
    rests = [normalize_messages(list(messages[shared:])) for messages in (first, second)]
    if max(map(len, rests)) == 1:
        answers = [str(rest[0]["content"]) for rest in rests]
    else:
        answers = ["\n\n".join(_format_message(message) for message in rest) for rest in rests]
    return AnswerComparison(list(first[:shared]), answers[0], answers[1])


def _format_message(message: Message) -> str:
    """Return a message as text with its role, without thoughts."""
    content = str(message["content"])
    text = drop_thoughts(content) if message["role"] == "assistant" else content
    return f"{_ROLE_NAMES.get(message['role'], message['role'])}: {text}"


def drop_thoughts(answer: str) -> str:
    """Return an answer without its thoughts and surrounding whitespace; "" for a thought that was
    cut off.
    """
    text = split_thoughts(answer)[0].strip()
    return "" if text.startswith(THOUGHT_BEGIN) else text


def swap_answers(comparison: AnswerComparison) -> AnswerComparison:
    """Return the comparison with its answers in the other order."""
    return AnswerComparison(comparison.messages, comparison.second, comparison.first)


def make_comparison_prompt(comparison: AnswerComparison) -> list[Message]:
    """Return the prompt to which a judge answers A, B or tie. A conversation of a single message is
    shown without its role.

    Answers are shown without their thoughts and surrounding whitespace: a sampler returns them in
    this form, and rows are shown in the same form.
    """
    conversation = format_conversation(comparison.messages)
    first, second = map(drop_thoughts, (comparison.first, comparison.second))
    text = (
        f"[Conversation]\n{conversation}\n\n[Answer A]\n{first}\n\n[Answer B]\n{second}\n\n"
        "Which answer is better? Say A, B or tie.\n"
    )
    return [{"role": "user", "content": text}]


def format_conversation(messages: Sequence[Message]) -> str:
    """Return a conversation as shown to a judge: the text of a single message, else each message
    with its role.
    """
    messages = normalize_messages(messages)
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{_ROLE_NAMES.get(m['role'], m['role'])}: {m['content']}" for m in messages)


def make_verdict_examples(
    comparison: AnswerComparison, renderer: Any
) -> list[tuple[ModelInput, np.ndarray]]:
    """Return tokens and weights (1 on the verdict) of each label in each order: A, B, tie; A, B,
    tie.
    """
    return [
        renderer.build_supervised_example(
            [*make_comparison_prompt(ordered), {"role": "assistant", "content": label}]
        )
        for ordered in (comparison, swap_answers(comparison))
        for label in VERDICT_LABELS
    ]


@dataclass(eq=False)
class ComparisonModel:
    """Judge comparisons. `client` scores the labels and samples nothing; `renderer` is the judge's
    renderer.
    """

    client: SamplingClient
    renderer: Any

    def compare(self, comparisons: Sequence[AnswerComparison]) -> list[ComparisonVerdict]:
        """Return a verdict for each comparison. Six sequences are scored per comparison: two
        orders, three labels. Raises UserError if one exceeds the judge's context.
        """
        examples = (
            example
            for comparison in comparisons
            for example in make_verdict_examples(comparison, self.renderer)
        )
        logprobs = compute_answer_logprobs(
            self.client,
            examples,
            judge=f"the comparison model {self.client.info['base_model']}",
            text="a conversation with two answers",
            remedy="lower max_tokens, or use a comparison model",
        )
        orders = np.asarray(logprobs).reshape(-1, 2, 3)
        return [_make_verdict(*pair) for pair in orders]


def _make_verdict(logprobs: np.ndarray, swapped_logprobs: np.ndarray) -> ComparisonVerdict:
    """Return the verdict from log P of (A, B, tie) in each order, normalized to sum to 1 over the
    three.
    """
    p, q = (np.exp(x - np.logaddexp.reduce(x)) for x in (logprobs, swapped_logprobs))
    same = {0: 1, 1: 0, 2: 2}[int(p.argmax())] == int(q.argmax())
    return ComparisonVerdict(
        float(p[0] + q[1]) / 2, float(p[1] + q[0]) / 2, float(p[2] + q[2]) / 2, same
    )
