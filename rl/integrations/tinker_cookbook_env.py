"""Adapt `Env` and `EnvGroupBuilder` of tinker-cookbook, which use tokens, to the rollout.

These classes are asynchronous. All environments of a group run in a single event loop of the group,
so that they may share objects that belong to a loop.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

from rl.envs import Environment, EpisodeLimits, load_object
from rl.errors import UserError
from rl.jsonl import replace_nonfinite
from rl.renderers import Renderer
from rl.rollout import (
    Env,
    EnvCall,
    EnvGroupBuilder,
    EnvThread,
    EpisodeFailed,
    EventLoopThread,
    Metrics,
    StepResult,
    Trajectory,
)
from rl.sanitize import describe_error, sanitize_text
from rl.types import ModelInput, Problem, SampledSequence


class TinkerGroup(EnvGroupBuilder):
    """Adapt a group builder of the cookbook for `rollout`. `seconds`: time limit of each call of an
    environment.

    An environment that waits for the step of another environment (two players with a coordinator)
    is not supported: all episodes of a batch take their turns together, so the call exceeds its
    limit and fails with an error. `Environment.seats` supports games with several players.
    """

    def __init__(
        self,
        builder: Any,
        problem_index: int = 0,
        *,
        seconds: float = 60.0,
        max_turns: int = 100,
        max_tokens: int | None = None,
    ):
        self.builder = builder
        self.problem_index = problem_index
        self.seconds = seconds
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.tag = _get_tag(builder)
        self._loop: EventLoopThread | None = None
        self._envs: list[TinkerEnv] = []

    def make_envs(self) -> Sequence[Env]:
        """Make the group's environments. If that fails, return a single environment that fails with
        the error.
        """
        loop = EventLoopThread(f"the cookbook's group {self.problem_index}", self.seconds)
        self._loop = loop
        try:
            self._envs = [
                TinkerEnv(env, loop, self._on_env_closed)
                for env in loop.submit(self.builder.make_envs).result()
            ]
            if not self._envs:
                raise EpisodeFailed(f"{loop.name} has no environments")
        except Exception as error:  # boundary: the builder's objects
            self._envs = []
            self._cleanup()
            why = (
                str(error)
                if isinstance(error, EpisodeFailed)
                else f"{loop.name} returned an invalid environment: {describe_error(error, 300)}"
            )
            return [FailedEnv(why)]
        return self._envs

    def _on_env_closed(self) -> None:
        """Clean up if all episodes are closed and none is trained; else `compute_group_rewards`
        will follow.
        """
        if all(env.closed and not env.is_trained for env in self._envs):
            self._cleanup()

    def on_discard(self) -> None:
        """Clean up a group that is not played to its end."""
        self._cleanup()

    def _cleanup(self) -> None:
        """Call the builder's `cleanup` and stop the event loop. Repeated calls are a no-op."""
        loop, self._loop = self._loop, None
        if loop is None:  # already clean
            return
        if hasattr(self.builder, "cleanup"):
            # A failing cleanup does not invalidate the episodes, which have ended.
            with contextlib.suppress(EpisodeFailed):
                loop.submit(self.builder.cleanup).result()
        loop.close()

    def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory]
    ) -> list[tuple[float, Metrics]]:
        """Return the builder's group rewards for the trained episodes, then clean up. Raises
        EpisodeFailed if the rewards are invalid.
        """
        loop = self._loop
        assert loop is not None  # make_envs was called before
        envs = [env.env for env in self._envs if env.is_trained]
        try:
            trajectories = [_convert_trajectory(trajectory) for trajectory in trajectories_G]
            results = loop.submit(
                lambda: self.builder.compute_group_rewards(trajectories, envs)
            ).result()
            if len(results) != len(trajectories):
                raise ValueError(f"{len(results)} rewards for {len(trajectories)} episodes")
            return [
                (_finite_number(reward), _finite_numbers(metrics)) for reward, metrics in results
            ]
        except EpisodeFailed:
            raise
        except Exception as error:  # boundary: the builder's objects
            raise EpisodeFailed(
                f"{loop.name} gave rewards that cannot be read: {describe_error(error, 300)}"
            ) from error
        finally:
            self._cleanup()


