"""All OpenAI-style routes of a desk."""

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
    """`sessions`: where turns are kept that carry a session; by default the application's own."""
    serving = Serving(desk, sessions or Sessions())
    found = [
        *chat.routes(serving),
        *completions.routes(serving),
        *generate.routes(serving),
        *episodes_routes.routes(serving),
    ]

    async def models(request: Request) -> Response:
        found = await asyncio.to_thread(desk.models, owner_of(request))
        return JsonAnswer({"object": "list", "data": [_model(one) for one in found]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        for one in await asyncio.to_thread(desk.models, owner_of(request)):
            if one.name == name:
                return JsonAnswer(_model(one))
        said = {
            "message": f"there is no model {name!r:.200}",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
        return JsonAnswer({"error": said}, 404)

    for prefix in ("", "/session/{session}"):
        found += [
            Route(prefix + "/v1/models", models),
            Route(prefix + "/v1/models/{model:path}", model),
        ]
    return found


def _model(one: Any) -> dict[str, Any]:
    """`max_model_len`: prompt and answer together, by which clients refuse what is too long before
    they send it.
    """
    # the last token is never read
    longest = None if one.max_context is None else one.max_context + 1
    return {
        "id": one.name,
        "object": "model",
        "created": one.created,
        "owned_by": "whetstone",
        "max_model_len": longest,
    }
