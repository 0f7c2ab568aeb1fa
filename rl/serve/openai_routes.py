"""Serve the OpenAI-style routes: chats, completions, token ids, models and sessions.

/v1/completions continues texts or token ids, and scores prompts with `echo` and `logprobs`, as
evaluation harnesses do. A stream of server-sent events has the certain part of a text at once, and
the rest when the response is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rl.serve.agent_sessions import AgentSession, AgentSessions, SamplingBackend
from rl.serve.api_routes import RouteHandler, TypedRoute, get_request_owner
from rl.serve.http_errors import HttpError, SafeJSONResponse, report_error
from rl.serve.openai_responses import (
    ChatReply,
    PartialSamples,
    ProgressCallback,
    SamplingReply,
    TextReply,
    TokenReply,
    make_id,
)
from rl.serve.openai_schemas import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatEvent,
    ChatResponse,
    CompletionBody,
    GenerateBody,
    RewardBody,
    TextChoice,
    TextResponse,
    TokenResponse,
)
from rl.serve.request_store import compute_digest
from rl.serve.schemas import parse_json_body, read_body
from rl.types import SampledSequence

SESSION_HEADER = "x-session-id"
SESSION_PATH = "/session/{session}"
KEEP_ALIVE_SECONDS = 10.0  # without an event, after which a stream sends a keep-alive comment
_PREFIXES, _REWARD_PATHS = ("", SESSION_PATH), ("/reward", "/v1/reward")
_END_OF_STREAM = b"data: [DONE]\n\n"
_MAX_NAME_LENGTH = 100  # of a metric

ReplyResult = tuple[SamplingReply, Any]  # the reply, and its full response
Event = dict[str, Any]  # in the form of ChatEvent or TextResponse


def make_openai_routes(
    backend: SamplingBackend, sessions: AgentSessions | None = None
) -> list[TypedRoute]:
    """Return all OpenAI-style routes.

    `sessions`: the store of the turns of requests that name a session; by default a new store.
    """
    return OpenAIRoutes(backend, sessions or AgentSessions()).routes()


@dataclass(frozen=True)
class OpenAIRoutes:
    """Hold the handlers of the OpenAI-style routes."""

    backend: SamplingBackend
    sessions: AgentSessions

    def routes(self) -> list[TypedRoute]:
        """Return the routes. Those that sample or list models exist with and without a session."""
        make = self._make_sampling_routes
        table: list[tuple[str, str, RouteHandler]] = [
            # next to the routes below OPENAI_BASE_URL (/v1), and among them
            *(("POST", SESSION_PATH + path, self.post_reward) for path in _REWARD_PATHS),
            ("GET", "/sessions", self.list_sessions),
            ("GET", SESSION_PATH, self.get_session),
            ("DELETE", SESSION_PATH, self.delete_session),
            *(("GET", prefix + "/v1/models", self.list_models) for prefix in _PREFIXES),
            *(("GET", prefix + "/v1/models/{model:path}", self.get_model) for prefix in _PREFIXES),
        ]
        return [
            *make("/v1/chat/completions", ChatReply, ChatBody, ChatResponse, ChatEvent),
            *make("/v1/completions", TextReply, CompletionBody, TextResponse, TextResponse),
            *make("/inference/v1/generate", TokenReply, GenerateBody, TokenResponse),
            *(TypedRoute(path, handler, method) for method, path, handler in table),
        ]

    def list_models(self, owner: str) -> Any:
        """List the models."""
        entries = [
            {
                "id": model.name,
                "object": "model",
                "created": model.created,
                "owned_by": "whetstone",
                # tokens of prompt and response together, of which the model never reads the last:
                # clients check it before they send
                "max_model_len": None if model.max_context is None else model.max_context + 1,
            }
            for model in self.backend.models(owner)
        ]
        return {"object": "list", "data": entries}

    def get_model(self, owner: str, model: str) -> Any:
        """Return a model."""
        for entry in self.list_models(owner)["data"]:
            if entry["id"] == model:
                return entry
        raise HttpError(404, f"unknown model {model!r:.200}", "model", code="model_not_found")

    async def list_sessions(self, owner: str) -> Any:
        """List the names of sessions."""
        return {"sessions": self.sessions.list_names(owner)}

    def get_session(self, owner: str, session: str) -> Response:
        """Return the turns of a session."""
        # built in this thread: thousands of turns take seconds
        return SafeJSONResponse(self.sessions.find(owner, session).to_json())

    async def delete_session(self, owner: str, session: str) -> Any:
        """Delete a session."""
        self.sessions.delete(owner, session)
        return {"deleted": True}

    async def post_reward(self, owner: str, session: str, body: RewardBody) -> Any:
        """Score a session."""
        scored = self.sessions.find(owner, session)
        scored.reward = body.reward
        scored.metrics |= {name[:_MAX_NAME_LENGTH]: body.metrics[name] for name in body.metrics}
        return {"reward": scored.reward, "turns": len(scored.turns)}

    # ------------------------------------------------------------------------------------- sampling

    def _make_sampling_routes(
        self, path: str, reply_type: type[SamplingReply], body_type: Any, *response_types: type
    ) -> list[TypedRoute]:
        """Return a POST route that samples, with and without a session in its path.

        `response_types`: the types of the response and of an event of its stream.
        """

        async def endpoint(request: Request) -> Any:
            return await self._reply(request, reply_type, body_type)

        endpoint.__name__, endpoint.__doc__ = reply_type.operation, reply_type.__doc__
        return [
            TypedRoute(prefix + path, endpoint, "POST", body_type, response_types)
            for prefix in _PREFIXES
        ]

    async def _reply(
        self, request: Request, reply_type: type[SamplingReply], body_type: Any
    ) -> Any:
        """Sample the reply to a request, and return the full response or a stream."""
        raw, owner = await request.body(), get_request_owner(request)
        body = read_body(body_type, parse_json_body(raw))
        name = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
        session = None if name is None else self.sessions.get_or_create(owner, name)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        key = compute_digest(request.url.path.encode("utf-8", "backslashreplace"), raw)
        live = LiveSamples() if body.stream else None

        async def run() -> ReplyResult:
            reply = reply_type(body, session or AgentSession(owner), self.backend)
            await reply.prepare()
            if live is None:
                return reply, await reply.run(None)
            live.writer = make_writer(reply)
            return reply, await reply.run(live.make_callback)

        work = asyncio.ensure_future(
            run() if session is None else session.run_once(key, is_retry, run)
        )

        def handle_disconnect() -> None:
            if session is not None:
                # sampling continues, for a retry of the request
                session.mark_disconnected(key)
            work.cancel()

        if live is not None:
            return await _stream_response(work, live, handle_disconnect)
        while not (await asyncio.wait({work}, timeout=1.0))[0]:
            if await request.is_disconnected():
                handle_disconnect()
                return Response(status_code=499)
        return work.result()[1]


class LiveSamples:
    """Pass samples from the sampling thread to the event loop of a stream.

    The event loop waits for `updated`, and passes `new` to `writer` once it is set.
    """

    def __init__(self) -> None:
        self.updated = asyncio.Event()
        self.writer: EventWriter | None = None
        self.new: dict[int, SampledSequence] = {}
        self._loop = asyncio.get_running_loop()

    def make_callback(self, first: int) -> ProgressCallback:
        """Return a callback that any thread may call with the samples so far.

        `first`: index of the choice of sample 0.
        """

        def add(samples: PartialSamples) -> None:
            self.new |= {first + i: sequence for i, sequence in samples.items()}
            self.updated.set()

        def deliver(samples: PartialSamples) -> None:
            self._loop.call_soon_threadsafe(add, samples)

        return deliver

    def write_new(self) -> Iterator[Event]:
        """Yield the events of the new samples, and clear `updated`."""
        self.updated.clear()
        samples, self.new = self.new, {}
        for index, sequence in sorted(samples.items()):
            assert self.writer is not None  # there are no samples before it is set
            yield from self.writer.write_sample(index, sequence)


class EventWriter:
    """Write the events of a response to a connection. Together the events are the full response.

    A subclass writes the events of a choice.
    """

    kind: str  # "object" of the events

    def __init__(self, reply: Any):
        self.reply, self.body = reply, reply.body

    def write_rest(self, response: Any) -> Iterator[Event]:
        """Yield the remaining events of the full response."""
        for choice in response["choices"]:
            yield from self.write_choice(choice)
        if self.body.stream_options.include_usage:
            yield {**self.make_event(), "usage": response["usage"]}

    def write_sample(self, index: int, sequence: SampledSequence) -> Iterator[Event]:
        """Yield the events of what is certain of the sample of a choice."""
        raise NotImplementedError

    def write_choice(self, choice: Any) -> Iterator[Event]:
        """Yield the remaining events of a choice."""
        raise NotImplementedError

    def make_event(self, *choices: Any) -> Event:
        """Return an event."""
        return {**self.reply.head, "object": self.kind, "choices": [*choices]}


class ChatEventWriter(EventWriter):
    """Write the events of a chat completion.

    Logprobs and ids are sent with their tokens; texts, and tool calls in parts, when they are
    certain.
    """

    kind = "chat.completion.chunk"

    def __init__(self, reply: Any):
        super().__init__(reply)
        self.sent_texts: dict[int, dict[str, str]] = {}  # sent texts by field, by choice
        # the sent part of the arguments of each tool call, by choice
        self.sent_calls: dict[int, list[str]] = defaultdict(list)
        self.sent_tokens: Counter[int] = Counter()  # number of sent tokens, by choice

    def write_sample(self, index: int, sequence: SampledSequence) -> Iterator[Event]:
        begin, fields = self.sent_tokens[index], dict[str, Any]()
        if len(sequence.tokens) > begin and not self.body.top_logprobs:
            assert sequence.logprobs is not None
            new = SampledSequence(sequence.tokens[begin:], sequence.logprobs[begin:])
            fields = self.reply.make_token_fields(new)
            self.sent_tokens[index] = len(sequence.tokens)
        message = self.reply.parse(sequence.tokens, ended=False)
        yield from self._write_deltas(index, message, fields)

    def write_choice(self, choice: ChatChoice) -> Iterator[Event]:
        index = choice["index"]
        begin, fields = self.sent_tokens[index], dict[str, Any]()
        if "token_ids" in choice:
            fields["token_ids"] = choice["token_ids"][begin:]
        if choice["logprobs"] is not None:
            content = choice["logprobs"]["content"][begin:]
            fields["logprobs"] = {**choice["logprobs"], "content": content}
        yield from self._write_deltas(index, choice["message"], fields, ended=True)
        yield self._make_delta_event(index, {}, finish_reason=choice["finish_reason"])

    def _write_deltas(
        self, index: int, message: Mapping[str, Any], fields: Mapping[str, Any], ended: bool = False
    ) -> Iterator[Event]:
        """Yield an event for each delta of a message, or one without text for `fields` alone.

        The first of these events has the fields too. Before the first event of a choice comes its
        role, and the very first has the prompt.
        """
        if index not in self.sent_texts:
            event = self._make_delta_event(index, {"role": "assistant", "content": ""})
            if self.body.return_token_ids and not self.sent_texts:
                event["prompt_token_ids"] = list(self.reply.prompt)
            self.sent_texts[index] = {}
            yield event
        deltas = self._make_deltas(index, message)
        if not deltas and (ended or any(fields.values())):
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self._make_delta_event(index, delta, **fields)
            fields = {}

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

    def _make_delta_event(self, index: int, delta: AssistantMessage, **more: Any) -> Event:
        """Return an event with a delta of a choice; `more` overrides fields of the choice."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.make_event(choice | more)


