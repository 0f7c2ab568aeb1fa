"""Collect all OpenAI-style routes of a server."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.serve import completions, generate_route, openai_serving, session_routes
from rl.serve.agent_sessions import AgentSessions, SamplingBackend
from rl.serve.json_response import SafeJSONResponse
from rl.serve.openai_serving import OpenAIServing, get_request_owner


def make_openai_routes(
    backend: SamplingBackend, sessions: AgentSessions | None = None
) -> list[Route]:
    """Return all OpenAI-style routes.

    `sessions`: the store of the turns of requests that name a session; by default a new store.
    """
    serving = OpenAIServing(backend, sessions or AgentSessions())
    route_list = [
        *openai_serving.make_chat_routes(serving),
        *completions.make_completion_routes(serving),
        *generate_route.routes(serving),
        *session_routes.make_session_routes(serving),
    ]

    async def models(request: Request) -> Response:
        models_found = await asyncio.to_thread(backend.models, get_request_owner(request))
        return SafeJSONResponse(
            {"object": "list", "data": [_make_model_entry(entry) for entry in models_found]}
        )

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        for entry in await asyncio.to_thread(backend.models, get_request_owner(request)):
            if entry.name == name:
                return SafeJSONResponse(_make_model_entry(entry))
        error = {
            "message": f"unknown model {name!r:.200}",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
        return SafeJSONResponse({"error": error}, 404)

    for prefix in ("", "/session/{session}"):
        route_list += [
            Route(prefix + "/v1/models", models),
            Route(prefix + "/v1/models/{model:path}", model),
        ]
    return route_list


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
