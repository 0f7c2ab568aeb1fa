"""Adapt `Env` and `EnvGroupBuilder` of tinker-cookbook, which use tokens, to the rollout.

These classes are asynchronous. All environments of a group run in a single event loop of the group,
so that they may share objects that belong to a loop.
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
    """Adapt a group builder of the cookbook for `rollout`. `seconds`: time limit of each call of an
    environment.

    An environment that waits for the step of another environment (two players with a coordinator)
    is not supported: all episodes of a batch take their turns together, so the call exceeds its
    limit and fails with an error. `Environment.seats` supports games with several players.
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
        """Make the group's environments. If that fails, return a single environment that fails with
        the error.
        """
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
                else f"{loop.name} returned an invalid environment: {says(error, 300)}"
            )
            return [NoEnv(why)]
        return self._envs

    def _closed(self) -> None:
        """Clean up if all episodes are closed and none is trained; else `compute_group_rewards`
        will follow.
        """
        if all(env.closed and not env.counts for env in self._envs):
            self._clean()

    def given_back(self) -> None:
        """Clean up a group that is not played to its end."""
        self._clean()

    def _clean(self) -> None:
        """Call the builder's `cleanup` and stop the event loop. Repeated calls are a no-op."""
        loop, self._loop = self._loop, None
        if loop is None:  # already clean
            return
        if hasattr(self.builder, "cleanup"):
            # A failing cleanup does not invalidate the episodes, which have ended.
            with contextlib.suppress(EpisodeFailed):
                loop.begin(self.builder.cleanup).result()
        loop.close()

    def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory]
    ) -> list[tuple[float, dict[str, float]]]:
        """Return the builder's group rewards for the trained episodes, then clean up. Raises
        EpisodeFailed if the rewards are invalid.
        """
        loop = self._loop
        assert loop is not None  # make_envs was called before
        envs = [env.env for env in self._envs if env.counts]
        try:
            trajectories = [_theirs(trajectory) for trajectory in trajectories_G]
            results = loop.begin(
                lambda: self.builder.compute_group_rewards(trajectories, envs)
            ).result()
            if len(results) != len(trajectories):
                raise ValueError(f"{len(results)} rewards for {len(trajectories)} episodes")
            return [(_number(reward), _numbers(metrics)) for reward, metrics in results]
        except (TypeError, ValueError, AttributeError) as error:
            raise EpisodeFailed(
                f"{loop.name} gave rewards that cannot be read: {says(error, 300)}"
            ) from error
        finally:
            self._clean()


class TinkerEnv(Env):
    """Adapt an environment of the cookbook. Its `step` receives a list of ints, and `extra` (the
    stop reason of sampling) if it has this parameter.
    """

    def __init__(self, env: Any, loop: _Loop, when_closed: Callable[[], None]):
        self.env, self.loop, self.when_closed = env, loop, when_closed
        self.closed = self.acted = False
        parameters = inspect.signature(env.step).parameters.values()
        self.takes_extra = any(p.name == "extra" or p.kind is p.VAR_KEYWORD for p in parameters)

    def initial_observation(self) -> Any:
        """Request the first observation; the returned object waits for it."""
        return _Promise(self, self.loop.begin(self.env.initial_observation), self._observed)

    @property
    def counts(self) -> bool:
        """Return True if the episode is trained. An episode with a first observation that is too
        long for the model is excluded, like a failed episode.
        """
        return self.acted and not self.left_out

    def step(self, action: SampledSequence) -> Any:
        """Request a step; the returned object waits for it."""
        self.acted = True
        extra = {"extra": {"stop_reason": action.stop_reason}} if self.takes_extra else {}
        return _Promise(
            self,
            self.loop.begin(lambda: self.env.step(list(action.tokens), **extra)),
            self._stepped,
        )

    def close(self) -> None:
        """Mark the episode as closed."""
        self.closed = True
        self.when_closed()

    def _observed(self, found: Any) -> tuple[ModelInput, Any]:
        # InitialObservationOverflow: the prompt exceeds the environment's budget
        """Convert the first observation and stop condition. Raises EpisodeFailed if the value is
        invalid.
        """
        if not isinstance(found, tuple) or len(found) != 2:
            raise EpisodeFailed(
                f"{self.name} has no first observation: {plain_text(repr(found), 200)}"
            )
        return _ours(found[0], self.name), _stop(found[1])

    def _stepped(self, found: Any) -> StepResult:
        """Convert a step's result."""
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
        """Return the environment's name for errors."""
        return f"the cookbook's {type(self.env).__name__}"


class NoEnv(Env):
    """Stand in for a group without environments, because making them failed: its only episode fails
    with the reason.
    """

    def __init__(self, why: str):
        self.why = why

    def initial_observation(self) -> Any:
        """Return this object as the pending observation."""
        return self

    def step(self, action: SampledSequence) -> Any:
        """Return this object as the pending step."""
        return self

    def result(self) -> Any:
        """Raise EpisodeFailed with the reason."""
        raise EpisodeFailed(self.why)


