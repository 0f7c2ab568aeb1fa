"""Sanitize foreign text for printing: bounded length, no escape sequences, encodable by every
stream.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import islice
from typing import Any

MAX_MESSAGE_CHARACTERS = 4000  # characters of a single message, for a human reader

# Complete sequences that move the cursor, or set colours, a title or a link: CSI; OSC, DCS and
# similar ones up to their end; two-character sequences.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]",
    re.DOTALL,
)
# Other control characters (C0 except tab and newline, DEL, C1) and marks that reverse the direction
# of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SURROGATES = re.compile("[\ud800-\udfff]")  # halves of pairs, which no stream can encode


def sanitize_text(text: str, limit: int) -> str:
    """Return `text` without escape sequences, truncated in the middle to about `limit` characters.

    A note replaces the omitted middle and counts its characters. Lines are kept. Unprintable
    characters are shown as \\x1b, \\ud800 and so on.
    """
    omitted = len(text) - limit
    if omitted > 0:  # truncate before any step that takes time in the length
        head, tail = text[: limit * 3 // 4], text[len(text) - limit // 4 :]
        return f"{_sanitize(head)} [... {omitted} characters omitted ...] {_sanitize(tail)}"
    return _sanitize(text)


def _sanitize(text: str) -> str:
    text = _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _SURROGATES.sub(_escape_character, _CONTROLS.sub(_escape_character, text))


def sanitize_message(
    text: str, limit: int = MAX_MESSAGE_CHARACTERS, encoding: str = "utf-8"
) -> str:
    """Return `text` for a message: like `sanitize_text`, but without control characters, and
    escaped for `encoding`.
    """
    if len(text) > limit:
        head, tail = limit * 3 // 4, limit // 4
        text = (
            f"{text[:head]} ... ({len(text) - head - tail} characters omitted) ... {text[-tail:]}"
        )
    text = _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))
    return _SURROGATES.sub("\ufffd", text).encode(encoding, "backslashreplace").decode(encoding)


def list_some(items: Collection[Any], limit: int, separator: str = ", ") -> str:
    """Return the first `limit` items as text, and the number of further items."""
    shown = separator.join(str(item) for item in islice(items, limit))
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def describe_error(error: BaseException, limit: int = 2000) -> str:
    """Return an exception as sanitized "Type: text".

    Its `__str__` is foreign code, which may fail.
    """
    try:
        text = str(error)
    except Exception as str_error:  # boundary: a foreign __str__
        text = f"(its text could not be computed: {type(str_error).__name__})"
    return sanitize_text(f"{type(error).__name__}: {text}", limit)
