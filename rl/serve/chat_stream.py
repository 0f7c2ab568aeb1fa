"""Write responses as server-sent events during sampling.

The certain part of a text is sent at once, the rest when the response is complete.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl.serve.chat_response import (
    AssistantMessage,
    ChatContext,
    ChatEvent,
    ChatEventChoice,
    ChatResponse,
    ResponseHead,
    TextChoice,
    TextResponse,
    make_id,
)
from rl.types import SampledSequence

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
