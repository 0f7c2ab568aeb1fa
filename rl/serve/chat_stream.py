"""Answers as server-sent events, as they are drawn: what of a text is certain is sent, the rest
when the answer is whole.
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
Samples = Mapping[int, SampledSequence]  # what has been drawn so far, by the number of its choice


class Writer(Protocol):
    """What one connection is sent. Events put together are the whole answer."""

    def more(self, samples: Samples) -> Iterator[Event]: ...

    def rest(self, whole: Mapping[str, Any]) -> Iterator[Event]: ...


class Live:
    """Between the thread that draws and the loop that answers: `writer`, once there is one, is to
    write `take()` at each `news`.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.writer: Writer | None = None
        self._loop = asyncio.get_running_loop()
        self._drawn: dict[int, SampledSequence] = {}

    def show(self, first: int = 0) -> Callable[[Samples], None]:
        """To be called from any thread with what has been drawn; its sample 0 is the choice
        `first`.
        """

        def shown(samples: Samples) -> None:
            self._loop.call_soon_threadsafe(
                self._put, {first + i: sequence for i, sequence in samples.items()}
            )

        return shown

    def _put(self, samples: Samples) -> None:
        self._drawn |= samples
        self.news.set()

    def take(self) -> Samples:
        self.news.clear()
        drawn, self._drawn = self._drawn, {}
        return drawn


class ChatWriter:
    """Of a chat completion. Logprobs and ids come with their tokens; texts, and calls piece by
    piece, when they are certain.
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
        self.sent: dict[int, dict[str, str]] = {}  # texts, by choice
        # of each of a choice's calls, the arguments that were sent
        self.calls: dict[int, list[str]] = {}
        self.tokens: dict[int, int] = {}  # how many of a choice's are sent

    def more(self, samples: Samples) -> Iterator[Event]:
        for index, sequence in sorted(samples.items()):
            yield from self._begin(index)
            message = shown(self.reader, sequence.tokens, self.within_thoughts, ended=False)
            deltas = self._new(index, message)
            news = {} if self.asked.top_logprobs else self._drawn(index, sequence)
            if deltas or news:
                yield self._event(index, deltas[0] if deltas else {"content": ""}, **news)
            for delta in deltas[1:]:
                yield self._event(index, delta)

    def rest(self, whole: Mapping[str, Any]) -> Iterator[Event]:
        for choice in whole["choices"]:
            index, message = choice["index"], choice["message"]
            yield from self._begin(index)
            deltas, begin = self._new(index, message), self.tokens.get(index, 0)
            news: dict[str, Any] = (
                {"token_ids": choice["token_ids"][begin:]} if "token_ids" in choice else {}
            )
            if choice["logprobs"] is not None:
                news["logprobs"] = {
                    **choice["logprobs"],
                    "content": choice["logprobs"]["content"][begin:],
                }
            yield self._event(index, deltas[0] if deltas else {"content": ""}, **news)
            for delta in deltas[1:]:
                yield self._event(index, delta)
            yield self._event(index, {}, finish_reason=choice["finish_reason"])
        if self.asked.usage_in_stream:
            yield {**self.head, "choices": [], "usage": whole["usage"]}

    def _begin(self, index: int) -> Iterator[Event]:
        if index not in self.sent:
            self.sent[index] = {}
            first, self.prompt = self.prompt, {}
            yield {**self._event(index, {"role": "assistant", "content": ""}), **first}

    def _new(self, index: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What of the message was not sent yet. A text that turned out otherwise (see `shown`) is
        sent behind what was.
        """
        deltas: list[dict[str, Any]] = []
        sent = self.sent[index]
        for name in ("reasoning_content", "content"):
            text, before = message.get(name) or "", sent.get(name, "")
            if not before.startswith(text):
                deltas.append({name: text.removeprefix(before)})
                sent[name] = text
        begun = self.calls.setdefault(index, [])
        for i, call in enumerate(message.get("tool_calls") or ()):
            arguments = call["function"]["arguments"]
            if i == len(begun):  # the first piece has its name and an id, as OpenAI's has
                begun.append("")
                first = {
                    "id": call.get("id") or new_id("call"),
                    "type": "function",
                    "function": {**call["function"], "arguments": ""},
                }
                deltas.append({"tool_calls": [{"index": i, **first}]})
            if len(arguments) > len(begun[i]):
                deltas.append(
                    {
                        "tool_calls": [
                            {
                                "index": i,
                                "function": {"arguments": arguments.removeprefix(begun[i])},
                            }
                        ]
                    }
                )
                begun[i] = arguments
        return deltas

    def _drawn(self, index: int, sequence: SampledSequence) -> dict[str, Any]:
        """Logprobs and ids of tokens that were not sent yet, where they are asked for."""
        begin, self.tokens[index] = self.tokens.get(index, 0), len(sequence.tokens)
        if begin == len(sequence.tokens):
            return {}
        assert sequence.logprobs is not None
        new = SampledSequence(sequence.tokens[begin:], sequence.logprobs[begin:])
        found: dict[str, Any] = {"token_ids": new.tokens} if self.asked.return_token_ids else {}
        if self.asked.logprobs:
            found["logprobs"] = {
                "content": content_logprobs(self.renderer.tokenizer, new, self.asked.as_ids),
                "refusal": None,
            }
        return found

    def _event(self, index: int, delta: dict[str, Any], **more: Any) -> Event:
        return {
            **self.head,
            "choices": [
                {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            ],
        }


class TextWriter:
    """Of completions. `read(choice's number, tokens)`: the certain part of the text; logprobs come
    with the end of a choice.
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
        piece, self.sent[index] = text.removeprefix(self.sent.get(index, "")), text
        if piece:
            yield {
                **self.head,
                "choices": [
                    {"index": index, "text": piece, "logprobs": None, "finish_reason": None}
                ],
            }