class _NoGroup:
    """Stand in for a missing builder: `make_envs` raises EpisodeFailed with the reason."""

    def __init__(self, why: str):
        self.why = why

    def make_envs(self) -> Any:
        raise EpisodeFailed(self.why)


class Tinker(Environment):
    """Run groups of tinker-cookbook from a function: builders(row, group_size, renderer) returns an
    EnvGroupBuilder.

    `row`: {"split": "train" or "test", "index": i}.
    """

    needs_rows: ClassVar[bool] = False

    def __init__(self, builders: str, call_seconds: float = 60.0):
        self.function, self.call_seconds = (
            load_object(builders, "a function of group builders"),
            call_seconds,
        )

    def rows(self, split: str, count: int) -> Sequence[dict[str, Any]]:
        """Return rows with the split and an index."""
        return [{"split": split, "index": i} for i in range(count)]

    def group(
        self, problem: Problem, group_size: int, renderer: Renderer, **_: Any
    ) -> EnvGroupBuilder:
        """Return the group builder, which replaces conversations in messages."""
        row = {
            "split": problem.meta.get("split", "train"),
            "index": problem.meta.get("index", problem.index),
        }
        work = EpisodeThread(self.call_seconds, "builders")
        try:
            builder = work.do(lambda: self.function(row, group_size, renderer)).wait()
            if not hasattr(builder, "make_envs"):
                raise EpisodeFailed(
                    f"builders(row, group_size, renderer) returned {builder!r:.100}; an"
                    " EnvGroupBuilder is expected"
                )
        except EpisodeFailed as error:
            builder = _NoGroup(f"group {problem.index} could not be made: {error}")
        work.end(lambda: None)
        return TinkerGroup(builder, problem.index, seconds=self.call_seconds)


class _Loop:
    """Run an event loop in a separate thread."""

    def __init__(self, name: str, seconds: float):
        self.name, self.seconds = name, seconds
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        """Run the loop until it is stopped."""
        self.loop.run_forever()
        self.loop.close()

    def begin(self, what: Callable[[], Any]) -> _Begun:
        """Start a call in the loop."""
        return _Begun(asyncio.run_coroutine_threadsafe(_settled(what), self.loop), self)

    def close(self) -> None:
        """Stop the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Begun:
    """Wait for a call in a group's event loop."""

    def __init__(self, future: Future[Any], loop: _Loop):
        self.future, self.loop = future, loop

    def result(self) -> Any:
        """Return the result. Raises EpisodeFailed if the call raised or exceeded its time limit."""
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
    """Wait for a call and convert its result."""

    def __init__(self, env: TinkerEnv, begun: _Begun, read: Callable[[Any], Any]):
        self.env, self.begun, self.read = env, begun, read

    def result(self) -> Any:
        """Return the converted result. If it fails, exclude the episode and raise EpisodeFailed."""
        try:
            return self.read(self.begun.result())
        except EpisodeFailed:
            self.env.left_out = True
            raise
        except (TypeError, ValueError, AttributeError) as error:
            self.env.left_out = True
            raise EpisodeFailed(
                f"{self.env.name} returned a result that cannot be read: {says(error, 300)}"
            ) from error


def _tag(builder: Any) -> str:
    """Return the tag under which the group's metrics are grouped: the first tag of the builder."""
    try:
        return str(builder.logging_tags()[0])
    except Exception:  # boundary: the user's code; an error here must not fail an episode
        return "tinker"


async def _settled(what: Callable[[], Any]) -> Any:
    """Call a function and await its result if it is awaitable."""
    try:
        result = what()
        return await result if isinstance(result, Awaitable) else result
    except SystemExit as error:  # would end the loop, and the group's other episodes
        raise RuntimeError(f"SystemExit: {error}") from error


def _ours(observation: Any, name: str) -> ModelInput:
    """Convert an observation to a ModelInput. Raises EpisodeFailed if it has no tokens."""
    tokens = [int(token) for token in observation.to_ints()]
    if not tokens:
        raise EpisodeFailed(
            f"{name} gave an observation without tokens, and the episode is not done"
        )
    return ModelInput.from_ints(tokens)


def _number(given: Any) -> float:
    """Return a finite float. Raises ValueError for any other value."""
    if not math.isfinite(number := float(given)):
        raise ValueError(f"got {given!r:.100}, a finite number is expected")
    return number


def _numbers(given: Any) -> dict[str, float]:
    """Return a dict of finite floats by name."""
    return {str(key): _number(value) for key, value in dict(given).items()}


def _stop(given: Any) -> Any:
    """Return a stop condition in the form that sampling takes; None if it is empty."""
    return list(given) if given else None


def _theirs(trajectory: Trajectory) -> Any:
    """Convert a trajectory to the cookbook's classes if it is installed, else to objects with equal
    attributes.
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
    """Return an imported module, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
