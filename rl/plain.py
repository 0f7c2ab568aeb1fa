"""Text of others made fit to print: bounded, without escape sequences, and such that every stream
can encode it.
"""

from __future__ import annotations

import re

MOST = 4000  # characters of one message: what a person reads

# What moves a cursor, changes colours, sets a title or a link, whole: CSI; OSC, DCS and their like
# up to their end; two-character ones.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]",
    re.DOTALL,
)
# Other control characters (C0 but tab and newline, DEL, C1) and marks that turn the direction of
# writing around.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SURROGATES = re.compile("[\ud800-\udfff]")  # halves of pairs, which no stream can encode


def plain_text(text: str, limit: int) -> str:
    """`text` in at most about `limit` characters (the middle left out, and how much), escape
    sequences removed, lines kept.

    Characters that cannot be printed are shown as \\x1b, \\ud800 and the like.
    """
    left_out = len(text) - limit
    if left_out > 0:  # before anything that takes time in its length
        head, tail = text[: limit * 3 // 4], text[len(text) - limit // 4 :]
        return f"{_printable(head)} [... {left_out} characters left out ...] {_printable(tail)}"
    return _printable(text)


def _printable(text: str) -> str:
    text = _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _SURROGATES.sub(_named, _CONTROLS.sub(_named, text))


def printable(text: str, most: int = MOST, encoding: str = "utf-8") -> str:
    """As `plain_text`, for a message: control characters are left out, not named, and what
    `encoding` lacks is escaped.
    """
    if len(text) > most:
        head, tail = most * 3 // 4, most // 4
        text = (
            f"{text[:head]} ... ({len(text) - head - tail} characters left out) ... {text[-tail:]}"
        )
    text = _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))
    return _SURROGATES.sub("\ufffd", text).encode(encoding, "backslashreplace").decode(encoding)


def _named(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def says(error: BaseException, limit: int = 2000) -> str:
    """An exception as "Type: text", made plain. Its text is code of whoever raised it, which may
    itself fail.
    """
    try:
        text = str(error)
    except Exception as second:  # boundary: somebody's __str__
        text = f"(its text could not be had: {type(second).__name__})"
    return plain_text(f"{type(error).__name__}: {text}", limit)
