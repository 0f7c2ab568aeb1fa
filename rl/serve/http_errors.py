"""Turn errors into HTTP responses: status, message and category. A traceback is never sent."""

from __future__ import annotations

from typing import Literal

from rl.errors import UserError

# the SDK raises immediately for "user", and reports the error as the caller's
ErrorCategory = Literal["user", "server", "unknown"]


class HttpError(Exception):
    """Signal that a request is refused, with an HTTP status and a message.

    `category` is the category of Tinker's failed futures. `retry_after` is the number of seconds
    after which a retry may succeed, or None.
    """

    def __init__(self, status: int, message: str, *, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after

    @property
    def category(self) -> ErrorCategory:
        """Return "user" for a status below 500, otherwise "server"."""
        return "user" if self.status < 500 else "server"


class ShutdownError(Exception):
    """Signal that the server shut down before it ran a request. The client may retry it."""


def to_http_error(error: BaseException, verb: str) -> tuple[str, ErrorCategory]:
    """Return (message, category) of an error, for the client that sent the request.

    Of an error that the caller cannot fix, the message holds only the type. `verb` is the verb that
    failed.
    """
    if isinstance(error, HttpError):
        return error.message, error.category
    if isinstance(error, ShutdownError):
        return f"{verb} was not run: the server is shutting down, try again", "server"
    if isinstance(error, (UserError, ValueError, TypeError, FloatingPointError)):
        return str(error), "user"
    return f"{verb} failed in the server ({type(error).__name__}); its log says why", "server"


def clear_tracebacks(error: BaseException | None) -> None:
    """Clear the tracebacks of an error and its causes.

    Otherwise a stored error would keep a request body in memory.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
