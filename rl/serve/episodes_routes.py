"""Serve the routes of a session: its turns, its reward, its deletion."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.jsonl import finite
from rl.serve.answers import JsonAnswer
from rl.serve.chat import Serving, answer_of, as_refused, owner_of, read_json
from rl.serve.chat_fields import Fields

MOST_METRICS = 100


def routes(serving: Serving) -> list[Route]:
    """Return the routes GET /sessions; GET and DELETE /session/NAME; POST /session/NAME/reward
    {"reward": 1.0, "metrics": {...}}.
    """
    sessions = serving.sessions

    async def list_names(request: Request) -> Any:
        return {"sessions": sessions.names(owner_of(request))}

    async def get_session(request: Request) -> Any:
        return finite(sessions.find(owner_of(request), request.path_params["session"]).as_json())

    async def delete_session(request: Request) -> Any:
        sessions.drop(owner_of(request), request.path_params["session"])
        return {"deleted": True}

    async def post_reward(request: Request) -> Any:
        session = sessions.find(owner_of(request), request.path_params["session"])
        session.reward, metrics = read_reward(read_json(await request.body()))
        session.metrics |= metrics
        return {"reward": session.reward, "turns": len(session.turns)}

    # next to the routes below OPENAI_BASE_URL (/v1), and among them
    paths = {"": post_reward, "/v1": post_reward}
    return [
        Route("/sessions", _said(list_names)),
        Route("/session/{session}", _said(get_session), methods=["GET"]),
        Route("/session/{session}", _said(delete_session), methods=["DELETE"]),
        *(
            Route(f"/session/{{session}}{prefix}/reward", _said(do), methods=["POST"])
            for prefix, do in paths.items()
        ),
    ]


def _said(do: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler: its result becomes a JSON response, any error an error response."""

    async def endpoint(request: Request) -> Response:
        try:
            return JsonAnswer(await do(request))
        except Exception as error:  # boundary: every failure is an error response
            return answer_of(as_refused(error))

    return endpoint


def read_reward(body: Any) -> tuple[float, dict[str, float]]:
    """Return the reward and the metrics of a posted score. Raises Refused."""
    fields = Fields(body)
    reward = fields.body.get("reward")
    if not _number(reward):
        raise fields.wrong("reward", reward, "a finite number")
    metrics = fields.get("metrics", {})
    is_valid = (
        isinstance(metrics, dict)
        and len(metrics) <= MOST_METRICS
        and all(_number(value) for value in metrics.values())
    )
    if not is_valid:
        raise fields.wrong(
            "metrics", metrics, f"an object of at most {MOST_METRICS} finite numbers by name"
        )
    fields.known.add("reward")
    fields.close()
    return float(reward or 0.0), {str(key)[:100]: float(value) for key, value in metrics.items()}


def _number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
