"""Rewards by name: `register_reward` puts a function into the registry, `resolve_reward` finds or imports one.

A reward is `fn(prompt: str, response: str, meta: dict | None) -> float | RewardResult`. Settings are keyword arguments after
these three; a class is registered as a factory: its `__init__` takes the settings, its instances are the rewards.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat, TypeVar

from rl.errors import UserError

RewardFunction = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward together with figures to log, e.g. {"correct": 1.0, "format": 0.0}."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Entry:
    target: Callable[..., Any]  # a reward function, or a class whose instances are rewards
    needs: tuple[str, ...]
    bounded: bool
    builtin: bool


_REGISTRY: dict[str, _Entry] = {}


def register_reward(
    name: str, *, replace: bool = False, needs: Sequence[str] = (), bounded: bool = False
) -> Callable[[F], F]:
    """Decorator: makes a reward function, or a class of rewards, available as `name`.

    A taken name is an error unless `replace` is set, the same function is registered again (a module reloaded), or the name is
    a built-in's (a warning says so). `needs` names modules that a worker imports before its first item. `bounded=True` promises
    that the function ends by itself within milliseconds, whatever the response: it then runs in the training process.
    """
    if not name or ":" in name:
        raise UserError(f"a reward's name is not empty and holds no ':' (that is for 'module:object'), got {name!r}")

    def decorate(target: F) -> F:
        builtin = target.__module__.startswith("rl.rewards.")
        old = _REGISTRY.get(name)
        if old is not None and not replace and _qualified_name(old.target) != _qualified_name(target):
            if not old.builtin:
                raise UserError(
                    f"reward {name!r} is already registered by {_qualified_name(old.target)}: choose another name, "
                    f"or register_reward({name!r}, replace=True) to take its place"
                )
            if builtin:
                return target  # the user's was there first
            warnings.warn(f"reward {name!r}: {_qualified_name(target)} takes the place of the built-in one", stacklevel=2)
        _REGISTRY[name] = _Entry(target, tuple(needs), bounded, builtin)
        return target

    return decorate


def registered_rewards() -> list[str]:
    """The names that `resolve_reward` knows, sorted."""
    return sorted(_REGISTRY)


class Reward:
    """A resolved reward with its settings bound. Calling it gives the float; `evaluate` keeps the metrics.

    `bounded`: ends by itself (see `register_reward`). `needs`: modules to import before the first call.
    It can be pickled wherever its function can be imported by name.
    """

    def __init__(self, name: str, function: RewardFunction, *, needs: tuple[str, ...] = (), bounded: bool = False):
        self.name = name
        self.function = function
        self.needs = needs
        self.bounded = bounded

    def evaluate(self, prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> RewardResult:
        """The reward and its metrics. Raises TypeError where the function returned no number; NaN and infinity pass."""
        value = self.function(prompt, response, meta)
        result = value if isinstance(value, RewardResult) else RewardResult(value)
        metrics = {key: _number(figure, f"metric {key!r}") for key, figure in result.metrics.items()}
        return RewardResult(_number(result.reward, "reward"), metrics)

    def __call__(self, prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> float:
        return self.evaluate(prompt, response, meta).reward

    def __repr__(self) -> str:
        return f"Reward({self.name!r})"


class Combined(ABC):
    """A reward made of rewards."""

    @abstractmethod
    def rewards(self) -> Sequence[Reward]:
        """The parts."""

    @abstractmethod
    def __call__(self, prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> RewardResult: ...


class _FileFunction:
    """An object of a .py file that is no importable module; pickled as its address, so that a worker loads it by itself."""

    def __init__(self, path: str, attribute: str, settings: Mapping[str, Any]):
        self.address = (path, attribute, dict(settings))
        self.function = _bind(f"{path}:{attribute}", _attribute(_load_file(path), attribute, f"{path}:{attribute}"), settings)

    def __call__(self, prompt: str, response: str, meta: Mapping[str, Any] | None) -> Any:
        return self.function(prompt, response, meta)

    def __reduce__(self) -> tuple[Any, ...]:
        return _FileFunction, self.address


def resolve_reward(spec: str | RewardFunction | Reward, **settings: Any) -> Reward:
    """The reward that `spec` names: a registered name, "module:object", "path/to/file.py:object", or a callable.

    `settings` are bound to it, e.g. `resolve_reward("length_penalty", target_length=100)`; one that it does not take, or a
    missing one that it needs, is an error that lists what it takes.
    """
    if isinstance(spec, Reward):
        if settings:
            raise UserError(f"{spec!r} is resolved already and takes no settings, got {sorted(settings)}: pass its name")
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
        raise UserError(f"no reward is named {spec!r}: {hint}registered are {known}; your own is given as 'module:function'")
    function = _bind(spec, entry.target, settings)
    if isinstance(function, Combined):  # as bounded as its parts, and it needs what they need
        needs = tuple(module for part in function.rewards() for module in part.needs)
        return Reward(spec, function, needs=needs, bounded=all(part.bounded for part in function.rewards()))
    return Reward(spec, function, needs=entry.needs, bounded=entry.bounded)


def _qualified_name(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _number(value: Any, what: str) -> float:
    if not isinstance(value, SupportsFloat):  # numbers, also numpy's and torch's; not text
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); a number or a RewardResult is expected")
    return float(value)


def _settings_of(target: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters that are settings: all of a class's, those after (prompt, response, meta) of a function."""
    parameters = list(inspect.signature(target).parameters.values())
    if isinstance(target, type):
        yield from parameters
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in parameters if p.kind in positional][3:]
    yield from rest
    yield from (p for p in parameters if p.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD))


def _bind(name: str, target: Callable[..., Any], settings: Mapping[str, Any]) -> RewardFunction:
    """`target` with its settings filled in: an instance of a class, a partial of a function."""
    parameters = list(_settings_of(target))
    accepted = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    open_ended = len(accepted) < len(parameters)
    listing = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
    unknown = sorted(set(settings) - set(accepted))
    if unknown and not open_ended:
        raise UserError(f"reward {name!r} has no setting {', '.join(map(repr, unknown))}: {listing}")
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.name in accepted]
    missing = [key for key in required if key not in settings]
    if missing:
        raise UserError(f"reward {name!r} needs the setting {', '.join(map(repr, missing))}: {listing}")
    if isinstance(target, type):
        return target(**settings)
    return functools.partial(target, **settings) if settings else target


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
        here = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        near = difflib.get_close_matches(dotted, here, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"reward {spec!r}: {dotted!r} is no callable there; {hint}it has {', '.join(here) or 'none'}")
    return found


def _load_file(path: str) -> ModuleType:
    """The module of a .py file, executed once per process and kept under a name of its own."""
    name = f"whetstone_file_{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not Path(path).is_file():
        raise UserError(f"reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true of every .py path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles in it look themselves up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # boundary: the user's module
        del sys.modules[name]
        raise UserError(f"reward file {path} failed to load: {type(error).__name__}: {error}") from error
    return module
