"""Serve the OpenAI-style routes: chats, completions, token ids, models and sessions.

/v1/completions continues texts or token ids, and scores prompts with `echo` and `logprobs`, as
evaluation harnesses do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rl.renderers import trim_uncertain_end
from rl.serve.agent_sessions import AgentSession, AgentSessions, SampledTurn, SamplingBackend
from rl.serve.api_routes import RouteHandler, TypedRoute
from rl.serve.http_errors import HttpError, MissingTokenizerError, SafeJSONResponse, report_error
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
from rl.serve.schemas import parse_json_body, read_body
from rl.types import SampledSequence, SampleResponse, SamplingParams

SESSION_HEADER = "x-session-id"
SESSION_PATH = "/session/{session}"
KEEP_ALIVE_SECONDS = 10.0  # without an event, after which a stream sends a keep-alive comment
_PREFIXES, _REWARD_PATHS = ("", SESSION_PATH), ("/reward", "/v1/reward")
_END_OF_STREAM = b"data: [DONE]\n\n"
_MAX_NAME_LENGTH = 100  # of a metric

TopRow = Sequence[tuple[int, float]] | None  # (id, logprob) of a position, most likely first
# the full response, and for a stream a function that creates the writer of its events
HandlerResult = tuple[Any, Callable[[], EventWriter] | None]
# (the request's body, its session, for a stream the samples so far)
Handler = Callable[[Any, AgentSession, LiveSamples | None], Coroutine[Any, Any, HandlerResult]]


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
            *make("/v1/chat/completions", self.handle_chat, ChatBody, ChatResponse, ChatEvent),
            *make(
                "/v1/completions",
                self.handle_completions,
                CompletionBody,
                TextResponse,
                TextResponse,
            ),
            *make("/inference/v1/generate", self.generate, GenerateBody, TokenResponse),
            *(TypedRoute(path, handler, method) for method, path, handler in table),
        ]

    def list_models(self, request: Request) -> Any:
        """List the models."""
        models = self.backend.models(get_request_owner(request))
        return {"object": "list", "data": list(map(_make_model_entry, models))}

    def get_model(self, request: Request) -> Any:
        """Return a model."""
        name = request.path_params["model"]
        for model in self.backend.models(get_request_owner(request)):
            if model.name == name:
                return _make_model_entry(model)
        raise HttpError(404, f"unknown model {name!r:.200}", "model", code="model_not_found")

    async def list_sessions(self, request: Request) -> Any:
        """List the names of sessions."""
        return {"sessions": self.sessions.list_names(get_request_owner(request))}

    async def get_session(self, request: Request) -> Any:
        """Return the turns of a session."""
        return self._find_session(request).to_json()

    async def delete_session(self, request: Request) -> Any:
        """Delete a session."""
        self.sessions.delete(get_request_owner(request), request.path_params["session"])
        return {"deleted": True}

    async def post_reward(self, request: Request, body: RewardBody) -> Any:
        """Score a session."""
        session = self._find_session(request)
        session.reward = body.reward
        session.metrics |= {name[:_MAX_NAME_LENGTH]: body.metrics[name] for name in body.metrics}
        return {"reward": session.reward, "turns": len(session.turns)}

    def _find_session(self, request: Request) -> AgentSession:
        """Return the session of the request's path. Raises HttpError (404) if there is none."""
        return self.sessions.find(get_request_owner(request), request.path_params["session"])

    # ------------------------------------------------------------------------------------- sampling

    def _make_sampling_routes(
        self, path: str, handler: Handler, body_type: Any, *response_types: type
    ) -> list[TypedRoute]:
        """Return a POST route that samples, with and without a session in its path.

        handler           see `Handler`
        response_types    the types of the response and of an event of its stream
        """

        async def endpoint(request: Request) -> Any:
            return await self._run_handler(request, handler, body_type)

        endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
        return [
            TypedRoute(prefix + path, endpoint, "POST", body_type, response_types)
            for prefix in _PREFIXES
        ]

    async def _run_handler(self, request: Request, handler: Handler, body_type: Any) -> Any:
        """Run a handler and return its result, or a response."""
        raw, owner = await request.body(), get_request_owner(request)
        fields = parse_json_body(raw)
        name = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
        session = None if name is None else self.sessions.get_or_create(owner, name)
        body = read_body(body_type, fields)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        key = compute_digest(request.url.path.encode("utf-8", "backslashreplace"), raw)
        live = LiveSamples() if body.stream else None
        run = partial(handler, body, session or AgentSession(owner), live)
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
        return work.result()[0]

    async def handle_chat(
        self, body: ChatBody, session: AgentSession, live: LiveSamples | None
    ) -> HandlerResult:
        """Sample a chat completion and record its turns in the session. Raises HttpError."""
        messages, tools = to_messages(body.messages), body.prompt_tools
        if body.top_logprobs and not session.allows_rescoring:
            raise HttpError(
                400,
                "top_logprobs is not supported in a training episode: only logprobs of the sampled "
                "tokens are",
                "top_logprobs",
            )
        renderer = await session.renderer(self.backend, body.model)
        with report_as_field_error("chat_template_kwargs", "chat_template_kwargs: "):
            renderer = renderer.with_settings(body.chat_template_kwargs)
        with report_as_field_error("tools"):
            with_tools = renderer.with_tools(tools)
        with report_as_field_error("messages"):
            # a megabyte takes more than a second
            prompt = await asyncio.to_thread(session.build_prompt, with_tools, messages, tools)
        context = ChatContext(body, with_tools, prompt)
        make_writer, options = partial(ChatEventWriter, context), {}
        if live is not None:
            live.writer, options = make_writer(), {"show": live.make_callback()}
        response = await session.sample(
            self.backend, body.model, prompt, body.n, context.params, **options
        )
        choices, top = [], None
        for index, sequence in enumerate(response.sequences):
            if body.top_logprobs:
                top = await session.compute_top_logprobs(
                    self.backend, body.model, prompt, sequence, body.top_logprobs
                )
            choices.append(context.make_choice(index, sequence, top))
            message, is_complete = context.reader.parse_response(sequence.tokens)
            turn = SampledTurn(prompt, sequence, message, is_complete, messages, tools)
            returned_message = read_body(ChatMessage, choices[-1]["message"])
            session.record_turn(turn, *to_messages([returned_message]))
        return context.make_response(choices, response), make_writer

    async def handle_completions(
        self, body: CompletionBody, session: AgentSession, live: LiveSamples | None
    ) -> HandlerResult:
        """Sample n completions of each prompt, in a common batch if the engine forms it.

        Sample j of prompt p is the choice with index p * n + j.
        """
        k, n = body.logprobs, body.n
        if k and not session.allows_rescoring:
            raise HttpError(
                400,
                "logprobs above 0 are not supported in a training episode: 0 returns those of the "
                "sampled tokens",
                "logprobs",
            )
        tokenizer = await session.tokenizer(self.backend, body.model)
        if tokenizer is None:
            raise MissingTokenizerError(body.model)
        request = _Completion(body, tokenizer)
        params = request.params
        # tokenizing a megabyte takes more than a second
        prompts = await asyncio.to_thread(request.tokenize_prompts)
        options: dict[str, Any] = {}
        if request.is_scored:
            options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k}
        head, usage = make_response_head("cmpl", body.model), body.stream_options.include_usage
        make_writer = partial(TextEventWriter, head, request.decode_certain, usage)
        pending = []
        for p, prompt in enumerate(prompts):
            if live is not None and body.max_tokens:
                options["show"] = live.make_callback(p * n)
            pending.append(session.sample(self.backend, body.model, prompt, n, params, **options))
        if live is not None:
            live.writer = make_writer()
        responses = await _gather_or_cancel(pending)
        choices: list[TextChoice] = []
        sampled: list[SampledSequence] = []
        for prompt, response in zip(prompts, responses, strict=True):
            for sequence in response.sequences:
                text = request.decode_sample(sequence)
                top: Sequence[TopRow] = [None] * len(sequence.tokens)
                if not body.max_tokens:  # the prompt is scored, the sampled token is dropped
                    sequence, text, top = SampledSequence([], [], "length"), "", []
                else:
                    if k:
                        top = await session.compute_top_logprobs(
                            self.backend, body.model, prompt, sequence, k
                        )
                    session.record_turn(_make_turn(prompt, sequence, text))
                sampled.append(sequence)
                index = len(choices)
                choices.append(request.make_choice(index, prompt, response, sequence, text, top))
        result: TextResponse = {
            **head,
            "object": "text_completion",
            "choices": choices,
            "usage": count_usage(prompts, responses, sampled),
        }
        return result, make_writer

    async def generate(
        self, body: GenerateBody, session: AgentSession, live: LiveSamples | None
    ) -> HandlerResult:
        """Sample completions of a prompt of token ids, and return a choice for each sample.

        The stop token is the last id of a choice. Tokens in `logprobs` are written `token_id:<id>`.
        Raises HttpError if a field has a wrong value or is not supported.
        """
        fields, prompt = body.sampling_params, body.token_ids
        params = fields.make_params(fields.max_tokens, prefix="sampling_params.")
        response = await session.sample(self.backend, body.model, prompt, fields.n, params)
        tokenizer = await session.tokenizer(self.backend, body.model)
        choices: list[TokenChoice] = []
        for index, sequence in enumerate(response.sequences):
            text = str(tokenizer.decode(list(sequence.tokens))) if tokenizer is not None else ""
            session.record_turn(_make_turn(prompt, sequence, text))
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


