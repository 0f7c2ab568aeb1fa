"""Rows that are too long: how long they may be, and what becomes of those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rl.errors import UserError
from rl.renderers import Renderer
from rl.settings import DataSettings
from rl.types import Message, Problem

_TRIES = 8  # a text cut between tokens may be a token or two longer than what was left of it


class TooLong(UserError):
    """A row that is too long. `skip`: whether it is to be left out, whatever is done about other
    bad rows.
    """

    def __init__(self, message: str, skip: bool):
        super().__init__(message)
        self.skip = skip


@dataclass(frozen=True)
class Limits:
    """`max_prompt_tokens`, `max_row_tokens`: None where there is none but the model's context."""

    max_prompt_tokens: int | None = None
    max_row_tokens: int | None = None
    on_too_long: Literal["auto", "error", "skip", "cut"] = "auto"

    @classmethod
    def of(cls, data: DataSettings) -> Limits:
        return cls(data.max_prompt_tokens, data.max_row_tokens, data.on_too_long)

    @property
    def any(self) -> bool:
        return self.max_prompt_tokens is not None or self.max_row_tokens is not None

    def prompt_limit(self, sampled: int) -> tuple[int | None, str]:
        """(how long a prompt may be that `sampled` tokens are to follow, which setting says so)."""
        own, row = (
            self.max_prompt_tokens,
            None if self.max_row_tokens is None or not sampled else self.max_row_tokens - sampled,
        )
        if row is None or (own is not None and own <= row):
            return own, f"max_prompt_tokens {own}"
        return row, f"max_row_tokens {self.max_row_tokens} with max_tokens {sampled}"

    def refuse(self, text: str) -> TooLong:
        """What is raised for a row beyond a limit that was given."""
        return TooLong(
            f"{text}; --on-too-long skip leaves such rows out, cut shortens them",
            self.on_too_long in ("auto", "skip"),
        )

    def beyond_context(self, text: str) -> TooLong:
        """What is raised for a row beyond the model's context."""
        return TooLong(text, self.on_too_long == "skip")


def cut_prompt(problem: Problem, renderer: Renderer, limit: int, where: str) -> Problem:
    """The problem with a prompt of at most `limit` tokens: its longest message of the user loses
    its beginning.

    What the template writes, the system message and the end of what is asked stay. UserError where
    that is not enough.
    """
    messages: list[Message] = list(problem.messages)
    users = [
        i
        for i, message in enumerate(messages)
        if message["role"] == "user" and isinstance(message["content"], str)
    ]
    if not users:
        raise UserError(
            f"{where} has no message of the user that could be cut to max_prompt_tokens {limit}: leave out the row"
        )
    at = max(users, key=lambda i: len(messages[i]["content"]))
    tokens = renderer.encode(messages[at]["content"])
    length = renderer.build_generation_prompt(messages).length
    for _ in range(_TRIES):
        if length <= limit:
            return replace(problem, messages=tuple(messages))
        tokens = tokens[length - limit :]
        if not tokens:
            break
        messages[at] = {**messages[at], "content": _whole(renderer, tokens)}
        tokens, length = (
            renderer.encode(messages[at]["content"]),
            renderer.build_generation_prompt(messages).length,
        )
    raise UserError(
        f"{where} cannot be cut to a prompt of {limit} tokens: without its longest message of the user it still takes "
        f"{length}; raise max_prompt_tokens, or leave out the row"
    )


def _whole(renderer: Renderer, tokens: Sequence[int]) -> str:
    """Their text, without half a character at its beginning."""
    text = str(
        renderer.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )
    return text.lstrip("\ufffd")
