"""Serve the chat page at /: a single HTML file that speaks the OpenAI-style endpoint."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

PAGE_PATH = "/"
_TEMPLATE = Path(__file__).with_name("chat.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def is_page_request(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a browser requests the page: `accept` names HTML, and not JSON."""
    accept = dict(scope["headers"]).get(b"accept", b"").lower()
    return (
        scope["path"] == PAGE_PATH
        and scope["method"] in ("GET", "HEAD")
        and b"text/html" in accept
        and b"application/json" not in accept
    )


class ChatPageRoute:
    """Answer requests of the page's path. All but those of browsers are not found."""

    def __init__(self) -> None:
        self._html = _TEMPLATE.read_bytes()
        self._headers = {
            "content-security-policy": make_content_policy(self._html.decode()),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "vary": "accept",
            "x-content-type-options": "nosniff",
        }

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        if not is_page_request(scope):
            raise HTTPException(404)
        response = Response(self._html, media_type="text/html", headers=self._headers)
        await response(scope, receive, send)


def make_content_policy(html: str) -> str:
    """Return a Content-Security-Policy that allows the page's inline script and style by their
    hashes, requests to this server, and nothing else.
    """
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        [
            "default-src 'none'",
            *(f"{kind}-src {' '.join(hashes)}" for kind, hashes in sources.items()),
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def make_chat_page_route() -> Route:
    """Return the route of the chat page, which needs no key: it contains no data."""
    return Route(PAGE_PATH, ChatPageRoute())
