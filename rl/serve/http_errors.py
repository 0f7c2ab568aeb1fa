"""Define the error of a refused request, the mapping of all errors to it, and JSON responses.

A traceback is never sent.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any, Literal

from starlette.responses import JSONResponse

from rl.errors import APIStatusError, ContextLengthError
from rl.jsonl import replace_nonfinite

# the SDK raises immediately for "user", and reports the error as the caller's
ErrorCategory = Literal["user", "server", "unknown"]

# Errors of the caller: of the values that it sent.
CALLER_ERRORS = (ValueError, TypeError, FloatingPointError)

_OPENAI_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_log = logging.getLogger("whetstone.serve")


class SafeJSONResponse(JSONResponse):
    """Encode any content as ASCII JSON.

    A lone surrogate, which a client may have sent, is escaped. NaN and infinity become null.
    Starlette's JSONResponse raises for both.
    """

    @staticmethod
    def render(content: Any) -> bytes:  # type: ignore[override]
        """Return `content` as compact ASCII JSON."""
        encode = functools.partial(json.dumps, separators=(",", ":"), allow_nan=False)
        try:
            return encode(content).encode("ascii")
        except ValueError:
            return encode(replace_nonfinite(content)).encode("ascii")


class HttpError(Exception):
    """Signal that a request is refused, with an HTTP status and a message.

    `param`, `code`, `kind`: as in OpenAI's errors: the field, a word for programs, their "type".
    `retry_after`: seconds after which a retry may succeed, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code, self.retry_after = code, retry_after
        self.kind = kind or _OPENAI_KINDS.get(status) or _get_kind(status)

    @property
    def category(self) -> ErrorCategory:
        """Return the category of Tinker's failed futures: "user" for a status below 500, otherwise
        "server".
        """
        return "user" if self.status < 500 else "server"

    def to_openai_json(self) -> dict[str, Any]:
        """Return the error as OpenAI's JSON object."""
        fields = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **fields}}


class ShutdownError(HttpError):
    """Signal that the server shut down before it ran a request. The client may retry it."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down: try again", retry_after=5.0)


def make_tokenizer_error(model: str | None) -> HttpError:
    """Return the error of a route that needs the tokenizer of a model that has none."""
    name = "this model" if model is None else f"the model {model!r}"
    text = f"{name} has no tokenizer on this server: send token ids to /inference/v1/generate"
    return HttpError(400, text, "model")


def _get_kind(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def to_http_error(
    error: BaseException,
    verb: str = "the request",
    caller_errors: tuple[type[BaseException], ...] = CALLER_ERRORS,
) -> HttpError:
    """Return the `HttpError` of any error, for the client that sent the request.

    Of an error that the caller cannot fix, the message holds only the type. `verb` is the verb that
    failed.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ContextLengthError):
        return HttpError(400, str(error), code="context_length_exceeded")
    if isinstance(error, APIStatusError):
        retry_after = 5.0 if error.status_code == 503 else None
        return HttpError(error.status_code, str(error), retry_after=retry_after)
    if isinstance(error, caller_errors):
        return HttpError(400, str(error))
    return HttpError(500, f"{verb} failed in the server ({type(error).__name__}); its log says why")


def report_error(error: BaseException) -> HttpError:
    """Return the `HttpError` of an error of a route, and log an error of the server.

    The type of every field has been checked: a TypeError is an error of the server.
    """
    http_error = to_http_error(error, caller_errors=(ValueError,))
    if http_error.status >= 500 and http_error is not error:
        _log.error("a request failed", exc_info=error)
    return http_error


def make_error_response(error: HttpError, is_openai: bool = False) -> SafeJSONResponse:
    """Return an error response in OpenAI's form, or in the form of Tinker's protocol, which clients
    of both show.
    """
    headers = {} if error.retry_after is None else {"retry-after": f"{error.retry_after:g}"}
    if error.status == 408:
        headers["connection"] = "close"  # the server does not wait for the rest of the body
    body = error.to_openai_json()
    if not is_openai:
        fields = {"type": _get_kind(error.status), "param": None, "code": error.status}
        body = {"detail": error.message, "error": {"message": error.message, **fields}}
    return SafeJSONResponse(body, error.status, headers=headers)


def clear_tracebacks(error: BaseException | None) -> None:
    """Clear the tracebacks of an error and its causes.

    Otherwise a stored error would keep a request body in memory.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
