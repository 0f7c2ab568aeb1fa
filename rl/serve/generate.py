"""Serve /inference/v1/generate: token ids in, token ids and their logprobs out.

Trainers that keep their tokens themselves use this route.
"""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from rl.serve.chat import Answer, Serving
from rl.serve.chat_fields import MOST_CHOICES, Fields, Refused, sampling_params, token_ids
from rl.serve.chat_reply import content_logprobs, new_id
from rl.serve.chat_request import MOST_TOKENS
from rl.serve.chat_stream import Live
from rl.serve.episodes import Session, Turn


def routes(serving: Serving) -> list[Route]:
    """Return the route of this module."""
    return serving.route("/inference/v1/generate", generate)


async def generate(serving: Serving, body: Any, session: Session, live: Live | None) -> Answer:
    """Sample completions of a prompt of token ids, and return a choice for each sample.

    The stop token is the last id of a choice. Tokens in `logprobs` are written `token_id:<id>`.
    Raises Refused if a field has a wrong value or is not supported.
    """
    fields = Fields(body)
    model, prompt = fields.text("model"), fields.get("token_ids")
    if not token_ids(prompt) or not prompt:
        raise fields.wrong("token_ids", prompt, "a list of at least one token id")
    if fields.switch("stream"):
        raise Refused("stream is not supported here: token ids are returned all at once", "stream")
    sampling_fields = Fields(fields.get("sampling_params", {}), "sampling_params.")
    num_samples = sampling_fields.whole("n", 1, 1, MOST_CHOICES) or 1
    max_tokens = sampling_fields.whole("max_tokens", None, 1, MOST_TOKENS)
    params = sampling_params(sampling_fields, max_tokens)
    logprobs = sampling_fields.whole("logprobs", None, 0, 1)
    if sampling_fields.get("prompt_logprobs") is not None:
        name = "sampling_params.prompt_logprobs"
        raise Refused(
            f"{name} is not supported: /v1/completions scores prompts, with echo and logprobs", name
        )
    sampling_fields.switch("skip_special_tokens", True)  # the response holds no text
    sampling_fields.close()
    fields.close()
    response = await session.draw(serving.desk, model, list(prompt), num_samples, params)
    tokenizer, choices = await session.tokenizer(serving.desk, model), []
    for index, sequence in enumerate(response.sequences):
        text = str(tokenizer.decode(list(sequence.tokens))) if tokenizer is not None else ""
        session.note(
            Turn(
                list(prompt),
                sequence,
                {"role": "assistant", "content": text},
                sequence.stop_reason == "stop",
            )
        )
        logprobs_field = (
            None
            if logprobs is None
            else {"content": content_logprobs(tokenizer, sequence, as_ids=True)}
        )
        choices.append(
            {
                "index": index,
                "token_ids": list(sequence.tokens),
                "finish_reason": sequence.stop_reason,
                "logprobs": logprobs_field,
            }
        )
    return {"request_id": new_id("gen"), "choices": choices, "prompt_token_ids": list(prompt)}, None
