"""Build the response of a chat completion."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rl.renderers import (
    Renderer,
    parse_partial_answer,
    prompt_opens_thoughts,
)
from rl.serve.openai_schemas import ChatBody
from rl.types import Message, SampledSequence, SamplingParams

# for each sampled token: (id, logprob), most likely first
TopLogprobs = Sequence[Sequence[tuple[int, float]]]


class TopLogprob(TypedDict):
    """Hold a token with its logprob."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """Hold a sampled token with the likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ContentLogprobs(TypedDict):
    """Hold the logprobs of a choice."""

    content: list[TokenLogprob]
    refusal: NotRequired[None]


class AssistantMessage(TypedDict):
    """Hold the message of a choice, or the part of it that an event adds."""

    role: NotRequired[str]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class ChatChoice(TypedDict):
    """Hold a choice of a chat completion."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ContentLogprobs | None
    token_ids: NotRequired[list[int]]


class TokenCounts(TypedDict):
    """Hold the token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ResponseHead(TypedDict):
    """Hold the fields that a response and each of its events begin with."""

    id: str
    created: int
    model: str


class ChatResponse(ResponseHead):
    """Hold a chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenCounts
    system_fingerprint: str
    prompt_token_ids: NotRequired[list[int]]


class ChatEventChoice(TypedDict):
    """Hold what an event adds to a choice."""

    index: int
    delta: AssistantMessage
    finish_reason: str | None
    logprobs: ContentLogprobs | None
    token_ids: NotRequired[list[int]]


class ChatEvent(ResponseHead):
    """Hold an event of a stream; the last one may hold the token counts."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: NotRequired[TokenCounts]
    prompt_token_ids: NotRequired[list[int]]


class TextLogprobs(TypedDict):
    """Hold the logprobs of a choice, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(TypedDict):
    """Hold a choice of a completion. An event holds the next part of its text."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextResponse(ResponseHead):
    """Hold a completion, or an event of its stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[TokenCounts]


class TokenChoice(TypedDict):
    """Hold the token ids of a sample."""

    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: ContentLogprobs | None


class TokenResponse(TypedDict):
    """Hold the samples of a prompt of token ids."""

    request_id: str
    choices: list[TokenChoice]
    prompt_token_ids: list[int]


def make_id(kind: str) -> str:
    """Return a random id with the prefix `kind`."""
    return f"{kind}-{secrets.token_hex(12)}"


def decode_exactly(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the exact text of tokens, including special tokens."""
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def format_token(tokenizer: Any, token: int, as_ids: bool) -> str:
    """Return a token as text; as token_id:<id> if `as_ids`, or if the token is only part of a
    character.
    """
    text = "\ufffd" if as_ids else decode_exactly(tokenizer, [token])
    return f"token_id:{token}" if "\ufffd" in text else text


def clamp_logprob(logprob: float) -> float:
    """Clamp a logprob to 0.

    Rounding can put the logprob of a near-certain token slightly above 0, which clients refuse.
    """
    return min(float(logprob), 0.0)


def make_content_logprobs(
    tokenizer: Any, sequence: SampledSequence, as_ids: bool, top: TopLogprobs | None = None
) -> ContentLogprobs:
    """Return OpenAI's logprobs: an entry for each sampled token and the end token."""

    def entry(token: int, logprob: float) -> TopLogprob:
        text = format_token(tokenizer, token, as_ids)
        utf8_bytes = None if text.startswith("token_id:") else list(text.encode("utf-8"))
        return {"token": text, "logprob": clamp_logprob(logprob), "bytes": utf8_bytes}

    assert sequence.logprobs is not None
    entries: list[TokenLogprob] = []
    for i, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
        likely = [entry(*pair) for pair in top[i]] if top else []
        entries.append({**entry(token, logprob), "top_logprobs": likely})
    return {"content": entries}


@dataclass(frozen=True)
class ChatContext:
    """Hold a chat request, its prompt and its renderer, and build the parts of its response."""

    request: ChatBody
    renderer: Renderer  # with the tools of the request
    prompt: list[int]

    @cached_property
    def params(self) -> SamplingParams:
        """Return the sampling parameters. Raises HttpError."""
        stops = self.renderer.get_stop_sequences()
        return self.request.make_params(self.request.max_new_tokens, stops)

    @cached_property
    def reader(self) -> Renderer:
        """Return the renderer that parses samples, without the stop texts of the request."""
        stops = get_request_stop_texts(self.params, self.renderer.get_stop_sequences())
        return self.renderer.with_stops(stops) if stops else self.renderer

    @cached_property
    def head(self) -> ResponseHead:
        """Return the fields that the response and each of its events begin with."""
        return make_response_head("chatcmpl", self.request.model)

    @cached_property
    def _opens_thoughts(self) -> bool:
        return prompt_opens_thoughts(self.renderer, self.prompt)

    def parse(self, tokens: Sequence[int], ended: bool) -> Message:
        """Return the message of a sample, or the certain part of it unless `ended`."""
        return parse_partial_answer(self.reader, tokens, self._opens_thoughts, ended=ended)

    def make_logprobs(
        self, sequence: SampledSequence, top: TopLogprobs | None = None
    ) -> ContentLogprobs:
        """Return the logprobs of a choice."""
        as_ids = self.request.tokens_as_ids
        logprobs = make_content_logprobs(self.renderer.tokenizer, sequence, as_ids, top)
        return {**logprobs, "refusal": None}

    def make_choice(
        self, index: int, sequence: SampledSequence, top: TopLogprobs | None
    ) -> ChatChoice:
        """Return a choice of the response. Each tool call gets an id."""
        message = self.parse(sequence.tokens, ended=True)
        calls = message.get("tool_calls") or ()
        reply: AssistantMessage = {
            "role": "assistant",
            "content": message["content"] or (None if calls else ""),
            "refusal": None,
        }
        if "reasoning_content" in message:
            reply["reasoning_content"] = message["reasoning_content"]
        if calls:
            reply["tool_calls"] = [
                {"id": make_id("call"), "type": "function", "function": call["function"]}
                for call in calls
            ]
        is_cut = sequence.stop_reason == "length"
        choice: ChatChoice = {
            "index": index,
            "message": reply,
            "finish_reason": "length" if is_cut else "tool_calls" if calls else "stop",
            "logprobs": self.make_logprobs(sequence, top) if self.request.logprobs else None,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = list(sequence.tokens)
        return choice

    def make_response(
        self, choices: list[ChatChoice], sequences: Sequence[SampledSequence]
    ) -> ChatResponse:
        """Return the full response."""
        versions = sorted({str(sequence.version) for sequence in sequences})
        response: ChatResponse = {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": count_usage(len(self.prompt), sequences),
            "system_fingerprint": f"weights-{'-'.join(versions)}",
        }
        if self.request.return_token_ids:
            response["prompt_token_ids"] = list(self.prompt)
        return response


def get_request_stop_texts(
    params: SamplingParams, renderer_stops: Sequence[str | int] = ()
) -> list[str]:
    """Return the stop texts of the request itself, which are cut off a response's text."""
    excluded = set(renderer_stops)
    return [item for item in params.stop or () if isinstance(item, str) and item not in excluded]


def count_usage(prompt_tokens: int, sequences: Sequence[SampledSequence]) -> TokenCounts:
    """Return the token counts of a response. `prompt_tokens`: tokens of all prompts together."""
    completion_tokens = sum(len(sequence.tokens) for sequence in sequences)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def make_response_head(kind: str, model: str | None) -> ResponseHead:
    """Return the fields that a response and each of its events begin with."""
    return {"id": make_id(kind), "created": int(time.time()), "model": model or "default"}