def _make_turn(prompt: list[int], sequence: SampledSequence, text: str) -> SampledTurn:
    """Return a turn whose prompt is not a chat."""
    answer = {"role": "assistant", "content": text}
    return SampledTurn(prompt, sequence, answer, sequence.stop_reason == "stop")


@dataclass(frozen=True)
class _Completion:
    """Hold a completion request, and build the parts of its response."""

    body: CompletionBody
    tokenizer: Any

    @cached_property
    def params(self) -> SamplingParams:
        """Return the sampling parameters. Raises HttpError."""
        return self.body.make_params(self.body.max_tokens or 1)

    def tokenize_prompts(self) -> list[list[int]]:
        """Return the token ids of each prompt. Raises HttpError."""
        prompts: list[list[int]] = []
        for i, item in enumerate(self.body.prompt):
            ids = item
            if isinstance(item, str):
                with report_as_field_error(f"prompt[{i}]"):
                    add = self.body.add_special_tokens
                    ids = self.tokenizer.encode(item, add_special_tokens=add)
            if not ids:
                text = "has no tokens, and the model has no token to begin with"
                raise HttpError(400, f"prompt[{i}] {text}", f"prompt[{i}]")
            prompts.append([int(token) for token in ids])
        return prompts

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

    def make_choice(
        self,
        index: int,
        prompt: list[int],
        response: SampleResponse,
        sequence: SampledSequence,
        text: str,
        top: Sequence[TopRow],
    ) -> TextChoice:
        """Return a choice of the response.

        text    the sampled text
        top     the likely tokens at each sampled position
        """
        choice: TextChoice = {
            "index": index,
            "text": self.make_echo(index // self.body.n) + text,
            "logprobs": None,
            "finish_reason": sequence.stop_reason,
        }
        if self.body.logprobs is not None:
            tokens, logprobs, rows = [*sequence.tokens], [*(sequence.logprobs or ())], [*top]
            if self.is_scored:
                tokens, logprobs = prompt + tokens, [*(response.prompt_logprobs or ()), *logprobs]
                rows = [*(response.topk_prompt_logprobs or [None] * len(prompt)), *rows]
            choice["logprobs"] = self.make_logprobs(tokens, logprobs, rows)
        if self.body.return_token_ids:
            choice["token_ids"] = list(sequence.tokens)
            choice["prompt_token_ids"] = prompt
        return choice


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


def get_request_owner(request: Request) -> str:
    """Return the owner of a request, as set by the surrounding application; "" without keys."""
    return str(getattr(request.state, "owner", "") or "")


async def _stream_response(
    work: asyncio.Future[HandlerResult],
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
        is_sent = False
        try:
            while not work.done():
                if not await _wait_for_progress(live, KEEP_ALIVE_SECONDS):
                    yield b": keep-alive\n\n"
                if live.writer is not None:
                    for event in live.writer.write_partial(live.take_new()):
                        yield _format_event(event)
            full_answer, make_writer = work.result()
            assert make_writer is not None
            # for a retry, `live` of the first request has the writer
            for event in (live.writer or make_writer()).write_rest(full_answer):
                yield _format_event(event)
            yield _END_OF_STREAM
            is_sent = True
        except Exception as error:  # boundary: the response has begun, so its failure is an event
            yield _format_event(report_error(error).to_openai_json())
            yield _END_OF_STREAM
            is_sent = True
        finally:
            if not is_sent:
                handle_disconnect()

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


@contextlib.contextmanager
def report_as_field_error(param: str, prefix: str = "") -> Iterator[None]:
    """Raise HttpError for a ValueError of a field, and for a text that the tokenizer cannot encode.

    The tokenizers library raises a bare Exception for an unknown word.
    """
    try:
        yield
    except ValueError as error:
        raise HttpError(400, f"{prefix}{error}", param) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        text = f"{param} contains text that the model's tokenizer cannot encode ({error})"
        raise HttpError(400, text[:300], param) from error


async def _gather_or_cancel(
    coroutines: Sequence[Coroutine[Any, Any, SampleResponse]],
) -> list[SampleResponse]:
    """Return the results of all coroutines. If any fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
