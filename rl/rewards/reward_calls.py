"""Call a reward function: for a single answer, a batch, as a coroutine, or with the whole episode.
Combine rewards, whose parts may fail or not apply.

A `RewardKind` combines what was declared in `register_reward` with the type of the function: an
`async def` function is awaited, with many coroutines running concurrently.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, SupportsFloat

from rl.sanitize import describe_error
from rl.types import Message

Meta = Mapping[str, Any] | None  # the data of a problem
RewardItem = tuple[Any, ...]  # prompt, response, meta, and the episode if the reward takes episodes
_MAX_CONCURRENT = 256  # maximum number of concurrent coroutines
_KIND_ATTRIBUTE = "__reward_kind__"
_THREAD = threading.local()  # `runner`: the event loop of the thread's coroutines


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Hold a reward and metrics to log, e.g. {"correct": 1.0, "format": 0.0}.

    `seconds`: run time of each reward that is part of it, by name.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False, repr=False)


Failure = Literal["error", "timeout", "nan", "death"]


@dataclass(frozen=True, slots=True)
class Score:
    """Hold the reward and metrics of a response, and the run time of each reward by name.

    If the reward failed, `reward` is None, `error` describes the failure, and `failure` is its
    kind. `gave_up`: the kind of failure at which a built-in reward gave up and scored 0.
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    failure: Failure | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False, repr=False)
    gave_up: Failure | None = field(default=None, compare=False, repr=False)


def make_failed_score(failure: Failure, error: str) -> Score:
    return Score(None, {}, error, failure)


