"""Serve /v1/chat/completions, and what all OpenAI-style routes share: reading bodies, sessions,
error responses, streaming and retried requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rl.errors import APIStatusError
from rl.renderers import StopsAt, opens_thoughts, shown
from rl.serve.answers import JsonAnswer
from rl.serve.body import check_size, json_of
from rl.serve.chat_fields import Refused, naming_words, own_texts
from rl.serve.chat_reply import choice, head_of, parsed, reply
from rl.serve.chat_request import read_chat, read_messages
from rl.serve.chat_stream import ChatWriter, Live, Writer
from rl.serve.chat_top import top_logprobs
from rl.serve.episodes import Desk, Session, Sessions, Turn
from rl.serve.refusals import Interrupted

SESSION_HEADER = "x-session-id"
KEEP_ALIVE_SECONDS = 10.0  # without an event, after which a stream sends a keep-alive comment
_log = logging.getLogger("whetstone.serve")

# the full response, and for a stream a function that creates the writer of its events
Answer = tuple[dict[str, Any], Callable[[], Writer] | None]
# (serving, the request's body, its session, for a stream the samples so far)
Handler = Callable[["Serving", Any, Session, Live | None], Coroutine[Any, Any, Answer]]


class Serving:
    """Hold the backend and the sessions of the OpenAI-style routes, and run their requests."""

    def __init__(self, desk: Desk, sessions: Sessions):
        self.desk, self.sessions = desk, sessions

    def session(self, request: Request) -> Session | None:
        """Return the session that the request's path or header names; None if neither does."""
        name = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
        return None if name is None else self.sessions.open(owner_of(request), name)

    def route(self, path: str, answer: Handler) -> list[Route]:
        """Return a POST route with and without a session in its path. `answer`: see `Handler`."""

        async def endpoint(request: Request) -> Response:
            return await self._answered(request, answer)

        return [
            Route(prefix + path, endpoint, methods=["POST"])
            for prefix in ("", "/session/{session}")
        ]

    async def _answered(self, request: Request, answer: Handler) -> Response:
        """Run a handler and return its response; every failure is an error response."""
        try:
            raw = await request.body()
            body = read_json(raw)
            session = self.session(request)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            key = hashlib.blake2b(path_and(raw, request), digest_size=16).digest()
            live = Live() if isinstance(body, dict) and body.get("stream") is True else None
            if session is None:
                work = asyncio.ensure_future(answer(self, body, Session(owner_of(request)), live))
            else:
                work = asyncio.ensure_future(
                    session.once(key, is_retry, lambda: answer(self, body, session, live))
                )
            if live is not None:
                return await _streamed(work, live, alone=session is None)
            while not (await asyncio.wait({work}, timeout=1.0))[0]:
                if await request.is_disconnected():
                    if session is not None:
                        # sampling continues, for a retry of the request
                        session.lost(key)
                    work.cancel()
                    return Response(status_code=499)
            return JsonAnswer(work.result()[0])
        except Exception as error:  # boundary: every failure is an error response, not a traceback
            return answer_of(as_refused(error))


def owner_of(request: Request) -> str:
    """Return the owner of a request, as set by the surrounding application; "" without keys."""
    return str(getattr(request.state, "owner", "") or "")


def path_and(raw: bytes, request: Request) -> bytes:
    """Return the path and the body of a request, which identify a retry."""
    return request.url.path.encode("utf-8", "backslashreplace") + b"\0" + raw