class TextEventWriter(EventWriter):
    """Write the events of a completion; logprobs come with the end of a choice."""

    kind = "text_completion"

    def __init__(self, reply: Any):
        super().__init__(reply)
        self.sent_texts: dict[int, str] = defaultdict(str)  # by choice

    def write_sample(self, index: int, sequence: SampledSequence) -> Iterator[Event]:
        yield from self._write_new_text(index, self.reply.decode_certain(index, sequence.tokens))

    def write_choice(self, choice: TextChoice) -> Iterator[Event]:
        yield from self._write_new_text(choice["index"], choice["text"])
        yield self.make_event({**choice, "text": ""})

    def _write_new_text(self, index: int, text: str) -> Iterator[Event]:
        """Yield an event with the unsent part of `text`, if any."""
        new_text, self.sent_texts[index] = text.removeprefix(self.sent_texts[index]), text
        if new_text:
            yield self.make_event(
                {"index": index, "text": new_text, "logprobs": None, "finish_reason": None}
            )


def make_writer(reply: SamplingReply) -> EventWriter:
    """Return a new writer of the events of a reply."""
    return ChatEventWriter(reply) if isinstance(reply, ChatReply) else TextEventWriter(reply)


async def _stream_response(
    work: asyncio.Future[ReplyResult],
    live: LiveSamples,
    handle_disconnect: Callable[[], None],
) -> Response:
    """Return the response as server-sent events.

    An error within the first 0.2 s becomes an error response; a later error becomes an event.
    `handle_disconnect`: called if the client disconnects before the last event.
    """
    work.add_done_callback(lambda _: live.updated.set())
    await _wait_for_progress(live, 0.2)
    if work.done():
        work.result()  # raises the error of a refused request

    async def events() -> AsyncIterator[bytes]:
        try:
            try:
                while not work.done():
                    if not await _wait_for_progress(live, KEEP_ALIVE_SECONDS):
                        yield b": keep-alive\n\n"
                    for event in live.write_new():
                        yield _format_event(event)
                reply, response = work.result()
                # for a retry, `live` of the first request has the writer
                for event in (live.writer or make_writer(reply)).write_rest(response):
                    yield _format_event(event)
            except Exception as error:  # boundary: the response has begun: its failure is an event
                yield _format_event(report_error(error).to_openai_json())
            yield _END_OF_STREAM
        except BaseException:  # the client disconnected
            handle_disconnect()
            raise

    return StreamingResponse(
        events(),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _wait_for_progress(live: LiveSamples, seconds: float) -> bool:
    """Return whether the response is done or has new samples within `seconds`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(live.updated.wait(), seconds)
    return live.updated.is_set()


def _format_event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return b"data: " + SafeJSONResponse.render(value) + b"\n\n"
