"""Build the ASGI application: API keys, limits, error responses, metrics, the request log, and the
chat page at /, a single HTML file that speaks the OpenAI-style endpoint.

The routes of the two protocols are in other modules.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.serve.api_routes import make_description_routes
from rl.serve.http_errors import HttpError, SafeJSONResponse, make_error_response, report_error
from rl.serve.scheduler import TenantCounter, check_share
from rl.serve.serve_settings import LOCAL_OWNER, LOOPBACK_HOSTS, compute_owner_id
from rl.serve.serving_engine import ServingEngine
from rl.serve.tinker_rest import LINK_PREFIX, UrlSigner

log = logging.getLogger("whetstone.serve")

PAGE_PATH = "/"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
KEYLESS_PATHS = ("/healthz", "/api/v1/healthz")  # served without a key
# lowest accepted rate of a body, in bytes per second: each byte extends the timeout by its inverse
_MIN_BYTES_PER_SECOND = 65_536
# headers that browsers send, and that a page cannot remove
_BROWSER_HEADERS = frozenset((b"origin", b"sec-fetch-site", b"accept-language"))


def make_app(engine: ServingEngine, routes: Sequence[BaseRoute], links: UrlSigner) -> ASGIApp:
    """Return an ASGI application with `routes`, /healthz, /metrics, /openapi.json and /docs."""

    async def health(request: Request) -> Response:
        # if it failed, a supervisor has to restart the server
        status = (
            "shutting_down" if engine.is_shutting_down else "ok" if engine.is_alive else "failed"
        )
        return SafeJSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        return Response(engine.metrics.render(), media_type="text/plain; version=0.0.4")

    built_in_routes = [Route(path, health) for path in KEYLESS_PATHS] + [Route("/metrics", metrics)]
    # Starlette raises an error again where a handler of Exception alone has answered it
    handlers = dict.fromkeys((HttpError, HTTPException, ValueError, Exception), _handle_error)
    all_routes = [*built_in_routes, *routes, *make_description_routes(routes)]
    app = Starlette(routes=all_routes, exception_handlers=handlers)
    return RequestGuard(app, engine, links)


async def _handle_error(request: Request, error: Exception) -> Response:
    """Return the response of an error that no handler answered, such as an unknown path."""
    if isinstance(error, HTTPException):
        path = redact_path(request.url.path)
        error = HttpError(error.status_code, f"{request.method} {path}: {error.detail}")
    return make_error_response(report_error(error))


class RequestGuard:
    """Wrap the application: check the key, the body's size and the number of open requests, and
    log each request.
    """

    def __init__(self, app: ASGIApp, engine: ServingEngine, links: UrlSigner):
        self.app = app
        self.engine = engine
        self.links = links
        # open requests by owner; None: requests without a valid key, which get 401 at once
        self._open_by_owner = TenantCounter()
        self._keys = [(key.encode(), compute_owner_id(key)) for key in engine.settings.keys]
        engine.metrics.set_gauge("open_requests", self._open_by_owner.total)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, response = time.perf_counter(), {"status": 0}

        async def record_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                response["status"] = message["status"]
            await send(message)

        owner = self._get_owner(scope)
        self._open_by_owner.change(owner, 1)
        try:
            self._check_request(scope, owner)
            scope.setdefault("state", {})["owner"] = owner
            limits = self.engine.settings.limits
            limited = limit_body(receive, limits.body_bytes, limits.body_seconds)
            # `_handle_error` has answered and logged the error, and Starlette raises it again
            with contextlib.suppress(Exception):
                await self.app(scope, limited, record_status)
        except HttpError as error:
            await make_error_response(error)(scope, receive, record_status)
        finally:
            self._open_by_owner.change(owner, -1)
            self._record_request(scope, response["status"], time.perf_counter() - begin)

    def _get_owner(self, scope: Scope) -> str | None:
        """Return the owner of the request; None if the request lacks a required key.

        A signed link belongs to its creator. An expired or invalid link belongs to LOCAL_OWNER.
        """
        if not self._keys or scope["path"] in KEYLESS_PATHS or is_page_request(scope):
            return LOCAL_OWNER
        if scope["path"].startswith(LINK_PREFIX):
            owners = (owner for _, owner in self._keys if self.links.is_valid(owner, scope["path"]))
            return next(owners, LOCAL_OWNER)
        headers = dict(scope["headers"])
        presented_key = headers.get(b"x-api-key", b"")
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        if not presented_key and kind.lower() == b"bearer":
            presented_key = bearer.strip()
        # compares with every key, each in constant time
        matches = [owner for key, owner in self._keys if hmac.compare_digest(key, presented_key)]
        return matches[0] if matches else None

    def _check_request(self, scope: Scope, owner: str | None) -> None:
        """Raise HttpError: 401 without a valid key, 403 for a page of another site, 503 and 429
        above the limit of open requests and the owner's share of it, 413 for a body above the
        limit.
        """
        limits, headers = self.engine.settings.limits, dict(scope["headers"])
        if not self._keys and headers.keys() & _BROWSER_HEADERS:
            self._check_site(headers)
        if owner is None:
            raise HttpError(
                401, "this server requires a key: send x-api-key, or authorization: Bearer"
            )
        if scope["path"] not in KEYLESS_PATHS:  # health checks have no limit
            total, owner_count = self._open_by_owner.total() - 1, self._open_by_owner[owner] - 1
            if total >= limits.open_requests:
                raise HttpError(503, "too many requests are open: try again", retry_after=1.0)
            resource, has_others = "open requests (--open-requests)", len(self._keys) > 1
            check_share(
                resource, limits.open_requests, total, owner_count, has_others, retry_after=1.0
            )
        length = headers.get(b"content-length", b"0")
        # bytes.isdigit is about ASCII; int() refuses more than 4300 digits
        if not length.isdigit() or len(length) > 18 or int(length) > limits.body_bytes:
            raise HttpError(
                413, f"a body may have at most {limits.body_bytes} bytes: send less at once"
            )

    def _check_site(self, headers: dict[bytes, bytes]) -> None:
        """Raise HttpError (403) for a browser's request from a page of another site.

        Without keys any page that a user of this machine opens could otherwise use the server:
        directly (the `origin` is the page's), or through a name of its own that it resolves to
        127.0.0.1 (the `host` is that name).
        """
        names = (name.lower() for name in self.engine.settings.allowed_hosts)
        allowed = {*LOOPBACK_HOSTS, *names}
        for name, prefix in (("host", "//"), ("origin", "")):
            if (raw := headers.get(name.encode())) is None:
                continue
            value, hostname = raw.decode("latin-1"), None
            with contextlib.suppress(ValueError):
                hostname = urlsplit(prefix + value).hostname
            if hostname not in allowed:
                raise HttpError(
                    403,
                    f"browsers may use this server only as {', '.join(sorted(allowed))}, got "
                    f"{name} {value!r:.100}: start it with --allowed-hosts and that name, or with "
                    "keys",
                )

    def _record_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Add the request to the metrics and to the log."""
        route = getattr(scope.get("route"), "path", "(none)")
        self.engine.metrics.increment("requests_total", route=route, status=str(status))
        self.engine.metrics.increment("request_seconds_total", seconds, route=route)
        fields = {
            "method": scope["method"],
            "path": redact_path(scope["path"]),
            "status": status,
            "owner": scope.get("state", {}).get("owner", ""),
            "ms": round(seconds * 1e3, 1),
        }
        log.info("request", extra=fields)


def limit_body(receive: Receive, limit: int, seconds: float) -> Receive:
    """Return a `receive` that limits size and duration of a body.

    It raises HttpError (413) for a body of more than `limit` bytes, and HttpError (408) for a slow
    body. The timeout is `seconds`, plus a second for every 64 KiB received.
    """
    length, complete, start = 0, False, time.monotonic()

    async def next_message() -> Message:
        nonlocal length, complete
        if complete:
            # waits for the client to disconnect, while the response is computed
            return await receive()
        remaining = start + seconds + length / _MIN_BYTES_PER_SECOND - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), max(remaining, 0.001))
        except TimeoutError:
            raise HttpError(
                408,
                f"received only {length} bytes of the body in {time.monotonic() - start:.0f} s: "
                "send it faster",
            ) from None
        length += len(message.get("body", b""))
        complete = message["type"] != "http.request" or not message.get("more_body", False)
        if length > limit:
            raise HttpError(413, f"a body may have at most {limit} bytes: send less at once")
        return message

    return next_message