def read_json(raw: bytes) -> Any:
    """Return the value of a JSON body. Raises Refused if it is too large or invalid."""
    check_size(raw)
    try:
        return json_of(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not valid JSON ({str(error)[:200]})") from error


def answer_of(refused: Refused) -> Response:
    """Return the error response of a `Refused`."""
    headers = {} if refused.retry_after is None else {"retry-after": f"{refused.retry_after:g}"}
    return JsonAnswer(refused.as_json(), refused.status, headers=headers)


def as_refused(error: BaseException) -> Refused:
    """Return the `Refused` for any error: with the error's message if the caller caused it, else
    with its type alone, and the error is logged.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, Interrupted):
        return Refused("the server is shutting down: try again", status=503, retry_after=5.0)
    status = getattr(error, "status", None) or (
        error.status_code if isinstance(error, APIStatusError) else None
    )
    if isinstance(status, int) and 400 <= status < 600:
        text = str(error)
        code = "context_length_exceeded" if "context" in text and status == 400 else None
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            status
        )
        return Refused(
            text,
            status=status,
            code=code,
            kind=kind,
            retry_after=getattr(error, "retry_after", None),
        )
    if isinstance(error, ValueError):
        return Refused(
            str(error), code="context_length_exceeded" if "context" in str(error) else None
        )
    _log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return Refused(
        f"the request failed in the server ({type(error).__name__}); its log says why", status=500
    )


async def _streamed(work: asyncio.Future[Answer], live: Live, alone: bool) -> Response:
    """Return the response as server-sent events.

    An error within the first 0.2 s becomes an error response; a later error becomes an event.
    `alone`: the request has no session, so its work is cancelled if the client disconnects.
    """
    await _stirred(work, live, 0.2)
    if work.done():
        work.result()  # raises the error of a refused request

    async def events() -> AsyncIterator[bytes]:
        try:
            while not work.done():
                if not await _stirred(work, live, KEEP_ALIVE_SECONDS):
                    yield b": the answer is being drawn\n\n"
                for event in live.writer.more(live.take()) if live.writer is not None else ():
                    yield _event(event)
        finally:
            if alone and not work.done():
                work.cancel()  # the client has disconnected
        try:
            full_answer, make_writer = work.result()
            # for a retry, `live` of the first request has the writer
            writer = live.writer or (make_writer and make_writer())
            for event in writer.rest(full_answer) if writer is not None else [full_answer]:
                yield _event(event)
        except Exception as error:  # boundary: the response has begun, so its failure is an event
            yield _event(as_refused(error).as_json())
        yield b"data: [DONE]\n\n"

    return StreamingResponse(
        events(),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _stirred(work: asyncio.Future[Answer], live: Live, seconds: float) -> bool:
    """Return whether the response is done or has new samples within `seconds`."""
    updated: asyncio.Future[Any] = asyncio.ensure_future(live.news.wait())
    futures: set[asyncio.Future[Any]] = {work, updated}
    try:
        done, _ = await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        updated.cancel()
    return bool(done)


def _event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return (
        b"data: "
        + json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
        + b"\n\n"
    )


def routes(serving: Serving) -> list[Route]:
    """Return the routes of /v1/chat/completions."""
    return serving.route("/v1/chat/completions", chat)


async def chat(serving: Serving, body: Any, session: Session, live: Live | None) -> Answer:
    """Sample a chat completion and record its turns in the session. Raises Refused."""
    request = read_chat(body)
    if request.top_logprobs and not session.reads_again:
        raise Refused(
            "top_logprobs is not supported in a training episode: only logprobs of the sampled "
            "tokens are",
            "top_logprobs",
        )
    desk = serving.desk
    renderer = await session.renderer(desk, request.model)
    try:
        renderer = renderer.with_settings(request.template_settings)
    except ValueError as error:
        raise Refused(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    try:
        with_tools = renderer.with_tools(request.tools)
    except ValueError as error:
        raise Refused(str(error), "tools") from error

    def tokenize() -> list[int]:
        with naming_words("messages"):
            return session.prompt(with_tools, request.messages, request.tools)

    try:
        prompt = await asyncio.to_thread(tokenize)  # a megabyte takes more than a second
    except ValueError as error:
        raise Refused(str(error), "messages") from error
    params, head = request.params(with_tools), head_of("chatcmpl", request.model)
    stops = own_texts(params, with_tools.get_stop_sequences())

    def make_writer() -> ChatWriter:
        return ChatWriter(request, head, with_tools, stops, prompt)

    options = {}
    if live is not None:
        live.writer, options = make_writer(), {"show": live.show()}
    response = await session.draw(desk, request.model, prompt, request.n, params, **options)
    choices, in_thoughts = [], opens_thoughts(with_tools, prompt)
    for index, sequence in enumerate(response.sequences):
        message, is_complete = parsed(with_tools, stops, sequence)
        top_tokens = (
            await top_logprobs(session, desk, request.model, prompt, sequence, request.top_logprobs)
            if request.top_logprobs
            else None
        )
        visible = shown(
            StopsAt(with_tools, stops) if stops else with_tools,
            sequence.tokens,
            in_thoughts,
            ended=True,
        )
        choices.append(choice(request, with_tools, index, sequence, visible, top_tokens))
        (returned_message,) = read_messages([choices[-1]["message"]])
        session.note(
            Turn(prompt, sequence, message, is_complete, request.messages, request.tools),
            returned_message,
        )
    return reply(
        request, head, prompt, choices, response.sequences
    ), make_writer if live is not None else None
