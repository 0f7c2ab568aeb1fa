"""What every renderer does: messages to tokens, and sampled tokens back to a message.

Shapes: a supervised example is N tokens and N weights, float32, 1 where the token is learnt (not shifted).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rl.errors import UserError
from rl.types import Message, ModelInput

TrainOn = Literal["last_assistant", "all_assistant"]
Span = tuple[int, int]


class Renderer(ABC):
    """Messages to tokens and back, for one tokenizer (any of transformers', or one with its encode and decode)."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @abstractmethod
    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        """The tokens after which the model writes the next assistant message."""

    @abstractmethod
    def build_supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        """The whole conversation as tokens, and weights: 1 on what the model is to write, its end-of-turn mark included.

        "last_assistant": only the last message, which must be the assistant's; the tokens before the first weight of 1 are
        those of `build_generation_prompt(messages[:-1])`. "all_assistant": every message of the assistant.
        """

    @abstractmethod
    def get_stop_sequences(self) -> list[str] | list[int]:
        """What ends an assistant message: token ids, or texts. Goes into `SamplingParams.stop`."""

    @abstractmethod
    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        """Sampled tokens as a message, without what ended it; False where nothing did (cut off by the length limit)."""

    def encode(self, text: str) -> list[int]:
        """Tokens of the text alone, without the tokenizer's own BOS or EOS; special tokens written in it are recognised.

        UserError where the vocabulary lacks some of it and has no token for what is unknown.
        """
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # tokenizers raises nothing narrower for that
            if "[UNK]" not in str(error):
                raise
            raise UserError(
                f"the model's tokenizer has no tokens for some of the text {text[:60]!r}: take a model (base_model) or a tokenizer "
                "whose vocabulary covers the data"
            ) from error

    def encode_in_pieces(self, text: str, cuts: Sequence[int]) -> list[list[int]]:
        """`text` as tokens, in pieces that meet at the character positions `cuts` (ascending).

        The tokens of the text as a whole, wherever these respect the cut. Where a token would straddle it (a prompt that ends
        in a line break, a response that begins with one), both sides are tokenised apart: a sampler sees the prompt alone.
        """
        pieces, begin, rest = [], 0, self.encode(text)
        for cut in cuts:
            head = self.encode(text[begin:cut])
            if rest[: len(head)] == head:
                rest = rest[len(head) :]
            else:
                rest = self.encode(text[cut:])
            pieces.append(head)
            begin = cut
        return [*pieces, rest]


def weighted_example(pieces: Sequence[tuple[Sequence[int], float]]) -> tuple[ModelInput, np.ndarray]:
    """Pieces of (tokens, weight) joined into a supervised example."""
    tokens = [token for piece, _ in pieces for token in piece]
    weights = np.concatenate([np.full(len(piece), weight, dtype=np.float32) for piece, weight in pieces])
    return ModelInput.from_ints(tokens), weights


def trained_indices(messages: Sequence[Message], train_on: TrainOn) -> list[int]:
    """Which messages are learnt. Raises UserError where the conversation does not fit."""
    if train_on not in ("last_assistant", "all_assistant"):
        raise UserError(f"train_on is 'last_assistant' or 'all_assistant', got {train_on!r}")
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "assistant":
        raise UserError(f"a supervised example ends with a message of the assistant, this one has the roles {roles}")
    return [len(roles) - 1] if train_on == "last_assistant" else [i for i, role in enumerate(roles) if role == "assistant"]


def text_of(message: Message) -> str:
    """The content of a message that must be text."""
    if not isinstance(message.get("content"), str):
        raise UserError(f"this renderer takes text as content, got {message!r}; a model's own template may take it")
    return message["content"]


def begin_tokens(tokenizer: Any) -> list[int]:
    """[BOS] where the tokenizer itself puts one before a text, else []."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    return [bos] if list(tokenizer.encode("a", add_special_tokens=True))[:1] == [bos] else []
