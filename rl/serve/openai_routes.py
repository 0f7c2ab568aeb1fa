"""Serve the OpenAI-style routes: chats, completions, token ids, models and sessions.

/v1/completions continues texts or token ids, and scores prompts with `echo` and `logprobs`, as
evaluation harnesses do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rl.renderers import trim_uncertain_end
from rl.serve.agent_sessions import AgentSession, AgentSessions, SampledTurn, SamplingBackend
from rl.serve.api_routes import RouteHandler, TypedRoute
from rl.serve.http_errors import HttpError, report_error
from rl.serve.openai_responses import (
    ChatContext,
    ChatEvent,
    ChatEventWriter,
    ChatResponse,
    EventWriter,
    LiveSamples,
    TextChoice,
    TextEventWriter,
    TextLogprobs,
    TextResponse,
    TokenChoice,
    TokenResponse,
    clamp_logprob,
    count_usage,
    decode_exactly,
    format_token,
    get_request_stop_texts,
    make_content_logprobs,
    make_id,
    make_response_head,
)
from rl.serve.openai_schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerateBody,
    RewardBody,
    to_messages,
)
from rl.serve.request_store import compute_digest
from rl.serve.schemas import JsonBody, parse_json_body, read_body
from rl.types import SampledSequence, SampleResponse, SamplingParams

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


TopRow = Sequence[tuple[int, float]] | None  # (id, logprob) of a position, most likely first


@dataclass(frozen=True)
class _Completion:
    """Hold a completion request, its prompts as token ids, and build the parts of its response."""

    body: CompletionBody
    tokenizer: Any
    prompts: list[list[int]]
    params: SamplingParams

    @classmethod
    def read(cls, body: Any, tokenizer: Any) -> _Completion:
        """Read a request and tokenize its prompts. Raises HttpError."""
        request = read_body(CompletionBody, body)
        params = request.make_params(request.max_tokens or 1)
        prompts: list[list[int]] = []
        for i, item in enumerate(request.prompt):
            ids = item
            if isinstance(item, str):
                with refuse_unknown_words(f"prompt[{i}]"):
                    ids = tokenizer.encode(item, add_special_tokens=request.add_special_tokens)
            if not ids:
                text = "has no tokens, and the model has no token to begin with"
                raise HttpError(400, f"prompt[{i}] {text}", f"prompt[{i}]")
            prompts.append([int(token) for token in ids])
        return cls(request, tokenizer, prompts, params)

    @property
    def samples_tokens(self) -> bool:
        """Return whether tokens are sampled, and not only the prompts are scored."""
        return self.body.max_tokens != 0

    @property
    def is_scored(self) -> bool:
        """Return whether the prompts are scored."""
        return self.body.echo and self.body.logprobs is not None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the exact text of tokens, including special tokens."""
        return decode_exactly(self.tokenizer, tokens)

    def decode_certain(self, index: int, tokens: Sequence[int]) -> str:
        """Return the certain part of the text of a choice, from its tokens so far."""
        stops = get_request_stop_texts(self.params)
        return self.make_echo(index // self.body.n) + trim_uncertain_end(self.decode(tokens), stops)

    def make_echo(self, p: int) -> str:
        """Return the text before a response to prompt p: the prompt if `echo`, else ""."""
        prompt = self.body.prompt[p]
        if not self.body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.decode(prompt)

    def decode_sample(self, sequence: SampledSequence) -> str:
        """Return the sampled text, without the end token or stop text."""
        text, stops = self.decode(sequence.tokens), get_request_stop_texts(self.params)
        cuts = [place for stop in stops if (place := text.find(stop)) >= 0]
        if cuts:
            return text[: min(cuts)]
        return self.decode(sequence.tokens[:-1]) if sequence.stop_reason == "stop" else text

    def make_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], rows: Sequence[TopRow]
    ) -> TextLogprobs:
        """Return OpenAI's logprobs: four lists with an entry for each token.

        Each entry of top_logprobs includes the sampled token, where harnesses look for it.
        """

        def format_id(token: int) -> str:
            return format_token(self.tokenizer, token, self.body.tokens_as_ids)

        texts = [format_id(token) for token in tokens]
        values = [None if logprob is None else clamp_logprob(logprob) for logprob in logprobs]
        tops: list[dict[str, float] | None] = []
        for text, value, row in zip(texts, values, rows, strict=True):
            top: dict[str, float] = {}
            for token, logprob in row or ():
                top.setdefault(format_id(token), clamp_logprob(logprob))
            if value is not None:
                top.setdefault(text, value)
            tops.append(None if value is None else top)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self.body.logprobs else None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
        }


