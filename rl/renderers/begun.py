"""An answer that is still being drawn: what of it will be part of its message, whatever follows."""

from __future__ import annotations

from collections.abc import Sequence

from rl.renderers.base import Renderer
from rl.renderers.call_forms import CALL_BEGINS, PYTHON_TAG
from rl.renderers.parsing import CALL_BEGIN, CHANNEL, THOUGHT_BEGIN, THOUGHT_END, begun_channels
from rl.types import Message


def opens_thoughts(renderer: Renderer, prompt: Sequence[int]) -> bool:
    """Whether a prompt's end is within thoughts, so that the answer begins there. `prompt`: its ids."""
    if THOUGHT_BEGIN not in renderer.marks():
        return False
    text = renderer._decode(prompt[-64:])
    return text.rfind(THOUGHT_BEGIN) > text.rfind(THOUGHT_END)


def parse_begun(renderer: Renderer, tokens: Sequence[int], within_thoughts: bool) -> Message:
    """The message of the first tokens of an answer, as far as it is certain: its texts are beginnings of the whole answer's.

    `within_thoughts`: as `opens_thoughts` says. Held back are thoughts until they end, a call of a tool and what follows it, and at the
    end of the text spaces, parts of characters, and what may be the beginning of a mark. One answer may yet turn out otherwise: a
    closing mark of thoughts that nothing opened makes thoughts of what came before it.
    """
    marks = renderer.marks()
    if CHANNEL in marks:  # the certain part of the text, read as a whole answer is
        ids = renderer.encode(certain_text(begun_channels(renderer._decode(renderer._until_end(tokens)[0])), marks))
        return renderer.parse_response(ids)[0]
    message = renderer.parse_response(tokens)[0]
    content = str(message["content"])
    begun = content.lstrip()
    if THOUGHT_BEGIN in marks and "reasoning_content" not in message:
        if within_thoughts or begun.startswith(THOUGHT_BEGIN) or THOUGHT_BEGIN.startswith(begun):
            return {**message, "content": ""}
    if PYTHON_TAG in marks and begun.startswith("{"):
        return {**message, "content": ""}  # it may be a call, which is the whole answer
    for mark in (THOUGHT_BEGIN, *{CALL_BEGIN, *CALL_BEGINS}):
        if mark in marks and mark in content:
            content = content[: content.index(mark)]
    return {**message, "content": certain_text(content, marks).rstrip()}


def certain_text(text: str, marks: Sequence[str]) -> str:
    """A text that goes on, less what at its end may be the beginning of a mark, or a part of a character."""
    held = max((_overlap(text, mark) for mark in marks), default=0)
    return text[: len(text) - held].rstrip("\ufffd")


def _overlap(text: str, mark: str) -> int:
    """How much of the end of `text` is a beginning of `mark`, and not all of it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
