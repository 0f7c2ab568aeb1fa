"""Build the ASGI application: API keys, limits, error responses, metrics and the request log.

The routes of the two protocols are in other modules.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from rl.serve.answers import JsonAnswer
from rl.serve.desk import Desk
from rl.serve.links import LINKS, Links
from rl.serve.refusals import Refused, told
from rl.serve.settings import LOCAL, owner_of
from rl.serve.shares import check_share
from rl.serve.time_limits import Receive, bounded

log = logging.getLogger("whetstone.serve")

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN_PATHS = ("/healthz", "/api/v1/healthz")  # served without a key


def make_app(desk: Desk, routes: Sequence[BaseRoute], links: Links) -> Any:
    """Return an ASGI application with `routes`, /healthz and /metrics."""

    async def health(request: Request) -> Response:
        status = "ending" if desk.ending else "ok"
        return JsonAnswer({"status": status}, status_code=503 if desk.ending else 200)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(desk.tally.page(), media_type="text/plain; version=0.0.4")

    built_in_routes = [Route(path, health) for path in OPEN_PATHS] + [Route("/metrics", metrics)]
    handlers = {Refused: _refused, HTTPException: _no_such, ValueError: _broken, Exception: _broken}
    app = Starlette(routes=[*built_in_routes, *routes], exception_handlers=handlers)
    return Guard(app, desk, links)


def refusal(status: int, message: str, retry_after: float | None = None) -> JsonAnswer:
    """Return an error response in a form that the clients of both protocols show.

    `retry_after`: seconds, sent as the retry-after header.
    """
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    if status == 408:
        headers["connection"] = "close"  # the server does not wait for the rest of the body
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {
        "detail": message,
        "error": {"message": message, "type": kind, "param": None, "code": status},
    }
    return JsonAnswer(body, status_code=status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    """Return the response of a `Refused`."""
    assert isinstance(error, Refused)
    return refusal(error.status, error.message, error.retry_after)


async def _no_such(request: Request, error: Exception) -> Response:
    """Return the response of Starlette's HTTPException, such as an unknown path."""
    assert isinstance(error, HTTPException)
    return refusal(
        error.status_code, f"{request.method} {shown_path(request.url.path)}: {error.detail}"
    )


async def _broken(request: Request, error: Exception) -> Response:
    """Return 400 for an error of the caller; log any other error and return 500."""
    message, category = told(error, "the request")
    if category == "user":
        return refusal(400, message)
    log.error(
        "a request failed",
        extra={"path": shown_path(request.url.path), "error": type(error).__name__},
        exc_info=error,
    )
    return refusal(500, message)


