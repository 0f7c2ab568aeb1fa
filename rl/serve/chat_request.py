"""A chat completion that is asked for: its messages, tools and settings, read from the body of the
request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.renderers import Renderer, broken_call
from rl.serve.chat_fields import MOST_CHOICES, MOST_TOP_LOGPROBS, Fields, Refused, sampling_params
from rl.types import Message, SamplingParams

MOST_TOKENS = 2**31 - 1
MOST_MESSAGES = 100_000
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_OF_MESSAGES = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal", "audio",
                "function_call", "annotations", "token_ids", "prompt_token_ids")  # fmt: skip


@dataclass(frozen=True)
class ChatAsk:
    """What is asked. `params` has no stops of a renderer yet (`stops_of` adds them). `max_tokens`
    None: up to the context's end.
    """

    model: str | None
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    template_settings: Mapping[str, Any]
    n: int
    fields: Fields
    max_tokens: int | None
    logprobs: bool
    top_logprobs: int
    stream: bool
    usage_in_stream: bool
    as_ids: bool  # tokens are spelt token_id:<id>
    return_token_ids: bool

    def params(self, renderer: Renderer) -> SamplingParams:
        return sampling_params(
            self.fields, self.max_tokens, own_stops=renderer.get_stop_sequences()
        )


def read_chat(body: Any) -> ChatAsk:
    """Raises Refused, naming the field, for what is malformed or not supported."""
    fields = Fields(body)
    given = fields.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise fields.wrong("messages", given, "a list of at least one message")
    messages = read_messages(given)
    if messages[-1]["role"] == "assistant":
        raise Refused(
            "the last of messages is the assistant's, and to go on writing it is not supported",
            f"messages[{len(given) - 1}]",
        )
    tools = _tools(fields)
    template_settings = fields.get("chat_template_kwargs", {})
    if not isinstance(template_settings, Mapping):
        raise fields.wrong(
            "chat_template_kwargs", template_settings, "an object of the chat template's settings"
        )
    if fields.switch("ignore_eos"):
        raise Refused(
            "ignore_eos=true is not supported for chats: an answer is read up to its end mark, and what is drawn after it is none; for "
            "answers of one length use /v1/completions",
            "ignore_eos",
        )
    most = fields.whole("max_tokens", None, 1, MOST_TOKENS)
    also = fields.whole("max_completion_tokens", None, 1, MOST_TOKENS)
    if most is not None and also is not None and most != also:
        raise Refused(
            f"max_tokens={most} and max_completion_tokens={also} differ: give one", "max_tokens"
        )
    logprobs, return_token_ids = fields.switch("logprobs"), fields.switch("return_token_ids")
    top = fields.whole("top_logprobs", 0, 0, MOST_TOP_LOGPROBS) or 0
    if top and not logprobs:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    stream = fields.switch("stream")
    options = Fields(fields.get("stream_options", {}), "stream_options.")
    if options.body and not stream:
        raise Refused("stream_options needs stream: true", "stream_options")
    usage, _ = options.switch("include_usage"), options.switch("include_obfuscation")
    options.close()
    asked = ChatAsk(
        model=fields.text("model"),
        messages=messages,
        tools=tools,
        template_settings=template_settings,
        n=fields.whole("n", 1, 1, MOST_CHOICES) or 1,
        fields=fields,
        max_tokens=most if most is not None else also,
        logprobs=logprobs,
        top_logprobs=top,
        stream=stream,
        usage_in_stream=usage,
        as_ids=return_token_ids or fields.switch("return_tokens_as_token_ids"),
        return_token_ids=return_token_ids,
    )
    # so that what is wrong with them is said before anything else
    sampling_params(fields, asked.max_tokens)
    fields.known.add("n")
    fields.close()
    return asked


def _tools(fields: Fields) -> list[Mapping[str, Any]]:
    """The tools that the model is told of: none where tool_choice is "none"."""
    given, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    if not isinstance(given, list):
        raise fields.wrong("tools", given, "a list of tools")
    tools: list[Mapping[str, Any]] = []
    for i, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if (
            not isinstance(tool, Mapping)
            or tool.get("type", "function") != "function"
            or not isinstance(function, Mapping)
        ):
            raise Refused(
                f'tools[{i}] is no {{"type": "function", "function": {{...}}}}, and other kinds are not supported',
                f"tools[{i}]",
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise Refused(
                f"tools[{i}].function.name is a text, got {name!r:.80}", f"tools[{i}].function.name"
            )
        if function.get("strict"):
            raise Refused(
                "strict tools are not supported: what the model writes is not constrained",
                f"tools[{i}].function.strict",
            )
        tools.append(
            {
                "type": "function",
                "function": {key: value for key, value in function.items() if key != "strict"},
            }
        )
    if choice not in ("auto", "none"):
        raise Refused(
            f"tool_choice={json.dumps(choice)[:80]} is not supported: what the model writes is not constrained to a grammar here, so a "
            "call cannot be forced. The model is free to call (auto), or is told of no tools (none); ask for the call in the messages",
            "tool_choice",
        )
    return [] if choice == "none" else tools


def read_messages(given: Sequence[Any]) -> list[Message]:
    """Messages as renderers take them: texts, calls with their arguments as objects, tools' answers
    with the tool's name.
    """
    messages: list[Message] = []
    named: dict[str, str] = {}  # calls by their ids
    for i, one in enumerate(given):
        place = f"messages[{i}]"
        if not isinstance(one, Mapping):
            raise Refused(
                f"{place} is an object with role and content, got {type(one).__name__}", place
            )
        role = one.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise Refused(
                f"{place}.role is one of {', '.join(_ROLES)}; got {role!r:.80}", f"{place}.role"
            )
        for key, value in one.items():
            if value is not None and (key not in _OF_MESSAGES or key in ("audio", "function_call")):
                raise Refused(f"{place}.{key} is not supported here", f"{place}.{key}")
        message: Message = {
            "role": _ROLES[role],
            "content": _content(one.get("content"), place, needed=role != "assistant"),
        }
        thoughts = one.get("reasoning_content") or one.get("reasoning")
        if role == "assistant":
            message |= {"reasoning_content": str(thoughts)} if thoughts else {}
            asked = one.get("tool_calls") or ()
            if not isinstance(asked, Sequence) or isinstance(asked, str):
                raise Refused(
                    f"{place}.tool_calls is a list of calls, got {asked!r:.80}",
                    f"{place}.tool_calls",
                )
            calls = [_call(call, f"{place}.tool_calls[{k}]", named) for k, call in enumerate(asked)]
            broken = [
                call["function"] for call in calls if isinstance(call["function"]["arguments"], str)
            ]
            if broken:  # as the model wrote them: text, and no calls
                message["content"] = "\n".join(
                    [
                        *([message["content"]] if message["content"] else []),
                        *map(broken_call, broken),
                    ]
                )
            calls = [call for call in calls if not isinstance(call["function"]["arguments"], str)]
            message |= {"tool_calls": calls} if calls else {}
        elif role == "tool":
            name = one.get("name") or named.get(str(one.get("tool_call_id")))
            message |= {"name": str(name)} if name else {}
        messages.append(message)
    return messages


def _content(given: Any, place: str, needed: bool) -> str:
    if isinstance(given, str):
        return given
    if given is None and not needed:
        return ""
    if not isinstance(given, list):
        raise Refused(
            f"{place}.content is a text or a list of text parts, got {type(given).__name__}",
            f"{place}.content",
        )
    texts = []
    for k, part in enumerate(given):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if (
            not isinstance(part, Mapping)
            or kind not in ("text", "refusal")
            or not isinstance(part.get(kind), str)
        ):
            raise Refused(
                f"{place}.content[{k}] is of the type {kind!r:.40}; models here read texts: {{'type': 'text', 'text': ...}}",
                f"{place}.content[{k}]",
            )
        texts.append(part[kind])
    return "".join(texts)


def _call(call: Any, place: str, named: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(
            f"{place} is a call of a function: {{id, type, function: {{name, arguments}}}}", place
        )
    arguments = function.get("arguments")
    named[str(call.get("id"))] = function["name"]
    try:
        arguments = (
            json.loads(arguments or "{}")
            if isinstance(arguments, str) or arguments is None
            else arguments
        )
    except (ValueError, RecursionError) as error:
        if not str(arguments).startswith("{"):
            raise Refused(
                f"{place}.function.arguments is no JSON ({error})", f"{place}.function.arguments"
            ) from error
        # a model's own, cut off or wrong
        return {
            "type": "function",
            "function": {"name": function["name"], "arguments": str(arguments)},
        }
    if not isinstance(arguments, Mapping):
        raise Refused(
            f"{place}.function.arguments is a JSON object, as text", f"{place}.function.arguments"
        )
    return {
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }
