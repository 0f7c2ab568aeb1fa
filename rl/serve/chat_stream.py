"""Write responses as server-sent events during sampling.

The certain part of a text is sent at once, the rest when the response is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rl.renderers import Renderer, StopsAt, opens_thoughts, shown
from rl.serve.chat_reply import content_logprobs, new_id
from rl.serve.chat_request import ChatAsk
from rl.types import SampledSequence

Event = dict[str, Any]
Samples = Mapping[int, SampledSequence]  # the tokens sampled so far, by the index of the choice


class Writer(Protocol):
    """Write the events of a response to a connection. Together the events are the full response."""

    def more(self, samples: Samples) -> Iterator[Event]:
        """Yield the events of the samples so far."""
        ...

    def rest(self, whole: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the remaining events of the full response."""
        ...


class Live:
    """Pass samples from the sampling thread to the event loop of a stream.

    The event loop waits for `news`, and passes the result of `take()` to `writer` once it is set.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.writer: Writer | None = None
        self._loop = asyncio.get_running_loop()
        self._drawn: dict[int, SampledSequence] = {}

    def show(self, first: int = 0) -> Callable[[Samples], None]:
        """Return a callback that any thread may call with the samples so far.

        `first`: index of the choice of sample 0.
        """

        def deliver(samples: Samples) -> None:
            self._loop.call_soon_threadsafe(
                self._put, {first + i: sequence for i, sequence in samples.items()}
            )

        return deliver

    def _put(self, samples: Samples) -> None:
        self._drawn |= samples
        self.news.set()

    def take(self) -> Samples:
        """Return the samples since the last call, and clear `news`."""
        self.news.clear()
        samples, self._drawn = self._drawn, {}
        return samples


class ChatWriter:
    """Write the events of a chat completion.

    Logprobs and ids are sent with their tokens; texts, and tool calls in parts, when they are
    certain.
    """

    def __init__(
        self,
        asked: ChatAsk,
        head: Mapping[str, Any],
        renderer: Renderer,
        stops: Sequence[str],
        prompt: Sequence[int],
    ):
        self.asked, self.renderer = asked, renderer
        self.reader = StopsAt(renderer, stops) if stops else renderer
        self.head = {**head, "object": "chat.completion.chunk"}
        self.prompt = {"prompt_token_ids": list(prompt)} if asked.return_token_ids else {}
        self.within_thoughts = opens_thoughts(renderer, prompt)
        self.sent: dict[int, dict[str, str]] = {}  # sent texts by field, by choice
        # the sent part of the arguments of each tool call, by choice
        self.calls: dict[int, list[str]] = {}
        self.tokens: dict[int, int] = {}  # number of sent tokens, by choice

    def more(self, samples: Samples) -> Iterator[Event]:
        for index, sequence in sorted(samples.items()):
            yield from self._begin(index)
            message = shown(self.reader, sequence.tokens, self.within_thoughts, ended=False)
            deltas = self._new(index, message)
            fields = {} if self.asked.top_logprobs else self._drawn(index, sequence)
            if deltas or fields:
                yield self._event(index, deltas[0] if deltas else {"content": ""}, **fields)
            for delta in deltas[1:]:
                yield self._event(index, delta)

    def rest(self, whole: Mapping[str, Any]) -> Iterator[Event]:
        for choice in whole["choices"]:
            index, message = choice["index"], choice["message"]
            yield from self._begin(index)
            deltas, begin = self._new(index, message), self.tokens.get(index, 0)
            fields: dict[str, Any] = (
                {"token_ids": choice["token_ids"][begin:]} if "token_ids" in choice else {}
            )
            if choice["logprobs"] is not None:
                fields["logprobs"] = {
                    **choice["logprobs"],
                    "content": choice["logprobs"]["content"][begin:],
                }
            yield self._event(index, deltas[0] if deltas else {"content": ""}, **fields)
            for delta in deltas[1:]:
                yield self._event(index, delta)
            yield self._event(index, {}, finish_reason=choice["finish_reason"])
        if self.asked.usage_in_stream:
            yield {**self.head, "choices": [], "usage": whole["usage"]}

    def _begin(self, index: int) -> Iterator[Event]:
        """Yield the first event of a choice, unless it was sent. The very first has the prompt."""
        if index not in self.sent:
            self.sent[index] = {}
            first, self.prompt = self.prompt, {}
            yield {**self._event(index, {"role": "assistant", "content": ""}), **first}

    def _new(self, index: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the deltas of the message since the last call.

        A text that differs from its sent part (see `shown`) is sent in full after that part.
        """
        deltas: list[dict[str, Any]] = []
        sent = self.sent[index]
        for name in ("reasoning_content", "content"):
            text, already_sent = message.get(name) or "", sent.get(name, "")
            if not already_sent.startswith(text):
                deltas.append({name: text.removeprefix(already_sent)})
                sent[name] = text
        sent_arguments = self.calls.setdefault(index, [])
        for i, call in enumerate(message.get("tool_calls") or ()):
            arguments = call["function"]["arguments"]
            if i == len(sent_arguments):  # the first delta has the name and an id, like OpenAI's
                sent_arguments.append("")
                first = {
                    "id": call.get("id") or new_id("call"),
                    "type": "function",
                    "function": {**call["function"], "arguments": ""},
                }
                deltas.append({"tool_calls": [{"index": i, **first}]})
            if len(arguments) > len(sent_arguments[i]):
                deltas.append(
                    {
                        "tool_calls": [
                            {
                                "index": i,
                                "function": {
                                    "arguments": arguments.removeprefix(sent_arguments[i])
                                },
                            }
                        ]
                    }
                )
                sent_arguments[i] = arguments
        return deltas

    def _drawn(self, index: int, sequence: SampledSequence) -> dict[str, Any]:
        """Return the requested logprobs and ids of the tokens since the last call."""
        begin, self.tokens[index] = self.tokens.get(index, 0), len(sequence.tokens)
        if begin == len(sequence.tokens):
            return {}
        assert sequence.logprobs is not None
        new = SampledSequence(sequence.tokens[begin:], sequence.logprobs[begin:])
        fields: dict[str, Any] = {"token_ids": new.tokens} if self.asked.return_token_ids else {}
        if self.asked.logprobs:
            fields["logprobs"] = {
                "content": content_logprobs(self.renderer.tokenizer, new, self.asked.as_ids),
                "refusal": None,
            }
        return fields

    def _event(self, index: int, delta: dict[str, Any], **more: Any) -> Event:
        """Return an event with a delta of a choice; `more` overrides fields of the choice."""
        return {
            **self.head,
            "choices": [
                {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            ],
        }


class TextWriter:
    """Write the events of a completion; logprobs come with the end of a choice.

    `read(index of the choice, tokens)` returns the certain part of the text.
    """

    def __init__(
        self, head: Mapping[str, Any], read: Callable[[int, Sequence[int]], str], usage: bool
    ):
        self.head, self.read, self.usage = dict(head), read, usage
        self.sent: dict[int, str] = {}

    def more(self, samples: Samples) -> Iterator[Event]:
        for index, sequence in sorted(samples.items()):
            yield from self._news(index, self.read(index, sequence.tokens))

    def rest(self, whole: Mapping[str, Any]) -> Iterator[Event]:
        for choice in whole["choices"]:
            yield from self._news(choice["index"], choice["text"])
            yield {**self.head, "choices": [{**choice, "text": ""}]}
        if self.usage:
            yield {**self.head, "choices": [], "usage": whole["usage"]}

    def _news(self, index: int, text: str) -> Iterator[Event]:
        """Yield an event with the unsent part of `text`, if any."""
        new_text, self.sent[index] = text.removeprefix(self.sent.get(index, "")), text
        if new_text:
            yield {
                **self.head,
                "choices": [
                    {"index": index, "text": new_text, "logprobs": None, "finish_reason": None}
                ],
            }
