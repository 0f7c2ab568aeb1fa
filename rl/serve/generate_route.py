"""Serve /inference/v1/generate: token ids in, token ids and their logprobs out.

Trainers that keep their tokens themselves use this route.
"""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from rl.serve.agent_sessions import AgentSession, SampledTurn
from rl.serve.chat_request import MAX_TOKENS
from rl.serve.chat_response import make_content_logprobs, make_id
from rl.serve.chat_stream import LiveSamples
from rl.serve.http_errors import HttpError
from rl.serve.openai_serving import HandlerResult, OpenAIServing
from rl.serve.request_fields import (
    MAX_CHOICES,
    FieldReader,
    is_token_ids,
    read_sampling_params,
)


def routes(serving: OpenAIServing) -> list[Route]:
    """Return the route of this module."""
    return serving.make_routes("/inference/v1/generate", generate)


async def generate(
    serving: OpenAIServing, body: Any, session: AgentSession, live: LiveSamples | None
) -> HandlerResult:
    """Sample completions of a prompt of token ids, and return a choice for each sample.

    The stop token is the last id of a choice. Tokens in `logprobs` are written `token_id:<id>`.
    Raises HttpError if a field has a wrong value or is not supported.
    """
    fields = FieldReader(body)
    model, prompt = fields.get_text("model"), fields.get("token_ids")
    if not is_token_ids(prompt) or not prompt:
        raise fields.make_error("token_ids", prompt, "a list of at least one token id")
    if fields.get_flag("stream"):
        raise HttpError(
            400, "stream is not supported here: token ids are returned all at once", "stream"
        )
    sampling_fields = FieldReader(fields.get("sampling_params", {}), "sampling_params.")
    num_samples = sampling_fields.get_int("n", 1, 1, MAX_CHOICES) or 1
    max_tokens = sampling_fields.get_int("max_tokens", None, 1, MAX_TOKENS)
    params = read_sampling_params(sampling_fields, max_tokens)
    logprobs = sampling_fields.get_int("logprobs", None, 0, 1)
    if sampling_fields.get("prompt_logprobs") is not None:
        name = "sampling_params.prompt_logprobs"
        raise HttpError(
            400,
            f"{name} is not supported: /v1/completions scores prompts, with echo and logprobs",
            name,
        )
    sampling_fields.get_flag("skip_special_tokens", True)  # the response holds no text
    sampling_fields.refuse_unread()
    fields.refuse_unread()
    response = await session.sample(serving.backend, model, list(prompt), num_samples, params)
    tokenizer, choices = await session.tokenizer(serving.backend, model), []
    for index, sequence in enumerate(response.sequences):
        text = str(tokenizer.decode(list(sequence.tokens))) if tokenizer is not None else ""
        session.record_turn(
            SampledTurn(
                list(prompt),
                sequence,
                {"role": "assistant", "content": text},
                sequence.stop_reason == "stop",
            )
        )
        logprobs_field = (
            None
            if logprobs is None
            else {"content": make_content_logprobs(tokenizer, sequence, as_ids=True)}
        )
        choices.append(
            {
                "index": index,
                "token_ids": list(sequence.tokens),
                "finish_reason": sequence.stop_reason,
                "logprobs": logprobs_field,
            }
        )
    return {
        "request_id": make_id("gen"),
        "choices": choices,
        "prompt_token_ids": list(prompt),
    }, None
