"""Build the responses of the OpenAI-style routes, and write them as server-sent events during
sampling.

The certain part of a text is sent at once, the rest when the response is complete.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NotRequired, Protocol

from typing_extensions import TypedDict

from rl.renderers import Renderer, parse_partial_answer, prompt_opens_thoughts
from rl.serve.openai_schemas import ChatBody
from rl.types import Message, SampledSequence, SampleResponse, SamplingParams

# for each sampled token: (id, logprob), most likely first
TopLogprobs = Sequence[Sequence[tuple[int, float]]]


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


def make_id(kind: str) -> str:
    """Return a random id with the prefix `kind`."""
    return f"{kind}-{secrets.token_hex(12)}"


def decode_exactly(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the exact text of tokens, including special tokens."""
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def format_token(tokenizer: Any, token: int, as_ids: bool) -> str:
    """Return a token as text; as token_id:<id> if `as_ids`, or if the token is only part of a
    character.
    """
    text = "\ufffd" if as_ids else decode_exactly(tokenizer, [token])
    return f"token_id:{token}" if "\ufffd" in text else text


def clamp_logprob(logprob: float) -> float:
    """Clamp a logprob to 0.

    Rounding can put the logprob of a near-certain token slightly above 0, which clients refuse.
    """
    return min(float(logprob), 0.0)


def make_content_logprobs(
    tokenizer: Any, sequence: SampledSequence, as_ids: bool, top: TopLogprobs | None = None
) -> ContentLogprobs:
    """Return OpenAI's logprobs: an entry for each sampled token and the end token."""

    def entry(token: int, logprob: float) -> TopLogprob:
        text = format_token(tokenizer, token, as_ids)
        utf8_bytes = None if text.startswith("token_id:") else list(text.encode("utf-8"))
        return {"token": text, "logprob": clamp_logprob(logprob), "bytes": utf8_bytes}

    assert sequence.logprobs is not None
    entries: list[TokenLogprob] = []
    for i, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
        likely = [entry(*pair) for pair in top[i]] if top else []
        entries.append({**entry(token, logprob), "top_logprobs": likely})
    return {"content": entries}


