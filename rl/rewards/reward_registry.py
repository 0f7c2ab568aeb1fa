"""Register rewards by name (`register_reward`) and resolve them (`resolve_reward`).

A reward is `fn(prompt: str, response: str, meta: dict | None) -> float | RewardResult | None`
(None: not applicable), or an `async def` of these. Settings are keyword arguments after these
three. A class is registered as a factory: its `__init__` takes the settings, its instances are the
rewards. A batched reward takes lists of the three arguments and returns a list; an episode reward
takes (episode, meta); a reward with a parameter `completions` takes TRL's lists. See
rl.rewards.reward_calls and rl.rewards.trl_adapter.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import logging
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from math import isfinite
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

from rl.errors import UserError
from rl.rewards.module_loader import load_file
from rl.rewards.reward_calls import (
    BatchCaller,
    CombinedReward,
    Episode,
    Meta,
    RewardItem,
    RewardKind,
    RewardResult,
    build_arguments,
    get_reward_kind,
    set_reward_kind,
    to_reward_result,
    try_call,
)
from rl.rewards.trl_adapter import (
    adapt_reward,
    get_parameters,
    is_trl_style,
    iter_trl_settings,
)
from rl.sanitize import describe_error

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
GAVE_UP = "gave_up"  # metric: 1 if a built-in reward could not evaluate an answer
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _RegistryEntry:
    target: Callable[..., Any]  # a reward function, or a class whose instances are rewards
    needs: tuple[str, ...]
    bounded: bool
    builtin: bool
    reports: tuple[str, ...]  # all metrics of the reward, 0 if it gave up


_REGISTRY: dict[str, _RegistryEntry] = {}


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
    """Register the decorated reward function, or class of rewards, as `name`.

    A name that is already registered raises UserError, unless `replace` is set, the same function
    is registered again (a reloaded module), or the name belongs to a built-in reward (then a
    warning is issued). `needs`: modules that a worker imports before its first item. `bounded=True`
    promises that the function ends within milliseconds for any response: it then runs in the
    training process. `batched=True`: called once for many answers, fn(prompts, responses, metas) ->
    a reward for each. `episode=True`: called as fn(episode, meta) with the whole `Episode`,
    including all its turns (lists of both if it is batched as well). `reports`: for a built-in
    reward, all its metrics, which are 0 for an answer on which it gave up.
    """
    if not name or ":" in name:
        raise UserError(
            "a reward's name is not empty and has no ':' (reserved for 'module:object'), "
            f"got {name!r}"
        )

    def decorate(target: F) -> F:
        set_reward_kind(target, RewardKind(batched, episode))
        builtin = target.__module__.startswith("rl.rewards.")
        existing = _REGISTRY.get(name)
        if (
            existing is not None
            and not replace
            and _get_qualified_name(existing.target) != _get_qualified_name(target)
        ):
            if not existing.builtin:
                raise UserError(
                    f"reward {name!r} is already registered by "
                    f"{_get_qualified_name(existing.target)}: choose another name, "
                    f"or register_reward({name!r}, replace=True) to replace it"
                )
            if builtin:
                # The user registered this name before the built-in module was imported
                return target
            warnings.warn(
                f"reward {name!r}: {_get_qualified_name(target)} replaces the built-in reward",
                stacklevel=2,
            )
        _REGISTRY[name] = _RegistryEntry(target, tuple(needs), bounded, builtin, tuple(reports))
        return target

    return decorate


def registered_rewards() -> list[str]:
    """Return all registered names, sorted."""
    return sorted(_REGISTRY)


def is_builtin_reward(name: str) -> bool:
    """Return whether a name is that of a built-in reward, which no other function replaced."""
    return name in _REGISTRY and _REGISTRY[name].builtin


@dataclass(eq=False, repr=False)
class Reward:
    """Hold a resolved reward with its settings bound.

    Calling it returns the float; `evaluate` also returns the metrics. `bounded`: ends by itself
    (see `register_reward`). `builtin`: returns a number for every answer, 0 if it gives up.
    `needs`: modules to import before the first call. `batched`: many answers are best scored in a
    single call of `iter_results` (a batched function or a coroutine). `episode`: takes whole
    episodes. A `Reward` can be pickled if its function can be imported by name. Of a function of a
    file, `file_address` (path, attribute, settings) is pickled, and a worker loads the file again.
    """

    name: str
    function: RewardFunction
    _: KW_ONLY
    needs: tuple[str, ...] = ()
    bounded: bool = False
    builtin: bool = False
    reports: tuple[str, ...] = ()
    file_address: tuple[str, str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.kind = get_reward_kind(self.function)
        parts: Sequence[Reward] = (
            self.function.part_rewards() if isinstance(self.function, CombinedReward) else ()
        )
        awaits = self.kind.batched or self.kind.is_coroutine
        self.batched: bool = awaits or any(part.batched for part in parts)
        self.episode: bool = self.kind.episode or any(part.episode for part in parts)
        if parts:
            self.builtin = all(part.builtin for part in parts)
        self.bounded = self.bounded and not self.batched

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        if self.file_address is None:
            return super().__reduce_ex__(protocol)
        return _resolve_in_file, (self.name, *self.file_address)

    def evaluate(
        self,
        prompt: str,
        response: str,
        meta: Meta = None,
        episode: Episode | None = None,
    ) -> RewardResult:
        """Return the reward and its metrics.

        NaN and infinity are accepted. Raises TypeError if the function did not return a number.
        """
        (outcome,) = self.iter_results([(prompt, response, meta, episode)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _evaluate_item(self, item: RewardItem) -> RewardResult:
        start = time.perf_counter()
        try:
            result = to_reward_result(self.function(*build_arguments(self.kind, item)))
            if self.builtin and not isfinite(result.reward):
                result = self.give_up_result(item)
        except Exception as error:  # boundary: an answer may break a grader in any way
            # A UserError is about the problem or the host, not about the answer.
            if not self.builtin or isinstance(error, UserError):
                raise
            logger.warning(
                "reward %r gave up on an answer, which scores 0: %s",
                self.name,
                describe_error(error),
            )
            result = self.give_up_result(item)
        return self._add_seconds(result, time.perf_counter() - start)

    def give_up_result(self, item: RewardItem) -> RewardResult:
        """Return the result of a reward that gave up: 0, or of a built-in combination the result
        whose parts all gave up, with metric `gave_up`. A user's combination may hang, too.
        """
        result = RewardResult(0.0, dict.fromkeys(self.reports, 0.0))
        combined = self.function
        if isinstance(combined, CombinedReward) and type(combined).__module__.startswith("rl."):
            parts = [part.give_up_result(item) for part in combined.part_rewards()]
            result = combined.combine_results(item, parts)
        return replace(result, metrics={**result.metrics, GAVE_UP: 1.0})

    def iter_results(
        self, items: Sequence[RewardItem], coroutine_timeout: float | None = None
    ) -> Iterator[RewardResult | BaseException]:
        """Yield the result of each item, or the exception that it raised, as soon as it is known.

        `coroutine_timeout`: time limit of each coroutine in seconds.
        """
        if isinstance(self.function, CombinedReward):
            yield from self.function.iter_results(items, coroutine_timeout)
        elif self.batched:
            yield from self._iter_batch_results(items, coroutine_timeout)
        else:
            for item in items:
                yield try_call(self._evaluate_item, item)

    def _iter_batch_results(
        self, items: Sequence[RewardItem], timeout: float | None
    ) -> Iterator[RewardResult | BaseException]:
        """Yield the results of a batched or coroutine function."""
        start = time.perf_counter()
        for values in BatchCaller(self.function, self.kind, timeout).iter_calls(items):
            seconds = (time.perf_counter() - start) / max(1, len(values))
            for value in values:
                if not isinstance(value, BaseException):
                    value = try_call(to_reward_result, value)
                if not isinstance(value, BaseException):
                    value = self._add_seconds(value, seconds)
                yield value
            start = time.perf_counter()

    def _add_seconds(self, result: RewardResult, seconds: float) -> RewardResult:
        return replace(result, seconds={**result.seconds, self.short_name: seconds})

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the data columns that the function requires, according to its signature."""
        return tuple(getattr(self.function, "columns", ()))

    @property
    def short_name(self) -> str:
        """Return the name used in metrics: for "module:function", the function."""
        return self.name.rpartition(":")[2]

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> float:
        return self.evaluate(prompt, response, meta).reward

    def parts(self) -> Iterator[Reward]:
        """Iterate over the parts of a combined reward, recursively; else over the reward itself."""
        if isinstance(self.function, CombinedReward):
            for part in self.function.part_rewards():
                yield from part.parts()
        else:
            yield self

    @property
    def runs_programs(self) -> bool:
        """Return whether any part runs answers as programs, in a sandbox."""
        return any(isinstance(part.function, ResourceReward) for part in self.parts())

    def start(self) -> None:
        """Start the parts' resources, such as sandboxes.

        Called once in the worker before its first item, so the start does not count against an
        item's time limit.
        """
        for part in self.parts():
            if isinstance(part.function, ResourceReward):
                part.function.start()

    def __repr__(self) -> str:
        return f"Reward({self.name!r})"


