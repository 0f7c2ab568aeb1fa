"""What is asked, and what was answered before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # {"role": "user" | "assistant" | "system" | "tool", "content": str, ...}


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer that was sampled and rewarded earlier. `place`: its file and line.

    `prompt_tokens`, `tokens`, `logprobs` (of `tokens`, at `temperature`): as it was drawn, where
    the file has them. `experts`: those of each of these tokens but the last, where a run noted them
    (`experts_from_text` reads it).
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
    """One row of a data set, ready to be asked.

    `messages` go through a renderer. `meta` reaches the reward (its "answer" is the expected answer
    by convention). `response`: a worked answer, where the data has one (supervised training). `tag`
    names the data set in metrics. `index`: the row's position in its data set, the problem's
    identity in random streams and rollouts. `rejected`: where the data has pairs, the answer that
    `response` was preferred to. `answers`: where the data is of stored rollouts, those to this
    problem. `place`: file and line of a row that was read. `chat`: whether the row's prompt was a
    list of messages.
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
