"""Render without special tokens: "plain" (the prompt unchanged) and "role_colon" ("User: ...",
"Assistant: ...").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.renderers.renderer import (
    Renderer,
    TrainOn,
    build_weighted_example,
    find_trained_messages,
    get_begin_tokens,
    get_text_content,
    normalize_messages,
)
from rl.renderers.response_parsing import (
    CALL_BEGIN,
    CALL_END,
    Tools,
    format_with_calls,
    parse_arguments,
)
from rl.renderers.tool_call_formats import TAGGED_CALLS, ToolCallFormat
from rl.types import Message, Messages, ModelInput

_SEPARATOR = "\n\n"
_STOP_TEXT = "\n\nUser:"


class _TextRenderer(Renderer):
    """Implement what both text renderers share: tools. role_colon writes their descriptions first;
    calls are written in the format of Qwen's templates.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = (), tools: Tools = ()):
        super().__init__(tokenizer, eos_token_ids)
        self.tools, self._begin = list(tools), get_begin_tokens(tokenizer)

    def with_tools(self, tools: Tools) -> Renderer:
        if not tools:
            return self
        renderer = copy(self)
        renderer.tools = list(tools)
        return renderer

    def available_tools(self) -> Tools:
        return self.tools

    def call_format(self) -> ToolCallFormat | None:
        return TAGGED_CALLS if self.tools else None

    def _get_text(self, message: Message) -> str:
        """Return the text of a message, including its calls if tools are set."""
        return (
            format_with_calls(parse_arguments(message))
            if self.tools and message["role"] == "assistant"
            else get_text_content(message)
        )


