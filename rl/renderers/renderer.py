"""Define the interface of renderers: messages to tokens, and sampled tokens back to a message.

Shapes: a supervised example has N tokens and N float32 weights, 1 for each trained token (not
shifted).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import numpy as np

from rl.errors import UserError
from rl.images import has_images, is_image_part
from rl.renderers.image_parts import split_image_parts
from rl.renderers.response_parsing import Tools, build_answer, split_thoughts
from rl.renderers.special_token_escaping import SpecialTokenEscaper
from rl.renderers.stop_tokens import get_end_tokens
from rl.renderers.tool_call_formats import ToolCallFormat
from rl.types import Message, Messages, ModelInput, Problem

TrainOn = Literal["last_assistant", "all_assistant"]
Span = tuple[int, int]


class Renderer(ABC):
    """Convert messages to tokens and back with a tokenizer (a transformers tokenizer, or an object
    with its encode and decode).

    `eos_token_ids`: tokens that end a sample, in addition to those known for the model
    (`rl.renderers.stop_tokens`). Special tokens in the text of a message are encoded as ordinary
    text (`rl.renderers.special_token_escaping`).
    """

    stops: tuple[str, ...] = ()  # texts before which an answer ends, besides its end mark
    _end_id: int  # the end-of-turn token, if the renderer writes one

    def __init__(
        self, tokenizer: Any, eos_token_ids: Iterable[int] = (), template_source: str = ""
    ):
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(
            get_end_tokens(tokenizer) | {int(token) for token in eos_token_ids}
        )
        self.escaper = SpecialTokenEscaper(tokenizer, template_source)

    @abstractmethod
    def build_generation_prompt(self, messages: Messages) -> ModelInput:
        """Return the prompt tokens for the next assistant message."""

    @abstractmethod
    def build_supervised_example(
        self, messages: Messages, train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        """Return the whole conversation as N tokens, and N weights: 1 on the text that the model is
        trained to write, including its end-of-turn token.

        "last_assistant": only the last message, which must be the assistant's; the tokens before
        the first weight of 1 equal `build_generation_prompt(messages[:-1])`. "all_assistant": every
        assistant message.
        """

    def get_stop_sequences(self) -> list[Any]:
        """Return the token ids or texts that end an answer, for `SamplingParams.stop`."""
        return [self._end_id, *sorted(self.end_tokens - {self._end_id}), *self.stops]

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        """Return (the message of the sampled tokens without their end mark, whether an end mark was
        sampled). False means that the length limit cut the answer off.
        """
        before, ended = self._split_at_end(tokens)
        return self._end_at_stop(self._parse_text(self.decode(before)), ended)

    def _parse_text(self, content: str) -> Message:
        """Return the text of an answer without its end mark as a message."""
        thoughts: str | None = None
        if (marks := self.thought_marks()) is not None:
            content, thoughts = split_thoughts(content, marks)
        if (form := self.call_format()) is None:
            return build_answer(content, thoughts)
        content, calls, unparsed = form.parse(content, self.available_tools())
        return build_answer(content, thoughts, calls, unparsed)

    def with_stops(self, stops: Sequence[str]) -> Renderer:
        """Return this renderer with texts before which answers also end. They are not part of the
        answer.
        """
        renderer = copy(self)
        renderer.stops = (*self.stops, *stops)
        return renderer

    def cut_at_stop(self, text: str) -> str:
        """Return the text before the first stop text."""
        places = (place for stop in self.stops if (place := text.find(stop)) >= 0)
        return text[: min(places, default=len(text))]

    def _end_at_stop(self, message: Message, ended: bool) -> tuple[Message, bool]:
        """Return the result of `parse_response`, cut at the first stop text."""
        content = str(message["content"])
        cut = self.cut_at_stop(content)
        return (message, ended) if cut == content else ({**message, "content": cut}, True)

    def with_end_mark(self, tokens: Sequence[int]) -> list[int]:
        """Return sampled tokens as `build_supervised_example` writes such an answer: with its
        end-of-turn token last, whichever token ended the sample.

        Nothing follows the end-of-turn token. An answer without an end stays unchanged.
        """
        before, ended = self._split_at_end(tokens)
        return [*before, self._end_id] if ended else before

    @abstractmethod
    def extend_prompt(
        self,
        messages: Messages,
        seen: Sequence[int],
        answer: Sequence[int],
        new: Messages,
    ) -> ModelInput | None:
        """Return the prompt of the next turn as a token-for-token extension of the previous prompt
        and answer, or None if that is impossible.

        messages  the conversation before the answer
        seen      the tokens of `messages`: the prompt of the answer
        answer    the sampled tokens
        new       the messages that follow the answer; the last of them is not the assistant's

        The result is `seen`, `answer`, the end mark if the answer lacks it (because it was cut
        off), and the rendering of `new`. No text of the model is decoded and tokenized again. The
        result is None if the template renders the conversation with `new` differently from the
        tokens that the model has seen, such as a template that removes earlier thoughts;
        `build_generation_prompt` then renders the whole conversation.
        """

    def get_answer_text(self, tokens: Sequence[int]) -> str:
        """Return the text of sampled tokens up to their end mark, which `parse_response` parses."""
        return self.decode(self._split_at_end(tokens)[0])

    def available_tools(self) -> Tools:
        """Return the tools that the model may call."""
        return ()

    def call_format(self) -> ToolCallFormat | None:
        """Return the format of tool calls in the text of an answer, or None if calls are separate
        messages or not parsed.
        """
        return None

    def thought_marks(self) -> tuple[str, str] | None:
        """Return the marks around thoughts in the text of an answer, both of which are in `marks`,
        or None if thoughts are not parsed.
        """
        return None

    def marks(self) -> tuple[str, ...]:
        """Return the texts that end the answer's text or start another part: thoughts, tool calls,
        another role's turn.
        """
        form = self.call_format()
        call = () if form is None else (form.begin,)
        return (*(self.thought_marks() or ()), *call, *self.stops)

    def with_tools(self, tools: Tools) -> Renderer:
        """Return this renderer with `tools` that the model may call, each {"type": "function",
        "function": {name, description, parameters}}.

        Their descriptions are rendered by the model's chat template; `parse_response` parses the
        calls. Raises UserError if the renderer has no place for tools.
        """
        raise UserError(f"{type(self).__name__} cannot render tools")

    def with_settings(self, settings: Mapping[str, Any]) -> Renderer:
        """Return this renderer with settings of its chat template (enable_thinking=False). Raises
        UserError for an unknown setting.
        """
        if not settings:
            return self
        raise UserError(
            "the renderer of this model uses no chat template, so it takes no settings; got "
            f"{sorted(settings)}"
        )

    def without_end_mark(self, tokens: Sequence[int]) -> list[int]:
        """Return an answer's tokens without its end mark, as if the answer had been cut off before
        it.
        """
        return self._split_at_end(tokens)[0]

    def reward_model_input(self, prompt: Sequence[int], answer: Sequence[int]) -> ModelInput:
        """Return the input of a reward model for an answer, the same in training and in use; the
        score is read at the last position.

        `answer`: the sampled tokens, or the trained tokens of a supervised example.
        """
        return ModelInput.from_ints([*prompt, *self.with_end_mark(answer)])

    def build_text(self, text: str) -> ModelInput:
        """Return the tokens of a text outside any conversation, for training: with BOS if the
        tokenizer adds it, and EOS if the tokenizer has it.

        Special tokens in the text are encoded as special tokens, because the text may be the output
        of a chat template.
        """
        tokenizer = self.tokenizer
        tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
        begin = [token for token in get_begin_tokens(tokenizer) if tokens[:1] != [token]]
        end = [] if tokenizer.eos_token_id in (None, *tokens[-1:]) else [tokenizer.eos_token_id]
        return ModelInput.from_ints([*begin, *tokens, *end])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the text, without BOS and EOS; special tokens in it are encoded as
        ordinary text.

        Raises UserError if the vocabulary lacks some of the text and has no token for unknown text.
        """
        return self._encode(self.escaper.escape(text))

    def _encode(self, text: str, *, continuing: bool = False) -> list[int]:
        """Return the tokens of a rendered text: the renderer's special tokens are encoded as such,
        those of messages are escaped already.

        `continuing`: other text precedes this text, so a tokenizer that marks the start of a text
        must not do so here.
        """
        try:
            if continuing and self.escaper.neutral_token is not None:
                return self.escaper.encode(self.escaper.neutral_token + text)[1:]
            return self.escaper.encode(text)
        except (
            UnicodeEncodeError,
            TypeError,
        ) as error:  # depends on the version of tokenizers
            if not any("\ud800" <= character <= "\udfff" for character in text):
                raise
            raise UserError(
                f"the text {text[:60]!r} holds half of a surrogate pair, which is not valid text: "
                "fix the data"
            ) from error
        except Exception as error:  # tokenizers raises no narrower exception here
            if "[UNK]" not in str(error):
                raise
            raise UserError(
                f"the model's tokenizer has no tokens for some of the text {text[:60]!r}: use a "
                "model (base_model) or a tokenizer with a vocabulary that covers the data"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens without clean-up, which would change spaces before
        punctuation.
        """
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _split_at_end(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """Return (the tokens before the first token that ends a sample, whether such a token
        exists).
        """
        end = next((i for i, token in enumerate(tokens) if token in self.end_tokens), len(tokens))
        return list(tokens[:end]), end < len(tokens)

    def encode_in_pieces(self, text: str, cuts: Sequence[int]) -> list[list[int]]:
        """Return the tokens of `text`, split at the character positions `cuts` (ascending).

        Special tokens in messages must be escaped already. If no token of the whole text crosses a
        cut, the pieces together are the tokens of the whole text. Otherwise the text before and the
        text after the cut are tokenized separately, because a sampler sees only the prompt. For
        example, a token crosses the cut if the prompt ends in a line break and the response begins
        with a line break.
        """
        pieces: list[list[int]] = []
        # `run` holds the tokens of text[base:]; the first `used` of them are in `pieces`
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


class StopTextRenderer:
    """Return `inner.with_stops(stops)`, whose former name this is."""

    def __new__(cls, inner: Renderer, stops: Sequence[str]) -> Renderer:  # type: ignore[misc]
        return inner.with_stops(stops)


def build_weighted_example(
    pieces: Sequence[tuple[Sequence[int], float]],
) -> tuple[ModelInput, np.ndarray]:
    """Join pieces of (tokens, weight) into a supervised example."""
    tokens = [token for piece, _ in pieces for token in piece]
    weights = np.concatenate([np.full(len(p), weight, np.float32) for p, weight in pieces])
    return ModelInput.from_ints(tokens), weights


def find_trained_messages(messages: Messages, train_on: TrainOn) -> list[int]:
    """Return the indices of the trained messages. Raises UserError if the conversation does not end
    with an assistant message.
    """
    if train_on not in ("last_assistant", "all_assistant"):
        raise UserError(f"train_on is 'last_assistant' or 'all_assistant', got {train_on!r}")
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "assistant":
        raise UserError(
            f"a supervised example ends with a message of the assistant, got the roles {roles}"
        )
    return (
        [len(roles) - 1]
        if train_on == "last_assistant"
        else [i for i, role in enumerate(roles) if role == "assistant"]
    )


def get_content_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or the joined parts {"type": "text",
    "text": ...}. Raises UserError for other content.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(
            f"{where} has content of type {type(content).__name__}; expected a text, or a list of "
            "text parts"
        )
    texts = []
    for part in content:
        if is_image_part(part):
            raise UserError(
                f"{where} has an image, but this renderer writes only text: use a vision-language "
                "model with its chat template (the renderer chat_template; the model folder "
                "contains the image processor), or leave the image out"
            )
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
                continue
            case {"type": kind}:
                shown = repr(kind)
            case _:
                shown = str(part)[:60]
        raise UserError(
            f"{where} has a part of content that is not text ({shown}): parts are "
            '{"type": "text", "text": ...}'
        )
    return "".join(texts)


def normalize_messages(messages: Messages, *, allow_images: bool = False) -> list[Message]:
    """Return the messages with their contents as text. Raises UserError for a message without a
    role, or without content and tool calls.

    If images are allowed, contents with images stay lists of parts (`rl.renderers.image_parts`);
    otherwise images are errors.
    """
    normalized = []
    for number, message in enumerate(messages):
        where = f"message {number} of the conversation"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where} is not {{'role': ..., 'content': ...}}: {str(message)[:60]!r}"
            )
        content = message.get("content")
        if allow_images and has_images([message]):
            content = split_image_parts(message["content"], message["role"], where)
        elif content is None and message.get("tool_calls"):
            content = ""
        else:
            content = get_content_text(content, where)
        normalized.append({**message, "content": content})
    return normalized


def get_text_content(message: Message) -> str:
    """Return the text of a message (from `normalize_messages`) for renderers that write only text.
    Raises UserError if it calls tools.
    """
    if message.get("tool_calls"):
        raise UserError(
            "this renderer writes only text, and a message calls tools: use the model's chat "
            "template (the renderer chat_template)"
        )
    return str(message["content"])


def get_begin_tokens(tokenizer: Any) -> list[int]:
    """Return [BOS] if the tokenizer adds it before a text, else []."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    return [bos] if list(tokenizer.encode("a", add_special_tokens=True))[:1] == [bos] else []


def renderer_for_row(renderer: Renderer, row: Problem) -> Renderer:
    """Return the renderer with the tools of a row. Raises UserError as `with_tools`."""
    return renderer.with_tools(row.tools) if row.tools else renderer