async def handle_completions(
    serving: OpenAIServing, body: Any, session: AgentSession, live: LiveSamples | None
) -> HandlerResult:
    """Sample n completions of each prompt, in a common batch if the engine forms it.

    Sample j of prompt p is the choice with index p * n + j.
    """
    backend, name = serving.backend, body.get("model") if isinstance(body, dict) else None
    model = name if isinstance(name, str) else None
    tokenizer = await session.tokenizer(backend, model)
    # tokenizing a megabyte takes more than a second
    request = await asyncio.to_thread(_Completion.read, body, tokenizer)
    k, n = request.body.logprobs, request.body.n
    if k and not session.allows_rescoring:
        raise HttpError(
            400,
            "logprobs above 0 are not supported in a training episode: 0 returns those of the "
            "sampled tokens",
            "logprobs",
        )
    options: dict[str, Any] = {}
    if request.is_scored:
        options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k}
    head, include_usage = (
        make_response_head("cmpl", model),
        request.body.stream_options.include_usage,
    )
    make_writer = partial(TextEventWriter, head, request.decode_certain, include_usage)
    pending = []
    for p, prompt in enumerate(request.prompts):
        if live is not None and request.samples_tokens:
            options["show"] = live.make_callback(p * n)
        pending.append(session.sample(backend, model, prompt, n, request.params, **options))
    if live is not None:
        live.writer = make_writer()
    responses = await _gather_or_cancel(pending)
    choices, sequences = await _make_choices(request, serving, session, responses)
    usage = count_usage(sum(map(len, request.prompts)), sequences)
    result: TextResponse = {
        **head,
        "object": "text_completion",
        "choices": choices,
        "usage": usage,
    }
    return result, make_writer


async def _make_choices(
    request: _Completion,
    serving: OpenAIServing,
    session: AgentSession,
    responses: Sequence[SampleResponse],
) -> tuple[list[TextChoice], list[SampledSequence]]:
    """Return the choices of a response and the sampled sequences, which become turns."""
    body, k = request.body, request.body.logprobs
    choices: list[TextChoice] = []
    sequences: list[SampledSequence] = []
    for p, response in enumerate(responses):
        prompt = request.prompts[p]
        for sequence in response.sequences:
            tokens: list[int] = []
            logprobs: list[float | None] = []
            rows: list[TopRow] = []
            if request.is_scored:
                tokens, logprobs = [*prompt], [*(response.prompt_logprobs or ())]
                rows = [*(response.topk_prompt_logprobs or [None] * len(prompt))]
            choice: TextChoice = {
                "index": len(choices),
                "text": request.make_echo(p),
                "logprobs": None,
                "finish_reason": sequence.stop_reason if request.samples_tokens else "length",
            }
            if request.samples_tokens:
                sequences.append(sequence)
                text = request.decode_sample(sequence)
                choice["text"] += text
                answer = {"role": "assistant", "content": text}
                is_complete = sequence.stop_reason == "stop"
                session.record_turn(SampledTurn(prompt, sequence, answer, is_complete))
                tokens += sequence.tokens
                logprobs += sequence.logprobs or []
                rows += (
                    await session.compute_top_logprobs(
                        serving.backend, body.model, prompt, sequence, k
                    )
                    if k
                    else [None] * len(sequence.tokens)
                )
            if k is not None:
                choice["logprobs"] = request.make_logprobs(tokens, logprobs, rows)
            if body.return_token_ids:
                choice["token_ids"] = list(sequence.tokens) if request.samples_tokens else []
                choice["prompt_token_ids"] = prompt
            choices.append(choice)
    return choices, sequences