class ResourceReward(ABC):
    """Define the interface of rewards that start a resource in the process in which they run."""

    @abstractmethod
    def start(self) -> None:
        """Start the resource. Raises UserError if that fails."""


def resolve_reward(spec: str | RewardFunction | Reward, **settings: Any) -> Reward:
    """Resolve a reward.

    `spec`: a registered name, "module:object", "path/to/file.py:object", or a callable. `settings`
    are bound to the reward, e.g. `resolve_reward("length_penalty", target_length=100)`. Raises
    UserError, listing the accepted settings, if a setting is unknown or a required setting is
    missing.
    """
    if isinstance(spec, Reward):
        if settings:
            raise UserError(
                f"{spec!r} is already resolved and takes no settings, got "
                f"{sorted(settings)}: pass its name"
            )
        return spec
    if not isinstance(spec, str):
        if not callable(spec):
            raise UserError(f"a reward is a name, 'module:object' or a callable, got {spec!r}")
        name = getattr(spec, "__name__", type(spec).__name__)
        return Reward(name, _bind_settings(name, spec, settings))
    if ":" in spec:
        return _resolve_address(spec, settings)
    entry = _REGISTRY.get(spec)
    if entry is None:
        known = ", ".join(registered_rewards())
        module, _, attribute = spec.rpartition(".")
        file = f"{module.replace('.', '/')}.py"
        is_file = module and os.path.isfile(file)  # Path.is_file raises for a long name
        near = f"did you mean '{file}:{attribute}'? " if is_file else _suggest_name(spec, _REGISTRY)
        raise UserError(
            f"no reward is named {spec!r}: {near}registered are {known}; "
            "pass your function as my_reward.py:function"
        )
    function = _bind_settings(spec, entry.target, settings)
    needs, bounded = entry.needs, entry.bounded
    if isinstance(function, CombinedReward):
        # Bounded if all parts are bounded; needs the modules of all parts.
        parts = function.part_rewards()
        needs = tuple(module for part in parts for module in part.needs)
        bounded = all(part.bounded for part in parts)
    return Reward(
        spec,
        function,
        needs=needs,
        bounded=bounded,
        builtin=entry.builtin,
        reports=entry.reports,
    )