@dataclass(frozen=True)
class ChatContext:
    """Hold a chat request, its prompt and its renderer, and build the parts of its response."""

    request: ChatBody
    renderer: Renderer  # with the tools of the request
    prompt: list[int]

    @cached_property
    def params(self) -> SamplingParams:
        """Return the sampling parameters. Raises HttpError."""
        stops = self.renderer.get_stop_sequences()
        return self.request.make_params(self.request.max_new_tokens, stops)

    @cached_property
    def reader(self) -> Renderer:
        """Return the renderer that parses samples, without the stop texts of the request."""
        stops = get_request_stop_texts(self.params, self.renderer.get_stop_sequences())
        return self.renderer.with_stops(stops) if stops else self.renderer

    @cached_property
    def head(self) -> ResponseHead:
        """Return the fields that the response and each of its events begin with."""
        return make_response_head("chatcmpl", self.request.model)

    @cached_property
    def _opens_thoughts(self) -> bool:
        return prompt_opens_thoughts(self.renderer, self.prompt)

    def parse(self, tokens: Sequence[int], ended: bool) -> Message:
        """Return the message of a sample, or the certain part of it unless `ended`."""
        return parse_partial_answer(self.reader, tokens, self._opens_thoughts, ended=ended)

    def make_logprobs(
        self, sequence: SampledSequence, top: TopLogprobs | None = None
    ) -> ContentLogprobs:
        """Return the logprobs of a choice."""
        as_ids = self.request.tokens_as_ids
        logprobs = make_content_logprobs(self.renderer.tokenizer, sequence, as_ids, top)
        return {**logprobs, "refusal": None}

    def make_choice(
        self, index: int, sequence: SampledSequence, top: TopLogprobs | None
    ) -> ChatChoice:
        """Return a choice of the response. Each tool call gets an id."""
        message = self.parse(sequence.tokens, ended=True)
        calls = message.get("tool_calls") or ()
        reply: AssistantMessage = {
            "role": "assistant",
            "content": message["content"] or (None if calls else ""),
            "refusal": None,
        }
        if "reasoning_content" in message:
            reply["reasoning_content"] = message["reasoning_content"]
        if calls:
            reply["tool_calls"] = [
                {"id": make_id("call"), "type": "function", "function": call["function"]}
                for call in calls
            ]
        is_cut = sequence.stop_reason == "length"
        choice: ChatChoice = {
            "index": index,
            "message": reply,
            "finish_reason": "length" if is_cut else "tool_calls" if calls else "stop",
            "logprobs": self.make_logprobs(sequence, top) if self.request.logprobs else None,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = list(sequence.tokens)
        return choice

    def make_response(self, choices: list[ChatChoice], sampled: SampleResponse) -> ChatResponse:
        """Return the full response."""
        versions = sorted({str(sequence.version) for sequence in sampled.sequences})
        response: ChatResponse = {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": count_usage([self.prompt], [sampled], sampled.sequences),
            "system_fingerprint": f"weights-{'-'.join(versions)}",
        }
        if self.request.return_token_ids:
            response["prompt_token_ids"] = list(self.prompt)
        return response


def get_request_stop_texts(
    params: SamplingParams, renderer_stops: Sequence[str | int] = ()
) -> list[str]:
    """Return the stop texts of the request itself, which are cut off a response's text."""
    excluded = set(renderer_stops)
    return [item for item in params.stop or () if isinstance(item, str) and item not in excluded]


def count_usage(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[SampleResponse],
    sequences: Sequence[SampledSequence],
) -> TokenCounts:
    """Return the token counts of the responses to prompts. `sequences`: the samples shown."""
    prompt_tokens = sum(map(len, prompts))
    cached_tokens = sum(response.prompt_cache_hit_tokens for response in responses)
    completion_tokens = sum(len(sequence.tokens) for sequence in sequences)
    return {
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def make_response_head(kind: str, model: str | None) -> ResponseHead:
    """Return the fields that a response and each of its events begin with."""
    return {"id": make_id(kind), "created": int(time.time()), "model": model or "default"}


Event = ChatEvent | TextResponse
PartialSamples = Mapping[int, SampledSequence]  # the samples so far, by the index of the choice


class EventWriter(Protocol):
    """Write the events of a response to a connection. Together the events are the full response."""

    def write_partial(self, samples: PartialSamples) -> Iterator[Event]:
        """Yield the events of the samples so far."""
        ...

    def write_rest(self, response: Any) -> Iterator[Event]:
        """Yield the remaining events of the full response."""
        ...


class LiveSamples:
    """Pass samples from the sampling thread to the event loop of a stream.

    The event loop waits for `updated`, and passes the result of `take_new()` to `writer` once it is
    set.
    """

    def __init__(self) -> None:
        self.updated = asyncio.Event()
        self.writer: EventWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._new_samples: dict[int, SampledSequence] = {}

    def make_callback(self, first: int = 0) -> Callable[[PartialSamples], None]:
        """Return a callback that any thread may call with the samples so far.

        `first`: index of the choice of sample 0.
        """

        def deliver(samples: PartialSamples) -> None:
            self._loop.call_soon_threadsafe(
                self._add, {first + i: sequence for i, sequence in samples.items()}
            )

        return deliver

    def _add(self, samples: PartialSamples) -> None:
        self._new_samples |= samples
        self.updated.set()

    def take_new(self) -> PartialSamples:
        """Return the samples since the last call, and clear `updated`."""
        self.updated.clear()
        samples, self._new_samples = self._new_samples, {}
        return samples


class ChatEventWriter:
    """Write the events of a chat completion.

    Logprobs and ids are sent with their tokens; texts, and tool calls in parts, when they are
    certain.
    """

    def __init__(self, context: ChatContext):
        self.context, self.request = context, context.request
        self.sent_texts: dict[int, dict[str, str]] = {}  # sent texts by field, by choice
        # the sent part of the arguments of each tool call, by choice
        self.sent_calls: dict[int, list[str]] = defaultdict(list)
        self.sent_tokens: Counter[int] = Counter()  # number of sent tokens, by choice

    def write_partial(self, samples: PartialSamples) -> Iterator[Event]:
        for index, sequence in sorted(samples.items()):
            yield from self._start_choice(index)
            deltas = self._make_deltas(index, self.context.parse(sequence.tokens, ended=False))
            fields = {} if self.request.top_logprobs else self._make_token_fields(index, sequence)
            if deltas or fields:
                yield from self._make_events(index, deltas, fields)

    def write_rest(self, response: ChatResponse) -> Iterator[Event]:
        for choice in response["choices"]:
            index, message = choice["index"], choice["message"]
            yield from self._start_choice(index)
            deltas, begin = self._make_deltas(index, message), self.sent_tokens[index]
            fields: dict[str, Any] = {}
            if "token_ids" in choice:
                fields["token_ids"] = choice["token_ids"][begin:]
            if choice["logprobs"] is not None:
                content = choice["logprobs"]["content"][begin:]
                fields["logprobs"] = {**choice["logprobs"], "content": content}
            yield from self._make_events(index, deltas, fields)
            yield self._make_event(index, {}, finish_reason=choice["finish_reason"])
        if self.request.stream_options.include_usage:
            event = self._make_event(None)
            event["usage"] = response["usage"]
            yield event

    def _start_choice(self, index: int) -> Iterator[Event]:
        """Yield the first event of a choice, unless it was sent. The very first has the prompt."""
        if index not in self.sent_texts:
            event = self._make_event(index, {"role": "assistant", "content": ""})
            if self.request.return_token_ids and not self.sent_texts:
                event["prompt_token_ids"] = list(self.context.prompt)
            self.sent_texts[index] = {}
            yield event

    def _make_deltas(self, index: int, message: Mapping[str, Any]) -> list[AssistantMessage]:
        """Return the deltas of the message since the last call.

        A text that differs from its sent part (see `parse_partial_answer`) is sent in full after
        that part.
        """
        deltas: list[Any] = []
        sent = self.sent_texts[index]
        for name in ("reasoning_content", "content"):
            text, already_sent = message.get(name) or "", sent.get(name, "")
            if not already_sent.startswith(text):
                deltas.append({name: text.removeprefix(already_sent)})
                sent[name] = text
        sent_arguments = self.sent_calls[index]
        for i, call in enumerate(message.get("tool_calls") or ()):
            arguments = call["function"]["arguments"]
            if i == len(sent_arguments):  # the first delta has the name and an id, like OpenAI's
                sent_arguments.append("")
                first = {
                    "id": call.get("id") or make_id("call"),
                    "type": "function",
                    "function": {**call["function"], "arguments": ""},
                }
                deltas.append({"tool_calls": [{"index": i, **first}]})
            if len(arguments) > len(sent_arguments[i]):
                rest = {"arguments": arguments.removeprefix(sent_arguments[i])}
                deltas.append({"tool_calls": [{"index": i, "function": rest}]})
                sent_arguments[i] = arguments
        return deltas

    def _make_token_fields(self, index: int, sequence: SampledSequence) -> dict[str, Any]:
        """Return the requested logprobs and ids of the tokens since the last call."""
        begin, self.sent_tokens[index] = self.sent_tokens[index], len(sequence.tokens)
        if begin == len(sequence.tokens):
            return {}
        assert sequence.logprobs is not None
        new = SampledSequence(sequence.tokens[begin:], sequence.logprobs[begin:])
        fields: dict[str, Any] = {"token_ids": new.tokens} if self.request.return_token_ids else {}
        if self.request.logprobs:
            fields["logprobs"] = self.context.make_logprobs(new)
        return fields

    def _make_events(
        self, index: int, deltas: Sequence[AssistantMessage], fields: Mapping[str, Any]
    ) -> Iterator[ChatEvent]:
        """Yield an event for each delta, or one without text. The first has the fields too."""
        first, *others = deltas or [{"content": ""}]
        yield self._make_event(index, first, **fields)
        for delta in others:
            yield self._make_event(index, delta)

    def _make_event(
        self, index: int | None, delta: AssistantMessage | None = None, **more: Any
    ) -> ChatEvent:
        """Return an event with a delta of a choice, or without choices; `more` overrides fields of
        the choice.
        """
        choices: list[ChatEventChoice] = []
        if index is not None:
            choice: Any = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            choices = [choice | more]
        return {**self.context.head, "object": "chat.completion.chunk", "choices": choices}


@dataclass
class TextEventWriter:
    """Write the events of a completion; logprobs come with the end of a choice.

    `decode_certain(index of the choice, tokens)` returns the certain part of the text.
    """

    head: ResponseHead
    decode_certain: Callable[[int, Sequence[int]], str]
    include_usage: bool
    sent_texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))

    def write_partial(self, samples: PartialSamples) -> Iterator[Event]:
        for index, sequence in sorted(samples.items()):
            yield from self._write_new_text(index, self.decode_certain(index, sequence.tokens))

    def write_rest(self, response: TextResponse) -> Iterator[Event]:
        for choice in response["choices"]:
            yield from self._write_new_text(choice["index"], choice["text"])
            yield self._make_event({**choice, "text": ""})
        if self.include_usage:
            event = self._make_event()
            event["usage"] = response["usage"]
            yield event

    def _write_new_text(self, index: int, text: str) -> Iterator[Event]:
        """Yield an event with the unsent part of `text`, if any."""
        new_text, self.sent_texts[index] = text.removeprefix(self.sent_texts[index]), text
        if new_text:
            yield self._make_event(
                {"index": index, "text": new_text, "logprobs": None, "finish_reason": None}
            )

    def _make_event(self, *choices: TextChoice) -> TextResponse:
        return {**self.head, "object": "text_completion", "choices": [*choices]}