async def _gather_or_cancel(
    coroutines: Sequence[Coroutine[Any, Any, SampleResponse]],
) -> list[SampleResponse]:
    """Return the results of all coroutines. If any fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(draw) for draw in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


_MAX_NAME_LENGTH = 100  # of a metric


def make_openai_routes(
    backend: SamplingBackend, sessions: AgentSessions | None = None
) -> list[TypedRoute]:
    """Return all OpenAI-style routes.

    `sessions`: the store of the turns of requests that name a session; by default a new store.
    """
    serving = OpenAIServing(backend, sessions or AgentSessions())
    sessions = serving.sessions

    def list_models(request: Request) -> Any:
        """List the models."""
        models = backend.models(get_request_owner(request))
        return {"object": "list", "data": list(map(_make_model_entry, models))}

    def get_model(request: Request) -> Any:
        """Return a model."""
        name = request.path_params["model"]
        for model in backend.models(get_request_owner(request)):
            if model.name == name:
                return _make_model_entry(model)
        raise HttpError(404, f"unknown model {name!r:.200}", "model", code="model_not_found")

    async def list_sessions(request: Request) -> Any:
        """List the names of sessions."""
        return {"sessions": sessions.list_names(get_request_owner(request))}

    async def get_session(request: Request) -> Any:
        """Return the turns of a session."""
        return serving.find_session(request).to_json()

    async def delete_session(request: Request) -> Any:
        """Delete a session."""
        sessions.delete(get_request_owner(request), request.path_params["session"])
        return {"deleted": True}

    async def post_reward(request: Request) -> Any:
        """Score a session."""
        session = serving.find_session(request)
        body = read_body(RewardBody, parse_json_body(await request.body()))
        session.reward = body.reward
        session.metrics |= {name[:_MAX_NAME_LENGTH]: body.metrics[name] for name in body.metrics}
        return {"reward": session.reward, "turns": len(session.turns)}

    path = "/session/{session}"
    table: list[tuple[str, str, RouteHandler]] = [
        ("GET", "/sessions", list_sessions),
        ("GET", path, get_session),
        ("DELETE", path, delete_session),
        *(("GET", prefix + "/v1/models", list_models) for prefix in ("", path)),
        *(("GET", prefix + "/v1/models/{model:path}", get_model) for prefix in ("", path)),
    ]
    return [
        *serving.make_routes(
            "/v1/chat/completions", handle_chat, ChatBody, ChatResponse, ChatEvent
        ),
        *serving.make_routes(
            "/v1/completions", handle_completions, CompletionBody, TextResponse, TextResponse
        ),
        *serving.make_routes("/inference/v1/generate", generate, GenerateBody, TokenResponse),
        *(
            # next to the routes below OPENAI_BASE_URL (/v1), and among them
            TypedRoute(path + place, post_reward, body_type=RewardBody, is_openai=True)
            for place in ("/reward", "/v1/reward")
        ),
        *(TypedRoute(place, handler, method, is_openai=True) for method, place, handler in table),
    ]


def _make_model_entry(model: Any) -> dict[str, Any]:
    """Return an entry of /v1/models.

    `max_model_len`: tokens of prompt and response together; clients check it before they send.
    """
    # the model never reads the last token
    longest = None if model.max_context is None else model.max_context + 1
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "whetstone",
        "max_model_len": longest,
    }


async def generate(
    serving: OpenAIServing, body: Any, session: AgentSession, live: LiveSamples | None
) -> HandlerResult:
    """Sample completions of a prompt of token ids, and return a choice for each sample.

    The stop token is the last id of a choice. Tokens in `logprobs` are written `token_id:<id>`.
    Raises HttpError if a field has a wrong value or is not supported.
    """
    request = read_body(GenerateBody, body)
    fields, prompt = request.sampling_params, request.token_ids
    params = fields.make_params(fields.max_tokens, prefix="sampling_params.")
    response = await session.sample(serving.backend, request.model, prompt, fields.n, params)
    tokenizer = await session.tokenizer(serving.backend, request.model)
    choices: list[TokenChoice] = []
    for index, sequence in enumerate(response.sequences):
        text = str(tokenizer.decode(list(sequence.tokens))) if tokenizer is not None else ""
        answer = {"role": "assistant", "content": text}
        is_complete = sequence.stop_reason == "stop"
        session.record_turn(SampledTurn([*prompt], sequence, answer, is_complete))
        choice: TokenChoice = {
            "index": index,
            "token_ids": list(sequence.tokens),
            "finish_reason": sequence.stop_reason,
            "logprobs": None,
        }
        if fields.logprobs is not None:
            choice["logprobs"] = make_content_logprobs(tokenizer, sequence, as_ids=True)
        choices.append(choice)
    result: TokenResponse = {
        "request_id": make_id("gen"),
        "choices": choices,
        "prompt_token_ids": prompt,
    }
    return result, None
