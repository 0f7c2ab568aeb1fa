"""Run the programs of `--environment endpoint`: requests of a program become observations of a
rollout, and the actions of the rollout become the responses.

All requests run in the event loop of a server on loopback, in a thread of this process. The rollout
reads the queue of events of each episode.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import uvicorn
from starlette.applications import Starlette

from rl.envs import EpisodeLimits, last_user_text
from rl.processes import SupervisedProcess
from rl.renderers import Renderer
from rl.rollout import EventLoopThread
from rl.serve import (
    AgentSession,
    AgentSessions,
    HttpError,
    SampledTurn,
    SamplingBackend,
    ServedModel,
    make_openai_routes,
    make_turn_logs,
)
from rl.types import Message, SampledSequence, SampleResponse, SamplingParams

HOST = "127.0.0.1"
POLICY_MODEL = "policy"  # the model name of the policy, which serves any other name as well
# after which the next program may start, even without a request of this one
_FIRST_REQUEST_SECONDS = 5.0


class LoopServer(EventLoopThread):
    """Run an application in a thread. `close` ends the server; the end of the process does as well.

    `url`: its address, a free port on loopback.
    """

    def __init__(self, application: Callable[[], Any], name: str):
        super().__init__(name)
        listener = socket.create_server((HOST, 0), backlog=2048)
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            application(),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=300,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._serving = self.run_coroutine(self._server.serve(sockets=[listener]))

    @property
    def is_alive(self) -> bool:
        """Return whether the server is running."""
        return not self._serving.done()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the server's event loop, and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the server's event loop; do nothing if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """End the server, wait up to 10 s for that, and stop the loop."""
        self._server.should_exit = self._server.force_exit = True
        wait([self._serving], timeout=10.0)
        self.call_soon(self.loop.stop)


@dataclass(eq=False)
class ActionRequest:
    """Hold a request that waits for an action. `logs`: filled in once the response is parsed."""

    prompt: list[int]
    params: SamplingParams
    answer: asyncio.Future[SampledSequence]
    logs: dict[str, Any] = field(default_factory=dict)
    is_dead: bool = False  # whether the program has ended

    def resolve(self, result: SampledSequence | HttpError) -> None:
        """Answer the request with an action or an error, unless it was answered before."""
        if self.answer.done():
            return
        if isinstance(result, HttpError):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


@dataclass(frozen=True)
class ProgramExit:
    """Hold the end of a program.

    `code`: its exit code, None if it did not start; `timed_out`: whether it exceeded its time
    limit; `output`: the end of its output; `seconds`: its wall time.
    """

    code: int | None
    timed_out: bool
    output: str
    seconds: float


class ProgramEpisode(AgentSession):
    """Hold the session of a program and its pending requests.

    `replaced_settings`: sampling settings of its requests that the run's settings replaced.
    """

    allows_rescoring = False

    def __init__(
        self, renderer: Renderer, limits: EpisodeLimits, system_prompt: str | None, strict: bool
    ):
        super().__init__()
        self.name = secrets.token_hex(16)
        self.events: queue.SimpleQueue[ActionRequest | ProgramExit] = queue.SimpleQueue()
        self.limits, self.system_prompt, self.strict = limits, system_prompt, strict
        self.end_reason: str | None = None  # the reason for which further requests are refused
        self.request_count = 0
        # set at the first request or at the end of the program
        self.requested_or_ended = asyncio.Event()
        self.replaced_settings: dict[str, Any] = {}
        self.timer = _ProgramTimer(limits.seconds)
        self._renderer = renderer
        # by the id() of the sampled sequence
        self._answered_requests: dict[int, ActionRequest] = {}
        self._pending_requests: set[ActionRequest] = set()

    def choose_backend(self, backend: SamplingBackend) -> Any:
        """Return the episode itself: the rollout samples for its program."""
        return self

    async def renderer(self, model: str | None, owner: str) -> Renderer:
        return self._renderer

    async def tokenizer(self, model: str | None, owner: str) -> Any:
        return self._renderer.tokenizer

    def build_prompt(
        self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        return super().build_prompt(renderer, self._with_system_prompt(messages), tools)

    def _with_system_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with the run's system prompt, unless they have a system prompt."""
        keep = self.system_prompt is None or messages[0]["role"] == "system"
        return messages if keep else [{"role": "system", "content": self.system_prompt}, *messages]

    async def sample(
        self,
        model: str | None,
        prompt_ids: list[int],
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        owner: str,
        **options: Any,
    ) -> SampleResponse:
        options.pop("show", None)  # a rollout returns complete actions, so nothing can be streamed
        if options:
            raise HttpError(
                400, "prompts are not scored in a training episode: omit echo or logprobs"
            )
        self._replace_settings(sampling_params)
        actions = [
            await self._request_action(prompt_ids, sampling_params) for _ in range(num_samples)
        ]
        return SampleResponse(actions)

    async def _request_action(self, prompt: list[int], params: SamplingParams) -> SampledSequence:
        """Put a request into the queue of events and wait for the action. Raises
        HttpError.
        """
        if self.end_reason is None and self.request_count >= self.limits.turns:
            self.end_reason = f"it has used its {self.limits.turns} turns (max_turns)"
        if self.end_reason is not None:
            raise HttpError(400, f"the episode is over: {self.end_reason}", code="episode_over")
        self.request_count += 1
        self.requested_or_ended.set()
        request = ActionRequest(prompt, params, asyncio.get_running_loop().create_future())
        self._pending_requests.add(request)
        self.timer.stop()
        self.events.put(request)
        try:
            sequence = await request.answer
        finally:
            self._pending_requests.discard(request)
            if not self._pending_requests:
                self.timer.start()
        self._answered_requests[id(sequence)] = request
        return sequence

    def _replace_settings(self, params: SamplingParams) -> None:
        """Record sampling settings of a request, which the run's settings replace.

        Raises HttpError for any such setting if `strict`.
        """
        for parameter in fields(SamplingParams):
            name, value = parameter.name, getattr(params, parameter.name)
            # the program's limit and stops apply; the server sets how logprobs are reported
            if name in ("max_tokens", "stop", "untruncated_logprobs"):
                continue
            if value != parameter.default:
                if self.strict:
                    raise HttpError(
                        400, f"{name}={value}: the run sets the sampling parameters; omit it", name
                    )
                self.replaced_settings[name] = value

    def record_turn(self, turn: SampledTurn, returned_message: Message | None = None) -> None:
        if turn.messages is not None:
            turn.messages = self._with_system_prompt(turn.messages)
        super().record_turn(turn, returned_message)
        request = self._answered_requests.pop(id(turn.sequence), None)
        if request is not None:
            text = (
                last_user_text(turn.messages)
                if turn.messages
                else self._renderer.tokenizer.decode(turn.prompt)
            )
            request.logs |= {
                **make_turn_logs(turn),
                "prompt": text,
                "answer_text": turn.answer["content"],
            }

    # ------------------------------------------------------------------------ calls of the rollout

    def refuse(self, reason: str) -> None:
        """Refuse all pending and all later requests; the program continues until it ends."""
        self.end_reason = reason
        for request in self._pending_requests:
            request.resolve(HttpError(400, reason, "messages", code="context_length_exceeded"))

    def refuse_pending(self) -> None:
        """Refuse all pending requests, and mark them as dead."""
        for request in list(self._pending_requests):
            request.is_dead = True
            request.resolve(HttpError(410, "the episode has ended", code="episode_over"))


