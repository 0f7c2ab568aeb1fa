"""Define the JSON bodies of the OpenAI-style routes, and the types of their responses.

A field is supported, accepted only at the values that have no effect (`NEUTRAL_VALUES`), ignored as
a label (`IGNORED_FIELDS`), or refused by name. Null means that a field is absent. A description
begins with the values that are accepted, which errors quote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from rl.config import nearest_name
from rl.renderers import format_broken_call
from rl.serve.http_errors import HttpError
from rl.serve.schemas import JsonBody, make_parameter, make_refusal
from rl.types import Message, SamplingParams
from rl.types.number_checks import shorten

MAX_TOKENS = 2**31 - 1
MAX_MESSAGES = 100_000
MAX_PROMPTS = 4096  # per request
MAX_CHOICES = 1024  # per request
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024  # OpenAI's limit
MAX_METRICS = 100

# Fields that do not change the response: labels, and hints for storage or billing.
IGNORED_FIELDS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "request_id",
    "priority",
)

# Fields that are accepted at these values, which have no effect; any other value is refused.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
_CONSTRAINTS = re.compile("guided_.*|response_format|structured_outputs")


def _add_neutral_fields(schema: dict[str, Any]) -> None:
    """Add the fields that are ignored, or accepted at some values, to a schema."""
    for name in (*NEUTRAL_VALUES, *IGNORED_FIELDS):
        text = "ignored" if name in IGNORED_FIELDS else "accepted at these values, without effect"
        values = {"enum": [None, *NEUTRAL_VALUES[name]]} if name in NEUTRAL_VALUES else {}
        schema["properties"].setdefault(name, {"description": text, **values})


class OpenAIBody(JsonBody):
    """Hold the fields of a body or of an object in it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, fields: Any) -> Any:
        """Drop the fields that are null or have no effect, and all but one unknown field, because
        an error for each of a million would take seconds.
        """
        if not isinstance(fields, dict):
            return fields
        known = cls.__pydantic_fields__
        present = {
            name: value for name, value in fields.items() if value is not None and name in known
        }
        for name, value in fields.items() if len(present) < len(fields) else ():
            if name not in known and value is not None and not cls.is_ignorable(name, value):
                return present | {name: value}
        return present

    @classmethod
    def is_ignorable(cls, name: str, value: Any) -> bool:
        """Return whether an unknown field is ignored at `value`."""
        return name in IGNORED_FIELDS or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in NEUTRAL_VALUES.get(name, ())
        )

    @classmethod
    def describe_unknown(cls, place: str, name: str, value: Any) -> HttpError:
        if name in NEUTRAL_VALUES:
            allowed = " or ".join(map(repr, NEUTRAL_VALUES[name])) or "null"
            reason = (
                ", for this server does not constrain the model to a grammar; request the format "
                "in the messages, and check the response"
            )
            text = (
                f"{place}={shorten(value, 80)} is not supported here"
                f"{reason if _CONSTRAINTS.fullmatch(name) else ''}: omit it (or pass {allowed})"
            )
            return HttpError(400, text, place)
        suggestion = nearest_name(name, {*cls.model_fields, *NEUTRAL_VALUES})
        hint = f"; did you mean {suggestion!r}?" if suggestion else ""
        text = f"unknown parameter: {place!r}{hint}"
        return HttpError(400, text, place, code="unknown_parameter")


def _convert_whole(value: Any) -> Any:
    """Return a float of a whole number, which some clients send, as an integer."""
    is_whole = isinstance(value, float) and abs(value) < 2**63 and value.is_integer()
    return int(value) if is_whole else value


def _read_token_key(value: str) -> int:
    """Return a token id that is a key of a JSON object."""
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ValueError
    return int(value)


Integer = Annotated[int, BeforeValidator(_convert_whole)]
OptionalInteger = Annotated[int | None, BeforeValidator(_convert_whole)]
TokenId = Annotated[int, Field(ge=0)]
NonEmptyText = Annotated[str, Field(min_length=1)]


