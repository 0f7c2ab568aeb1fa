"""Add texts that end an answer, besides the model's end-of-turn tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.renderers.renderer import Renderer, TrainOn
from rl.renderers.response_parsing import Tools
from rl.renderers.tool_call_formats import ToolCallFormat
from rl.types import Message, ModelInput


class StopTextRenderer(Renderer):
    """Wrap a renderer so that answers also end before any of the texts `stops`, which are not part
    of the answer.
    """

    def __init__(self, inner: Renderer, stops: Sequence[str]):
        self.inner, self.stops = inner, tuple(stops)
        self.tokenizer, self.end_tokens, self.escaper = (
            inner.tokenizer,
            inner.end_tokens,
            inner.escaper,
        )

    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        return self.inner.build_generation_prompt(messages)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        return self.inner.build_supervised_example(messages, train_on)

    def get_stop_sequences(self) -> list[str] | list[int]:
        return [*self.inner.get_stop_sequences(), *self.stops]  # type: ignore[return-value, list-item]  # the sampler accepts both

    def get_answer_text(self, tokens: Sequence[int]) -> str:
        return self.inner.get_answer_text(tokens)

    def call_format(self) -> ToolCallFormat | None:
        return self.inner.call_format()

    def available_tools(self) -> Tools:
        return self.inner.available_tools()

    def thought_marks(self) -> tuple[str, str] | None:
        return self.inner.thought_marks()

    def marks(self) -> tuple[str, ...]:
        return (*self.inner.marks(), *self.stops)

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        message, ended = self.inner.parse_response(tokens)
        content = str(message["content"])
        cut = self.cut_at_stop(content)
        return (message, ended) if cut == content else ({**message, "content": cut}, True)

    def cut_at_stop(self, text: str) -> str:
        """Return the text before the first stop text."""
        return text[
            : min(
                (place for stop in self.stops if (place := text.find(stop)) >= 0), default=len(text)
            )
        ]

    def with_end_mark(self, tokens: Sequence[int]) -> list[int]:
        return self.inner.with_end_mark(tokens)

    def without_end_mark(self, tokens: Sequence[int]) -> list[int]:
        return self.inner.without_end_mark(tokens)

    def extend_prompt(
        self,
        messages: Sequence[Message],
        seen: Sequence[int],
        answer: Sequence[int],
        new: Sequence[Message],
    ) -> ModelInput | None:
        return self.inner.extend_prompt(messages, seen, answer, new)

    def with_tools(self, tools: Tools) -> Renderer:
        return StopTextRenderer(self.inner.with_tools(tools), self.stops)

    def with_settings(self, settings: Mapping[str, Any]) -> Renderer:
        return StopTextRenderer(self.inner.with_settings(settings), self.stops)
