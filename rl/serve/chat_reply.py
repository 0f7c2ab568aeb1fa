"""What a chat completion is answered with."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl.renderers import Renderer, StopsAt
from rl.serve.chat_request import ChatAsk
from rl.types import Message, SampledSequence

# of each sampled token: (id, logprob), the likeliest first
TopLogprobs = Sequence[Sequence[tuple[int, float]]]


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def spelt(tokenizer: Any, token: int, as_ids: bool) -> str:
    """A token as text; as token_id:<id> where that is asked for, or where it is part of a character
    and no text of its own.
    """
    text = (
        ""
        if as_ids
        else str(
            tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
    )
    return f"token_id:{token}" if as_ids or "\ufffd" in text else text


def below_zero(logprob: float) -> float:
    """A logprob; the rounding of a sure token's can put it a hair above 0, which clients refuse."""
    return min(float(logprob), 0.0)


def content_logprobs(
    tokenizer: Any, sequence: SampledSequence, as_ids: bool, top: TopLogprobs | None = None
) -> list[dict[str, Any]]:
    """One entry for each sampled token, its end mark included, as OpenAI's logprobs.content has
    them.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = spelt(tokenizer, token, as_ids)
        said = None if text.startswith("token_id:") else list(text.encode("utf-8"))
        return {"token": text, "logprob": below_zero(logprob), "bytes": said}

    assert sequence.logprobs is not None
    found = []
    for i, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
        found.append(
            {
                **entry(token, logprob),
                "top_logprobs": [entry(*pair) for pair in top[i]] if top else [],
            }
        )
    return found


def parsed(
    renderer: Renderer, stops: Sequence[str], sequence: SampledSequence
) -> tuple[Message, bool]:
    """The message that was sampled, without the text that stopped it; and whether it ended by
    itself.
    """
    return (StopsAt(renderer, stops) if stops else renderer).parse_response(sequence.tokens)


def choice(
    asked: ChatAsk,
    renderer: Renderer,
    index: int,
    sequence: SampledSequence,
    message: Message,
    top: TopLogprobs | None,
) -> dict:
    """A choice. `message`: as `rl.renderers.shown` gave it. Each call gets an id."""
    calls = message.get("tool_calls") or ()
    said: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    said |= (
        {"reasoning_content": message["reasoning_content"]}
        if "reasoning_content" in message
        else {}
    )
    if calls:
        said["content"] = message["content"] or None
        said["tool_calls"] = [
            {"id": new_id("call"), "type": "function", "function": call["function"]}
            for call in calls
        ]
    reason = "length" if sequence.stop_reason == "length" else "tool_calls" if calls else "stop"
    logprobs = (
        {
            "content": content_logprobs(renderer.tokenizer, sequence, asked.as_ids, top),
            "refusal": None,
        }
        if asked.logprobs
        else None
    )
    found = {"index": index, "message": said, "finish_reason": reason, "logprobs": logprobs}
    return found | ({"token_ids": list(sequence.tokens)} if asked.return_token_ids else {})


def usage(prompts: int, sequences: Sequence[SampledSequence]) -> dict[str, int]:
    """Counts of tokens. `prompts`: of all prompts together."""
    drawn = sum(len(sequence.tokens) for sequence in sequences)
    return {"prompt_tokens": prompts, "completion_tokens": drawn, "total_tokens": prompts + drawn}


def head_of(kind: str, model: str | None) -> dict[str, Any]:
    """What an answer and each event of it begin with."""
    return {"id": new_id(kind), "created": int(time.time()), "model": model or "default"}


def reply(
    asked: ChatAsk,
    head: Mapping[str, Any],
    prompt: Sequence[int],
    choices: Sequence[dict],
    sequences: Sequence[SampledSequence],
) -> dict[str, Any]:
    """The whole answer."""
    versions = sorted({str(sequence.version) for sequence in sequences})
    found = {
        **head,
        "object": "chat.completion",
        "choices": list(choices),
        "usage": usage(len(prompt), sequences),
        "system_fingerprint": f"weights-{'-'.join(versions)}",
    }
    return found | ({"prompt_token_ids": list(prompt)} if asked.return_token_ids else {})
