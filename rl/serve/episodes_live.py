"""Episodes that are under way in this process: a program's requests become the observations of a
rollout, its actions their answers.

All of it happens in the loop of one server on loopback; the rollout hears of it through each
episode's queue of events.
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

_START_SECONDS = 5.0  # after which the next program may begin, whatever this one does
MODEL = "policy"  # what the policy is called; any other name is answered by it as well


@dataclass(eq=False)
class Ask:
    """A request that waits for an action. `logs`: filled in once the answer is parsed."""

    prompt: list[int]
    params: SamplingParams
    answer: asyncio.Future[SampledSequence]
    logs: dict[str, Any] = field(default_factory=dict)
    dead: bool = False  # the program that asked has ended


@dataclass(frozen=True)
class Ended:
    """The program is gone. `code`: its exit code, None where none started; `late`: it was out of
    time; `printed`: its last words.
    """

    code: int | None
    late: bool
    printed: str
    seconds: float


class Episode(Session):
    """One program and its requests. `overruled`: settings of its requests in whose place the run's
    were taken.
    """

    reads_again = False

    def __init__(self, renderer: Renderer, limits: Limits, system_prompt: str | None, strict: bool):
        super().__init__()
        self.name = secrets.token_hex(16)
        self.events: queue.SimpleQueue[Ask | Ended] = queue.SimpleQueue()
        self.limits, self.system_prompt, self.strict = limits, system_prompt, strict
        self.over: str | None = None  # why nothing is answered any more
        self.asked = 0
        self.stirred = asyncio.Event()  # it has asked for the first time, or is gone
        self.overruled: dict[str, Any] = {}
        self.clock = _Clock(limits.seconds)
        self._renderer = renderer
        self._asks: dict[int, Ask] = {}  # by the sequence that answered them
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
        """With the run's system prompt, where the program has none of its own."""
        own = self.system_prompt is None or messages[0]["role"] == "system"
        return messages if own else [{"role": "system", "content": self.system_prompt}, *messages]

    async def draw(
        self,
        desk: Desk,
        model: str | None,
        prompt: list[int],
        n: int,
        params: SamplingParams,
        **what: Any,
    ) -> SampleResponse:
        what.pop("show", None)  # actions are whole: a rollout draws them
        if what:
            raise Refused(
                "prompts are not scored in an episode that is trained on: leave out echo, or logprobs"
            )
        self._overrule(params)
        return SampleResponse([await self._ask(prompt, params) for _ in range(n)])

    async def _ask(self, prompt: list[int], params: SamplingParams) -> SampledSequence:
        if self.over is None and self.asked >= self.limits.turns:
            self.over = f"its {self.limits.turns} answers (max_turns) are used up"
        if self.over is not None:
            raise Refused(f"the episode has come to an end: {self.over}", code="episode_over")
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
        """The run says how tokens are drawn. What a request asks instead is noted, or refused where
        `strict`.
        """
        usual = SamplingParams()
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
            wanted = getattr(params, name)
            if wanted != getattr(usual, name):
                if self.strict:
                    raise Refused(
                        f"{name}={wanted}: the run says how tokens are drawn; leave it out", name
                    )
                self.overruled[name] = wanted

    def note(self, turn: Turn, back: Message | None = None) -> None:
        if turn.messages is not None:
            turn.messages = self._begun(turn.messages)
        super().note(turn, back)
        ask = self._asks.pop(id(turn.sequence), None)
        if ask is not None:
            asked = turn.messages if turn.messages is not None else ()
            text = prompt_text(asked) if asked else self._renderer.tokenizer.decode(turn.prompt)
            ask.logs |= {**logs_of(turn), "prompt": text, "answer_text": turn.answer["content"]}

    # ------------------------------------------------------------------------ what the rollout says

    def give(self, ask: Ask, sequence: SampledSequence) -> None:
        """The action, in answer to a request."""
        if not ask.answer.done():
            ask.answer.set_result(sequence)

    def refuse(self, ask: Ask, why: str) -> None:
        """Nothing is answered from now on: the program may come to its own end."""
        self.over = why
        if not ask.answer.done():
            ask.answer.set_exception(Refused(why, "messages", code="context_length_exceeded"))

    def end(self) -> None:
        for ask in list(self._waiting):
            ask.dead = True
            if not ask.answer.done():
                ask.answer.set_exception(
                    Refused("the episode has ended", status=410, code="episode_over")
                )


