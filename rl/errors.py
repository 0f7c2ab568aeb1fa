"""Define the errors shown to users (without a traceback on the command line) and remarks, which are
warnings.
"""

import os
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal


class TinkerError(Exception):
    """Base class of the errors of Tinker's API, so that `except rl.TinkerError` works as in
    Tinker's client.
    """


class APIError(TinkerError):
    """Report an API error. `message`: description. `body`: always None here, without a server."""

    def __init__(self, message: str = "", *_: Any, **__: Any):
        super().__init__(message)
        self.message = message
        self.body: object | None = None


class APIStatusError(APIError):
    """Report what a server would answer with this `status_code`."""

    status_code = 400


class BadRequestError(APIStatusError, ValueError):
    """Reject the arguments of an API call. The message has the received and expected value, and the
    remedy.
    """


class ContextLengthError(BadRequestError):
    """Reject a prompt that, with the tokens to sample, exceeds the model's context."""


class UserError(BadRequestError):
    """Report an error that the user can fix. The message has the value, the expected value, and the
    remedy.
    """


class RequestFailedError(TinkerError):
    """Report a call that failed during execution. `category` and `request_id` as in Tinker's
    client.
    """

    def __init__(self, message: str = "", request_id: str = "", category: str = "unknown"):
        super().__init__(message, request_id, category)
        self.message, self.request_id, self.category = message, request_id, category

    def __str__(self) -> str:
        return self.message


# Never raised here, without server and account: scripts for Tinker's client name them in `except`.


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
    """Reject a run's folder for the requested use. The message names the remedy."""


class UnusedSettingError(ValueError):
    """Reject a setting that has no effect with the other settings. `name`: the setting."""

    def __init__(self, name: str, text: str):
        super().__init__(text)
        self.name = name


class OtherRankFailed(Exception):
    """End this rank after another rank failed. Never shown: the other rank's error is."""


class RankLost(RuntimeError):
    """Report that another rank ended, hangs, or is out of step, so this run cannot continue.

    The message names the rank, its host and process.
    """


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of pyproject.toml.

    The package index has another project called whetstone, so extras are installed from a checkout.
    """
    return f'pip install -e ".[{extra}]" in the checkout'


def warn_on_rank_zero(text: str, stacklevel: int = 3) -> None:
    """Warn on rank 0 only, since every rank detects the same condition.

    `stacklevel` as in `warnings.warn`; 3 names the caller's caller.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        warnings.warn(text, stacklevel=stacklevel)


def suggest_path(path: Path) -> str:
    """Return "; did you mean ...?" with the nearest name beside a missing file, or ""."""
    import difflib

    try:
        siblings = [item.name for item in path.parent.iterdir()]
    except OSError:  # no folder, or one that cannot be read
        siblings = []
    near_names = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.75)
    return f"; did you mean {path.with_name(near_names[0])}?" if near_names else ""


def describe_import_error(error: BaseException, path: str) -> str:
    """Return the type and text of an error in a user's file, without the file's name, which the
    message has.
    """
    if isinstance(error, SyntaxError) and Path(error.filename or "").name == Path(path).name:
        return f"{type(error).__name__} in line {error.lineno}: {error.msg}"
    return f"{type(error).__name__}: {error}"


def check_hub_access(
    name: str, kind: Literal["model", "dataset"], known: Iterable[str] = ()
) -> None:
    """Raise UserError if a hub name is not cached and the hub cannot be reached. `known`: as for
    `suggest_hub_name`.

    One request without retries decides. The libraries of Hugging Face repeat each request for half
    a minute. Existing folders, and offline mode, which fails at once, are not checked.
    """
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if constants.HF_HUB_OFFLINE or cached.is_dir() or Path(name).expanduser().exists():
        return
    problem = _probe_hub(constants.ENDPOINT)
    if problem is None:
        return
    local = (
        "a local folder, or tiny:ascii, a small untrained model that is built here"
        if kind == "model"
        else "a local file or folder"
    )
    raise UserError(
        f"the {kind} {name!r} is neither a local folder nor in the hub's cache"
        f"{suggest_hub_name(name, known, kind)}, and {constants.ENDPOINT} cannot be reached "
        f"({problem}). Without a network use {local}. A cache that was filled elsewhere is read "
        "too: set HF_HOME, and HF_HUB_OFFLINE=1 against requests"
    )


@cache
def _probe_hub(endpoint: str) -> str | None:
    """Return why an address does not answer a request; None if it does, with any status."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=10)
    except Exception as error:  # of the HTTP library that this version of huggingface_hub uses
        return str(error) or type(error).__name__
    return None


def suggest_hub_name(name: str, known: Iterable[str], kind: Literal["model", "dataset"]) -> str:
    """Return " (did you mean ...?)" with the name that was meant if a hub name has a typing
    mistake, or "".

    A typing mistake is at most two letters, and no digit: Qwen3-1.7B and Qwen3-0.6B are two models.
    The candidates are `known`, what the hub's cache holds, and the model folders and runs beside
    `name`. Nothing is fetched.
    """
    import difflib

    from huggingface_hub.constants import HF_HUB_CACHE

    cached = [
        path.name.removeprefix(f"{kind}s--").replace("--", "/")
        for path in Path(HF_HUB_CACHE).glob(f"{kind}s--*")
    ]
    configs = Path(name).expanduser().parent.glob("*/config.json") if kind == "model" else ()
    folders = [str(path.parent) for path in configs]
    names = {candidate.lower(): candidate for candidate in (*cached, *known, *folders)}
    if name in names.values() or Path(name).expanduser().exists():
        return ""

    typed = str(Path(name).expanduser()).lower()  # without ./, as the folders are written

    def is_mistake(candidate: str) -> bool:
        edits = difflib.SequenceMatcher(None, typed, candidate).get_opcodes()
        changed = sum(max(b - a, d - c) for kind, a, b, c, d in edits if kind != "equal")
        digits = [[c for c in text if c.isdigit()] for text in (typed, candidate)]
        return changed <= 2 and digits[0] == digits[1]

    matches = difflib.get_close_matches(typed, filter(is_mistake, names), n=1, cutoff=0.75)
    return f" (did you mean {names[matches[0]]}?)" if matches else ""
