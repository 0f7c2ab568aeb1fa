"""Define problems and stored answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # {"role": "user" | "assistant" | "system" | "tool", "content": str, ...}
Messages = Sequence[Message]  # a conversation


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """Hold an answer that was sampled and rewarded earlier.

    prompt_tokens, tokens, logprobs (of `tokens`, at `temperature`): as sampled, if the file has
        them.
    experts: the experts of each of these tokens but the last, if a run recorded them
        (`experts_from_text` decodes the text).
    place: the answer's file and line.
    """

    reward: float
    text: str = ""
    prompt_tokens: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    temperature: float | None = None
    place: str = ""
    experts: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Hold a row of a data set as a problem.

    messages: the prompt, to be rendered.
    meta: passed to the reward; its "answer" is the expected answer by convention.
    response: the reference answer, if the data has it (supervised training).
    tag: the name of the data set in metrics.
    index: the row's position in its data set; identifies the problem in random streams and
        rollouts.
    rejected: the answer that `response` was preferred to, if the data has pairs.
    answers: the stored answers to this problem, if the data is stored rollouts.
    place: the file and line of a row that was read.
    chat: whether the row's prompt was a list of messages.
    tools: the tools that the prompt describes, each {"type": "function", "function": {...}}.
    """

    messages: Sequence[Message]
    meta: Mapping[str, Any] = field(default_factory=dict)
    response: str | None = None
    tag: str = "problem"
    index: int = 0
    rejected: str | None = None
    answers: Sequence[StoredAnswer] = ()
    place: str = ""
    chat: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