def redact_path(path: str) -> str:
    """Return a path for the log, without the signature of a link, which is as secret as a key."""
    if not path.startswith(LINK_PREFIX):
        return path[:200]
    expires, _, rest = path.removeprefix(LINK_PREFIX).partition("/")
    return f"{LINK_PREFIX}{expires}/.../{rest.partition('/')[2]}"[:200]


class JsonLineFormatter(logging.Formatter):
    """Format each log record as a line of JSON: time, level, event, the record's FIELDS, and the
    type of an exception with its last 12 frames.

    Prompts and keys are never logged.
    """

    FIELDS = (
        "method",
        "path",
        "status",
        "ms",
        "owner",
        "verb",
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
            "event": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in self.FIELDS if hasattr(record, name)}
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            # without the exception's message, which may contain a user's tokens
            line["where"] = [
                f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(record.exc_info[2], limit=-12)
            ]
        return json.dumps(line)


def is_page_request(scope: Scope) -> bool:
    """Return whether a browser requests the page: `accept` names HTML, and not JSON."""
    accept = dict(scope["headers"]).get(b"accept", b"").lower()
    return (
        scope["path"] == PAGE_PATH
        and scope["method"] in ("GET", "HEAD")
        and b"text/html" in accept
        and b"application/json" not in accept
    )


class ChatPage(Response):
    """Hold the chat page. Other requests than those of browsers are not found."""

    media_type = "text/html"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_page_request(scope):
            raise HTTPException(404)
        await super().__call__(scope, receive, send)


def make_chat_page_route() -> Route:
    """Return the route of the chat page, which needs no key: it contains no data.

    Its Content-Security-Policy allows the page's inline script and style by their hashes, requests
    to this server, and nothing else.
    """
    html = Path(__file__).with_name("chat.html").read_text("utf-8")
    digests = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in _INLINE.findall(html)
    }
    own_code = "".join(f"{kind}-src 'sha256-{digest}'; " for kind, digest in digests.items())
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    headers = {
        "content-security-policy": own_code + policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "vary": "accept",
        "x-content-type-options": "nosniff",
    }
    return Route(PAGE_PATH, ChatPage(html, headers=headers))