def make_formatted_result(score: float, has_format: bool, **metrics: float) -> RewardResult:
    """Return score + 0.1 (format - 1): best 1, worst -0.1.

    `metrics`: further metrics; `correct` is the score unless it is one of them.
    """
    shown = {"correct": score, "format": float(has_format), **metrics}
    return RewardResult(score + 0.1 * (float(has_format) - 1.0), shown)


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """Hold the policy's response in a single turn, its reward and its metrics."""

    response: str
    reward: float = 0.0
    tokens: int = 0
    stop_reason: str = "stop"
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Episode:
    """Hold an episode as passed to a reward function.

    `messages`: all messages in order, including the policy's answers and tool results.
    """

    messages: Sequence[Message]
    turns: Sequence[EpisodeTurn]
    tag: str = "problem"

    @property
    def reward(self) -> float:
        """Return the sum of the rewards that the environment has returned so far."""
        return sum(turn.reward for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RewardKind:
    """Describe the call signature of a reward function.

    `batched`: called once with lists. `episode`: takes the episode instead of prompt and response.
    `is_coroutine`: a coroutine function.
    """

    batched: bool = False
    episode: bool = False
    is_coroutine: bool = False

    @property
    def leading_parameters(self) -> int:
        """Return the number of parameters before the settings."""
        return 2 if self.episode else 3


def set_reward_kind(target: Callable[..., Any], kind: RewardKind) -> None:
    """Store the kind declared in `register_reward` on a function or class.

    The kind is then also known if the target is loaded by its address instead of its registered
    name.
    """
    if kind != RewardKind():
        setattr(target, _KIND_ATTRIBUTE, kind)


def get_reward_kind(target: Any) -> RewardKind:
    """Return the kind of a function, a class, an instance, or a partial of these."""
    inner = getattr(target, "func", target)  # of functools.partial
    declared = getattr(inner, _KIND_ATTRIBUTE, None)
    declared = declared if isinstance(declared, RewardKind) else RewardKind()
    call = getattr(inner, "__call__", None)  # noqa: B004
    awaits = any(inspect.iscoroutinefunction(function) for function in (inner, call))
    return RewardKind(declared.batched, declared.episode, awaits or declared.is_coroutine)


def build_arguments(kind: RewardKind, item: RewardItem) -> tuple[Any, ...]:
    """Return the arguments with which a function of this kind is called for a single item.

    Raises ValueError if the kind takes an episode and the item has none.
    """
    prompt, response, meta, *rest = item
    if not kind.episode:
        return prompt, response, meta
    if not rest or rest[0] is None:
        raise ValueError(
            "takes whole episodes, but was called for a single answer: pass the episode"
        )
    return rest[0], meta


@dataclass(frozen=True, slots=True)
class BatchCaller:
    """Call a function for many items.

    `coroutine_timeout`: time limit of each coroutine in seconds.
    """

    function: Callable[..., Any]
    kind: RewardKind
    coroutine_timeout: float | None

    def iter_calls(self, items: Sequence[RewardItem]) -> Iterator[list[Any]]:
        """Yield the function's results for each call's items in order: the value, or the exception
        that it raised, of each item.

        A batched function is called for all items. If it raises or returns the wrong number of
        results, each half is called again, so an error that a single item causes affects that item
        only. Of a coroutine function, _MAX_CONCURRENT coroutines run at a time.
        """
        if self.kind.batched:
            if items:
                yield self._call_batch(items)
            return
        for start in range(0, len(items), _MAX_CONCURRENT):
            part = items[start : start + _MAX_CONCURRENT]
            yield run_coroutine(self._call_concurrently(part))

    def _call_batch(self, items: Sequence[RewardItem]) -> list[Any]:
        try:
            arguments = [build_arguments(self.kind, item) for item in items]
            values = self.function(*map(list, zip(*arguments, strict=True)))
            if inspect.isawaitable(values):
                values = run_coroutine(self._await(values))
            if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
                raise TypeError(
                    f"returned {str(values)[:80]!r} ({type(values).__name__}) for {len(items)} "
                    "answers; a list of rewards is expected"
                )
            if len(values) != len(items):
                raise ValueError(f"returned {len(values)} rewards for {len(items)} answers")
            return list(values)
        except (Exception, SystemExit) as error:  # boundary: user code
            if len(items) == 1:
                return [error]
            half = len(items) // 2
            return self._call_batch(items[:half]) + self._call_batch(items[half:])

    async def _call_concurrently(self, items: Sequence[RewardItem]) -> list[Any]:
        async def run_item(item: RewardItem) -> Any:
            try:
                return await self._await(self.function(*build_arguments(self.kind, item)))
            except (Exception, SystemExit) as error:  # boundary: user code
                return error

        return await asyncio.gather(*map(run_item, items))

    async def _await(self, awaitable: Any) -> Any:
        try:
            async with asyncio.timeout(self.coroutine_timeout) as deadline:
                return await awaitable
        except TimeoutError as error:
            if deadline.expired():
                raise RewardTimeout(f"did not end within {self.coroutine_timeout:g} s") from error
            raise


class RewardTimeout(Exception):
    """Raised when a coroutine exceeds its time limit."""


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine and return its result.

    All coroutines of a thread share an event loop: clients and locks of a reward's module are bound
    to the loop of their first use. If the calling thread already runs another event loop, the
    coroutine runs in a new thread.
    """
    runner: asyncio.Runner = _THREAD.__dict__.setdefault("runner", asyncio.Runner())
    context = contextvars.copy_context()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return runner.run(coroutine, context=context)
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(runner.run(coroutine, context=context))
        except BaseException as error:  # boundary: user code
            result.set_exception(error)

    # A daemon: neither Ctrl-C nor the end of the process waits for a coroutine that hangs.
    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result()
    except KeyboardInterrupt:
        del _THREAD.runner  # its loop still runs the coroutine
        raise


def convert_number(value: Any, label: str) -> float:
    """Convert a number to float, including numpy and torch scalars.

    Raises TypeError for any other type.
    """
    if not isinstance(value, SupportsFloat):  # false for str
        raise TypeError(
            f"{label} is {value!r} ({type(value).__name__}); a number or a RewardResult is expected"
        )
    return float(value)


class NotApplicable(TypeError):
    """Raised when a reward returns None: the reward does not apply to this answer.

    It is an error if the reward is the only one.
    """

    def __init__(self) -> None:
        super().__init__(
            "reward is None (NoneType), not applicable, and it is the only reward (--rewards "
            "adds up several): is a return missing?"
        )


def to_reward_result(value: Any) -> RewardResult:
    """Convert a function's return value to a `RewardResult` with float metrics.

    NaN and infinity are accepted. Raises NotApplicable for None, TypeError for any other value that
    is not a number.
    """
    if value is None or (isinstance(value, RewardResult) and value.reward is None):
        raise NotApplicable
    result = value if isinstance(value, RewardResult) else RewardResult(value)
    metrics = {
        str(key): convert_number(figure, f"metric {key!r}")
        for key, figure in result.metrics.items()
    }
    return RewardResult(convert_number(result.reward, "reward"), metrics, dict(result.seconds))


# ------------------------------------------------------------------------ combined rewards


def try_call(call: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call of user code, or the exception that it raised."""
    try:
        return call(*args)
    except (Exception, SystemExit) as error:  # boundary: user code
        return error


class RewardPartError(Exception):
    """Raised when a part of a combined reward fails: "in its part 'a', which raised ...".

    `__cause__` is the exception that the part raised.
    """


class CombinedReward(ABC):
    """Compute a reward from other rewards. If a part fails, the whole fails and the error names the
    part.
    """

    # If true, a part that does not apply has the result None, instead of failing the whole.
    skips_not_applicable = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.part_rewards() for name in part.columns))

    @abstractmethod
    def part_rewards(self) -> Sequence[Any]:
        """Return the parts."""

    @abstractmethod
    def combine_results(self, item: RewardItem, results: Sequence[Any]) -> RewardResult:
        """Compute the whole's result from the results of its parts, in their order."""

    def iter_results(
        self, items: Sequence[RewardItem], coroutine_timeout: float | None = None
    ) -> Iterator[RewardResult | BaseException]:
        """Yield the result of each item once all parts have scored it; an item fails if any part
        fails on it.
        """
        columns = [part.iter_results(items, coroutine_timeout) for part in self.part_rewards()]
        for item, *row in zip(items, *columns, strict=True):
            yield try_call(self._combine_or_raise, item, row)

    def _combine_or_raise(
        self, item: RewardItem, results: Sequence[RewardResult | BaseException]
    ) -> RewardResult:
        applicable: list[RewardResult | None] = []
        for part, result in zip(self.part_rewards(), results, strict=True):
            if self.skips_not_applicable and isinstance(result, NotApplicable):
                applicable.append(None)
            elif isinstance(result, RewardTimeout):
                raise result
            elif isinstance(result, BaseException):
                nested = isinstance(result, RewardPartError)
                reason = str(result) if nested else f"which raised {describe_error(result)}"
                cause = result.__cause__ or result
                raise RewardPartError(f"in its part {part.name!r}, {reason}") from cause
            elif not isfinite(result.reward):
                raise RewardPartError(f"in its part {part.name!r}, which returned {result.reward}")
            else:
                applicable.append(result)
        return to_reward_result(self.combine_results(item, applicable))

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        (outcome,) = self.iter_results([(prompt, response, meta, None)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
