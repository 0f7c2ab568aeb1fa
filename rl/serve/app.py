"""The application: who may ask, how much, and what is noted of it. What is answered is in the
routes of the two protocols.
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

OPEN_PATHS = ("/healthz", "/api/v1/healthz")  # to be asked without a key


def make_app(desk: Desk, routes: Sequence[BaseRoute], links: Links) -> Any:
    """Return an ASGI application with these routes beside /healthz and /metrics."""

    async def health(request: Request) -> Response:
        status = "ending" if desk.ending else "ok"
        return JsonAnswer({"status": status}, status_code=503 if desk.ending else 200)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(desk.tally.page(), media_type="text/plain; version=0.0.4")

    own = [Route(path, health) for path in OPEN_PATHS] + [Route("/metrics", metrics)]
    handlers = {Refused: _refused, HTTPException: _no_such, ValueError: _broken, Exception: _broken}
    app = Starlette(routes=[*own, *routes], exception_handlers=handlers)
    return Guard(app, desk, links)


def refusal(status: int, message: str, retry_after: float | None = None) -> JsonAnswer:
    """An error in a form that both protocols' clients show."""
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    if status == 408:
        headers["connection"] = "close"  # the rest of the body is not waited for
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {
        "detail": message,
        "error": {"message": message, "type": kind, "param": None, "code": status},
    }
    return JsonAnswer(body, status_code=status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(error.status, error.message, error.retry_after)


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(
        error.status_code, f"{request.method} {shown_path(request.url.path)}: {error.detail}"
    )


async def _broken(request: Request, error: Exception) -> Response:
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
    """Around every request: a key where keys are set, a body no larger than allowed, not too many
    at once, a line in the log.
    """

    def __init__(self, app: Any, desk: Desk, links: Links):
        self.app = app
        self.desk = desk
        self.links = links
        self.open = 0
        # by owner; None: those without a key, which are refused at once
        self._open_of: Counter[str | None] = Counter()
        self._keys = [(key.encode(), owner_of(key)) for key in desk.settings.keys]
        desk.tally.gauges["open_requests"] = lambda: float(self.open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, seen = time.perf_counter(), {"status": 0}

        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
            await send(message)

        owner = self._owner_of(scope)
        self.open += 1
        self._open_of[owner] += 1
        try:
            await self._answer(scope, receive, noting, owner)
        finally:
            self.open -= 1
            self._open_of[owner] -= 1
            if not self._open_of[owner]:
                del self._open_of[owner]
            self._note(scope, seen["status"], time.perf_counter() - begin)

    def _owner_of(self, scope: Scope) -> str | None:
        """Return the owner of the request; None if it lacks a key that it needs.

        A link is its creator's. A link that nobody created, or that has expired, is LOCAL's.
        """
        if not self._keys or scope["path"] in OPEN_PATHS:
            return LOCAL
        if scope["path"].startswith(LINKS):
            owners = (owner for _, owner in self._keys)
            return self.links.owner(scope["path"], owners) or LOCAL
        return self._owner(dict(scope["headers"]))

    def _refusal(self, owner: str) -> Refused | None:
        """Why one more open request of that owner is not answered."""
        limit, total, mine = (
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
                mine,
                len(self._keys) > 1,
                retry_after=1.0,
            )
        except Refused as refused:
            return refused
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send, owner: str | None) -> None:
        headers = dict(scope["headers"])
        limits = self.desk.settings.limits
        if owner is None:
            await refusal(401, "this server asks for a key: x-api-key, or authorization: Bearer")(
                scope, receive, send
            )
            return
        # A health check is answered however much is open.
        if scope["path"] not in OPEN_PATHS and (refused := self._refusal(owner)) is not None:
            await refusal(refused.status, refused.message, refused.retry_after)(
                scope, receive, send
            )
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limits.body_bytes:
            await refusal(
                413, f"a body may have {limits.body_bytes} bytes here: send less at once"
            )(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
        # `_broken` has answered and noted it, and Starlette raises it once more
        with contextlib.suppress(Exception):
            await self.app(scope, bounded(receive, limits.body_bytes, limits.body_seconds), send)

    def _owner(self, headers: dict[bytes, bytes]) -> str | None:
        """Whose key it is, None for nobody's. Compares with every key, each in constant time."""
        given = headers.get(b"x-api-key", b"")
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        if not given and kind.lower() == b"bearer":
            given = bearer.strip()
        found = [owner for key, owner in self._keys if hmac.compare_digest(key, given)]
        return found[0] if found else None

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
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
    """Return a path for the log. A link's signature, which is as good as a key, is left out."""
    if not path.startswith(LINKS):
        return path[:200]
    expires, _, rest = path.removeprefix(LINKS).partition("/")
    return f"{LINKS}{expires}/.../{rest.partition('/')[2]}"[:200]


class JsonLines(logging.Formatter):
    """A line of JSON for each event: when, how grave, what, and its own fields. No prompts, no
    keys.
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
    """The places that a traceback names; its message may hold somebody's tokens."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    return places[-12:]