class TinkerEnv(Env):
    """Adapt an environment of the cookbook. Its `step` receives a list of ints, and `extra` (the
    stop reason of sampling) if it has this parameter.
    """

    blocks = False

    def __init__(self, env: Any, loop: EventLoopThread, on_closed: Callable[[], None]):
        self.env, self.loop, self.on_closed = env, loop, on_closed
        self.closed = self.has_acted = False
        parameters = inspect.signature(env.step).parameters.values()
        self.takes_extra = any(p.name == "extra" or p.kind is p.VAR_KEYWORD for p in parameters)

    def initial_observation(self) -> EnvCall:
        """Request the first observation; the returned call waits for it."""
        return self.loop.submit(self.env.initial_observation, partial(self._convert, self._observe))

    @property
    def is_trained(self) -> bool:
        """Return True if the episode is trained. An episode with a first observation that is too
        long for the model is excluded, like a failed episode.
        """
        return self.has_acted and not self.left_out

    def step(self, action: SampledSequence) -> Any:
        """Request a step; the returned object waits for it."""
        self.has_acted = True
        extra = {"extra": {"stop_reason": action.stop_reason}} if self.takes_extra else {}
        return self.loop.submit(
            lambda: self.env.step(list(action.tokens), **extra),
            partial(self._convert, self._read_step),
        )

    def close(self) -> None:
        """Mark the episode as closed."""
        self.closed = True
        self.on_closed()

    def _convert(self, convert: Callable[[Any], Any], result: Any) -> Any:
        """Return the converted result. Raises EpisodeFailed if the result is invalid."""
        try:
            return convert(result)
        except EpisodeFailed:
            raise
        except Exception as error:  # boundary: the environment's objects
            raise EpisodeFailed(
                f"{self.name} returned a result that cannot be read: {describe_error(error, 300)}"
            ) from error

    def _observe(self, result: Any) -> tuple[ModelInput, Any]:
        """Convert the first observation and stop condition. Raises EpisodeFailed if the value is
        invalid.
        """
        # not a tuple: an InitialObservationOverflow, the prompt exceeds the environment's budget
        if not isinstance(result, tuple) or len(result) != 2:
            raise EpisodeFailed(
                f"{self.name} has no first observation: {sanitize_text(repr(result), 200)}"
            )
        return _convert_observation(result[0], self.name), _stop_condition(result[1])

    def _read_step(self, result: Any) -> StepResult:
        """Convert a step's result."""
        done, metrics = bool(result.episode_done), _finite_numbers(result.metrics or {})
        following = (
            ModelInput.empty() if done else _convert_observation(result.next_observation, self.name)
        )
        limited = any(
            metrics.get(f"stop/{why}")
            for why in ("max_turns", "max_tokens", "max_sampled_tokens", "context_overflow")
        )
        logs = replace_nonfinite(dict(getattr(result, "logs", None) or {}))
        json.dumps(logs)  # raises for an integer with more digits than Python prints
        return StepResult(
            _finite_number(result.reward),
            done,
            following,
            _stop_condition(result.next_stop_condition),
            metrics,
            logs,
            done and limited,
        )

    @property
    def name(self) -> str:
        """Return the environment's name for errors."""
        return f"the cookbook's {type(self.env).__name__}"


class FailedEnv(Env):
    """Stand in for a group without environments, because making them failed: its only episode fails
    with the reason.
    """

    def __init__(self, reason: str):
        self.reason = reason

    def initial_observation(self) -> Any:
        """Raise EpisodeFailed with the reason."""
        raise EpisodeFailed(self.reason)

    def step(self, action: SampledSequence) -> Any:
        """Do nothing: an episode without an observation has no step."""