def _refuse_many(value: Any) -> Any:
    """Raise ValueError for an object of many fields before each of them is checked."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError
    return value


LogitBias = Annotated[
    dict[
        Annotated[int, BeforeValidator(_read_token_key)], Annotated[float, Field(ge=-100, le=100)]
    ],
    BeforeValidator(_refuse_many),
]


_IGNORED: Any = Field(default=None, description="ignored")
_MODEL: Any = Field(default=None, description="a text; by default the first base model")


def _flag(text: str, default: bool = False) -> Any:
    """Return a boolean field with a description."""
    return Field(default, description=f"true or false; {text}")


def _count(text: str, minimum: int, maximum: int, default: int | None = None) -> Any:
    """Return an integer field with bounds and a description."""
    expected = f"an integer from {minimum} to {maximum}"
    return Field(default, ge=minimum, le=maximum, description=f"{expected}; {text}")


class SamplingBody(OpenAIBody):
    """Hold sampling parameters.

    Logprobs are of the whole distribution at the temperature, before logit_bias, penalties and
    truncation by top_p, top_k and min_p.
    """

    n: Integer = _count("samples of each prompt", 1, MAX_CHOICES, 1)
    max_tokens: OptionalInteger = _count(
        "most tokens of a sample; by default what the context holds", 1, MAX_TOKENS
    )
    temperature: float = make_parameter("temperature", 100)
    top_p: float = make_parameter("top_p")
    top_k: Integer = _count("0 or -1: no truncation", -1, MAX_TOKENS, -1)
    min_p: float = make_parameter("min_p")
    min_tokens: Integer = make_parameter("min_tokens")
    presence_penalty: float = make_parameter("presence_penalty")
    frequency_penalty: float = make_parameter("frequency_penalty")
    repetition_penalty: float = make_parameter("repetition_penalty")
    logit_bias: LogitBias = Field(
        default={},
        max_length=MAX_BIASES,
        description=f"an object of at most {MAX_BIASES} token ids with numbers from -100 to 100",
    )
    ignore_eos: bool = _flag("do not stop at the end token")
    seed: OptionalInteger = _count("equal seeds give equal samples", -(2**63), 2**63 - 1)
    stop: Annotated[
        list[NonEmptyText],
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value,
            json_schema_input_type=str | list[str],
        ),
    ] = Field(
        default=[],
        max_length=MAX_STOPS,
        description=f"a text or a list of at most {MAX_STOPS} non-empty texts",
    )
    stop_token_ids: list[TokenId] = Field(
        default=[], fail_fast=True, description="a list of token ids"
    )

    def make_params(
        self, max_tokens: int | None, renderer_stops: Sequence[str | int] = (), prefix: str = ""
    ) -> SamplingParams:
        """Return the sampling parameters. Raises HttpError for values that exclude each other.

        renderer_stops    stops of the renderer, which are always added
        prefix            prefix of the field names in errors
        """
        values = {name: getattr(self, name) for name in _SHARED_PARAMETERS}
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                seed=None if self.seed is None else self.seed % 2**63,
                # the sampler accepts texts and ids together
                stop=[*renderer_stops, *self.stop, *self.stop_token_ids] or None,  # type: ignore[arg-type]
                top_k=self.top_k or -1,  # some clients send 0 for no truncation
                untruncated_logprobs=True,
                logit_bias=dict(self.logit_bias) or None,
                **values,
            )
        except ValueError as error:  # begins with the name of the field
            name = re.match(r"\w*", str(error))
            raise HttpError(400, f"{prefix}{error}", prefix + name[0] if name else None) from error


# parameters that have the same name and form in `SamplingParams`: all but those that `make_params`
# converts
_SHARED_PARAMETERS = tuple(
    parameter.name
    for parameter in fields(SamplingParams)
    if parameter.name in SamplingBody.model_fields
    and parameter.name not in ("max_tokens", "seed", "stop", "top_k", "logit_bias")
)


class StreamOptions(OpenAIBody):
    """Hold the options of a stream."""

    include_usage: bool = _flag("end with an event that has the token counts")
    include_obfuscation: bool = _flag("ignored")


class TextBody(SamplingBody):
    """Hold the fields that chats and completions share."""

    model_config = ConfigDict(json_schema_extra=_add_neutral_fields)

    model: str | None = _MODEL
    stream: bool = _flag("send events as tokens are sampled")
    stream_options: StreamOptions = Field(
        default=StreamOptions(), description="an object; options of the stream"
    )
    return_token_ids: bool = _flag("return the ids of the prompt and of each sample")
    return_tokens_as_token_ids: bool = _flag("write tokens as token_id:<id>")

    @field_validator("stream_options", mode="before")
    @classmethod
    def _check_stream_options(cls, options: Any, info: ValidationInfo) -> Any:
        if options and not info.data.get("stream"):
            raise make_refusal("needs stream: true")
        return options

    @property
    def tokens_as_ids(self) -> bool:
        """Return whether tokens are written as token_id:<id>."""
        return self.return_token_ids or self.return_tokens_as_token_ids


def _list_prompts(value: Any) -> Any:
    """Return a single prompt as a list of prompts."""
    is_ids = isinstance(value, list) and value and all(isinstance(item, int) for item in value)
    return [value] if is_ids or isinstance(value, str) else value


def _is_token_ids(value: Any) -> bool:
    """Return whether `value` is a list of non-negative integers."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


