"""Read the fields of a JSON request body; errors name a missing or mistyped field."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from starlette.requests import Request

from rl.serve.http_errors import HttpError

T = TypeVar("T")
MAX_JSON_BYTES = 32 * 2**20


def parse_json(raw: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises ValueError for invalid JSON, and for a lone surrogate, which cannot be encoded again.
    """
    # json.loads itself accepts other encodings, and encoded surrogates
    text = raw.decode("utf-8-sig")
    value = json.loads(text)
    if "\\u" in text:  # the only spelling of a lone surrogate in valid UTF-8
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it contains half of a surrogate pair") from None
    return value


def check_json_size(raw: bytes, limit: int = MAX_JSON_BYTES) -> None:
    """Raise HttpError (413) for a JSON body of more than `limit` bytes.

    Parsing blocks the event loop for about 20 ms per MiB.
    """
    if len(raw) > limit:
        raise HttpError(
            413,
            f"the JSON body has {len(raw)} bytes, the limit is {limit}: send less at once",
        )


class RequestBody:
    """Hold the JSON object of a request body, and check its fields on access.

    Every method raises HttpError (400) for a field of another type.
    """

    def __init__(self, fields: dict[str, Any]):
        self.fields = fields

    @classmethod
    async def from_request(cls, request: Request, limit: int = MAX_JSON_BYTES) -> RequestBody:
        """Return the body of `request`. Raises HttpError: 413 above `limit` bytes, 400 if the body
        is not a JSON object.
        """
        raw = await request.body()
        check_json_size(raw, limit)
        try:
            fields = parse_json(raw) if raw else {}
        except (ValueError, RecursionError):
            raise HttpError(400, "the body is not valid JSON") from None
        if not isinstance(fields, dict):
            raise HttpError(400, f"the body must be a JSON object, got {type(fields).__name__}")
        return cls(fields)

    def get_text(self, name: str) -> str:
        """Return a required text field."""
        return self._require(name, self.get_optional(name, str))

    def get_int(self, name: str, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        """Return a required integer field from `minimum` to `maximum`."""
        return self._require(name, self.get_optional_int(name, minimum, maximum))

    def get_optional_int(self, name: str, minimum: int = 0, maximum: int = 2**31 - 1) -> int | None:
        """Return an optional integer field from `minimum` to `maximum`."""
        value = self.get_optional(name, int)
        if value is not None and not minimum <= value <= maximum:
            raise HttpError(
                400, f"{name} must be an integer from {minimum} to {maximum}, got {value}"
            )
        return value

    def get_optional(self, name: str, kind: type[T]) -> T | None:
        """Return an optional field of type `kind`; None if it is absent or null."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise HttpError(
                400, f"{name} must be of type {kind.__name__}, got {type(value).__name__}"
            )
        return value

    def get_flag(self, name: str) -> bool:
        """Return an optional boolean field; False if it is absent or null."""
        return bool(self.get_optional(name, bool))

    def get_metadata(self, name: str) -> dict[str, str]:
        """Return an optional map of user metadata; a value that is not a text becomes its JSON."""
        return {
            str(key): value if isinstance(value, str) else json.dumps(value)
            for key, value in (self.get_optional(name, dict) or {}).items()
        }

    def _require(self, name: str, value: T | None) -> T:
        """Return the value. Raises HttpError (400) if it is None."""
        if value is None:
            raise HttpError(400, f"the body lacks {name!r}")
        return value
