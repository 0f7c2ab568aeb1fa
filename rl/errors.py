"""What a user is meant to read: errors, shown without a traceback by the command line, and remarks,
for which nothing ends.
"""

import os
import warnings
from typing import Any


class TinkerError(Exception):
    """The root of the errors that Tinker's client names, so that `except rl.TinkerError` means here
    what it means there.
    """


class APIError(TinkerError):
    """`message`: what went wrong. `body`: nothing here, where no server answers."""

    def __init__(self, message: str = "", *_: Any, **__: Any):
        super().__init__(message)
        self.message = message
        self.body: object | None = None


class APIStatusError(APIError):
    """An answer of a server with this `status_code`; here, what would have been one."""

    status_code = 400


class BadRequestError(APIStatusError, ValueError):
    """A verb was called with what it cannot do: what it got, what was expected, and the remedy."""


class UserError(BadRequestError):
    """Something the user can set right: the message gives the value, what was expected, and the
    remedy.
    """


class RequestFailedError(TinkerError):
    """A verb failed while it ran. `category` and `request_id` as in Tinker's client."""

    def __init__(self, message: str = "", request_id: str = "", category: str = "unknown"):
        super().__init__(message, request_id, category)
        self.message, self.request_id, self.category = message, request_id, category

    def __str__(self) -> str:
        return self.message


# Never raised here, where there is no server and no account: scripts written for Tinker's client
# name them in `except`.


class APIConnectionError(APIError):
    pass


class APITimeoutError(APIConnectionError):
    pass


class APIResponseValidationError(APIError):
    pass


class AuthenticationError(APIStatusError):
    status_code = 401


class BillingError(APIStatusError):
    status_code = 402


class PermissionDeniedError(APIStatusError):
    status_code = 403


class NotFoundError(APIStatusError):
    status_code = 404


class ConflictError(APIStatusError):
    status_code = 409


class UnprocessableEntityError(APIStatusError):
    status_code = 422


class RateLimitError(APIStatusError):
    status_code = 429


class InternalServerError(APIStatusError):
    status_code = 500


class RunFolderError(UserError):
    """A run's folder cannot be used as asked; the message says what to do."""


class UnusedSetting(ValueError):
    """A setting was given that has no effect beside the others. `name`: which."""

    def __init__(self, name: str, text: str):
        super().__init__(text)
        self.name = name


class FailedElsewhere(Exception):
    """Another rank could not do its part: this one leaves off as well. Never shown: the other
    rank's error is.
    """


class RankLost(RuntimeError):
    """Another rank ended, hangs, or fell out of step: this run cannot go on. The message names the
    rank, its host and process.
    """


def remark(text: str, stacklevel: int = 3) -> None:
    """A warning on rank 0 alone: every rank finds the same. `stacklevel` as in `warnings.warn`; 3
    names the caller's caller.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        warnings.warn(text, stacklevel=stacklevel)
