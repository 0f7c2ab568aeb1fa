"""Serve /v1/chat/completions, and what all OpenAI-style routes share: reading bodies, sessions,
error responses, streaming and retried requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rl.renderers import StopTextRenderer, parse_partial_answer, prompt_opens_thoughts
from rl.serve.agent_sessions import AgentSession, AgentSessions, SampledTurn, SamplingBackend
from rl.serve.api_routes import TypedRoute
from rl.serve.chat_response import (
    ChatResponse,
    TextResponse,
    TokenResponse,
    make_choice,
    make_response,
    make_response_head,
    parse_sample,
)
from rl.serve.chat_stream import ChatEventWriter, EventWriter, LiveSamples
from rl.serve.http_errors import HttpError, report_error
from rl.serve.openai_schemas import ChatBody, ChatMessage, to_messages
from rl.serve.schemas import JsonBody, parse_json_body, read_body
from rl.types import SamplingParams

SESSION_HEADER = "x-session-id"
KEEP_ALIVE_SECONDS = 10.0  # without an event, after which a stream sends a keep-alive comment

# the full response, and for a stream a function that creates the writer of its events
HandlerResult = tuple[ChatResponse | TextResponse | TokenResponse, Callable[[], EventWriter] | None]
# (serving, the request's body, its session, for a stream the samples so far)
Handler = Callable[
    ["OpenAIServing", Any, AgentSession, LiveSamples | None], Coroutine[Any, Any, HandlerResult]
]


class OpenAIServing:
    """Hold the backend and the sessions of the OpenAI-style routes, and run their requests."""

    def __init__(self, backend: SamplingBackend, sessions: AgentSessions):
        self.backend, self.sessions = backend, sessions

    def get_session(self, request: Request) -> AgentSession | None:
        """Return the session that the request's path or header names; None if neither does."""
        name = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
        return (
            None if name is None else self.sessions.get_or_create(get_request_owner(request), name)
        )

    def make_routes(
        self, path: str, handler: Handler, body_type: type[JsonBody], *response_types: type
    ) -> list[TypedRoute]:
        """Return a POST route with and without a session in its path.

        handler           see `Handler`
        response_types    the types of the response and of an event of its stream
        """

        async def endpoint(request: Request) -> Any:
            return await self._handle(request, handler)

        endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
        return [
            TypedRoute(
                prefix + path,
                endpoint,
                body_type=body_type,
                is_openai=True,
                response_types=response_types,
            )
            for prefix in ("", "/session/{session}")
        ]

    async def _handle(self, request: Request, handler: Handler) -> Any:
        """Run a handler and return its result, or a response."""
        raw = await request.body()
        body = parse_json_body(raw)
        session = self.get_session(request)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        key = hashlib.blake2b(join_path_and_body(raw, request), digest_size=16).digest()
        live = LiveSamples() if isinstance(body, dict) and body.get("stream") is True else None
        if session is None:
            work = asyncio.ensure_future(
                handler(self, body, AgentSession(get_request_owner(request)), live)
            )
        else:
            work = asyncio.ensure_future(
                session.run_once(key, is_retry, lambda: handler(self, body, session, live))
            )
        if live is not None:
            return await _stream_response(work, live, has_no_session=session is None)
        while not (await asyncio.wait({work}, timeout=1.0))[0]:
            if await request.is_disconnected():
                if session is not None:
                    # sampling continues, for a retry of the request
                    session.mark_disconnected(key)
                work.cancel()
                return Response(status_code=499)
        return work.result()[0]


def get_request_owner(request: Request) -> str:
    """Return the owner of a request, as set by the surrounding application; "" without keys."""
    return str(getattr(request.state, "owner", "") or "")


def join_path_and_body(raw: bytes, request: Request) -> bytes:
    """Return the path and the body of a request, which identify a retry."""
    return request.url.path.encode("utf-8", "backslashreplace") + b"\0" + raw