class CompletionBody(TextBody):
    """Hold a completion request."""

    prompt: Annotated[
        list[Any],
        BeforeValidator(_list_prompts, json_schema_input_type=Any),
    ] = Field(
        min_length=1,
        max_length=MAX_PROMPTS,
        description=f"a text, token ids, or a list of at most {MAX_PROMPTS} of either",
    )
    max_tokens: OptionalInteger = _count(
        "most tokens of a sample; 0 with echo: only score the prompt", 0, MAX_TOKENS, 16
    )
    echo: bool = _flag("return the prompt before each sample")
    logprobs: OptionalInteger = _count(
        "return logprobs, and those of so many likely tokens", 0, MAX_TOP_LOGPROBS
    )
    best_of: Any = Field(default=None, description="n: the response has every sample")
    add_special_tokens: bool = _flag("whether the tokenizer adds its special tokens", True)

    @field_validator("prompt")
    @classmethod
    def _check_prompts(cls, prompts: list[Any]) -> list[Any]:
        for i, item in enumerate(prompts):
            if not isinstance(item, str) and not (_is_token_ids(item) and item):
                text = f"must be a text or a list of token ids, got {item!r:.80}"
                raise make_refusal(text, f"[{i}]")
        return prompts

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise HttpError(
                400,
                "max_tokens=0 samples no token: pass echo: true, with logprobs, to score the "
                "prompt",
                "max_tokens",
            )
        if self.best_of is not None and self.best_of != self.n:
            text = f"best_of must be n ({self.n}): the response has every sample"
            raise HttpError(400, f"{text}, got {shorten(self.best_of, 80)}", "best_of")
        return self


class GenerateParams(SamplingBody):
    """Hold the sampling parameters of /inference/v1/generate."""

    logprobs: OptionalInteger = _count("return logprobs of the sampled tokens", 0, 1)
    prompt_logprobs: Any = Field(default=None, description="null")
    skip_special_tokens: bool = _flag("ignored: the response has no text", True)

    @field_validator("prompt_logprobs")
    @classmethod
    def _refuse_scores(cls, value: Any) -> None:
        raise make_refusal(
            "is not supported: /v1/completions scores prompts, with echo and logprobs"
        )


class GenerateBody(OpenAIBody):
    """Hold a request for samples of a prompt of token ids."""

    model_config = ConfigDict(json_schema_extra=_add_neutral_fields)

    model: str | None = _MODEL
    token_ids: list[TokenId] = Field(
        min_length=1, fail_fast=True, description="a list of at least one token id"
    )
    stream: bool = _flag("must be false")
    sampling_params: GenerateParams = Field(
        default=GenerateParams(), description="an object; as in the other routes"
    )

    @field_validator("stream")
    @classmethod
    def _refuse_stream(cls, value: bool) -> bool:
        if value:
            raise make_refusal("is not supported here: token ids are returned all at once")
        return value


class RewardBody(OpenAIBody):
    """Hold the score of a session."""

    reward: FiniteFloat = Field(description="a finite number")
    metrics: Annotated[dict[str, FiniteFloat], BeforeValidator(_refuse_many)] = Field(
        default={},
        max_length=MAX_METRICS,
        description=f"an object of at most {MAX_METRICS} finite numbers by name",
    )


# ------------------------------------------------------------------------------------------- chats


class ChatToolCall(OpenAIBody):
    """Hold a call of a tool. Arguments that are cut-off JSON, as a model may have written them,
    stay a text.
    """

    model_config = ConfigDict(
        extra="ignore", title="a function call: {id, type, function: {name, arguments}}"
    )

    id: Any = None
    function: dict[str, Any]

    @field_validator("function")
    @classmethod
    def _read_arguments(cls, function: dict[str, Any]) -> dict[str, Any]:
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str):
            raise ValueError
        if isinstance(arguments, str) or arguments is None:
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                if not str(arguments).startswith("{"):
                    text = f"is not valid JSON ({error})"
                    raise make_refusal(text, ".function.arguments") from error
                return {"name": name, "arguments": arguments}  # cut off or malformed
        if not isinstance(arguments, dict):
            raise make_refusal("must be a JSON object, as text", ".function.arguments")
        return {"name": name, "arguments": arguments}