class Guard:
    """Wrap the application: check the key, the body's size and the number of open requests, and
    log each request.
    """

    def __init__(self, app: Any, desk: Desk, links: Links):
        self.app = app
        self.desk = desk
        self.links = links
        self.open = 0
        # open requests by owner; None: requests without a valid key, which get 401 at once
        self._open_of: Counter[str | None] = Counter()
        self._keys = [(key.encode(), owner_of(key)) for key in desk.settings.keys]
        desk.tally.gauges["open_requests"] = lambda: float(self.open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, response = time.perf_counter(), {"status": 0}

        async def record_status(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                response["status"] = message["status"]
            await send(message)

        owner = self._owner_of(scope)
        self.open += 1
        self._open_of[owner] += 1
        try:
            await self._answer(scope, receive, record_status, owner)
        finally:
            self.open -= 1
            self._open_of[owner] -= 1
            if not self._open_of[owner]:
                del self._open_of[owner]
            self._note(scope, response["status"], time.perf_counter() - begin)

    def _owner_of(self, scope: Scope) -> str | None:
        """Return the owner of the request; None if the request lacks a required key.

        A signed link belongs to its creator. An expired or invalid link belongs to LOCAL.
        """
        if not self._keys or scope["path"] in OPEN_PATHS:
            return LOCAL
        if scope["path"].startswith(LINKS):
            owners = (owner for _, owner in self._keys)
            return self.links.owner(scope["path"], owners) or LOCAL
        return self._owner(dict(scope["headers"]))

    def _refusal(self, owner: str) -> Refused | None:
        """Return the error for a request above the owner's share of open requests, or None."""
        limit, total, owner_count = (
            self.desk.settings.limits.open_requests,
            self.open - 1,
            self._open_of[owner] - 1,
        )
        if total >= limit:
            return Refused(503, "too many requests are open: try again", retry_after=1.0)
        try:
            check_share(
                "open requests (--open-requests)",
                limit,
                total,
                owner_count,
                len(self._keys) > 1,
                retry_after=1.0,
            )
        except Refused as error:
            return error
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send, owner: str | None) -> None:
        """Check key, load and body size, then pass the request to the application."""
        headers = dict(scope["headers"])
        limits = self.desk.settings.limits
        if owner is None:
            await refusal(
                401, "this server requires a key: send x-api-key, or authorization: Bearer"
            )(scope, receive, send)
            return
        # The limit of open requests does not apply to health checks.
        if scope["path"] not in OPEN_PATHS and (refused := self._refusal(owner)) is not None:
            await refusal(refused.status, refused.message, refused.retry_after)(
                scope, receive, send
            )
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limits.body_bytes:
            await refusal(
                413, f"a body may have at most {limits.body_bytes} bytes: send less at once"
            )(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
        # `_broken` has answered and logged the error, and Starlette raises it again
        with contextlib.suppress(Exception):
            await self.app(scope, bounded(receive, limits.body_bytes, limits.body_seconds), send)

    def _owner(self, headers: dict[bytes, bytes]) -> str | None:
        """Return the owner of the key in `headers`; None if no configured key matches.

        Compares with every key, each in constant time.
        """
        presented_key = headers.get(b"x-api-key", b"")
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        if not presented_key and kind.lower() == b"bearer":
            presented_key = bearer.strip()
        matches = [owner for key, owner in self._keys if hmac.compare_digest(key, presented_key)]
        return matches[0] if matches else None

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        """Add the request to the metrics and to the log."""
        endpoint = scope.get("route")
        route = getattr(endpoint, "path", "(none)")
        self.desk.tally.add("requests_total", route=route, status=str(status))
        self.desk.tally.add("request_seconds_total", seconds, route=route)
        owner = scope.get("state", {}).get("owner", "")
        fields = {
            "method": scope["method"],
            "path": shown_path(scope["path"]),
            "status": status,
            "owner": owner,
        }
        fields["ms"] = round(seconds * 1e3, 1)
        log.info("request", extra=fields)


def shown_path(path: str) -> str:
    """Return a path for the log, without the signature of a link, which is as secret as a key."""
    if not path.startswith(LINKS):
        return path[:200]
    expires, _, rest = path.removeprefix(LINKS).partition("/")
    return f"{LINKS}{expires}/.../{rest.partition('/')[2]}"[:200]


class JsonLines(logging.Formatter):
    """Format each log record as a line of JSON: time, level, event and the record's FIELDS.

    Prompts and keys are never logged.
    """

    FIELDS = (
        "method",
        "path",
        "status",
        "ms",
        "owner",
        "what",
        "error",
        "model",
        "session",
        "seconds",
        "address",
    )

    def format(self, record: logging.LogRecord) -> str:
        """Return `record` as a line of JSON."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
        }
        line["event"] = record.getMessage()
        line |= {name: getattr(record, name) for name in self.FIELDS if hasattr(record, name)}
        if record.exc_info and record.exc_info[2] is not None:
            line["where"] = _where(record.exc_info[2])
        return json.dumps(line)


def _where(traceback: Any) -> list[str]:
    """Return the last 12 frames of a traceback as "file:line function".

    The message of the exception is omitted: it may contain a user's tokens.
    """
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    return places[-12:]