async def _stream_response(
    work: asyncio.Future[HandlerResult], live: LiveSamples, has_no_session: bool
) -> Response:
    """Return the response as server-sent events.

    An error within the first 0.2 s becomes an error response; a later error becomes an event.
    `has_no_session`: the request has no session, so its work is cancelled if the client
    disconnects.
    """
    await _wait_for_progress(work, live, 0.2)
    if work.done():
        work.result()  # raises the error of a refused request

    async def events() -> AsyncIterator[bytes]:
        try:
            while not work.done():
                if not await _wait_for_progress(work, live, KEEP_ALIVE_SECONDS):
                    yield b": the answer is being drawn\n\n"
                for event in (
                    live.writer.write_partial(live.take_new()) if live.writer is not None else ()
                ):
                    yield _format_event(event)
        finally:
            if has_no_session and not work.done():
                work.cancel()  # the client has disconnected
        try:
            full_answer: Any
            full_answer, make_writer = work.result()
            # for a retry, `live` of the first request has the writer
            writer = live.writer or (make_writer and make_writer())
            for event in writer.write_rest(full_answer) if writer is not None else [full_answer]:
                yield _format_event(event)
        except Exception as error:  # boundary: the response has begun, so its failure is an event
            yield _format_event(report_error(error).to_openai_json())
        yield b"data: [DONE]\n\n"

    return StreamingResponse(
        events(),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _wait_for_progress(
    work: asyncio.Future[HandlerResult], live: LiveSamples, seconds: float
) -> bool:
    """Return whether the response is done or has new samples within `seconds`."""
    updated: asyncio.Future[Any] = asyncio.ensure_future(live.updated.wait())
    futures: set[asyncio.Future[Any]] = {work, updated}
    try:
        done, _ = await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        updated.cancel()
    return bool(done)


def _format_event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return (
        b"data: "
        + json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
        + b"\n\n"
    )


@contextlib.contextmanager
def refuse_unknown_words(param: str) -> Iterator[None]:
    """Raise HttpError for a text that the tokenizer cannot encode.

    The tokenizers library raises a bare Exception for an unknown word.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise HttpError(
            400,
            f"{param} contains text that the model's tokenizer cannot encode ({error})"[:300],
            param,
        ) from error


def get_request_stop_texts(
    params: SamplingParams, renderer_stops: Sequence[str | int]
) -> list[str]:
    """Return the stop texts of the request itself, which are cut off a response's text."""
    excluded = set(renderer_stops)
    return [item for item in params.stop or () if isinstance(item, str) and item not in excluded]


async def handle_chat(
    serving: OpenAIServing, body: Any, session: AgentSession, live: LiveSamples | None
) -> HandlerResult:
    """Sample a chat completion and record its turns in the session. Raises HttpError."""
    request = read_body(ChatBody, body)
    messages, tools = to_messages(request.messages), request.prompt_tools
    if request.top_logprobs and not session.allows_rescoring:
        raise HttpError(
            400,
            "top_logprobs is not supported in a training episode: only logprobs of the sampled "
            "tokens are",
            "top_logprobs",
        )
    backend = serving.backend
    renderer = await session.renderer(backend, request.model)
    try:
        renderer = renderer.with_settings(request.chat_template_kwargs)
    except ValueError as error:
        raise HttpError(400, f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    try:
        with_tools = renderer.with_tools(tools)
    except ValueError as error:
        raise HttpError(400, str(error), "tools") from error

    def tokenize() -> list[int]:
        with refuse_unknown_words("messages"):
            return session.build_prompt(with_tools, messages, tools)

    try:
        prompt = await asyncio.to_thread(tokenize)  # a megabyte takes more than a second
    except ValueError as error:
        raise HttpError(400, str(error), "messages") from error
    params = request.make_params(request.max_new_tokens, with_tools.get_stop_sequences())
    head = make_response_head("chatcmpl", request.model)
    stops = get_request_stop_texts(params, with_tools.get_stop_sequences())

    def make_writer() -> ChatEventWriter:
        return ChatEventWriter(request, head, with_tools, stops, prompt)

    options = {}
    if live is not None:
        live.writer, options = make_writer(), {"show": live.make_callback()}
    response = await session.sample(backend, request.model, prompt, request.n, params, **options)
    choices, in_thoughts = [], prompt_opens_thoughts(with_tools, prompt)
    for index, sequence in enumerate(response.sequences):
        message, is_complete = parse_sample(with_tools, stops, sequence)
        top_tokens = (
            await session.compute_top_logprobs(
                backend, request.model, prompt, sequence, request.top_logprobs
            )
            if request.top_logprobs
            else None
        )
        visible = parse_partial_answer(
            StopTextRenderer(with_tools, stops) if stops else with_tools,
            sequence.tokens,
            in_thoughts,
            ended=True,
        )
        choices.append(make_choice(request, with_tools, index, sequence, visible, top_tokens))
        (returned_message,) = to_messages([read_body(ChatMessage, choices[-1]["message"])])
        session.record_turn(
            SampledTurn(prompt, sequence, message, is_complete, messages, tools),
            returned_message,
        )
    return make_response(
        request, head, prompt, choices, response.sequences
    ), make_writer if live is not None else None
