"""tinker-cookbook: its `Env` and `EnvGroupBuilder`, which speak tokens, as environments of a
rollout.

They are asynchronous. All of a group's run in one event loop of the group's own, so that they may
share what belongs to a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

from rl.environments.environment import Environment
from rl.environments.registry import load_object
from rl.environments.work import EpisodeThread
from rl.episodes import Env, EnvGroupBuilder, EpisodeFailed, StepResult, Trajectory
from rl.jsonl import finite
from rl.plain import plain_text, says
from rl.renderers import Renderer
from rl.types import ModelInput, Problem, SampledSequence


class TinkerGroup(EnvGroupBuilder):
    """A cookbook's group for `rollout`. `seconds`: that each call of one of its environments may
    take.

    An environment that waits for another one's step (two players behind one coordinator) is not
    served: all episodes of a batch take their turns together, so it runs into its limit and is
    named. `Environment.seats` has games of several.
    """

    def __init__(
        self, builder: Any, problem_index: int = 0, *, seconds: float = 60.0, max_turns: int = 100
    ):
        self.builder, self.problem_index, self.seconds, self.max_turns = (
            builder,
            problem_index,
            seconds,
            max_turns,
        )
        self.tag = _tag(builder)
        self._loop: _Loop | None = None
        self._envs: list[TinkerEnv] = []

    def make_envs(self) -> Sequence[Env]:
        loop = _Loop(f"the cookbook's group {self.problem_index}", self.seconds)
        self._loop = loop
        try:
            self._envs = [
                TinkerEnv(env, loop, self._closed)
                for env in loop.begin(self.builder.make_envs).result()
            ]
            if not self._envs:
                raise EpisodeFailed(f"{loop.name} has no environments")
        except (EpisodeFailed, TypeError, ValueError, AttributeError) as error:
            self._envs = []
            self._clean()
            why = (
                str(error)
                if isinstance(error, EpisodeFailed)
                else f"{loop.name} made what is no environment: {says(error, 300)}"
            )
            return [NoEnv(why)]
        return self._envs

    def _closed(self) -> None:
        """With the last of its episodes a group that has none left is cleaned up; else
        `compute_group_rewards` is yet to come.
        """
        if all(env.closed and not env.counts for env in self._envs):
            self._clean()

    def given_back(self) -> None:
        self._clean()

    def _clean(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:  # it is clean
            return
        if hasattr(self.builder, "cleanup"):
            with contextlib.suppress(EpisodeFailed):  # its episodes have ended, and count
                loop.begin(self.builder.cleanup).result()
        loop.close()

    def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory]
    ) -> list[tuple[float, dict[str, float]]]:
        """The builder's own, of the episodes that count. It is cleaned up afterwards."""
        loop = self._loop
        assert loop is not None  # make_envs came before
        envs = [env.env for env in self._envs if env.counts]
        try:
            given = [_theirs(one) for one in trajectories_G]
            found = loop.begin(lambda: self.builder.compute_group_rewards(given, envs)).result()
            if len(found) != len(given):
                raise ValueError(f"{len(found)} rewards for {len(given)} episodes")
            return [(_number(reward), _numbers(metrics)) for reward, metrics in found]
        except (TypeError, ValueError, AttributeError) as error:
            raise EpisodeFailed(
                f"{loop.name} gave rewards that cannot be read: {says(error, 300)}"
            ) from error
        finally:
            self._clean()


class TinkerEnv(Env):
    """One of its environments. Gets a list of ints, and `extra` (why sampling stopped) where its
    `step` takes that.
    """

    def __init__(self, env: Any, loop: _Loop, when_closed: Callable[[], None]):
        self.env, self.loop, self.when_closed = env, loop, when_closed
        self.closed = self.acted = False
        parameters = inspect.signature(env.step).parameters.values()
        self.takes_extra = any(p.name == "extra" or p.kind is p.VAR_KEYWORD for p in parameters)

    def initial_observation(self) -> Any:
        return _Promise(self, self.loop.begin(self.env.initial_observation), self._observed)

    @property
    def counts(self) -> bool:
        """Whether its episode is trained: one whose first observation is too long for the model is
        left out as one that fails is.
        """
        return self.acted and not self.left_out

    def step(self, action: SampledSequence) -> Any:
        self.acted = True
        extra = {"extra": {"stop_reason": action.stop_reason}} if self.takes_extra else {}
        return _Promise(
            self,
            self.loop.begin(lambda: self.env.step(list(action.tokens), **extra)),
            self._stepped,
        )

    def close(self) -> None:
        self.closed = True
        self.when_closed()

    def _observed(self, found: Any) -> tuple[ModelInput, Any]:
        # InitialObservationOverflow: a prompt beyond the environment's own budget
        if not isinstance(found, tuple) or len(found) != 2:
            raise EpisodeFailed(
                f"{self.name} has no first observation: {plain_text(repr(found), 200)}"
            )
        return _ours(found[0], self.name), _stop(found[1])

    def _stepped(self, found: Any) -> StepResult:
        done, metrics = bool(found.episode_done), _numbers(found.metrics or {})
        following = ModelInput.empty() if done else _ours(found.next_observation, self.name)
        limited = any(
            metrics.get(f"stop/{why}")
            for why in ("max_turns", "max_tokens", "max_sampled_tokens", "context_overflow")
        )
        logs = finite(dict(getattr(found, "logs", None) or {}))
        return StepResult(
            _number(found.reward),
            done,
            following,
            _stop(found.next_stop_condition),
            metrics,
            logs,
            done and limited,
        )

    @property
    def name(self) -> str:
        return f"the cookbook's {type(self.env).__name__}"


