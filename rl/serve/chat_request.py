"""Read the messages, tools and settings of a chat completion from the body of the request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.renderers import Renderer, format_broken_call
from rl.serve.http_errors import HttpError
from rl.serve.request_fields import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    FieldReader,
    read_sampling_params,
)
from rl.types import Message, SamplingParams

MAX_TOKENS = 2**31 - 1
MAX_MESSAGES = 100_000
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MESSAGE_FIELDS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "refusal",
    "audio",
    "function_call",
    "annotations",
    "token_ids",
    "prompt_token_ids",
)


@dataclass(frozen=True)
class ChatRequest:
    """Hold a chat completion request.

    `max_tokens`: None samples up to the end of the context. `make_sampling_params` adds the
    renderer's stops.
    """

    model: str | None
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    template_settings: Mapping[str, Any]
    n: int
    fields: FieldReader
    max_tokens: int | None
    logprobs: bool
    top_logprobs: int
    stream: bool
    include_usage: bool
    tokens_as_ids: bool  # whether tokens are written as token_id:<id>
    return_token_ids: bool

    def make_sampling_params(self, renderer: Renderer) -> SamplingParams:
        """Return the sampling parameters, with the stops of `renderer`."""
        return read_sampling_params(
            self.fields, self.max_tokens, renderer_stops=renderer.get_stop_sequences()
        )


def read_chat_request(body: Any) -> ChatRequest:
    """Read a chat completion request.

    Raises HttpError, which names the field, for a malformed or unsupported field.
    """
    fields = FieldReader(body)
    raw_messages = fields.get("messages")
    if not isinstance(raw_messages, list) or not 0 < len(raw_messages) <= MAX_MESSAGES:
        raise fields.make_error("messages", raw_messages, "a list of at least one message")
    messages = read_messages(raw_messages)
    if messages[-1]["role"] == "assistant":
        raise HttpError(
            400,
            "messages must not end with an assistant message: continuing it is not supported",
            f"messages[{len(raw_messages) - 1}]",
        )
    tools = _read_tools(fields)
    template_settings = fields.get("chat_template_kwargs", {})
    if not isinstance(template_settings, Mapping):
        raise fields.make_error(
            "chat_template_kwargs", template_settings, "an object of the chat template's settings"
        )
    if fields.get_flag("ignore_eos"):
        raise HttpError(
            400,
            "ignore_eos=true is not supported for chats: a message is parsed up to its end token, "
            "and tokens after it are no part of it; for responses of a fixed length use "
            "/v1/completions",
            "ignore_eos",
        )
    max_tokens = fields.get_int("max_tokens", None, 1, MAX_TOKENS)
    max_completion_tokens = fields.get_int("max_completion_tokens", None, 1, MAX_TOKENS)
    if (
        max_tokens is not None
        and max_completion_tokens is not None
        and max_tokens != max_completion_tokens
    ):
        raise HttpError(
            400,
            f"max_tokens={max_tokens} and max_completion_tokens={max_completion_tokens} differ: "
            "pass only max_tokens or only max_completion_tokens",
            "max_tokens",
        )
    logprobs, return_token_ids = fields.get_flag("logprobs"), fields.get_flag("return_token_ids")
    top_logprobs = fields.get_int("top_logprobs", 0, 0, MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    stream = fields.get_flag("stream")
    options = FieldReader(fields.get("stream_options", {}), "stream_options.")
    if options.body and not stream:
        raise HttpError(400, "stream_options needs stream: true", "stream_options")
    usage, _ = options.get_flag("include_usage"), options.get_flag("include_obfuscation")
    options.refuse_unread()
    request = ChatRequest(
        model=fields.get_text("model"),
        messages=messages,
        tools=tools,
        template_settings=template_settings,
        n=fields.get_int("n", 1, 1, MAX_CHOICES) or 1,
        fields=fields,
        max_tokens=max_tokens if max_tokens is not None else max_completion_tokens,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=usage,
        tokens_as_ids=return_token_ids or fields.get_flag("return_tokens_as_token_ids"),
        return_token_ids=return_token_ids,
    )
    # report invalid sampling parameters before unknown fields
    read_sampling_params(fields, request.max_tokens)
    fields.read_names.add("n")
    fields.refuse_unread()
    return request


def _read_tools(fields: FieldReader) -> list[Mapping[str, Any]]:
    """Return the tools that the prompt describes: none if tool_choice is "none"."""
    raw_tools, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    if not isinstance(raw_tools, list):
        raise fields.make_error("tools", raw_tools, "a list of tools")
    tools: list[Mapping[str, Any]] = []
    for i, tool in enumerate(raw_tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if (
            not isinstance(tool, Mapping)
            or tool.get("type", "function") != "function"
            or not isinstance(function, Mapping)
        ):
            raise HttpError(
                400,
                f'tools[{i}] must be {{"type": "function", "function": {{...}}}}; other kinds are '
                "not supported",
                f"tools[{i}]",
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise HttpError(
                400,
                f"tools[{i}].function.name must be a non-empty text, got {name!r:.80}",
                f"tools[{i}].function.name",
            )
        if function.get("strict"):
            raise HttpError(
                400,
                "strict tools are not supported: this server does not constrain the model's output",
                f"tools[{i}].function.strict",
            )
        tools.append(
            {
                "type": "function",
                "function": {key: value for key, value in function.items() if key != "strict"},
            }
        )
    if choice not in ("auto", "none"):
        raise HttpError(
            400,
            f"tool_choice={json.dumps(choice)[:80]} is not supported: this server does not "
            "constrain the model to a grammar, so it cannot force a call. Pass auto (the model may "
            "call) or none (no tools in the prompt), and request the call in the messages",
            "tool_choice",
        )
    return [] if choice == "none" else tools


def read_messages(raw_messages: Sequence[Any]) -> list[Message]:
    """Return messages in the form of renderers: contents as texts, the arguments of calls as
    objects, tool results with the tool's name.
    """
    messages: list[Message] = []
    call_names: dict[str, str] = {}  # function name by call id
    for i, raw in enumerate(raw_messages):
        place = f"messages[{i}]"
        if not isinstance(raw, Mapping):
            raise HttpError(
                400,
                f"{place} must be an object with role and content, got {type(raw).__name__}",
                place,
            )
        role = raw.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise HttpError(
                400,
                f"{place}.role must be any of {', '.join(_ROLES)}; got {role!r:.80}",
                f"{place}.role",
            )
        for key, value in raw.items():
            if value is not None and (
                key not in _MESSAGE_FIELDS or key in ("audio", "function_call")
            ):
                raise HttpError(400, f"{place}.{key} is not supported", f"{place}.{key}")
        message: Message = {
            "role": _ROLES[role],
            "content": _read_content(raw.get("content"), place, is_required=role != "assistant"),
        }
        thoughts = raw.get("reasoning_content") or raw.get("reasoning")
        if role == "assistant":
            message |= {"reasoning_content": str(thoughts)} if thoughts else {}
            raw_calls = raw.get("tool_calls") or ()
            if not isinstance(raw_calls, Sequence) or isinstance(raw_calls, str):
                raise HttpError(
                    400,
                    f"{place}.tool_calls must be a list of calls, got {raw_calls!r:.80}",
                    f"{place}.tool_calls",
                )
            calls = [
                _read_call(call, f"{place}.tool_calls[{k}]", call_names)
                for k, call in enumerate(raw_calls)
            ]
            broken = [
                call["function"] for call in calls if isinstance(call["function"]["arguments"], str)
            ]
            if broken:  # malformed calls stay in the content, as the model wrote them
                message["content"] = "\n".join(
                    [
                        *([message["content"]] if message["content"] else []),
                        *map(format_broken_call, broken),
                    ]
                )
            calls = [call for call in calls if not isinstance(call["function"]["arguments"], str)]
            message |= {"tool_calls": calls} if calls else {}
        elif role == "tool":
            name = raw.get("name") or call_names.get(str(raw.get("tool_call_id")))
            message |= {"name": str(name)} if name else {}
        messages.append(message)
    return messages


def _read_content(value: Any, place: str, is_required: bool) -> str:
    """Return the content of a message as text. `is_required`: None is refused."""
    if isinstance(value, str):
        return value
    if value is None and not is_required:
        return ""
    if not isinstance(value, list):
        raise HttpError(
            400,
            f"{place}.content must be a text or a list of text parts, got {type(value).__name__}",
            f"{place}.content",
        )
    texts = []
    for k, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if (
            not isinstance(part, Mapping)
            or kind not in ("text", "refusal")
            or not isinstance(part.get(kind), str)
        ):
            raise HttpError(
                400,
                f"{place}.content[{k}] has type {kind!r:.40}; this server accepts texts: "
                "{'type': 'text', 'text': ...}",
                f"{place}.content[{k}]",
            )
        texts.append(part[kind])
    return "".join(texts)


def _read_call(call: Any, place: str, call_names: dict[str, str]) -> dict[str, Any]:
    """Return a tool call in the form of renderers, and add its name to `call_names` by its id.

    Arguments that are cut-off JSON, as a model may have written them, stay a text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise HttpError(
            400,
            f"{place} must be a function call: {{id, type, function: {{name, arguments}}}}",
            place,
        )
    arguments = function.get("arguments")
    call_names[str(call.get("id"))] = function["name"]
    try:
        arguments = (
            json.loads(arguments or "{}")
            if isinstance(arguments, str) or arguments is None
            else arguments
        )
    except (ValueError, RecursionError) as error:
        if not str(arguments).startswith("{"):
            raise HttpError(
                400,
                f"{place}.function.arguments is not valid JSON ({error})",
                f"{place}.function.arguments",
            ) from error
        # written by a model: cut off or malformed
        return {
            "type": "function",
            "function": {"name": function["name"], "arguments": str(arguments)},
        }
    if not isinstance(arguments, Mapping):
        raise HttpError(
            400,
            f"{place}.function.arguments must be a JSON object, as text",
            f"{place}.function.arguments",
        )
    return {
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }
