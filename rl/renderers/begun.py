"""An answer as a client sees it, while it is drawn and when it is whole: the one is always a
beginning of the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl.renderers.base import Renderer
from rl.renderers.begun_calls import BegunCall, certain_text, read_calls, read_channel_calls
from rl.renderers.call_forms import PYTHON_TAG
from rl.renderers.parsing import CALL_BEGIN, CHANNEL, begun_channels, split_channels, split_thoughts
from rl.renderers.stops import StopsAt
from rl.types import Message


def opens_thoughts(renderer: Renderer, prompt: Sequence[int]) -> bool:
    """Whether a prompt's end is within thoughts, so that the answer begins there. `prompt`: its
    ids.
    """
    thought = renderer.thought_marks()
    if thought is None:
        return False
    text = renderer._decode(prompt[-64:])
    return text.rfind(thought[0]) > text.rfind(thought[1])


def shown(renderer: Renderer, tokens: Sequence[int], within_thoughts: bool, ended: bool) -> Message:
    """The message of an answer's first tokens, as far as it is certain; of all of them where it has
    `ended`.

    Thoughts (`reasoning_content`) and text go on as they are written. Calls (`tool_calls`) have
    arguments as text, which go on as well; one counts from the moment that its name is known
    (`rl.renderers.begun_calls`). A thought that never ended is one here, and no text.
    `within_thoughts`: as `opens_thoughts` says. Held back are, at the end of a text, spaces, parts
    of characters, and what may be the beginning of a mark. One answer may yet turn out otherwise: a
    closing mark of thoughts that nothing opened makes thoughts of what came before it.
    """
    marks, text = renderer.marks(), renderer.text_of(tokens)
    calls: list[BegunCall] = []
    if CHANNEL in marks:
        text, calls = read_channel_calls(text, marks, ended)
        content, thoughts, *_ = split_channels(
            text if ended else begun_channels(certain_text(text, marks))
        )
        return _message(renderer, content, thoughts, calls)
    around = renderer.thought_marks()
    content, thoughts = split_thoughts(text, around) if around is not None else (text, None)
    if around is not None:
        content, thoughts, thinking = _open_thought(
            content, thoughts, around[0], within_thoughts, ended
        )
        if thinking and thoughts is not None:
            # A call that is written before the thoughts have ended is one where they never end.
            opening = _opening(renderer)
            thoughts, called, rest = (
                thoughts.partition(opening) if opening in marks else (thoughts, "", "")
            )
            more, calls = _calls(renderer, called + rest, True) if ended else ("", calls)
            content, thoughts = (
                content + more,
                thoughts if ended else certain_text(thoughts, (around[1], *marks)),
            )
        thoughts = None if thoughts is None else thoughts.strip()
        if thinking:
            return _message(renderer, content if ended else content.rstrip(), thoughts, calls)
    if _opening(renderer) in marks:
        content, calls = _calls(renderer, content, ended)
    return _message(
        renderer, content if ended else certain_text(content, marks).rstrip(), thoughts, calls
    )


def _opening(renderer: Renderer) -> str:
    """The mark with which a call begins, where the renderer reads calls."""
    form = renderer.call_form()
    return CALL_BEGIN if form is None else form.begin


def _calls(renderer: Renderer, text: str, ended: bool) -> tuple[str, list[BegunCall]]:
    """(the text without its calls, the calls). Those of a form of its own
    (`rl.renderers.call_forms`) are shown when all has ended.
    """
    form, tools = renderer.call_form(), renderer.offered()
    if form is None:
        return read_calls(text, tools, ended)
    if ended:
        content, found, _ = form.take(text, tools)
        functions = [call["function"] for call in found]
        return content, [
            BegunCall(one["name"], json.dumps(one["arguments"], ensure_ascii=False))
            for one in functions
        ]
    if form.begin == PYTHON_TAG and tools and text.lstrip().startswith("{"):
        return "", []  # it may be a call, which is the whole answer
    return text.partition(form.begin)[0], []


def _open_thought(
    content: str, thoughts: str | None, begin: str, within: bool, ended: bool
) -> tuple[str, str | None, bool]:
    """What is left of the content, the thoughts with one that has not ended, and whether there is
    one.
    """
    if within and thoughts is None:
        return "", content.removeprefix(begin), True
    said, opened, thought = content.partition(begin)
    if opened:
        thought = thought.lstrip()
        joined = thought if not thoughts else f"{thoughts}\n\n{thought}" if thought else thoughts
        return said if said.strip() else "", joined, True
    if not ended and thoughts is None and begin.startswith(content.lstrip()):
        return "", None, True  # nothing yet, or half of a mark
    return content, thoughts, False


def _message(
    renderer: Renderer, content: str, thoughts: str | None, calls: Sequence[BegunCall]
) -> Message:
    message: Message = {
        "role": "assistant",
        "content": renderer.before_stop(content) if isinstance(renderer, StopsAt) else content,
    }
    message |= {} if thoughts is None else {"reasoning_content": thoughts}
    functions: list[dict[str, Any]] = [
        {"name": call.name, "arguments": call.arguments} for call in calls
    ]
    return message | (
        {"tool_calls": [{"type": "function", "function": one} for one in functions]}
        if functions
        else {}
    )