def _get_qualified_name(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _iter_settings(target: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Iterate over the parameters that are settings.

    These are all parameters of a class; of a function those after (prompt, response, meta) or
    (episode, meta).
    """
    parameters = list(get_parameters(target).values())
    if isinstance(target, type):
        yield from parameters
        return
    if is_trl_style(target):
        yield from iter_trl_settings(target)
        return
    # the kinds in the order of a signature; neither the leading parameters nor *args are settings
    positional = [p for p in parameters if p.kind < inspect.Parameter.VAR_POSITIONAL]
    yield from positional[get_reward_kind(target).leading_parameters :]
    yield from (p for p in parameters if p.kind > inspect.Parameter.VAR_POSITIONAL)


def _bind_settings(
    name: str, target: Callable[..., Any], settings: Mapping[str, Any]
) -> RewardFunction:
    """Bind settings to `target`: an instance of a class, or a partial of a function."""
    parameters = list(_iter_settings(target))
    accepted = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    listing = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
    unknown = sorted(set(settings) - set(accepted))
    if unknown and len(accepted) == len(parameters):  # no **settings
        raise UserError(
            f"reward {name!r} has no setting {', '.join(map(repr, unknown))}: {listing}"
        )
    required = {p.name for p in parameters if p.default is inspect.Parameter.empty}
    if missing := [name for name in accepted if name in required - set(settings)]:
        raise UserError(
            f"reward {name!r} needs the setting {', '.join(map(repr, missing))}: {listing}"
        )
    if isinstance(target, type):
        instance = target(**settings)
        return instance if isinstance(instance, CombinedReward) else adapt_reward(name, instance)
    return adapt_reward(name, functools.partial(target, **settings) if settings else target)


def _resolve_address(spec: str, settings: Mapping[str, Any]) -> Reward:
    location, _, attribute = spec.rpartition(":")
    if not location or not attribute:
        raise UserError(f"reward {spec!r}: 'module:object' or 'path/to/file.py:object' is expected")
    if location.endswith(".py"):
        return _resolve_in_file(
            spec, str(Path(location).expanduser().resolve()), attribute, settings
        )
    try:
        module = importlib.import_module(location)
    except (Exception, SystemExit) as error:  # boundary: user code
        raise UserError(
            f"reward {spec!r}: importing {location!r} failed ({type(error).__name__}: {error}); it "
            "must be importable from the current environment (PYTHONPATH), or be passed as "
            f"'path/to/file.py:{attribute}'"
        ) from error
    return _resolve_object(spec, spec, _get_callable(module, attribute, spec), settings)


def _resolve_in_file(spec: str, path: str, attribute: str, settings: Mapping[str, Any]) -> Reward:
    """Resolve an object of a .py file that is not an importable module. `spec`: the name."""
    label = f"{path}:{attribute}"
    target = _get_callable(load_file(path, "reward"), attribute, label)
    reward = _resolve_object(spec, label, target, settings)
    reward.file_address = (path, attribute, dict(settings))
    return reward


def _resolve_object(
    spec: str, label: str, target: Callable[..., Any], settings: Mapping[str, Any]
) -> Reward:
    """Resolve an object that was found by its address. `label`: its name in errors."""
    if isinstance(target, Reward):
        return replace(resolve_reward(target, **settings), name=spec)
    return Reward(spec, _bind_settings(label, target, settings))


def _get_callable(module: ModuleType, dotted: str, spec: str) -> Callable[..., Any]:
    value: Any = module
    for part in dotted.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        available = _list_callables(module)
        raise UserError(
            f"reward {spec!r}: the module has no callable {dotted!r}; "
            f"{_suggest_name(dotted, available)}it has {', '.join(available) or 'none'}"
        )
    return value


def _suggest_name(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {matches[0]!r}? " if matches else ""


def _list_callables(module: ModuleType) -> list[str]:
    """Return the names of callables in a module that could be rewards.

    Imported callables are listed only if the module defines none.
    """
    callables = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_")
    }
    # an instance (a partial, a callable object) was created in this module
    plain_types = (type, FunctionType, BuiltinFunctionType)
    defined_here = [
        key
        for key, value in callables.items()
        if not isinstance(value, plain_types) or value.__module__ == module.__name__
    ]
    return sorted(defined_here or callables)
