"""What every renderer does: messages to tokens, and sampled tokens back to a message.

Shapes: a supervised example is N tokens and N weights, float32, 1 where the token is learnt (not
shifted).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rl.errors import UserError
from rl.images import has_images, is_image_part
from rl.renderers.call_forms import CallForm
from rl.renderers.ends import ends_of
from rl.renderers.pictures import parts_of
from rl.renderers.shield import Shield
from rl.types import Message, ModelInput

TrainOn = Literal["last_assistant", "all_assistant"]
Span = tuple[int, int]


class Renderer(ABC):
    """Messages to tokens and back, for one tokenizer (any of transformers', or one with its encode
    and decode).

    `eos_token_ids`: tokens that end a sample beside those known of the model (`rl.renderers.ends`).
    Special tokens that stand in a message are text (`rl.renderers.shield`).
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = (), written: str = ""):
        self.tokenizer = tokenizer
        self.ends = frozenset(ends_of(tokenizer) | {int(token) for token in eos_token_ids})
        self.shield = Shield(tokenizer, written)

    @abstractmethod
    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        """The tokens after which the model writes the next assistant message."""

    @abstractmethod
    def build_supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        """The whole conversation as tokens, and weights: 1 on what the model is to write, its
        end-of-turn mark included.

        "last_assistant": only the last message, which must be the assistant's; the tokens before
        the first weight of 1 are those of `build_generation_prompt(messages[:-1])`.
        "all_assistant": every message of the assistant.
        """

    @abstractmethod
    def get_stop_sequences(self) -> list[str] | list[int]:
        """What ends an assistant message: token ids, or texts. Goes into `SamplingParams.stop`."""

    @abstractmethod
    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        """Sampled tokens as a message, without what ended it; False where nothing did (cut off by
        the length limit).
        """

    @abstractmethod
    def finished(self, tokens: Sequence[int]) -> list[int]:
        """Sampled tokens as `build_supervised_example` writes such an answer: its end mark last,
        whichever token ended it.

        Nothing follows the mark. An answer that nothing ended is as it is.
        """

    @abstractmethod
    def bridge(
        self,
        messages: Sequence[Message],
        seen: Sequence[int],
        answer: Sequence[int],
        new: Sequence[Message],
    ) -> ModelInput | None:
        """The prompt of the next turn as an extension, token for token, of what the model has read
        and written; None where there is none.

        messages  the conversation up to the answer. seen: its tokens, the answer's prompt. answer:
        the tokens that were sampled new       what is said to the model next; the last message of
        these is not the assistant's The tokens are `seen`, `answer`, the end mark where the answer
        lacks it (it was cut off), and the rendering of `new`. Nothing that the model wrote is
        decoded and tokenised again. None where the conversation, with `new` in it, is written
        otherwise than the model has seen it, such as by a template that leaves out earlier
        thoughts: then `build_generation_prompt` writes it anew.
        """

    def text_of(self, tokens: Sequence[int]) -> str:
        """What `parse_response` takes apart: the text of sampled tokens, without what ended it."""
        return self._decode(self._until_end(tokens)[0])

    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that may be called."""
        return ()

    def call_form(self) -> CallForm | None:
        """How the model writes calls, where it is neither JSON within <tool_call> nor a message of
        its own.
        """
        return None

    def thought_marks(self) -> tuple[str, str] | None:
        """What stands around thoughts in an answer's text, both of them among `marks`; None where
        thoughts are not taken out of it.
        """
        return None

    def marks(self) -> tuple[str, ...]:
        """Texts with which an answer's text ends, or becomes something else: thoughts, calls of
        tools, another's turn.
        """
        return ()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """This renderer, where the model may call `tools`, each {"type": "function", "function":
        {name, description, parameters}}.

        Their descriptions stand where the model's own template puts them; `parse_response` takes
        calls apart.
        """
        raise UserError(f"{type(self).__name__} cannot render tools")

    def with_settings(self, settings: Mapping[str, Any]) -> Renderer:
        """Return this renderer with settings of its chat template (enable_thinking=False). Raises
        UserError for one it has not.
        """
        if not settings:
            return self
        raise UserError(
            f"the renderer of this model uses no chat template, so it takes no settings; got {sorted(settings)}"
        )

    def unfinished(self, tokens: Sequence[int]) -> list[int]:
        """An answer's tokens without its end mark, as of one that was cut off there."""
        return self._until_end(tokens)[0]

    def judged(self, prompt: Sequence[int], answer: Sequence[int]) -> ModelInput:
        """What a reward model reads of an answer, the same where it learns and where it judges; the
        last position is its score's.

        `answer`: as it was sampled, or the tokens that a supervised example learns.
        """
        return ModelInput.from_ints([*prompt, *self.finished(answer)])

    def build_text(self, text: str) -> ModelInput:
        """A text of no conversation, to be learnt as it stands: BOS where the tokenizer puts one,
        and EOS where it knows one.

        Special tokens written in it are special tokens: a text that was put through a template
        beforehand is read as that.
        """
        tokenizer = self.tokenizer
        tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
        begin = [token for token in begin_tokens(tokenizer) if tokens[:1] != [token]]
        end = [] if tokenizer.eos_token_id in (None, *tokens[-1:]) else [tokenizer.eos_token_id]
        return ModelInput.from_ints([*begin, *tokens, *end])

    def encode(self, text: str) -> list[int]:
        """Tokens of the text alone, without the tokenizer's own BOS or EOS; special tokens written
        in it are spelt out as text.

        UserError where the vocabulary lacks some of it and has no token for what is unknown.
        """
        return self._encode(self.shield.cover(text))

    def _encode(self, text: str, *, continuing: bool = False) -> list[int]:
        """Tokens of a text that holds the renderer's own special tokens, and other people's
        covered.

        `continuing`: something stands before it, so that a tokenizer that marks the beginning of a
        text must not do so here.
        """
        try:
            if continuing and self.shield.wall is not None:
                return self.shield.encode(self.shield.wall + text)[1:]
            return self.shield.encode(text)
        except (
            UnicodeEncodeError,
            TypeError,
        ) as error:  # some versions of tokenizers raise the one, some the other
            if not any("\ud800" <= character <= "\udfff" for character in text):
                raise
            raise UserError(
                f"the text {text[:60]!r} holds half of a surrogate pair, which is no text: mend the data"
            ) from error
        except Exception as error:  # tokenizers raises nothing narrower for that
            if "[UNK]" not in str(error):
                raise
            raise UserError(
                f"the model's tokenizer has no tokens for some of the text {text[:60]!r}: take a model (base_model) or a tokenizer "
                "whose vocabulary covers the data"
            ) from error

    def _decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens as it is: clean-up would change spaces before punctuation."""
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _until_end(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens before the first that ends a sample, and whether there was one."""
        end = next(
            (position for position, token in enumerate(tokens) if token in self.ends), len(tokens)
        )
        return list(tokens[:end]), end < len(tokens)

    def encode_in_pieces(self, text: str, cuts: Sequence[int]) -> list[list[int]]:
        """`text` (other people's special tokens covered) as tokens, in pieces that meet at the
        character positions `cuts` (ascending).

        The tokens of the text as a whole, wherever these respect the cut. Where a token would
        straddle it (a prompt that ends in a line break, a response that begins with one), both
        sides are tokenised apart: a sampler sees the prompt alone.
        """
        pieces: list[list[int]] = []
        # where the text begins that `run` holds the tokens of, and how many of them are in pieces
        base, used = 0, 0
        run = self._encode(text)
        for cut in cuts:
            head = self._encode(text[base:cut], continuing=base > 0)
            pieces.append(head[used:])
            used = len(head)
            if run[:used] != head:
                base, used = cut, 0
                run = self._encode(text[cut:], continuing=True)
        return [*pieces, run[used:]]


