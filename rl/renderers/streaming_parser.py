"""Parse an answer while it is sampled, for streaming to a client. Each partial message is a prefix
of the final message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl.renderers.renderer import Renderer
from rl.renderers.response_parsing import (
    CALL_BEGIN,
    CHANNEL,
    drop_partial_message,
    split_channels,
    split_thoughts,
)
from rl.renderers.streaming_calls import (
    PartialCall,
    parse_channel_calls,
    parse_partial_calls,
    trim_uncertain_end,
)
from rl.renderers.tool_call_formats import PYTHON_TAG
from rl.types import Message


def prompt_opens_thoughts(renderer: Renderer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt (token ids) ends within thoughts, so that the answer starts there."""
    thought = renderer.thought_marks()
    if thought is None:
        return False
    text = renderer._decode(prompt[-64:])
    return text.rfind(thought[0]) > text.rfind(thought[1])


def parse_partial_answer(
    renderer: Renderer, tokens: Sequence[int], within_thoughts: bool, ended: bool
) -> Message:
    """Return the message of an answer's first tokens, as far as it is certain, or of all tokens if
    it has `ended`.

    Thoughts (`reasoning_content`) and text are streamed as they are written. Calls (`tool_calls`)
    have their arguments as text, which is streamed too; a call is included once its name is known
    (`rl.renderers.streaming_calls`). A thought that never ended counts as thought, not as text.
    `within_thoughts`: the result of `prompt_opens_thoughts`. At the end of a text, these are held
    back: spaces, parts of characters, and possible starts of a mark. A single exception to the
    prefix property remains: a closing mark of thoughts without an opening mark turns the preceding
    text into thoughts.
    """
    marks, text = renderer.marks(), renderer.get_answer_text(tokens)
    calls: list[PartialCall] = []
    if CHANNEL in marks:
        text, calls = parse_channel_calls(text, marks, ended)
        content, thoughts, *_ = split_channels(
            text if ended else drop_partial_message(trim_uncertain_end(text, marks))
        )
        return _build_message(renderer, content, thoughts, calls)
    around = renderer.thought_marks()
    content, thoughts = split_thoughts(text, around) if around is not None else (text, None)
    if around is not None:
        content, thoughts, thinking = _split_open_thought(
            content, thoughts, around[0], within_thoughts, ended
        )
        if thinking and thoughts is not None:
            # A call within thoughts counts as a call only if the thoughts never end.
            opening = _get_call_mark(renderer)
            thoughts, called, rest = (
                thoughts.partition(opening) if opening in marks else (thoughts, "", "")
            )
            more, calls = (
                _split_partial_calls(renderer, called + rest, True) if ended else ("", calls)
            )
            content, thoughts = (
                content + more,
                thoughts if ended else trim_uncertain_end(thoughts, (around[1], *marks)),
            )
        thoughts = None if thoughts is None else thoughts.strip()
        if thinking:
            return _build_message(renderer, content if ended else content.rstrip(), thoughts, calls)
    if _get_call_mark(renderer) in marks:
        content, calls = _split_partial_calls(renderer, content, ended)
    return _build_message(
        renderer, content if ended else trim_uncertain_end(content, marks).rstrip(), thoughts, calls
    )


def _get_call_mark(renderer: Renderer) -> str:
    """Return the opening mark of a tool call, if the renderer parses calls."""
    form = renderer.call_format()
    return CALL_BEGIN if form is None else form.begin


def _split_partial_calls(
    renderer: Renderer, text: str, ended: bool
) -> tuple[str, list[PartialCall]]:
    """Return (the text without its calls, the calls). Calls in a special format
    (`rl.renderers.tool_call_formats`) are included only when the answer has ended.
    """
    form, tools = renderer.call_format(), renderer.available_tools()
    if form is None:
        return parse_partial_calls(text, tools, ended)
    if ended:
        content, parsed_calls, _ = form.parse(text, tools)
        functions = [call["function"] for call in parsed_calls]
        return content, [
            PartialCall(function["name"], json.dumps(function["arguments"], ensure_ascii=False))
            for function in functions
        ]
    if form.begin == PYTHON_TAG and tools and text.lstrip().startswith("{"):
        return "", []  # the whole answer may be a call
    return text.partition(form.begin)[0], []


def _split_open_thought(
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


def _build_message(
    renderer: Renderer, content: str, thoughts: str | None, calls: Sequence[PartialCall]
) -> Message:
    """Return the assistant message of the parsed parts."""
    message: Message = {
        "role": "assistant",
        "content": renderer.cut_at_stop(content),
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
