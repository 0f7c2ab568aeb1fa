"""A JSON body, read field by field: what is missing or of another kind is refused by name."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from starlette.requests import Request

from rl.serve.refusals import Refused

T = TypeVar("T")
MOST_BYTES = 32 * 2**20


def json_of(raw: bytes) -> Any:
    """What the bytes say. ValueError for what is no JSON, and for half of a surrogate pair, which
    no text holds and nothing can write.
    """
    # json itself takes other encodings, and halves of pairs as bytes
    text = raw.decode("utf-8-sig")
    found = json.loads(text)
    if "\\u" in text:  # only so can one be written
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair stands in it") from None
    return found


def check_size(raw: bytes, limit: int = MOST_BYTES) -> None:
    """Raise Refused (413) for a JSON body that would stop the event loop: it is read in one piece,
    at about 20 ms a MiB.
    """
    if len(raw) > limit:
        raise Refused(
            413,
            f"a body in JSON has {len(raw)} bytes, and {limit} are the most here: send less at once",
        )


class Body:
    """The object that a request brings."""

    def __init__(self, fields: dict[str, Any]):
        self.fields = fields

    @classmethod
    async def of(cls, request: Request, limit: int = MOST_BYTES) -> Body:
        raw = await request.body()
        check_size(raw, limit)
        try:
            fields = json_of(raw) if raw else {}
        except (ValueError, RecursionError):
            raise Refused(400, "the body is no JSON") from None
        if not isinstance(fields, dict):
            raise Refused(400, f"the body is a JSON object, got {type(fields).__name__}")
        return cls(fields)

    def text(self, name: str) -> str:
        return self._need(name, self.maybe(name, str))

    def whole(self, name: str, least: int = 0, most: int = 2**31 - 1) -> int:
        return self._need(name, self.maybe_whole(name, least, most))

    def maybe_whole(self, name: str, least: int = 0, most: int = 2**31 - 1) -> int | None:
        found = self.maybe(name, int)
        if found is not None and not least <= found <= most:
            raise Refused(400, f"{name} is a whole number from {least} to {most}, got {found}")
        return found

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """Absent or null: None."""
        found = self.fields.get(name)
        if found is None:
            return None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise Refused(400, f"{name} is of type {kind.__name__}, got {type(found).__name__}")
        return found

    def flag(self, name: str) -> bool:
        return bool(self.maybe(name, bool))

    def words(self, name: str) -> dict[str, str]:
        """A map of words of the caller's own; what is no text becomes it."""
        return {
            str(key): value if isinstance(value, str) else json.dumps(value)
            for key, value in (self.maybe(name, dict) or {}).items()
        }

    def _need(self, name: str, found: T | None) -> T:
        if found is None:
            raise Refused(400, f"the body lacks {name!r}")
        return found
