"""Collect the OpenAI-style routes of a server, and serve the short ones: token ids, models,
sessions.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from rl.serve.agent_sessions import AgentSession, AgentSessions, SampledTurn, SamplingBackend
from rl.serve.api_routes import RouteHandler, TypedRoute
from rl.serve.chat_response import (
    ChatEvent,
    ChatResponse,
    TextResponse,
    TokenChoice,
    TokenResponse,
    make_content_logprobs,
    make_id,
)
from rl.serve.chat_stream import LiveSamples
from rl.serve.completions import handle_completions
from rl.serve.http_errors import HttpError
from rl.serve.openai_schemas import ChatBody, CompletionBody, GenerateBody, RewardBody
from rl.serve.openai_serving import (
    HandlerResult,
    OpenAIServing,
    get_request_owner,
    handle_chat,
)
from rl.serve.schemas import parse_json_body, read_body

_MAX_NAME_LENGTH = 100  # of a metric


def make_openai_routes(
    backend: SamplingBackend, sessions: AgentSessions | None = None
) -> list[TypedRoute]:
    """Return all OpenAI-style routes.

    `sessions`: the store of the turns of requests that name a session; by default a new store.
    """
    serving = OpenAIServing(backend, sessions or AgentSessions())
    sessions = serving.sessions

    def list_models(request: Request) -> Any:
        """List the models."""
        models = backend.models(get_request_owner(request))
        return {"object": "list", "data": list(map(_make_model_entry, models))}

    def get_model(request: Request) -> Any:
        """Return a model."""
        name = request.path_params["model"]
        for model in backend.models(get_request_owner(request)):
            if model.name == name:
                return _make_model_entry(model)
        raise HttpError(404, f"unknown model {name!r:.200}", "model", code="model_not_found")

    async def list_sessions(request: Request) -> Any:
        """List the names of sessions."""
        return {"sessions": sessions.list_names(get_request_owner(request))}

    async def get_session(request: Request) -> Any:
        """Return the turns of a session."""
        return serving.find_session(request).to_json()

    async def delete_session(request: Request) -> Any:
        """Delete a session."""
        sessions.delete(get_request_owner(request), request.path_params["session"])
        return {"deleted": True}

    async def post_reward(request: Request) -> Any:
        """Score a session."""
        session = serving.find_session(request)
        body = read_body(RewardBody, parse_json_body(await request.body()))
        session.reward = body.reward
        session.metrics |= {name[:_MAX_NAME_LENGTH]: body.metrics[name] for name in body.metrics}
        return {"reward": session.reward, "turns": len(session.turns)}

    path = "/session/{session}"
    table: list[tuple[str, str, RouteHandler]] = [
        ("GET", "/sessions", list_sessions),
        ("GET", path, get_session),
        ("DELETE", path, delete_session),
        *(("GET", prefix + "/v1/models", list_models) for prefix in ("", path)),
        *(("GET", prefix + "/v1/models/{model:path}", get_model) for prefix in ("", path)),
    ]
    return [
        *serving.make_routes(
            "/v1/chat/completions", handle_chat, ChatBody, ChatResponse, ChatEvent
        ),
        *serving.make_routes(
            "/v1/completions", handle_completions, CompletionBody, TextResponse, TextResponse
        ),
        *serving.make_routes("/inference/v1/generate", generate, GenerateBody, TokenResponse),
        *(
            # next to the routes below OPENAI_BASE_URL (/v1), and among them
            TypedRoute(path + place, post_reward, body_type=RewardBody, is_openai=True)
            for place in ("/reward", "/v1/reward")
        ),
        *(TypedRoute(place, handler, method, is_openai=True) for method, place, handler in table),
    ]


def _make_model_entry(model: Any) -> dict[str, Any]:
    """Return an entry of /v1/models.

    `max_model_len`: tokens of prompt and response together; clients check it before they send.
    """
    # the model never reads the last token
    longest = None if model.max_context is None else model.max_context + 1
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "whetstone",
        "max_model_len": longest,
    }


async def generate(
    serving: OpenAIServing, body: Any, session: AgentSession, live: LiveSamples | None
) -> HandlerResult:
    """Sample completions of a prompt of token ids, and return a choice for each sample.

    The stop token is the last id of a choice. Tokens in `logprobs` are written `token_id:<id>`.
    Raises HttpError if a field has a wrong value or is not supported.
    """
    request = read_body(GenerateBody, body)
    fields, prompt = request.sampling_params, request.token_ids
    params = fields.make_params(fields.max_tokens, prefix="sampling_params.")
    response = await session.sample(serving.backend, request.model, prompt, fields.n, params)
    tokenizer = await session.tokenizer(serving.backend, request.model)
    choices: list[TokenChoice] = []
    for index, sequence in enumerate(response.sequences):
        text = str(tokenizer.decode(list(sequence.tokens))) if tokenizer is not None else ""
        answer = {"role": "assistant", "content": text}
        is_complete = sequence.stop_reason == "stop"
        session.record_turn(SampledTurn([*prompt], sequence, answer, is_complete))
        choice: TokenChoice = {
            "index": index,
            "token_ids": list(sequence.tokens),
            "finish_reason": sequence.stop_reason,
            "logprobs": None,
        }
        if fields.logprobs is not None:
            choice["logprobs"] = make_content_logprobs(tokenizer, sequence, as_ids=True)
        choices.append(choice)
    result: TokenResponse = {
        "request_id": make_id("gen"),
        "choices": choices,
        "prompt_token_ids": prompt,
    }
    return result, None