def _join_parts(value: Any) -> Any:
    """Return the content of a message as text."""
    if not isinstance(value, list):
        return value
    texts = []
    for k, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            text = f"has type {kind!r:.40}; this server accepts texts: "
            raise make_refusal(text + "{'type': 'text', 'text': ...}", f"[{k}]")
        texts.append(part[kind])
    return "".join(texts)


class ChatMessage(OpenAIBody):
    """Hold a message of a chat."""

    model_config = ConfigDict(title="an object with role and content")

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="any of system, developer, user, assistant, tool"
    )
    content: Annotated[str, BeforeValidator(_join_parts, json_schema_input_type=str | list)] = (
        Field(default="", description="a text or a list of text parts")
    )
    name: Any = Field(default=None, description="the name of the tool whose result this is")
    tool_calls: list[ChatToolCall] = Field(
        default=[], fail_fast=True, description="a list of calls"
    )
    tool_call_id: Any = Field(default=None, description="the id of the call whose result this is")
    reasoning_content: Any = Field(default=None, description="the thoughts of an assistant message")
    reasoning: Any = Field(default=None, description="the same as reasoning_content")
    refusal: Any = _IGNORED
    annotations: Any = _IGNORED
    token_ids: Any = _IGNORED
    prompt_token_ids: Any = _IGNORED

    @model_validator(mode="before")
    @classmethod
    def _drop_calls(cls, fields: Any) -> Any:
        """Drop the calls of a message of another role, and an empty value in the place of calls."""
        if isinstance(fields, dict) and not (
            fields.get("role") == "assistant" and fields.get("tool_calls")
        ):
            return {name: value for name, value in fields.items() if name != "tool_calls"}
        return fields

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            text = "must be a text or a list of text parts, got NoneType"
            raise make_refusal(text, ".content")
        return self

    @classmethod
    def is_ignorable(cls, name: str, value: Any) -> bool:
        return False

    @classmethod
    def describe_unknown(cls, place: str, name: str, value: Any) -> HttpError:
        return HttpError(400, f"{place} is not supported", place)


