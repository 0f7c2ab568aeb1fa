"""/v1/chat/completions, and what all OpenAI-style routes share: bodies, sessions, errors, answers
that come too late.
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
KEEP_ALIVE_SECONDS = 10.0  # between two signs of life in a stream
_log = logging.getLogger("whetstone.serve")

# the whole, and what makes events of it where a stream was asked for
Answer = tuple[dict[str, Any], Callable[[], Writer] | None]
# (serving, the request's body, its session, what has been drawn so far where a stream was asked
# for)
Handler = Callable[["Serving", Any, Session, Live | None], Coroutine[Any, Any, Answer]]


class Serving:
    """The desk and the sessions, as the routes see them."""

    def __init__(self, desk: Desk, sessions: Sessions):
        self.desk, self.sessions = desk, sessions

    def session(self, request: Request) -> Session | None:
        """The session that the request's path or header names; None where neither does."""
        name = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
        return None if name is None else self.sessions.open(owner_of(request), name)

    def route(self, path: str, answer: Handler) -> list[Route]:
        """A POST route, with and without a session in its path. `answer`: see `Handler`."""

        async def endpoint(request: Request) -> Response:
            return await self._answered(request, answer)

        return [
            Route(prefix + path, endpoint, methods=["POST"])
            for prefix in ("", "/session/{session}")
        ]

    async def _answered(self, request: Request, answer: Handler) -> Response:
        try:
            raw = await request.body()
            body = read_json(raw)
            session = self.session(request)
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            key = hashlib.blake2b(path_and(raw, request), digest_size=16).digest()
            live = Live() if isinstance(body, dict) and body.get("stream") is True else None
            if session is None:
                work = asyncio.ensure_future(answer(self, body, Session(owner_of(request)), live))
            else:
                work = asyncio.ensure_future(
                    session.once(key, again, lambda: answer(self, body, session, live))
                )
            if live is not None:
                return await _streamed(work, live, alone=session is None)
            while not (await asyncio.wait({work}, timeout=1.0))[0]:
                if await request.is_disconnected():
                    if session is not None:
                        # it is drawn all the same, for a request that comes again
                        session.lost(key)
                    work.cancel()
                    return Response(status_code=499)
            return JsonAnswer(work.result()[0])
        except Exception as error:  # boundary: every failure is an answer, and none is a traceback
            return answer_of(as_refused(error))


def owner_of(request: Request) -> str:
    """Whose request it is: what the application around these routes noted of the key. "" where keys
    are not asked for.
    """
    return str(getattr(request.state, "owner", "") or "")


def path_and(raw: bytes, request: Request) -> bytes:
    return request.url.path.encode("utf-8", "backslashreplace") + b"\0" + raw


def read_json(raw: bytes) -> Any:
    check_size(raw)
    try:
        return json_of(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON ({str(error)[:200]})") from error


def answer_of(refused: Refused) -> Response:
    headers = {} if refused.retry_after is None else {"retry-after": f"{refused.retry_after:g}"}
    return JsonAnswer(refused.as_json(), refused.status, headers=headers)


def as_refused(error: BaseException) -> Refused:
    """What a client is told of a failure: the caller's own in words, others by their kind."""
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
    """Events. What is refused at once is an error answer; what fails later is an event with the
    error. `alone`: of no session.
    """
    await _stirred(work, live, 0.2)
    if work.done():
        work.result()  # raises what was refused

    async def events() -> AsyncIterator[bytes]:
        try:
            while not work.done():
                if not await _stirred(work, live, KEEP_ALIVE_SECONDS):
                    yield b": the answer is being drawn\n\n"
                for piece in live.writer.more(live.take()) if live.writer is not None else ():
                    yield _event(piece)
        finally:
            if alone and not work.done():
                work.cancel()  # whoever asked has gone
        try:
            whole, make = work.result()
            # of a request that came again, the first has the other
            writer = live.writer or (make and make())
            for piece in writer.rest(whole) if writer is not None else [whole]:
                yield _event(piece)
        except Exception as error:  # boundary: the answer has begun, so its failure is an event
            yield _event(as_refused(error).as_json())
        yield b"data: [DONE]\n\n"

    return StreamingResponse(
        events(),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _stirred(work: asyncio.Future[Answer], live: Live, seconds: float) -> bool:
    """Whether within so many seconds there is an answer, or something of it."""
    news: asyncio.Future[Any] = asyncio.ensure_future(live.news.wait())
    both: set[asyncio.Future[Any]] = {work, news}
    try:
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        news.cancel()
    return bool(done)


def _event(value: Any) -> bytes:
    return (
        b"data: "
        + json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
        + b"\n\n"
    )


def routes(serving: Serving) -> list[Route]:
    return serving.route("/v1/chat/completions", chat)


async def chat(serving: Serving, body: Any, session: Session, live: Live | None) -> Answer:
    """An answer to a chat completion's body, whose turns are noted in the session."""
    asked = read_chat(body)
    if asked.top_logprobs and not session.reads_again:
        raise Refused(
            "top_logprobs is not served in an episode that is trained on: logprobs of the drawn tokens are",
            "top_logprobs",
        )
    desk = serving.desk
    renderer = await session.renderer(desk, asked.model)
    try:
        renderer = renderer.with_settings(asked.template_settings)
    except ValueError as error:
        raise Refused(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    try:
        with_tools = renderer.with_tools(asked.tools)
    except ValueError as error:
        raise Refused(str(error), "tools") from error

    def tokenize() -> list[int]:
        with naming_words("messages"):
            return session.prompt(with_tools, asked.messages, asked.tools)

    try:
        prompt = await asyncio.to_thread(tokenize)  # a megabyte takes more than a second
    except ValueError as error:
        raise Refused(str(error), "messages") from error
    params, head = asked.params(with_tools), head_of("chatcmpl", asked.model)
    stops = own_texts(params, with_tools.get_stop_sequences())

    def writer() -> ChatWriter:
        return ChatWriter(asked, head, with_tools, stops, prompt)

    show = {}
    if live is not None:
        live.writer, show = writer(), {"show": live.show()}
    response = await session.draw(desk, asked.model, prompt, asked.n, params, **show)
    choices, within = [], opens_thoughts(with_tools, prompt)
    for index, sequence in enumerate(response.sequences):
        message, ended = parsed(with_tools, stops, sequence)
        top = (
            await top_logprobs(session, desk, asked.model, prompt, sequence, asked.top_logprobs)
            if asked.top_logprobs
            else None
        )
        seen = shown(
            StopsAt(with_tools, stops) if stops else with_tools, sequence.tokens, within, ended=True
        )
        choices.append(choice(asked, with_tools, index, sequence, seen, top))
        (back,) = read_messages([choices[-1]["message"]])
        session.note(Turn(prompt, sequence, message, ended, asked.messages, asked.tools), back)
    return reply(
        asked, head, prompt, choices, response.sequences
    ), writer if live is not None else None
