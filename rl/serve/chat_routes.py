"""Collect all OpenAI-style routes of a server."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.serve import chat, completions, episodes_routes, generate
from rl.serve.answers import JsonAnswer
from rl.serve.chat import Serving, owner_of
from rl.serve.episodes import Desk, Sessions


def routes(desk: Desk, sessions: Sessions | None = None) -> list[Route]:
    """Return all OpenAI-style routes.

    `sessions`: the store of the turns of requests that name a session; by default a new store.
    """
    serving = Serving(desk, sessions or Sessions())
    route_list = [
        *chat.routes(serving),
        *completions.routes(serving),
        *generate.routes(serving),
        *episodes_routes.routes(serving),
    ]

    async def models(request: Request) -> Response:
        models_found = await asyncio.to_thread(desk.models, owner_of(request))
        return JsonAnswer({"object": "list", "data": [_model(entry) for entry in models_found]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        for entry in await asyncio.to_thread(desk.models, owner_of(request)):
            if entry.name == name:
                return JsonAnswer(_model(entry))
        error = {
            "message": f"unknown model {name!r:.200}",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
        return JsonAnswer({"error": error}, 404)

    for prefix in ("", "/session/{session}"):
        route_list += [
            Route(prefix + "/v1/models", models),
            Route(prefix + "/v1/models/{model:path}", model),
        ]
    return route_list


def _model(one: Any) -> dict[str, Any]:
    """Return an entry of /v1/models.

    `max_model_len`: tokens of prompt and response together; clients check it before they send.
    """
    # the model never reads the last token
    longest = None if one.max_context is None else one.max_context + 1
    return {
        "id": one.name,
        "object": "model",
        "created": one.created,
        "owned_by": "whetstone",
        "max_model_len": longest,
    }
