"""Renderers without special tokens: "plain" (the prompt as it is) and "role_colon" ("User: ...", "Assistant: ...")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.renderers.base import Renderer, TrainOn, begin_tokens, text_of, trained_indices, weighted_example
from rl.types import Message, ModelInput

_TURN = "\n\n"
_STOP = "\n\nUser:"


class PlainRenderer(Renderer):
    """The text of the messages, one after the other, without roles; the assistant's end with EOS.

    For base and character models: "12+34=" is the prompt, "46" and EOS the response.
    """

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        if tokenizer.eos_token_id is None:
            raise UserError("the renderer 'plain' ends a response with EOS, which the tokenizer lacks: set its eos_token")
        self._eos: int = tokenizer.eos_token_id
        self._begin = begin_tokens(tokenizer)

    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        return ModelInput.from_ints([*self._begin, *(token for message in messages for token in self._message(message))])

    def build_supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        trained = set(trained_indices(messages, train_on))
        pieces = [(self._message(message), float(index in trained)) for index, message in enumerate(messages)]
        return weighted_example([(self._begin, 0.0), *pieces])

    def get_stop_sequences(self) -> list[int]:
        return [self._eos]

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        content, stopped = _until_eos(self.tokenizer, tokens)
        return {"role": "assistant", "content": content}, stopped

    def _message(self, message: Message) -> list[int]:
        tokens = self.encode(text_of(message))
        return [*tokens, self._eos] if message["role"] == "assistant" else tokens


class RoleColonRenderer(Renderer):
    """ "User: Hi\\n\\nAssistant: Hello\\n\\nUser:", for base models without a template. The next "User:" ends a response.

    That mark is learnt with each response, so that the model stops; EOS, where the model knows one, stops it as well.
    """

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self._begin = begin_tokens(tokenizer)

    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        return ModelInput.from_ints([*self._begin, *self.encode(self._text(messages) + "Assistant:")])

    def build_supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        text = self._text(messages) + "User:"
        cuts: list[int] = []
        for index in trained_indices(messages, train_on):
            begin = len(self._text(messages[:index])) + len("Assistant:")
            end = begin + len(" ") + len(text_of(messages[index])) + len(_TURN)
            # where another role than the user's follows, the empty line alone is learnt
            cuts += [begin, end + len("User:") if text.startswith("User:", end) else end]
        pieces = self.encode_in_pieces(text, cuts)
        return weighted_example([(self._begin, 0.0), *((piece, float(i % 2)) for i, piece in enumerate(pieces))])

    def get_stop_sequences(self) -> list[str]:
        return [_STOP]

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        text, stopped = _until_eos(self.tokenizer, tokens)
        content, mark, _ = text.partition(_STOP)
        return {"role": "assistant", "content": content.strip()}, stopped or bool(mark)

    def _text(self, messages: Sequence[Message]) -> str:
        return "".join(f"{message['role'].capitalize()}: {text_of(message)}{_TURN}" for message in messages)


def _until_eos(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, bool]:
    """The text before EOS, and whether there was one."""
    eos = tokenizer.eos_token_id
    end = next((position for position, token in enumerate(tokens) if token == eos), len(tokens))
    text = tokenizer.decode(list(tokens[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text, end < len(tokens)