class _ProgramTimer:
    """Measure the time of a program, except while it waits for a response.

    `on_timeout`: called when the limit of `seconds` is exceeded. Use on the event loop's thread.
    """

    def __init__(self, seconds: float):
        self.remaining = seconds
        self.on_timeout: Any = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, unless it runs."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, self.remaining), self.on_timeout
            )

    def stop(self) -> None:
        """Pause the timer, if it runs."""
        if self._timer is not None:
            self.remaining = self._timer.when() - asyncio.get_running_loop().time()
            self._timer.cancel()
            self._timer = None


class _ProgramSessions(AgentSessions):
    """Hold the sessions of running programs; requests cannot create sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, ProgramEpisode] = {}

    def get_or_create(self, owner: str, name: str) -> AgentSession:
        return self.find(owner, name)

    def find(self, owner: str, name: str) -> AgentSession:
        episode = self.running.get(name)
        if episode is None:
            raise HttpError(
                404,
                "the episode is unknown, or it has ended",
                code="session_not_found",
                kind="invalid_request_error",
            )
        return episode

    def list_names(self, owner: str) -> list[str]:
        return []

    def delete(self, owner: str, name: str) -> None:
        raise HttpError(405, "an episode cannot be deleted: it ends with its program")


class _NoBackend:
    """Refuse to sample for requests outside an episode."""

    async def sample(self, *_: Any, **__: Any) -> SampleResponse:
        return await self.tokenizer(None, "")

    def models(self, owner: str) -> Sequence[Any]:
        return [ServedModel(POLICY_MODEL, None, 0)]

    async def tokenizer(self, model: str | None, owner: str) -> Any:
        raise HttpError(
            404,
            "only requests of an episode are served: use the URL in OPENAI_BASE_URL unchanged",
            kind="invalid_request_error",
        )

    renderer = tokenizer


class LiveEndpoint:
    """Run the server of a trainer's episodes.

    `begin` starts the program of an episode; `end` kills it and all processes that it started.
    """

    def __init__(self) -> None:
        self.episodes = _ProgramSessions()
        self._starting = asyncio.Semaphore(max(2, os.cpu_count() or 1))  # of starting programs
        self.server = LoopServer(
            lambda: Starlette(routes=make_openai_routes(_NoBackend(), self.episodes)),
            "the endpoint of --environment endpoint",
        )

    def begin(
        self, episode: ProgramEpisode, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Start the program of an episode. `words`: its command line."""
        self.episodes.running[episode.name] = episode
        self.server.run_coroutine(self._run_program(episode, words, environment))

    def end(self, episode: ProgramEpisode) -> None:
        """End an episode: kill its program if it runs, and refuse its requests."""
        self.server.call_soon(self._end_episode, episode)

    def _end_episode(self, episode: ProgramEpisode) -> None:
        self.episodes.running.pop(episode.name, None)
        episode.end_reason = episode.end_reason or "it has ended"
        episode.refuse_pending()
        episode.timer.on_timeout()

    async def _run_program(
        self, episode: ProgramEpisode, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Run a program from its start to its end, and put an `ProgramExit` into the queue of
        events.

        The semaphore limits the programs between start and first request to the number of cores:
        starting an interpreter takes about a second of a core.
        """
        folder = ""
        finished = asyncio.Event()
        timed_out = False

        def finish() -> None:
            finished.set()
            episode.requested_or_ended.set()

        def time_out() -> None:
            nonlocal timed_out
            timed_out = True
            finish()

        def read_output() -> None:
            if program is not None and not program.read_output():
                finish()

        start_time = time.monotonic()
        program: SupervisedProcess | None = None
        code, output = None, ""
        loop = asyncio.get_running_loop()
        try:
            folder = tempfile.mkdtemp(prefix="whetstone-episode-")
            try:
                async with self._starting:
                    start_time = time.monotonic()
                    if episode.name in self.episodes.running:
                        program = SupervisedProcess(words, {**environment, "TMPDIR": folder})
                        loop.add_reader(program.fileno(), read_output)
                        episode.timer.on_timeout = time_out
                        episode.timer.start()
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(
                                episode.requested_or_ended.wait(), _FIRST_REQUEST_SECONDS
                            )
                if program is not None:
                    await finished.wait()
                    episode.timer.stop()
            finally:
                if program is not None:
                    loop.remove_reader(program.fileno())
                    code = await asyncio.to_thread(program.stop)
                    output = program.last_output
        # boundary: any failure of a program is reported as the end of its episode
        except Exception as error:
            code, output = None, str(error)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)
        episode.timer.stop()
        episode.refuse_pending()
        episode.events.put(ProgramExit(code, timed_out, output, time.monotonic() - start_time))


@cache
def get_live_endpoint() -> LiveEndpoint:
    """Return the endpoint of all episodes of this process; the first call creates it."""
    live_endpoint = LiveEndpoint()
    atexit.register(live_endpoint.server.close)
    return live_endpoint
