"""How a reward function is called: on one answer, on many at once, as a coroutine, with the whole
episode.

A kind is what `register_reward` says of a function, and what the function is: an `async def` is
awaited, many side by side.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from rl.types import Message

Item = tuple[Any, ...]  # prompt, response, meta, and the episode where one is seen
_AT_ONCE = 256  # coroutines that run side by side
_KIND = "__reward_kind__"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward together with figures to log, e.g. {"correct": 1.0, "format": 0.0}. `seconds`: what
    each reward in it took.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy wrote at one turn, and what came of it."""

    response: str
    reward: float = 0.0
    tokens: int = 0
    stop_reason: str = "stop"
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode as a reward sees it. `messages`: all of it in order, the policy's answers and
    those of tools included.
    """

    messages: Sequence[Message]
    turns: Sequence[Turn]
    tag: str = "problem"

    @property
    def reward(self) -> float:
        """What the environment gave so far."""
        return sum(turn.reward for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Kind:
    """`batched`: called once with lists. `episode`: sees the episode in the place of prompt and
    response. `awaits`: a coroutine.
    """

    batched: bool = False
    episode: bool = False
    awaits: bool = False

    @property
    def leading(self) -> int:
        """How many parameters come before the settings."""
        return 2 if self.episode else 3


def mark_kind(target: Callable[..., Any], kind: Kind) -> None:
    """Notes on a function or class what `register_reward` said of it, so that it is known by its
    address too.
    """
    if kind != Kind():
        setattr(target, _KIND, kind)


def kind_of(target: Any) -> Kind:
    """Of a function, a class, an instance or a partial of them."""
    inner = getattr(target, "func", target)  # of functools.partial
    said = getattr(inner, _KIND, None)
    said = said if isinstance(said, Kind) else Kind()
    call = getattr(inner, "__call__", None)  # noqa: B004
    awaits = any(inspect.iscoroutinefunction(function) for function in (inner, call))
    return Kind(said.batched, said.episode, awaits or said.awaits)


def arguments(kind: Kind, item: Item) -> tuple[Any, ...]:
    """What a function of this kind is called with for one item. Raises ValueError where it lacks
    the episode.
    """
    prompt, response, meta, *rest = item
    if not kind.episode:
        return prompt, response, meta
    if not rest or rest[0] is None:
        raise ValueError(
            "sees whole episodes, and was asked about an answer alone: give the episode"
        )
    return rest[0], meta


def call_together(
    function: Callable[..., Any], kind: Kind, items: Sequence[Item], limit: float | None
) -> list[Any]:
    """What the function gives for each item: its value, or the exception that it raised for this
    one.

    A call on many that raises, or does not return as many as it was given, is made again on each
    half: what only one of them breaks costs that one alone. `limit`: seconds that each coroutine
    may take.
    """
    if kind.batched:
        return _in_one_call(function, kind, list(items), limit)
    return run_coroutine(_side_by_side(function, kind, items, limit))


def _in_one_call(
    function: Callable[..., Any], kind: Kind, items: list[Item], limit: float | None
) -> list[Any]:
    try:
        columns = [
            list(column) for column in zip(*(arguments(kind, item) for item in items), strict=True)
        ]
        found = function(*columns)
        if inspect.isawaitable(found):
            found = run_coroutine(_within(found, limit))
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__"):
            kind_found = type(found).__name__
            raise TypeError(
                f"returned {str(found)[:80]!r} ({kind_found}) for {len(items)} answers; a list of rewards is expected"
            )
        if len(found) != len(items):
            raise ValueError(f"returned {len(found)} rewards for {len(items)} answers")
        return list(found)
    except (Exception, SystemExit) as error:  # boundary: the user's code
        if len(items) == 1:
            return [error]
        half = len(items) // 2
        return [
            *_in_one_call(function, kind, items[:half], limit),
            *_in_one_call(function, kind, items[half:], limit),
        ]


async def _side_by_side(
    function: Callable[..., Any], kind: Kind, items: Sequence[Item], limit: float | None
) -> list[Any]:
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Item) -> Any:
        async with turn:
            try:
                return await _within(function(*arguments(kind, item)), limit)
            except (Exception, SystemExit) as error:  # boundary: the user's code
                return error

    return await asyncio.gather(*(one(item) for item in items))


async def _within(awaitable: Any, limit: float | None) -> Any:
    try:
        async with asyncio.timeout(limit) as clock:
            return await awaitable
    except TimeoutError as error:
        if clock.expired():
            raise TookTooLong(f"did not end within {limit:g} s") from error
        raise


class TookTooLong(Exception):
    """A coroutine was given up at its time limit."""


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its result, also where the calling thread runs an event loop already (in a thread of its
    own).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((asyncio.run(coroutine), None))
        except BaseException as error:  # raised again in the caller's thread
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


def as_number(value: Any, what: str) -> float:
    """A float, of numpy's and torch's numbers too. Raises TypeError for anything else."""
    if not isinstance(value, SupportsFloat):  # not text
        raise TypeError(
            f"{what} is {value!r} ({type(value).__name__}); a number or a RewardResult is expected"
        )
    return float(value)


class NotApplicable(TypeError):
    """A reward returned None: it says nothing of this answer. An error where there is no other
    reward beside it.
    """

    def __init__(self) -> None:
        super().__init__(
            "reward is None (NoneType), not applicable, and there is no other beside it (--rewards adds up several): is a return missing?"
        )


def as_result(value: Any) -> RewardResult:
    """What a function returned, with its metrics as floats. NaN and infinity pass.

    Raises NotApplicable for None, TypeError for what else is no number.
    """
    if value is None or (isinstance(value, RewardResult) and value.reward is None):
        raise NotApplicable
    result = value if isinstance(value, RewardResult) else RewardResult(value)
    metrics = {
        str(key): as_number(figure, f"metric {key!r}") for key, figure in result.metrics.items()
    }
    return RewardResult(as_number(result.reward, "reward"), metrics, dict(result.seconds))
