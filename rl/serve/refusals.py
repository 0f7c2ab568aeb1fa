"""What a client is told when it does not get what it asked for: a status, a sentence, whose fault
it is. Never a traceback.
"""

from __future__ import annotations

from typing import Literal

from rl.errors import UserError

Category = Literal["user", "server", "unknown"]  # the SDK raises at once for the first, and says so


class Refused(Exception):
    """An answer with this HTTP status. `category` as in Tinker's failed futures; `retry_after`
    seconds where another try may work.
    """

    def __init__(self, status: int, message: str, *, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after

    @property
    def category(self) -> Category:
        return "user" if self.status < 500 else "server"


class Interrupted(Exception):
    """The server ends before this was run: it was not, and may be asked for again."""


def told(error: BaseException, what: str) -> tuple[str, Category]:
    """(message, category) of what failed, for whoever asked. What is not the caller's to mend is
    named, not shown.
    """
    if isinstance(error, Refused):
        return error.message, error.category
    if isinstance(error, Interrupted):
        return f"{what} was not run: the server is shutting down, try again", "server"
    if isinstance(error, (UserError, ValueError, TypeError, FloatingPointError)):
        return str(error), "user"
    return f"{what} failed in the server ({type(error).__name__}); its log says why", "server"


def drop_traceback(error: BaseException | None) -> None:
    """Clear the tracebacks of an error and its causes, so that a stored error keeps no request body
    alive.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