def weighted_example(
    pieces: Sequence[tuple[Sequence[int], float]],
) -> tuple[ModelInput, np.ndarray]:
    """Pieces of (tokens, weight) joined into a supervised example."""
    tokens = [token for piece, _ in pieces for token in piece]
    weights = np.concatenate(
        [np.full(len(piece), weight, dtype=np.float32) for piece, weight in pieces]
    )
    return ModelInput.from_ints(tokens), weights


def trained_indices(messages: Sequence[Message], train_on: TrainOn) -> list[int]:
    """Which messages are learnt. Raises UserError where the conversation does not fit."""
    if train_on not in ("last_assistant", "all_assistant"):
        raise UserError(f"train_on is 'last_assistant' or 'all_assistant', got {train_on!r}")
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "assistant":
        raise UserError(
            f"a supervised example ends with a message of the assistant, this one has the roles {roles}"
        )
    return (
        [len(roles) - 1]
        if train_on == "last_assistant"
        else [i for i, role in enumerate(roles) if role == "assistant"]
    )


def content_text(content: Any, where: str) -> str:
    """The text of a message's content: a text, or a list of parts {"type": "text", "text": ...},
    put together.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(
            f"{where} has content of type {type(content).__name__}; a text is expected, or a list of parts of text"
        )
    for part in content:
        if is_image_part(part):
            raise UserError(
                f"{where} has an image, and what is rendered here is text alone: take a vision-language model with its own template "
                "(the renderer chat_template; a model folder has its image processor beside it), or leave the image out"
            )
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = (
                repr(part["type"]) if isinstance(part, dict) and "type" in part else str(part)[:60]
            )
            raise UserError(
                f'{where} has a part of content that is not text ({kind}): parts are {{"type": "text", "text": ...}}'
            )
    return "".join(part["text"] for part in content)


def texts(messages: Sequence[Message], *, sees: bool = False) -> list[Message]:
    """The messages with their contents as text. UserError for one without a role, or without
    content (and calls of tools).

    `sees`: contents with images stay lists of parts (`rl.renderers.pictures`); else they are
    errors.
    """
    found = []
    for number, message in enumerate(messages):
        where = f"message {number} of the conversation"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} is no {{'role': ..., 'content': ...}}: {str(message)[:60]!r}")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        if sees and has_images([message]):
            found.append(
                {**message, "content": parts_of(message["content"], message["role"], where)}
            )
            continue
        found.append({**message, "content": content_text(content, where)})
    return found


def said(message: Message) -> str:
    """The text of a message (one of `texts`) for renderers that write nothing else."""
    if message.get("tool_calls"):
        raise UserError(
            "this renderer writes text alone, and a message calls tools: use the model's own template (chat_template)"
        )
    return str(message["content"])


def begin_tokens(tokenizer: Any) -> list[int]:
    """[BOS] where the tokenizer itself puts one before a text, else []."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    return [bos] if list(tokenizer.encode("a", add_special_tokens=True))[:1] == [bos] else []