class PlainRenderer(_TextRenderer):
    """Render the text of the messages without roles, in sequence; assistant messages end with EOS.

    For base and character models: "12+34=" is the prompt, "46" and EOS the response. Tools are not
    described to the model, which must learn them in training.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = (), tools: Tools = ()):
        super().__init__(tokenizer, eos_token_ids, tools)
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the renderer 'plain' ends a response with EOS, which the tokenizer lacks: set its "
                "eos_token"
            )
        self._end_id = tokenizer.eos_token_id

    def build_generation_prompt(self, messages: Messages) -> ModelInput:
        return ModelInput.from_ints(
            [*self._begin, *chain(*self._iter_message_tokens(normalize_messages(messages)))]
        )

    def build_supervised_example(
        self, messages: Messages, train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        messages = normalize_messages(messages)
        trained = set(find_trained_messages(messages, train_on))
        pieces = [
            (piece, float(index in trained))
            for index, piece in enumerate(self._iter_message_tokens(messages))
        ]
        return build_weighted_example([(self._begin, 0.0), *pieces])

    def extend_prompt(
        self,
        messages: Messages,
        seen: Sequence[int],
        answer: Sequence[int],
        new: Messages,
    ) -> ModelInput:
        """Extend the prompt; see `Renderer`. This always succeeds, because the format has no roles
        and does not change earlier text.
        """
        mark = [] if answer and answer[-1] in self.end_tokens else [self._end_id]
        following = self._iter_message_tokens(normalize_messages(new), continuing=True)
        return ModelInput.from_ints([*seen, *answer, *mark, *chain(*following)])

    def _iter_message_tokens(
        self, messages: Messages, continuing: bool = False
    ) -> Iterator[list[int]]:
        """Yield the tokens of each message."""
        for index, message in enumerate(messages):
            tokens = self._encode(
                self.escaper.escape(self._get_text(message)), continuing=continuing or index > 0
            )
            yield [*tokens, self._end_id] if message["role"] == "assistant" else tokens


class RoleColonRenderer(_TextRenderer):
    """Render as "User: Hi\\n\\nAssistant: Hello\\n\\nUser:", for base models without a template.
    The next "User:" ends a response.

    That mark is trained with each response, so that the model stops; EOS also ends a response if
    the tokenizer has it.
    """

    def build_generation_prompt(self, messages: Messages) -> ModelInput:
        text = self._render_tools() + self._render_text(normalize_messages(messages)) + "Assistant:"
        return ModelInput.from_ints([*self._begin, *self._encode(text)])

    def extend_prompt(
        self,
        messages: Messages,
        seen: Sequence[int],
        answer: Sequence[int],
        new: Messages,
    ) -> ModelInput | None:
        """Extend the prompt; see `Renderer`. Returns None if the model wrote "User:" itself and
        another role speaks next, or if it wrote more text after it.
        """
        before, stopped = self._split_at_end(answer)
        tail = self._render_text(normalize_messages(new)) + "Assistant:"
        _, mark, after = self.decode(before).partition(_STOP_TEXT)
        if not mark:
            following = _SEPARATOR + tail
        elif stopped or after or not tail.startswith("User:"):
            return None
        else:
            following = tail.removeprefix("User:")
        return ModelInput.from_ints([*seen, *answer, *self._encode(following, continuing=True)])

    def _render_tools(self) -> str:
        """Return the description of tools and of the format of calls."""
        if not self.tools:
            return ""
        described = "\n".join(
            self.escaper.escape(json.dumps(tool["function"], ensure_ascii=False))
            for tool in self.tools
        )
        form = (
            f'{CALL_BEGIN}\n{{"name": "the tool", "arguments": {{"its argument": "a value"}}}}\n'
            f"{CALL_END}"
        )
        return (
            "System: You may call tools. To call one, "
            f"write\n{form}\nTools:\n{described}{_SEPARATOR}"
        )

    def build_supervised_example(
        self, messages: Messages, train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        messages = normalize_messages(messages)
        text = self._render_tools() + self._render_text(messages) + "User:"
        cuts: list[int] = []
        for index in find_trained_messages(messages, train_on):
            before = self._render_tools() + self._render_text(messages[:index]) + "Assistant:"
            answer = self.escaper.escape(self._get_text(messages[index]))
            begin, end = len(before), len(f"{before} {answer}{_SEPARATOR}")
            # if another role than the user follows, only the empty line is trained
            cuts += [begin, end + len("User:") if text.startswith("User:", end) else end]
        pieces = self.encode_in_pieces(text, cuts)
        return build_weighted_example(
            [(self._begin, 0.0), *((piece, float(i % 2)) for i, piece in enumerate(pieces))]
        )

    def get_stop_sequences(self) -> list[Any]:
        return [_STOP_TEXT, *([CALL_END] if self.tools else []), *self.stops]

    def marks(self) -> tuple[str, ...]:
        return (*super().marks(), _STOP_TEXT)

    def get_answer_text(self, tokens: Sequence[int]) -> str:
        return super().get_answer_text(tokens).partition(_STOP_TEXT)[0].strip()

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        before, stopped = self._split_at_end(tokens)
        content, mark, _ = self.decode(before).partition(_STOP_TEXT)
        called = bool(self.tools) and content.rstrip().endswith(CALL_END)
        ended = stopped or bool(mark) or called
        return self._end_at_stop(self._parse_text(content.strip()), ended)

    def with_end_mark(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of the answer's text and the end mark, for every way in which they were
        sampled (".", then the mark, or ".\\n\\n" as a single token) or ended.
        """
        before, stopped = self._split_at_end(tokens)
        sampled_text = self._decode_after_role(before)
        text, mark, after = sampled_text.partition(_STOP_TEXT)
        if not mark and not stopped:
            return before
        if mark and not after:
            reencoded = self._encode(self.escaper.escape(sampled_text), continuing=True)
            # the text loses incomplete characters
            return reencoded if self._decode_after_role(reencoded) == sampled_text else before
        return self._encode(self.escaper.escape(f" {text.strip()}{_STOP_TEXT}"), continuing=True)

    def _decode_after_role(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens after the role, because some tokenizers drop a
        space at the start of a text.
        """
        role = self._encode("Assistant:", continuing=True)
        return self.decode([*role, *tokens]).removeprefix(self.decode(role))

    def without_end_mark(self, tokens: Sequence[int]) -> list[int]:
        before = self._split_at_end(tokens)[0]
        text, mark, _ = self.decode(before).partition(_STOP_TEXT)
        return (
            self._encode(self.escaper.escape(f" {text.strip()}"), continuing=True)
            if mark
            else before
        )

    def _render_text(self, messages: Messages) -> str:
        """Return the escaped text of messages with their roles."""
        return "".join(
            self.escaper.escape(f"{message['role'].capitalize()}: {self._get_text(message)}")
            + _SEPARATOR
            for message in messages
        )
