"""Rewards by name: `register_reward` puts a function into the registry, `resolve_reward` finds or
imports one.

A reward is `fn(prompt: str, response: str, meta: dict | None) -> float | RewardResult | None`
(None: not applicable), or an `async def` of these. Settings are keyword arguments after these
three; a class is registered as a factory: its `__init__` takes the settings, its instances are the
rewards. A batched one gets lists of the three and returns a list; one of episodes gets (episode,
meta); one with a parameter `completions` gets TRL's lists. See rl.rewards.calls and
rl.rewards.styles.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

from rl.errors import UserError
from rl.plain import says
from rl.rewards.calls import (
    Episode,
    Item,
    Kind,
    RewardResult,
    arguments,
    as_result,
    call_together,
    kind_of,
    mark_kind,
)
from rl.rewards.combined import Combined, caught
from rl.rewards.files import load_file
from rl.rewards.styles import adapted, settings_of_lists, takes_lists

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
GAVE_UP = "gave_up"  # metric: 1 where a built-in reward could not work an answer out
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Entry:
    target: Callable[..., Any]  # a reward function, or a class whose instances are rewards
    needs: tuple[str, ...]
    bounded: bool
    builtin: bool
    reports: tuple[str, ...]  # metrics that are 0 where the reward gave up


_REGISTRY: dict[str, _Entry] = {}


def register_reward(
    name: str,
    *,
    replace: bool = False,
    needs: Sequence[str] = (),
    bounded: bool = False,
    batched: bool = False,
    episode: bool = False,
    reports: Sequence[str] = (),
) -> Callable[[F], F]:
    """Decorator: makes a reward function, or a class of rewards, available as `name`.

    A taken name is an error unless `replace` is set, the same function is registered again (a
    module reloaded), or the name is a built-in's (a warning says so). `needs` names modules that a
    worker imports before its first item. `bounded=True` promises that the function ends by itself
    within milliseconds, whatever the response: it then runs in the training process.
    `batched=True`: called once for many answers, fn(prompts, responses, metas) -> a reward for
    each. `episode=True`: called as fn(episode, meta) with the whole `Episode`, all its turns (lists
    of both where it is batched as well). `reports`: of a built-in reward, the metrics that are 0
    for an answer on which it gave up.
    """
    if not name or ":" in name:
        raise UserError(
            f"a reward's name is not empty and holds no ':' (that is for 'module:object'), got {name!r}"
        )

    def decorate(target: F) -> F:
        mark_kind(target, Kind(batched, episode))
        builtin = target.__module__.startswith("rl.rewards.")
        old = _REGISTRY.get(name)
        if (
            old is not None
            and not replace
            and _qualified_name(old.target) != _qualified_name(target)
        ):
            if not old.builtin:
                raise UserError(
                    f"reward {name!r} is already registered by {_qualified_name(old.target)}: choose another name, "
                    f"or register_reward({name!r}, replace=True) to take its place"
                )
            if builtin:
                return target  # the user's was there first
            warnings.warn(
                f"reward {name!r}: {_qualified_name(target)} takes the place of the built-in one",
                stacklevel=2,
            )
        _REGISTRY[name] = _Entry(target, tuple(needs), bounded, builtin, tuple(reports))
        return target

    return decorate


def registered_rewards() -> list[str]:
    """The names that `resolve_reward` knows, sorted."""
    return sorted(_REGISTRY)


class Reward:
    """A resolved reward with its settings bound. Calling it gives the float; `evaluate` keeps the
    metrics.

    `bounded`: ends by itself (see `register_reward`). `builtin`: it gives a number for every
    answer, 0 if it gives up. `needs`: modules to import before the first call. `together`: answers
    are best scored many in one call, `evaluate_many` (a batched function, a coroutine). `episode`:
    it sees whole episodes.
    It can be pickled wherever its function can be imported by name.
    """

    together: bool
    episode: bool
    limit: float | None = None  # seconds for each coroutine, from the scorer that runs it

    def __init__(
        self,
        name: str,
        function: RewardFunction,
        *,
        needs: tuple[str, ...] = (),
        bounded: bool = False,
        builtin: bool = False,
        reports: tuple[str, ...] = (),
    ):
        self.name = name
        self.function = function
        self.needs = needs
        self.reports = reports
        self.kind = kind_of(function)
        parts: Sequence[Reward] = function.rewards() if isinstance(function, Combined) else ()
        self.together: bool = (
            self.kind.batched or self.kind.awaits or any(part.together for part in parts)
        )
        self.episode: bool = self.kind.episode or any(part.episode for part in parts)
        self.bounded = bounded and not self.together
        self.builtin: bool = all(part.builtin for part in parts) if parts else builtin

    def evaluate(
        self,
        prompt: str,
        response: str,
        meta: Mapping[str, Any] | None = None,
        episode: Episode | None = None,
    ) -> RewardResult:
        """The reward and its metrics. Raises TypeError where the function returned no number; NaN
        and infinity pass.
        """
        item = (prompt, response, meta, episode)
        if self.together:
            (found,) = self.evaluate_many([item], self.limit)
            if isinstance(found, BaseException):
                raise found
            return found
        begin = time.perf_counter()
        if isinstance(self.function, Combined):
            return as_result(self.function.evaluate(item))
        try:
            result = as_result(self.function(*arguments(self.kind, item)))
        except Exception as error:  # boundary: an answer may break a grader in any way
            # which is about the problem or the host, not about the answer
            if not self.builtin or isinstance(error, UserError):
                raise
            logger.warning(
                "reward %r gave up on an answer, which scores 0: %s", self.name, says(error)
            )
            result = self.gave_up()
        else:
            if self.builtin and not isfinite(result.reward):
                result = self.gave_up()
        return self._timed(result, time.perf_counter() - begin)

    def gave_up(self) -> RewardResult:
        """The result of a built-in reward for an answer that it could not work out: 0, with the
        metric `gave_up`.
        """
        metrics = {name: 0.0 for part in self.parts() for name in part.reports}
        return RewardResult(0.0, {**metrics, GAVE_UP: 1.0})

    def evaluate_many(
        self, items: Sequence[Item], limit: float | None = None
    ) -> list[RewardResult | BaseException]:
        """The result of each item, or the exception that it raised. `limit`: seconds that each
        coroutine may take.
        """
        if self.together and isinstance(self.function, Combined):
            return self.function.evaluate_many(items, limit)
        begin, found = time.perf_counter(), []
        if not self.together:
            return [caught(self.evaluate, *item) for item in items]
        for value in call_together(self.function, self.kind, items, limit):
            found.append(value if isinstance(value, BaseException) else caught(as_result, value))
        seconds = (time.perf_counter() - begin) / max(1, len(items))
        return [
            one if isinstance(one, BaseException) else self._timed(one, seconds) for one in found
        ]

    def _timed(self, result: RewardResult, seconds: float) -> RewardResult:
        return replace(result, seconds={**result.seconds, self.short_name: seconds})

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it cannot do without, as far as its signature says."""
        return tuple(getattr(self.function, "columns", ()))

    @property
    def short_name(self) -> str:
        """As metrics name it: of "module:function" the function."""
        return self.name.rpartition(":")[2]

    def __call__(self, prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> float:
        return self.evaluate(prompt, response, meta).reward

    def parts(self) -> Iterator[Reward]:
        """The rewards that it is made of: itself, where it is none of several."""
        if isinstance(self.function, Combined):
            for part in self.function.rewards():
                yield from part.parts()
        else:
            yield self

    @property
    def runs_programs(self) -> bool:
        """Whether a part of it runs answers as programs, in a sandbox."""
        return any(isinstance(part.function, Starts) for part in self.parts())

    def begin(self) -> None:
        """Called once where it is to run, before its first item: what it starts there is not on an
        item's time.
        """
        for part in self.parts():
            if isinstance(part.function, Starts):
                part.function.begin()

    def __repr__(self) -> str:
        return f"Reward({self.name!r})"


class Starts(ABC):
    """A reward that starts something of its own where it runs."""

    @abstractmethod
    def begin(self) -> None:
        """Start it. Raises UserError where it cannot be."""


class _FileFunction:
    """An object of a .py file that is no importable module; pickled as its address, so that a
    worker loads it by itself.
    """

    def __init__(self, path: str, attribute: str, settings: Mapping[str, Any]):
        self.address = (path, attribute, dict(settings))
        self.function = _bind(
            f"{path}:{attribute}",
            _attribute(load_file(path, "reward"), attribute, f"{path}:{attribute}"),
            settings,
        )

        mark_kind(self, kind_of(self.function))
        self.columns = tuple(getattr(self.function, "columns", ()))

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _FileFunction, self.address


def resolve_reward(spec: str | RewardFunction | Reward, **settings: Any) -> Reward:
    """The reward that `spec` names: a registered name, "module:object", "path/to/file.py:object",
    or a callable.

    `settings` are bound to it, e.g. `resolve_reward("length_penalty", target_length=100)`; one that
    it does not take, or a missing one that it needs, is an error that lists what it takes.
    """
    if isinstance(spec, Reward):
        if settings:
            raise UserError(
                f"{spec!r} is resolved already and takes no settings, got {sorted(settings)}: pass its name"
            )
        return spec
    if not isinstance(spec, str):
        if not callable(spec):
            raise UserError(f"a reward is a name, 'module:object' or a callable, got {spec!r}")
        name = getattr(spec, "__name__", type(spec).__name__)
        return Reward(name, _bind(name, spec, settings))
    if ":" in spec:
        return Reward(spec, _from_address(spec, settings))
    entry = _REGISTRY.get(spec)
    if entry is None:
        near = difflib.get_close_matches(spec, _REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(registered_rewards())
        raise UserError(
            f"no reward is named {spec!r}: {hint}registered are {known}; your own is given as 'module:function'"
        )
    function = _bind(spec, entry.target, settings)
    if isinstance(function, Combined):  # as bounded as its parts, and it needs what they need
        needs = tuple(module for part in function.rewards() for module in part.needs)
        return Reward(
            spec, function, needs=needs, bounded=all(part.bounded for part in function.rewards())
        )
    return Reward(
        spec,
        function,
        needs=entry.needs,
        bounded=entry.bounded,
        builtin=entry.builtin,
        reports=entry.reports,
    )


def _qualified_name(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _settings_of(target: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters that are settings: all of a class's, those after (prompt, response, meta) or
    (episode, meta) of a function.
    """
    parameters = list(inspect.signature(target).parameters.values())
    if isinstance(target, type):
        yield from parameters
        return
    if takes_lists(target):
        yield from settings_of_lists(target)
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in parameters if p.kind in positional][kind_of(target).leading :]
    yield from rest
    yield from (
        p
        for p in parameters
        if p.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    )


def _bind(name: str, target: Callable[..., Any], settings: Mapping[str, Any]) -> RewardFunction:
    """`target` with its settings filled in: an instance of a class, a partial of a function."""
    parameters = list(_settings_of(target))
    accepted = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    open_ended = len(accepted) < len(parameters)
    listing = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
    unknown = sorted(set(settings) - set(accepted))
    if unknown and not open_ended:
        raise UserError(
            f"reward {name!r} has no setting {', '.join(map(repr, unknown))}: {listing}"
        )
    required = [
        p.name for p in parameters if p.default is inspect.Parameter.empty and p.name in accepted
    ]
    missing = [key for key in required if key not in settings]
    if missing:
        raise UserError(
            f"reward {name!r} needs the setting {', '.join(map(repr, missing))}: {listing}"
        )
    if isinstance(target, type):
        made = target(**settings)
        return made if isinstance(made, Combined) else adapted(name, made)
    return adapted(name, functools.partial(target, **settings) if settings else target)


def _from_address(spec: str, settings: Mapping[str, Any]) -> RewardFunction:
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise UserError(f"reward {spec!r}: 'module:object' or 'path/to/file.py:object' is expected")
    if place.endswith(".py"):
        return _FileFunction(str(Path(place).expanduser().resolve()), attribute, settings)
    try:
        module = importlib.import_module(place)
    except ImportError as error:
        raise UserError(
            f"reward {spec!r}: importing {place!r} failed ({type(error).__name__}: {error}); it must be importable from "
            f"where you run (PYTHONPATH), or be given as 'path/to/file.py:{attribute}'"
        ) from error
    return _bind(spec, _attribute(module, attribute, spec), settings)


def _attribute(module: ModuleType, dotted: str, spec: str) -> Callable[..., Any]:
    found: Any = module
    for part in dotted.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        here = _own_callables(module)
        near = difflib.get_close_matches(dotted, here, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"reward {spec!r}: {dotted!r} is no callable there; {hint}it has {', '.join(here) or 'none'}"
        )
    return found


def _own_callables(module: ModuleType) -> list[str]:
    """Names of what could be a reward there: what it imports from elsewhere is not offered, unless
    it has nothing else.
    """
    found = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_")
    }
    # an instance (a partial, an object that is called) was made there
    kinds = (type, FunctionType, BuiltinFunctionType)
    own = [
        key
        for key, value in found.items()
        if not isinstance(value, kinds) or value.__module__ == module.__name__
    ]
    return sorted(own or found)
