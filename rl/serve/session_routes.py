"""Serve the routes of a session: its turns, its reward, its deletion."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.jsonl import replace_nonfinite
from rl.serve.http_errors import make_openai_error_response, to_openai_error
from rl.serve.json_response import SafeJSONResponse
from rl.serve.openai_serving import (
    OpenAIServing,
    get_request_owner,
    parse_json_body,
)
from rl.serve.request_fields import FieldReader

MAX_METRICS = 100


def make_session_routes(serving: OpenAIServing) -> list[Route]:
    """Return the routes GET /sessions; GET and DELETE /session/NAME; POST /session/NAME/reward
    {"reward": 1.0, "metrics": {...}}.
    """
    sessions = serving.sessions

    async def list_names(request: Request) -> Any:
        return {"sessions": sessions.list_names(get_request_owner(request))}

    async def get_session(request: Request) -> Any:
        return replace_nonfinite(
            sessions.find(get_request_owner(request), request.path_params["session"]).to_json()
        )

    async def delete_session(request: Request) -> Any:
        sessions.delete(get_request_owner(request), request.path_params["session"])
        return {"deleted": True}

    async def post_reward(request: Request) -> Any:
        session = sessions.find(get_request_owner(request), request.path_params["session"])
        session.reward, metrics = read_reward(parse_json_body(await request.body()))
        session.metrics |= metrics
        return {"reward": session.reward, "turns": len(session.turns)}

    # next to the routes below OPENAI_BASE_URL (/v1), and among them
    paths = {"": post_reward, "/v1": post_reward}
    return [
        Route("/sessions", _wrap_handler(list_names)),
        Route("/session/{session}", _wrap_handler(get_session), methods=["GET"]),
        Route("/session/{session}", _wrap_handler(delete_session), methods=["DELETE"]),
        *(
            Route(f"/session/{{session}}{prefix}/reward", _wrap_handler(do), methods=["POST"])
            for prefix, do in paths.items()
        ),
    ]


def _wrap_handler(
    do: Callable[[Request], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler: its result becomes a JSON response, any error an error response."""

    async def endpoint(request: Request) -> Response:
        try:
            return SafeJSONResponse(await do(request))
        except Exception as error:  # boundary: every failure is an error response
            return make_openai_error_response(to_openai_error(error))

    return endpoint


def read_reward(body: Any) -> tuple[float, dict[str, float]]:
    """Return the reward and the metrics of a posted score. Raises HttpError."""
    fields = FieldReader(body)
    reward = fields.body.get("reward")
    if not _is_number(reward):
        raise fields.make_error("reward", reward, "a finite number")
    metrics = fields.get("metrics", {})
    is_valid = (
        isinstance(metrics, dict)
        and len(metrics) <= MAX_METRICS
        and all(_is_number(value) for value in metrics.values())
    )
    if not is_valid:
        raise fields.make_error(
            "metrics", metrics, f"an object of at most {MAX_METRICS} finite numbers by name"
        )
    fields.read_names.add("reward")
    fields.refuse_unread()
    return float(reward or 0.0), {str(key)[:100]: float(value) for key, value in metrics.items()}


def _is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