def to_messages(chat: Sequence[ChatMessage]) -> list[Message]:
    """Return messages in the form of renderers: contents as texts, the arguments of calls as
    objects, tool results with the tool's name.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}  # function name by call id
    for item in chat:
        role = "system" if item.role == "developer" else item.role
        message: Message = {"role": role, "content": item.content}
        if item.role == "assistant":
            thoughts = item.reasoning_content or item.reasoning
            message |= {"reasoning_content": str(thoughts)} if thoughts else {}
            names |= {str(call.id): call.function["name"] for call in item.tool_calls}
            functions = [call.function for call in item.tool_calls]
            # malformed calls stay in the content, as the model wrote them
            broken = [call for call in functions if isinstance(call["arguments"], str)]
            texts = [item.content] if item.content or not broken else []
            message["content"] = "\n".join([*texts, *map(format_broken_call, broken)])
            if calls := [call for call in functions if not isinstance(call["arguments"], str)]:
                message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        elif item.role == "tool" and (name := item.name or names.get(str(item.tool_call_id))):
            message["name"] = str(name)
        messages.append(message)
    return messages


class ChatTool(OpenAIBody):
    """Describe a function that the model may call."""

    model_config = ConfigDict(extra="ignore", title='{"type": "function", "function": {...}}')

    type: Literal["function"] = "function"
    function: dict[str, Any]

    @field_validator("function")
    @classmethod
    def _check_function(cls, function: dict[str, Any]) -> dict[str, Any]:
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise make_refusal(f"must be a non-empty text, got {name!r:.80}", ".function.name")
        if function.get("strict"):
            raise make_refusal(
                "is not supported: this server does not constrain the model's output",
                ".function.strict",
            )
        return {key: value for key, value in function.items() if key != "strict"}


class ChatBody(TextBody):
    """Hold a chat completion request. Its last message is not of the assistant."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="a list of at least one message",
    )
    tools: list[ChatTool] = Field(default=[], fail_fast=True, description="a list of tools")
    tool_choice: Any = Field(
        default="auto", description='"auto", or "none" for no tools in the prompt'
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="an object of the chat template's settings"
    )
    max_completion_tokens: OptionalInteger = _count("the same as max_tokens", 1, MAX_TOKENS)
    logprobs: bool = _flag("return logprobs of the sampled tokens")
    top_logprobs: Integer = _count("likely tokens at each position", 0, MAX_TOP_LOGPROBS, 0)

    @field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, choice: Any) -> Any:
        if choice not in ("auto", "none"):
            raise make_refusal(
                f"cannot be {json.dumps(choice)[:80]}: this server does not constrain the "
                "model to a grammar, so it cannot force a call. Pass auto (the model may call) or "
                "none (no tools in the prompt), and request the call in the messages",
            )
        return choice

    @field_validator("ignore_eos")
    @classmethod
    def _check_end(cls, ignore_eos: bool) -> bool:
        if ignore_eos:
            raise make_refusal(
                "is not supported for chats: a message is parsed up to its end token, and tokens "
                "after it are no part of it; for responses of a fixed length use /v1/completions"
            )
        return ignore_eos

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, count: int, info: ValidationInfo) -> int:
        if count and not info.data.get("logprobs"):
            raise make_refusal("needs logprobs: true")
        return count

    @model_validator(mode="after")
    def _check_body(self) -> Self:
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            text = "messages must not end with an assistant message: continuing it"
            raise HttpError(400, f"{text} is not supported", f"messages[{last}]")
        counts = {"max_tokens", "max_completion_tokens"}
        if counts <= self.model_fields_set and self.max_tokens != self.max_completion_tokens:
            raise HttpError(
                400,
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} differ: pass only max_tokens or only "
                "max_completion_tokens",
                "max_tokens",
            )
        self.make_params(self.max_new_tokens)  # excludes what no stop of a renderer can allow
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Return the most tokens of a sample; None up to the end of the context."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def prompt_tools(self) -> list[Mapping[str, Any]]:
        """Return the tools that the prompt describes."""
        if self.tool_choice == "none":
            return []
        return [{"type": "function", "function": tool.function} for tool in self.tools]


# --------------------------------------------------------------------------------------- responses


class TopLogprob(TypedDict):
    """Hold a token with its logprob."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """Hold a sampled token with the likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ContentLogprobs(TypedDict):
    """Hold the logprobs of a choice."""

    content: list[TokenLogprob]
    refusal: NotRequired[None]


class AssistantMessage(TypedDict):
    """Hold the message of a choice, or the part of it that an event adds."""

    role: NotRequired[str]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class ChatChoice(TypedDict):
    """Hold a choice of a chat completion."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ContentLogprobs | None
    token_ids: NotRequired[list[int]]


class PromptTokenCounts(TypedDict):
    """Hold the number of prompt tokens whose keys and values were in the cache."""

    cached_tokens: int


class TokenCounts(TypedDict):
    """Hold the token counts of a response."""

    prompt_tokens: int
    prompt_tokens_details: PromptTokenCounts
    completion_tokens: int
    total_tokens: int


class ResponseHead(TypedDict):
    """Hold the fields that a response and each of its events begin with."""

    id: str
    created: int
    model: str


class ChatResponse(ResponseHead):
    """Hold a chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenCounts
    system_fingerprint: str
    prompt_token_ids: NotRequired[list[int]]


class ChatEventChoice(TypedDict):
    """Hold what an event adds to a choice."""

    index: int
    delta: AssistantMessage
    finish_reason: str | None
    logprobs: ContentLogprobs | None
    token_ids: NotRequired[list[int]]


class ChatEvent(ResponseHead):
    """Hold an event of a stream; the last one may hold the token counts."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: NotRequired[TokenCounts]
    prompt_token_ids: NotRequired[list[int]]


class TextLogprobs(TypedDict):
    """Hold the logprobs of a choice, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(TypedDict):
    """Hold a choice of a completion. An event holds the next part of its text."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextResponse(ResponseHead):
    """Hold a completion, or an event of its stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[TokenCounts]


class TokenChoice(TypedDict):
    """Hold the token ids of a sample."""

    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: ContentLogprobs | None


class TokenResponse(TypedDict):
    """Hold the samples of a prompt of token ids."""

    request_id: str
    choices: list[TokenChoice]
    prompt_token_ids: list[int]