class _Clock:
    """Counts while a program works, and not while it waits for an answer. `late`: called when the
    time is over. Of the loop's thread.
    """

    def __init__(self, seconds: float):
        self.left = self.seconds = seconds
        self.late: Any = lambda: None
        self._begun: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._begun is None:
            self._begun = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self.left), self.late)

    def stop(self) -> None:
        if self._begun is not None and self._timer is not None:
            self.left -= time.monotonic() - self._begun
            self._timer.cancel()
            self._begun = None


class _Episodes(Sessions):
    """The sessions of programs that run; there are no others."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Episode] = {}

    def open(self, owner: str, name: str) -> Session:
        return self.find(owner, name)

    def find(self, owner: str, name: str) -> Session:
        episode = self.live.get(name)
        if episode is None:
            raise Refused(
                "there is no such episode, or it has ended", status=404, code="session_not_found"
            )
        return episode

    def names(self, owner: str) -> list[str]:
        return []

    def drop(self, owner: str, name: str) -> None:
        raise Refused("an episode ends with its program", status=405)


class _Nobody:
    """What draws without an episode: nobody."""

    async def sample(self, *_: Any, **__: Any) -> SampleResponse:
        raise Refused(
            "answers are drawn for an episode alone: take OPENAI_BASE_URL as it was given",
            status=404,
        )

    def models(self, owner: str) -> Sequence[Any]:
        return [ServedModel(MODEL, None, 0)]

    def tokenizer(self, model: str | None, owner: str) -> Any:
        raise Refused(
            "there is an answer for an episode alone: take OPENAI_BASE_URL as it was given",
            status=404,
        )

    renderer = tokenizer


class LiveEndpoint:
    """The server of a trainer's episodes. `begin` starts an episode's program; `end` kills it and
    all it started, if it runs.
    """

    def __init__(self) -> None:
        self.episodes = _Episodes()
        self.server = LoopServer(self._application, "the endpoint of --environment endpoint")
        self.server.do(self._ready()).result()

    async def _ready(self) -> None:
        self._starting = asyncio.Semaphore(max(2, os.cpu_count() or 1))

    def _application(self) -> Any:
        from starlette.applications import Starlette

        from rl.serve.chat_routes import routes

        return Starlette(routes=routes(_Nobody(), self.episodes))

    def begin(self, episode: Episode, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.episodes.live[episode.name] = episode
        self.server.do(self._live(episode, words, environment))

    def end(self, episode: Episode) -> None:
        self.server.soon(self._end, episode)

    def _end(self, episode: Episode) -> None:
        self.episodes.live.pop(episode.name, None)
        episode.over = episode.over or "it has ended"
        episode.end()
        episode.clock.late()

    async def _live(
        self, episode: Episode, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """A program's life. So many at once are on their way to their first request: an
        interpreter's start is a second of a core.
        """
        folder = tempfile.mkdtemp(prefix="whetstone-episode-")
        gone = asyncio.Event()
        late = False

        def leave() -> None:
            gone.set()
            episode.stirred.set()

        def give_up() -> None:
            nonlocal late
            late = True
            leave()

        def heard() -> None:
            if program is not None and not program.hear():
                leave()

        begun = time.monotonic()
        program: GuardedProgram | None = None
        loop = asyncio.get_running_loop()
        try:
            async with self._starting:
                begun = time.monotonic()
                if episode.name in self.episodes.live:
                    program = GuardedProgram(words, {**environment, "TMPDIR": folder}, episode.name)
                    loop.add_reader(program.fileno(), heard)
                    episode.clock.late = give_up
                    episode.clock.start()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(episode.stirred.wait(), _START_SECONDS)
            if program is not None:
                await gone.wait()
                loop.remove_reader(program.fileno())
                program.let_go()
            code = None if program is None else await asyncio.to_thread(program.ended)
            printed = "" if program is None else program.printed
        except (
            Exception
        ) as error:  # boundary: whatever goes wrong with a program is told of its episode
            code, printed = None, str(error)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)
        episode.clock.stop()
        episode.end()
        episode.events.put(Ended(code, late, printed, time.monotonic() - begun))


@cache
def endpoint() -> LiveEndpoint:
    """One for all episodes of this process, made when the first of them needs it."""
    made = LiveEndpoint()
    atexit.register(made.server.close)
    return made