class Tinker(Environment):
    """Run groups of tinker-cookbook from a function: builders(row, group_size, renderer) returns an
    EnvGroupBuilder.

    `row`: {"split": "train" or "test", "index": i}.
    """

    needs_rows: ClassVar[bool] = False

    def __init__(self, builders: str, call_seconds: float | None = None):
        self.function = load_object(builders, "a function of group builders")
        self.call_seconds = call_seconds

    def rows(self, split: str, count: int) -> Sequence[dict[str, Any]]:
        """Return rows with the split and an index."""
        return [{"split": split, "index": i} for i in range(count)]

    def make_token_level_group(  # type: ignore[override]
        self,
        problem: Problem,
        group_size: int,
        renderer: Renderer,
        *,
        limits: EpisodeLimits,
        system_prompt: str | None,
    ) -> EnvGroupBuilder:
        """Return the group builder, which replaces conversations in messages. Each call of its
        environments has `call_seconds`, by default `limits.seconds`.

        Raises UserError for a system prompt, since the builders write the first observation.
        """
        if system_prompt is not None:
            raise UserError(
                "the environment tinker takes no system_prompt: remove it, and write the prompt in"
                " the builders' first observation"
            )
        seconds = limits.seconds if self.call_seconds is None else self.call_seconds
        row = {
            "split": problem.meta.get("split", "train"),
            "index": problem.meta.get("index", problem.index),
        }
        work = EnvThread(seconds, "builders")
        try:
            builder = work.submit(lambda: self.function(row, group_size, renderer)).result()
            if not hasattr(builder, "make_envs"):
                raise EpisodeFailed(
                    f"builders(row, group_size, renderer) returned {builder!r:.100}; an"
                    " EnvGroupBuilder is expected"
                )
        except EpisodeFailed as error:
            failure = EpisodeFailed(f"group {problem.index} could not be made: {error}")

            def fail() -> Any:
                raise failure

            builder = SimpleNamespace(make_envs=fail)
        work.finish()
        return TinkerGroup(
            builder,
            problem.index,
            seconds=seconds,
            max_turns=limits.turns,
            max_tokens=limits.tokens,
        )


def _get_tag(builder: Any) -> str:
    """Return the tag under which the group's metrics are grouped: the first tag of the builder."""
    try:
        return str(builder.logging_tags()[0])
    except Exception:  # boundary: the user's code; an error here must not fail an episode
        return "tinker"


def _convert_observation(observation: Any, name: str) -> ModelInput:
    """Convert an observation to a ModelInput. Raises EpisodeFailed if it has no tokens."""
    tokens = [int(token) for token in observation.to_ints()]
    if not tokens:
        raise EpisodeFailed(
            f"{name} gave an observation without tokens, and the episode is not done"
        )
    return ModelInput.from_ints(tokens)


def _finite_number(value: Any) -> float:
    """Return a finite float. Raises ValueError for any other value."""
    if not math.isfinite(number := float(value)):
        raise ValueError(f"got {value!r:.100}, a finite number is expected")
    return number


def _finite_numbers(values: Any) -> Metrics:
    """Return a dict of finite floats by name."""
    return {str(key): _finite_number(value) for key, value in dict(values).items()}


def _stop_condition(condition: Any) -> Any:
    """Return a stop condition in the form that sampling takes; None if it is empty."""
    return list(condition) if condition else None


def _convert_trajectory(trajectory: Trajectory) -> Any:
    """Convert a trajectory to the cookbook's classes if it is installed, else to objects with equal
    attributes.
    """
    types, completers, tinker = (
        _import_optional(name)
        for name in ("tinker_cookbook.rl.types", "tinker_cookbook.completers", "tinker")
    )

    def convert(ob: ModelInput) -> Any:
        return ob if tinker is None else tinker.ModelInput.from_ints(ob.to_ints())

    turns = []
    for turn in trajectory.transitions:
        tokens, logprobs = list(turn.ac.tokens), list(turn.ac.logprobs or ())
        ob = convert(turn.ob)
        kind = SimpleNamespace if completers is None else completers.TokensWithLogprobs
        ac = kind(tokens=tokens, maybe_logprobs=logprobs, stop_reason=turn.ac.stop_reason)
        make = SimpleNamespace if types is None else types.Transition
        names = ("reward", "episode_done", "metrics", "logs")
        turns.append(make(ob=ob, ac=ac, **{name: getattr(turn, name) for name in names}))
    make = SimpleNamespace if types is None else types.Trajectory
    return make(transitions=turns, final_ob=convert(trajectory.final_ob))


def _import_optional(name: str) -> Any:
    """Return an imported module, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
