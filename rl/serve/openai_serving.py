"""Serve /v1/chat/completions, and what all OpenAI-style routes share: reading bodies, sessions,
error responses, streaming and retried requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rl.serve.agent_sessions import AgentSession, AgentSessions, SampledTurn, SamplingBackend
from rl.serve.api_routes import TypedRoute
from rl.serve.chat_response import ChatContext, ChatResponse, TextResponse, TokenResponse
from rl.serve.chat_stream import ChatEventWriter, EventWriter, LiveSamples
from rl.serve.http_errors import HttpError, report_error
from rl.serve.openai_schemas import ChatBody, ChatMessage, to_messages
from rl.serve.request_store import compute_digest
from rl.serve.schemas import JsonBody, parse_json_body, read_body

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

    def find_session(self, request: Request) -> AgentSession:
        """Return the session of the request's path. Raises HttpError (404) if there is none."""
        return self.sessions.find(get_request_owner(request), request.path_params["session"])

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
        key = compute_digest(request.url.path.encode("utf-8", "backslashreplace"), raw)
        live = LiveSamples() if isinstance(body, dict) and body.get("stream") is True else None
        run = functools.partial(
            handler, self, body, session or AgentSession(get_request_owner(request)), live
        )
        work = asyncio.ensure_future(
            run() if session is None else session.run_once(key, is_retry, run)
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
                if live.writer is not None:
                    for event in live.writer.write_partial(live.take_new()):
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
    text = json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode("utf-8", "backslashreplace")


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


@contextlib.contextmanager
def _blame(param: str, prefix: str = "") -> Iterator[None]:
    """Raise HttpError for a ValueError of a field."""
    try:
        yield
    except ValueError as error:
        raise HttpError(400, f"{prefix}{error}", param) from error


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
    with _blame("chat_template_kwargs", "chat_template_kwargs: "):
        renderer = renderer.with_settings(request.chat_template_kwargs)
    with _blame("tools"):
        with_tools = renderer.with_tools(tools)
    with _blame("messages"), refuse_unknown_words("messages"):
        # a megabyte takes more than a second
        prompt = await asyncio.to_thread(session.build_prompt, with_tools, messages, tools)
    context = ChatContext(request, with_tools, prompt)
    make_writer, options = functools.partial(ChatEventWriter, context), {}
    if live is not None:
        live.writer, options = make_writer(), {"show": live.make_callback()}
    response = await session.sample(
        backend, request.model, prompt, request.n, context.params, **options
    )
    choices, top = [], None
    for index, sequence in enumerate(response.sequences):
        if request.top_logprobs:
            top = await session.compute_top_logprobs(
                backend, request.model, prompt, sequence, request.top_logprobs
            )
        choices.append(context.make_choice(index, sequence, top))
        message, is_complete = context.reader.parse_response(sequence.tokens)
        turn = SampledTurn(prompt, sequence, message, is_complete, messages, tools)
        returned_message = read_body(ChatMessage, choices[-1]["message"])
        session.record_turn(turn, *to_messages([returned_message]))
    return context.make_response(choices, response.sequences), make_writer
