"""Parse an answer while it is sampled, for streaming to a client. Each partial message is a prefix
of the final message.
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
    """Return whether a prompt (token ids) ends within thoughts, so that the answer starts there."""
    thought = renderer.thought_marks()
    if thought is None:
        return False
    text = renderer._decode(prompt[-64:])
    return text.rfind(thought[0]) > text.rfind(thought[1])


def shown(renderer: Renderer, tokens: Sequence[int], within_thoughts: bool, ended: bool) -> Message:
    """Return the message of an answer's first tokens, as far as it is certain, or of all tokens if
    it has `ended`.

    Thoughts (`reasoning_content`) and text are streamed as they are written. Calls (`tool_calls`)
    have their arguments as text, which is streamed too; a call is included once its name is known
    (`rl.renderers.begun_calls`). A thought that never ended counts as thought, not as text.
    `within_thoughts`: the result of `opens_thoughts`. At the end of a text, these are held back:
    spaces, parts of characters, and possible starts of a mark. A single exception to the prefix
    property remains: a closing mark of thoughts without an opening mark turns the preceding text
    into thoughts.
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
            # A call within thoughts counts as a call only if the thoughts never end.
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
    """Return the opening mark of a tool call, if the renderer parses calls."""
    form = renderer.call_form()
    return CALL_BEGIN if form is None else form.begin


def _calls(renderer: Renderer, text: str, ended: bool) -> tuple[str, list[BegunCall]]:
    """Return (the text without its calls, the calls). Calls in a special format
    (`rl.renderers.call_forms`) are included only when the answer has ended.
    """
    form, tools = renderer.call_form(), renderer.offered()
    if form is None:
        return read_calls(text, tools, ended)
    if ended:
        content, parsed_calls, _ = form.take(text, tools)
        functions = [call["function"] for call in parsed_calls]
        return content, [
            BegunCall(function["name"], json.dumps(function["arguments"], ensure_ascii=False))
            for function in functions
        ]
    if form.begin == PYTHON_TAG and tools and text.lstrip().startswith("{"):
        return "", []  # the whole answer may be a call
    return text.partition(form.begin)[0], []


def _open_thought(
    content: str, thoughts: str | None, begin: str, within: bool, ended: bool
) -> tuple[str, str | None, bool]:
    """Return (the remaining content, the thoughts including an unfinished thought, whether an
    unfinished thought exists).
    """
    if within and thoughts is None:
        return "", content.removeprefix(begin), True
    before, opened, thought = content.partition(begin)
    if opened:
        thought = thought.lstrip()
        joined = thought if not thoughts else f"{thoughts}\n\n{thought}" if thought else thoughts
        return before if before.strip() else "", joined, True
    if not ended and thoughts is None and begin.startswith(content.lstrip()):
        return "", None, True  # no text yet, or part of a mark
    return content, thoughts, False


def _message(
    renderer: Renderer, content: str, thoughts: str | None, calls: Sequence[BegunCall]
) -> Message:
    """Return the assistant message of the parsed parts."""
    message: Message = {
        "role": "assistant",
        "content": renderer.before_stop(content) if isinstance(renderer, StopsAt) else content,
    }
    message |= {} if thoughts is None else {"reasoning_content": thoughts}
    functions: list[dict[str, Any]] = [
        {"name": call.name, "arguments": call.arguments} for call in calls
    ]
    return message | (
        {"tool_calls": [{"type": "function", "function": function} for function in functions]}
        if functions
        else {}
    )