class NoEnv(Env):
    """Stands for a group whose environments could not be made: its one episode fails, and says why."""

    def __init__(self, why: str):
        self.why = why

    def initial_observation(self) -> Any:
        return self

    def step(self, action: SampledSequence) -> Any:
        return self

    def result(self) -> Any:
        raise EpisodeFailed(self.why)


class _NoGroup:
    """Stands for a builder that there is none of: it makes no environments, and says why."""

    def __init__(self, why: str):
        self.why = why

    def make_envs(self) -> Any:
        raise EpisodeFailed(self.why)


class Tinker(Environment):
    """Groups of tinker-cookbook from a function of yours: builders(row, group_size, renderer)
    returns an EnvGroupBuilder.

    `row`: {"split": "train" or "test", "index": i}.
    """

    needs_rows: ClassVar[bool] = False

    def __init__(self, builders: str, call_seconds: float = 60.0):
        self.function, self.call_seconds = (
            load_object(builders, "a function of group builders"),
            call_seconds,
        )

    def rows(self, split: str, count: int) -> Sequence[dict[str, Any]]:
        return [{"split": split, "index": i} for i in range(count)]

    def group(
        self, problem: Problem, group_size: int, renderer: Renderer, **_: Any
    ) -> EnvGroupBuilder:
        """What is played instead of conversations in messages."""
        row = {
            "split": problem.meta.get("split", "train"),
            "index": problem.meta.get("index", problem.index),
        }
        work = EpisodeThread(self.call_seconds, "builders")
        try:
            builder = work.do(lambda: self.function(row, group_size, renderer)).wait()
            if not hasattr(builder, "make_envs"):
                raise EpisodeFailed(
                    f"builders(row, group_size, renderer) returned {builder!r:.100}; an EnvGroupBuilder is expected"
                )
        except EpisodeFailed as error:
            builder = _NoGroup(f"group {problem.index} could not be made: {error}")
        work.end(lambda: None)
        return TinkerGroup(builder, problem.index, seconds=self.call_seconds)


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str, seconds: float):
        self.name, self.seconds = name, seconds
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def begin(self, what: Callable[[], Any]) -> _Begun:
        return _Begun(asyncio.run_coroutine_threadsafe(_settled(what), self.loop), self)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Begun:
    def __init__(self, future: Future[Any], loop: _Loop):
        self.future, self.loop = future, loop

    def result(self) -> Any:
        try:
            return self.future.result(self.loop.seconds)
        except TimeoutError as error:
            self.future.cancel()
            raise EpisodeFailed(
                f"{self.loop.name} did not answer within {self.loop.seconds:g} s"
            ) from error
        except EpisodeFailed:
            raise
        except Exception as error:  # boundary: the user's code
            raise EpisodeFailed(f"{self.loop.name} raised {says(error, 1000)}") from error


class _Promise:
    def __init__(self, env: TinkerEnv, begun: _Begun, read: Callable[[Any], Any]):
        self.env, self.begun, self.read = env, begun, read

    def result(self) -> Any:
        try:
            return self.read(self.begun.result())
        except EpisodeFailed:
            self.env.left_out = True
            raise
        except (TypeError, ValueError, AttributeError) as error:
            self.env.left_out = True
            raise EpisodeFailed(
                f"{self.env.name} answered with what cannot be read: {says(error, 300)}"
            ) from error


def _tag(builder: Any) -> str:
    """What its figures are gathered under: the first of its own tags."""
    try:
        return str(builder.logging_tags()[0])
    except Exception:  # boundary: the user's code, and none of it concerns an episode
        return "tinker"


async def _settled(what: Callable[[], Any]) -> Any:
    try:
        found = what()
        return await found if isinstance(found, Awaitable) else found
    except SystemExit as error:  # which would end the loop, and with it the group's other episodes
        raise RuntimeError(f"SystemExit: {error}") from error


def _ours(observation: Any, name: str) -> ModelInput:
    tokens = [int(token) for token in observation.to_ints()]
    if not tokens:
        raise EpisodeFailed(
            f"{name} gave an observation without tokens, and the episode is not done"
        )
    return ModelInput.from_ints(tokens)


def _number(given: Any) -> float:
    """Raises ValueError for what is not finite."""
    if not math.isfinite(found := float(given)):
        raise ValueError(f"{given!r:.100} where a finite number is expected")
    return found


def _numbers(given: Any) -> dict[str, float]:
    return {str(key): _number(value) for key, value in dict(given).items()}


def _stop(given: Any) -> Any:
    """A stop condition as sampling takes it; None where it is empty."""
    return list(given) if given else None


def _theirs(trajectory: Trajectory) -> Any:
    """A trajectory in the cookbook's own classes where it is installed, else in objects of the same
    names.
    """
    types, completers, tinker = (
        _module(name)
        for name in ("tinker_cookbook.rl.types", "tinker_cookbook.completers", "tinker")
    )
    turns = []
    for turn in trajectory.transitions:
        tokens, logprobs = list(turn.ac.tokens), list(turn.ac.logprobs or ())
        ob = turn.ob if tinker is None else tinker.ModelInput.from_ints(turn.ob.to_ints())
        kind = SimpleNamespace if completers is None else completers.TokensWithLogprobs
        ac = kind(tokens=tokens, maybe_logprobs=logprobs)
        make = SimpleNamespace if types is None else types.Transition
        turns.append(
            make(
                ob=ob,
                ac=ac,
                reward=turn.reward,
                episode_done=turn.episode_done,
                metrics=turn.metrics,
                logs=turn.logs,
            )
        )
    final = (
        trajectory.final_ob
        if tinker is None
        else tinker.ModelInput.from_ints(trajectory.final_ob.to_ints())
    )
    return (SimpleNamespace if types is None else types.Trajectory)(
        transitions=turns, final_ob=final
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
