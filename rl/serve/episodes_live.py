"""Run the programs of `--environment endpoint`: requests of a program become observations of a
rollout, and the actions of the rollout become the responses.

All requests run in the event loop of a server on loopback. The rollout reads the queue of events
of each episode.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rl.environments import Limits, prompt_text
from rl.renderers import Renderer
from rl.rewards import GuardedProgram
from rl.serve.chat_fields import Refused
from rl.serve.desk import ServedModel
from rl.serve.episodes import Desk, Session, Sessions, Turn, logs_of
from rl.serve.episodes_server import LoopServer
from rl.types import Message, SampledSequence, SampleResponse, SamplingParams

_START_SECONDS = 5.0  # after which the next program may start, even without a request of this one
MODEL = "policy"  # the model name of the policy, which serves any other name as well


@dataclass(eq=False)
class Ask:
    """Hold a request that waits for an action. `logs`: filled in once the response is parsed."""

    prompt: list[int]
    params: SamplingParams
    answer: asyncio.Future[SampledSequence]
    logs: dict[str, Any] = field(default_factory=dict)
    dead: bool = False  # whether the program has ended


@dataclass(frozen=True)
class Ended:
    """Hold the end of a program.

    `code`: its exit code, None if it did not start; `late`: whether it exceeded its time limit;
    `printed`: the end of its output; `seconds`: its wall time.
    """

    code: int | None
    late: bool
    printed: str
    seconds: float


class Episode(Session):
    """Hold the session of a program and its pending requests.

    `overruled`: sampling settings of its requests that the run's settings replaced.
    """

    reads_again = False

    def __init__(self, renderer: Renderer, limits: Limits, system_prompt: str | None, strict: bool):
        super().__init__()
        self.name = secrets.token_hex(16)
        self.events: queue.SimpleQueue[Ask | Ended] = queue.SimpleQueue()
        self.limits, self.system_prompt, self.strict = limits, system_prompt, strict
        self.over: str | None = None  # the reason for which further requests are refused
        self.asked = 0
        self.stirred = asyncio.Event()  # set at the first request or at the end of the program
        self.overruled: dict[str, Any] = {}
        self.clock = _Clock(limits.seconds)
        self._renderer = renderer
        self._asks: dict[int, Ask] = {}  # by the id() of the sampled sequence
        self._waiting: set[Ask] = set()

    async def renderer(self, desk: Desk, model: str | None) -> Renderer:
        return self._renderer

    async def tokenizer(self, desk: Desk, model: str | None) -> Any:
        return self._renderer.tokenizer

    def prompt(
        self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        return super().prompt(renderer, self._begun(messages), tools)

    def _begun(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with the run's system prompt, unless they have a system prompt."""
        keep = self.system_prompt is None or messages[0]["role"] == "system"
        return messages if keep else [{"role": "system", "content": self.system_prompt}, *messages]

    async def draw(
        self,
        desk: Desk,
        model: str | None,
        prompt: list[int],
        n: int,
        params: SamplingParams,
        **what: Any,
    ) -> SampleResponse:
        what.pop("show", None)  # a rollout returns complete actions, so nothing can be streamed
        if what:
            raise Refused("prompts are not scored in a training episode: omit echo or logprobs")
        self._overrule(params)
        return SampleResponse([await self._ask(prompt, params) for _ in range(n)])

    async def _ask(self, prompt: list[int], params: SamplingParams) -> SampledSequence:
        """Put a request into the queue of events and wait for the action. Raises Refused."""
        if self.over is None and self.asked >= self.limits.turns:
            self.over = f"it has used its {self.limits.turns} turns (max_turns)"
        if self.over is not None:
            raise Refused(f"the episode is over: {self.over}", code="episode_over")
        self.asked += 1
        self.stirred.set()
        ask = Ask(prompt, params, asyncio.get_running_loop().create_future())
        self._waiting.add(ask)
        self.clock.stop()
        self.events.put(ask)
        try:
            sequence = await ask.answer
        finally:
            self._waiting.discard(ask)
            if not self._waiting:
                self.clock.start()
        self._asks[id(sequence)] = ask
        return sequence

    def _overrule(self, params: SamplingParams) -> None:
        """Record sampling settings of a request, which the run's settings replace.

        Raises Refused for any such setting if `strict`.
        """
        defaults = SamplingParams()
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "logit_bias",
            "min_tokens",
            "ignore_eos",
            "seed",
        ):
            value = getattr(params, name)
            if value != getattr(defaults, name):
                if self.strict:
                    raise Refused(
                        f"{name}={value}: the run sets the sampling parameters; omit it", name
                    )
                self.overruled[name] = value

    def note(self, turn: Turn, back: Message | None = None) -> None:
        if turn.messages is not None:
            turn.messages = self._begun(turn.messages)
        super().note(turn, back)
        ask = self._asks.pop(id(turn.sequence), None)
        if ask is not None:
            messages = turn.messages if turn.messages is not None else ()
            text = (
                prompt_text(messages) if messages else self._renderer.tokenizer.decode(turn.prompt)
            )
            ask.logs |= {**logs_of(turn), "prompt": text, "answer_text": turn.answer["content"]}

    # ------------------------------------------------------------------------ calls of the rollout

    def give(self, ask: Ask, sequence: SampledSequence) -> None:
        """Answer a request with an action."""
        if not ask.answer.done():
            ask.answer.set_result(sequence)

    def refuse(self, ask: Ask, why: str) -> None:
        """Refuse this and all later requests; the program continues until it ends."""
        self.over = why
        if not ask.answer.done():
            ask.answer.set_exception(Refused(why, "messages", code="context_length_exceeded"))

    def end(self) -> None:
        """Refuse all pending requests, and mark them as dead."""
        for ask in list(self._waiting):
            ask.dead = True
            if not ask.answer.done():
                ask.answer.set_exception(
                    Refused("the episode has ended", status=410, code="episode_over")
                )


