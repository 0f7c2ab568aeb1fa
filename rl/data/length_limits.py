"""Define the length limits of rows, and skip or cut the rows that exceed them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rl.config import DataSettings
from rl.errors import UserError
from rl.renderers import Renderer, renderer_for_row
from rl.types import Message, Problem

_TRIES = 8  # a text cut between tokens may encode to a few tokens more than remained


class RowTooLong(UserError):
    """Report a row that is too long.

    skip: skip the row, whatever on_bad_row says about other bad rows.
    """

    def __init__(self, message: str, skip: bool):
        super().__init__(message)
        self.skip = skip


@dataclass(frozen=True)
class LengthLimits:
    """Hold the length limits of rows in tokens; None: only the model's context is a limit."""

    max_prompt_tokens: int | None = None
    max_row_tokens: int | None = None
    on_too_long: Literal["auto", "error", "skip", "cut"] = "auto"

    @classmethod
    def from_settings(cls, data: DataSettings) -> LengthLimits:
        """Return the limits of the data settings."""
        return cls(data.max_prompt_tokens, data.max_row_tokens, data.on_too_long)

    @property
    def has_limits(self) -> bool:
        """Return whether any limit is set."""
        return self.max_prompt_tokens is not None or self.max_row_tokens is not None

    @property
    def row_cut(self) -> int | None:
        """Return the number of tokens to which a row is cut; None if rows are not cut."""
        return self.max_row_tokens if self.on_too_long == "cut" else None

    def prompt_limit(self, sampled: int) -> tuple[int | None, str]:
        """Return (limit of a prompt before `sampled` sampled tokens, text of the setting)."""
        prompt, row = self.max_prompt_tokens, self.max_row_tokens
        if row is None or not sampled or (prompt is not None and prompt <= row - sampled):
            return prompt, f"max_prompt_tokens {prompt}"
        return row - sampled, f"max_row_tokens {row} with max_tokens {sampled}"

    def limit_error(self, text: str) -> RowTooLong:
        """Return the error for a row that exceeds a configured limit."""
        return RowTooLong(
            f"{text}; --on-too-long skip leaves such rows out, cut shortens them",
            self.on_too_long in ("auto", "skip"),
        )

    def context_error(self, text: str) -> RowTooLong:
        """Return the error for a row that exceeds the model's context."""
        return RowTooLong(text, self.on_too_long == "skip")


def cut_prompt(problem: Problem, renderer: Renderer, limit: int, where: str) -> Problem:
    """Cut the beginning of the longest user message, so that the prompt has at most `limit` tokens.

    The text of the template, the system message and the end of the user message are kept. Raises
    UserError if the prompt is still too long.
    """
    messages: list[Message] = list(problem.messages)
    renderer = renderer_for_row(renderer, problem)
    users = [
        i
        for i, message in enumerate(messages)
        if message["role"] == "user" and isinstance(message["content"], str)
    ]
    if not users:
        raise UserError(
            f"{where} has no user message that could be cut to max_prompt_tokens {limit}: "
            "leave out the row"
        )
    at = max(users, key=lambda i: len(messages[i]["content"]))
    for _ in range(_TRIES):
        length = renderer.build_generation_prompt(messages).length
        if length <= limit:
            return replace(problem, messages=tuple(messages))
        tokens = renderer.encode(messages[at]["content"])[length - limit :]
        if not tokens:
            break
        # without a partial character at the beginning
        messages[at] = {**messages[at], "content": renderer.decode(tokens).lstrip("\ufffd")}
    raise UserError(
        f"{where} cannot be cut to a prompt of {limit} tokens: without its longest user message "
        f"it still takes {length}; raise max_prompt_tokens, or leave out the row"
    )
