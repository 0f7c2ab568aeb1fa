"""Build the response of a chat completion."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rl.renderers import Renderer, StopTextRenderer
from rl.serve.openai_schemas import ChatBody
from rl.types import Message, SampledSequence

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


def format_token(tokenizer: Any, token: int, as_ids: bool) -> str:
    """Return a token as text; as token_id:<id> if `as_ids`, or if the token is only part of a
    character.
    """
    text = (
        ""
        if as_ids
        else str(
            tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
    )
    return f"token_id:{token}" if as_ids or "\ufffd" in text else text


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


def parse_sample(
    renderer: Renderer, stops: Sequence[str], sequence: SampledSequence
) -> tuple[Message, bool]:
    """Return the sampled message without the stop text, and whether it ended by itself."""
    return (StopTextRenderer(renderer, stops) if stops else renderer).parse_response(
        sequence.tokens
    )


def make_choice(
    request: ChatBody,
    renderer: Renderer,
    index: int,
    sequence: SampledSequence,
    message: Message,
    top: TopLogprobs | None,
) -> ChatChoice:
    """Return a choice of the response. Each tool call gets an id.

    `message`: the result of `rl.renderers.parse_partial_answer`.
    """
    calls = message.get("tool_calls") or ()
    reply: AssistantMessage = {"role": "assistant", "content": message["content"], "refusal": None}
    if "reasoning_content" in message:
        reply["reasoning_content"] = message["reasoning_content"]
    if calls:
        reply["content"] = message["content"] or None
        reply["tool_calls"] = [
            {"id": make_id("call"), "type": "function", "function": call["function"]}
            for call in calls
        ]
    reason = "length" if sequence.stop_reason == "length" else "tool_calls" if calls else "stop"
    choice: ChatChoice = {
        "index": index,
        "message": reply,
        "finish_reason": reason,
        "logprobs": None,
    }
    if request.logprobs:
        as_ids = request.tokens_as_ids
        logprobs = make_content_logprobs(renderer.tokenizer, sequence, as_ids, top)
        choice["logprobs"] = {**logprobs, "refusal": None}
    if request.return_token_ids:
        choice["token_ids"] = list(sequence.tokens)
    return choice


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


def make_response(
    request: ChatBody,
    head: ResponseHead,
    prompt: Sequence[int],
    choices: Sequence[ChatChoice],
    sequences: Sequence[SampledSequence],
) -> ChatResponse:
    """Return the full response of a chat completion."""
    versions = sorted({str(sequence.version) for sequence in sequences})
    response: ChatResponse = {
        **head,
        "object": "chat.completion",
        "choices": list(choices),
        "usage": count_usage(len(prompt), sequences),
        "system_fingerprint": f"weights-{'-'.join(versions)}",
    }
    if request.return_token_ids:
        response["prompt_token_ids"] = list(prompt)
    return response
