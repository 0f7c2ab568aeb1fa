"""/inference/v1/generate: ids in, ids and their logprobs out, as trainers that keep their own
tokens ask for it.
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
    return serving.route("/inference/v1/generate", generate)


async def generate(serving: Serving, body: Any, session: Session, live: Live | None) -> Answer:
    """A choice for each sample; its end mark is the last of its ids. Tokens of logprobs are spelt
    token_id:<id>.
    """
    fields = Fields(body)
    model, prompt = fields.text("model"), fields.get("token_ids")
    if not token_ids(prompt) or not prompt:
        raise fields.wrong("token_ids", prompt, "a list of at least one token id")
    if fields.switch("stream"):
        raise Refused("stream is not supported here: ids come whole", "stream")
    own = Fields(fields.get("sampling_params", {}), "sampling_params.")
    n = own.whole("n", 1, 1, MOST_CHOICES) or 1
    most = own.whole("max_tokens", None, 1, MOST_TOKENS)
    params = sampling_params(own, most)
    logprobs = own.whole("logprobs", None, 0, 1)
    if own.get("prompt_logprobs") is not None:
        name = "sampling_params.prompt_logprobs"
        raise Refused(
            f"{name} is not supported: /v1/completions scores prompts, with echo and logprobs", name
        )
    own.switch("skip_special_tokens", True)  # there is no text in the answer
    own.close()
    fields.close()
    response = await session.draw(serving.desk, model, list(prompt), n, params)
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
        said = (
            None
            if logprobs is None
            else {"content": content_logprobs(tokenizer, sequence, as_ids=True)}
        )
        choices.append(
            {
                "index": index,
                "token_ids": list(sequence.tokens),
                "finish_reason": sequence.stop_reason,
                "logprobs": said,
            }
        )
    return {"request_id": new_id("gen"), "choices": choices, "prompt_token_ids": list(prompt)}, None