class _Clock:
    """Measure the time of a program, except while it waits for a response.

    `late`: called when the limit of `seconds` is exceeded. Use on the event loop's thread.
    """

    def __init__(self, seconds: float):
        self.left = self.seconds = seconds
        self.late: Any = lambda: None
        self._begun: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, unless it runs."""
        if self._begun is None:
            self._begun = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self.left), self.late)

    def stop(self) -> None:
        """Pause the timer, if it runs."""
        if self._begun is not None and self._timer is not None:
            self.left -= time.monotonic() - self._begun
            self._timer.cancel()
            self._begun = None


class _Episodes(Sessions):
    """Hold the sessions of running programs; requests cannot create sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Episode] = {}

    def open(self, owner: str, name: str) -> Session:
        return self.find(owner, name)

    def find(self, owner: str, name: str) -> Session:
        episode = self.live.get(name)
        if episode is None:
            raise Refused(
                "the episode is unknown, or it has ended", status=404, code="session_not_found"
            )
        return episode

    def names(self, owner: str) -> list[str]:
        return []

    def drop(self, owner: str, name: str) -> None:
        raise Refused("an episode cannot be deleted: it ends with its program", status=405)


class _Nobody:
    """Refuse to sample for requests outside an episode."""

    async def sample(self, *_: Any, **__: Any) -> SampleResponse:
        raise Refused(
            "only requests of an episode are served: use the URL in OPENAI_BASE_URL unchanged",
            status=404,
        )

    def models(self, owner: str) -> Sequence[Any]:
        return [ServedModel(MODEL, None, 0)]

    def tokenizer(self, model: str | None, owner: str) -> Any:
        raise Refused(
            "only requests of an episode are served: use the URL in OPENAI_BASE_URL unchanged",
            status=404,
        )

    renderer = tokenizer


class LiveEndpoint:
    """Run the server of a trainer's episodes.

    `begin` starts the program of an episode; `end` kills it and all processes that it started.
    """

    def __init__(self) -> None:
        self.episodes = _Episodes()
        self.server = LoopServer(self._application, "the endpoint of --environment endpoint")
        self.server.do(self._ready()).result()

    async def _ready(self) -> None:
        """Create the semaphore of starting programs in the event loop."""
        self._starting = asyncio.Semaphore(max(2, os.cpu_count() or 1))

    def _application(self) -> Any:
        """Return the ASGI application with the OpenAI-style routes."""
        from starlette.applications import Starlette

        from rl.serve.chat_routes import routes

        return Starlette(routes=routes(_Nobody(), self.episodes))

    def begin(self, episode: Episode, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the program of an episode. `words`: its command line."""
        self.episodes.live[episode.name] = episode
        self.server.do(self._live(episode, words, environment))

    def end(self, episode: Episode) -> None:
        """End an episode: kill its program if it runs, and refuse its requests."""
        self.server.soon(self._end, episode)

    def _end(self, episode: Episode) -> None:
        self.episodes.live.pop(episode.name, None)
        episode.over = episode.over or "it has ended"
        episode.end()
        episode.clock.late()

    async def _live(
        self, episode: Episode, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Run a program from its start to its end, and put an `Ended` into the queue of events.

        The semaphore limits the programs between start and first request to the number of cores:
        starting an interpreter takes about a second of a core.
        """
        folder = tempfile.mkdtemp(prefix="whetstone-episode-")
        finished = asyncio.Event()
        timed_out = False

        def finish() -> None:
            finished.set()
            episode.stirred.set()

        def time_out() -> None:
            nonlocal timed_out
            timed_out = True
            finish()

        def read_output() -> None:
            if program is not None and not program.hear():
                finish()

        start_time = time.monotonic()
        program: GuardedProgram | None = None
        loop = asyncio.get_running_loop()
        try:
            async with self._starting:
                start_time = time.monotonic()
                if episode.name in self.episodes.live:
                    program = GuardedProgram(words, {**environment, "TMPDIR": folder}, episode.name)
                    loop.add_reader(program.fileno(), read_output)
                    episode.clock.late = time_out
                    episode.clock.start()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(episode.stirred.wait(), _START_SECONDS)
            if program is not None:
                await finished.wait()
                loop.remove_reader(program.fileno())
                program.let_go()
            code = None if program is None else await asyncio.to_thread(program.ended)
            output = "" if program is None else program.printed
        # boundary: any failure of a program is reported as the end of its episode
        except Exception as error:
            code, output = None, str(error)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)
        episode.clock.stop()
        episode.end()
        episode.events.put(Ended(code, timed_out, output, time.monotonic() - start_time))


@cache
def endpoint() -> LiveEndpoint:
    """Return the endpoint of all episodes of this process; the first call creates it."""
    live_endpoint = LiveEndpoint()
    atexit.register(live_endpoint.server.close)
    return live_endpoint
