"""Build the response of a chat completion."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl.renderers import Renderer, StopTextRenderer
from rl.serve.openai_schemas import ChatBody
from rl.types import Message, SampledSequence

# for each sampled token: (id, logprob), most likely first
TopLogprobs = Sequence[Sequence[tuple[int, float]]]


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
) -> list[dict[str, Any]]:
    """Return OpenAI's logprobs.content: an entry for each sampled token and the end token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = format_token(tokenizer, token, as_ids)
        utf8_bytes = None if text.startswith("token_id:") else list(text.encode("utf-8"))
        return {"token": text, "logprob": clamp_logprob(logprob), "bytes": utf8_bytes}

    assert sequence.logprobs is not None
    entries = []
    for i, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
        entries.append(
            {
                **entry(token, logprob),
                "top_logprobs": [entry(*pair) for pair in top[i]] if top else [],
            }
        )
    return entries


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
) -> dict:
    """Return a choice of the response. Each tool call gets an id.

    `message`: the result of `rl.renderers.parse_partial_answer`.
    """
    calls = message.get("tool_calls") or ()
    reply_message: dict[str, Any] = {
        "role": "assistant",
        "content": message["content"],
        "refusal": None,
    }
    reply_message |= (
        {"reasoning_content": message["reasoning_content"]}
        if "reasoning_content" in message
        else {}
    )
    if calls:
        reply_message["content"] = message["content"] or None
        reply_message["tool_calls"] = [
            {"id": make_id("call"), "type": "function", "function": call["function"]}
            for call in calls
        ]
    reason = "length" if sequence.stop_reason == "length" else "tool_calls" if calls else "stop"
    logprobs = (
        {
            "content": make_content_logprobs(
                renderer.tokenizer, sequence, request.tokens_as_ids, top
            ),
            "refusal": None,
        }
        if request.logprobs
        else None
    )
    result = {
        "index": index,
        "message": reply_message,
        "finish_reason": reason,
        "logprobs": logprobs,
    }
    return result | ({"token_ids": list(sequence.tokens)} if request.return_token_ids else {})


def count_usage(prompt_tokens: int, sequences: Sequence[SampledSequence]) -> dict[str, int]:
    """Return the token counts of a response. `prompt_tokens`: tokens of all prompts together."""
    completion_tokens = sum(len(sequence.tokens) for sequence in sequences)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def make_response_head(kind: str, model: str | None) -> dict[str, Any]:
    """Return the fields that a response and each of its events begin with."""
    return {"id": make_id(kind), "created": int(time.time()), "model": model or "default"}


def make_response(
    request: ChatBody,
    head: Mapping[str, Any],
    prompt: Sequence[int],
    choices: Sequence[dict],
    sequences: Sequence[SampledSequence],
) -> dict[str, Any]:
    """Return the full response of a chat completion."""
    versions = sorted({str(sequence.version) for sequence in sequences})
    answer = {
        **head,
        "object": "chat.completion",
        "choices": list(choices),
        "usage": count_usage(len(prompt), sequences),
        "system_fingerprint": f"weights-{'-'.join(versions)}",
    }
    return answer | ({"prompt_token_ids": list(prompt)} if request.return_token_ids else {})
