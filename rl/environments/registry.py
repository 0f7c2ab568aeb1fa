"""Environments by name, `module:Class` or `file.py:Class`, and their settings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import shlex
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

from rl.environments.environment import Environment
from rl.environments.trl import TrlEnvironment, class_of
from rl.errors import UserError
from rl.plain import says
from rl.rewards import load_file
from rl.settings import Given, SettingsError, build, nearest

T = TypeVar("T", bound=type)

BUILT_IN: dict[str, str] = {
    "calculator": "rl.environments.calculator:Calculator",
    "debate": "rl.environments.debate:Debate",
    "debugging": "rl.environments.debugging:Debugging",
    # of a room above: it is asked for by name alone
    "endpoint": "rl.serve.episodes_program:Endpoint",
    "guess_number": "rl.environments.guess_number:GuessNumber",
    "tic_tac_toe": "rl.environments.tic_tac_toe:TicTacToe",
    "twenty_questions": "rl.environments.twenty_questions:TwentyQuestions",
    "mcp": "rl.environments.wrappers.mcp:McpTools",
    "openenv": "rl.environments.wrappers.openenv:OpenEnv",
    "python": "rl.environments.python:Python",
    "reasoning_gym": "rl.environments.wrappers.reasoning_gym:ReasoningGym",
    "search": "rl.environments.search:Search",
    "skyrl_gym": "rl.environments.wrappers.skyrl_gym:SkyRLGym",
    "textarena": "rl.environments.wrappers.textarena:TextArena",
    "tinker": "rl.environments.wrappers.tinker:Tinker",
}
# Built-in environments whose module imports packages that requirements.txt does not install.
_REQUIREMENTS = {"endpoint": "requirements-serve.txt"}
_REGISTERED: dict[str, type] = {}


def register_environment(name: str, *, replace: bool = False) -> Callable[[T], T]:
    """Decorator: makes a class available as `name`. A taken name is an error unless `replace` is
    set or it is the same class again.
    """
    if not name or ":" in name:
        raise UserError(
            f"an environment's name is not empty and holds no ':' (that is for 'module:Class'), got {name!r}"
        )

    def decorate(cls: T) -> T:
        old = _REGISTERED.get(name)
        same = old is not None and (old.__module__, old.__qualname__) == (
            cls.__module__,
            cls.__qualname__,
        )
        if not (same or replace) and (old is not None or name in BUILT_IN):
            raise UserError(
                f"an environment is called {name!r} already: choose another, or say register_environment(..., replace=True)"
            )
        _REGISTERED[name] = cls
        return cls

    return decorate


def registered_environments() -> list[str]:
    """The names that `resolve_environment` knows, sorted."""
    return sorted({*BUILT_IN, *_REGISTERED})


@dataclass(frozen=True)
class EnvironmentSpec:
    """A class of environments with its settings. `make()` gives one, for one episode.

    address  where the class is imported from, where it was named; in another process it is found
    there own_rows no data set is named, and the environment is one that can do without (see
    `can_make_rows`) root     what forks processes for its episodes (see `rl.environments.process`);
    None: they run in this one
    """

    name: str
    cls: type
    settings: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None
    own_rows: bool = False
    root: Any = field(default=None, compare=False, repr=False)

    @property
    def stream(self) -> str:
        """What its episodes' seeds are derived from: the name, wherever the file lies that it
        names.
        """
        return self.name.rpartition("/")[2]

    def make(self) -> Environment:
        made = self.cls(**self.settings)
        if isinstance(made, Environment):
            return made
        return TrlEnvironment(made)

    @property
    def shares(self) -> bool:
        """Whether its groups share something."""
        return issubclass(self.cls, Environment) and self.cls.share is not Environment.share

    @property
    def needs_rows(self) -> bool:
        return not self.own_rows and bool(self.make().needs_rows)  # settings may decide

    @property
    def can_make_rows(self) -> bool:
        """Whether rows of a data set may be left out: objects of other makes say nothing of it, and
        may do without.
        """
        return not issubclass(self.cls, Environment) and self.token_level is None

    @property
    def token_level(self) -> Callable[..., Any] | None:
        """What makes a group of environments that speak tokens, for a class that stands for such;
        else None.
        """
        return (
            getattr(self.cls(**self.settings), "group", None)
            if hasattr(self.cls, "group")
            else None
        )


def environment_from_values(
    spec: str | type | EnvironmentSpec, settings: Mapping[str, Any]
) -> EnvironmentSpec:
    """The environment with settings as values, which are taken as they are. See
    `resolve_environment`.
    """
    if isinstance(spec, EnvironmentSpec):
        if settings:
            raise UserError(
                f"the environment {spec.name!r} is resolved and takes no settings, got {sorted(settings)}: pass its name"
            )
        return spec
    if isinstance(spec, str):
        spec, behind = _taken_apart(spec)
        settings = {**{key: shlex.split(text)[0] for key, text in behind}, **settings}
    cls = spec if isinstance(spec, type) else _find(spec)
    name = spec if isinstance(spec, str) else cls.__name__
    address = None if isinstance(spec, type) else _address(spec)
    known = settings_table(cls, name)
    if known is None:
        return _tried(EnvironmentSpec(name, cls, settings, address))
    fields = {item.name: item for item in dataclasses.fields(known)}
    problems = [_unknown(name, key, fields) for key in settings if key not in fields]
    missing = [key for key, item in fields.items() if key not in settings and _required(item)]
    problems += [
        f"environment {name!r} needs the setting {key!r}: give --environment.{key}"
        for key in missing
    ]
    if problems:
        raise SettingsError(problems)
    return _tried(EnvironmentSpec(name, cls, settings, address))


def _tried(spec: EnvironmentSpec) -> EnvironmentSpec:
    """The same, once one has been made of it. UserError where that fails: settings that do not fit
    each other, say.
    """
    try:
        spec.make()
    except UserError:
        raise
    except Exception as error:  # boundary: the environment's own checks
        said = str(error) if isinstance(error, ValueError) else says(error, 500)
        raise UserError(
            f"the environment {spec.name} cannot be made with these settings: {said}"
        ) from error
    return spec


def environment_from_address(address: str, settings: Mapping[str, Any]) -> EnvironmentSpec:
    """The environment at an address (of `EnvironmentSpec`), with settings that were checked before."""
    return EnvironmentSpec(address, _find(address), dict(settings), address)


def _taken_apart(name: str) -> tuple[str, list[tuple[str, str]]]:
    """ "endpoint:python agent.py" as "endpoint" and its setting `program`: a class says by
    `behind_colon` which one may stand there.
    """
    head, colon, rest = name.partition(":") if isinstance(name, str) else (name, "", "")
    if (
        not colon
        or head not in registered_environments()
        or (setting := getattr(_find(head), "behind_colon", None)) is None
    ):
        return name, []
    return head, [(setting, shlex.quote(rest))]


def _address(name: str) -> str | None:
    """module:Class, or a file's absolute path and the class; None for what was registered here, by
    this process's own code.
    """
    if name in _REGISTERED:
        return None
    place, _, attribute = BUILT_IN.get(name, name).rpartition(":")
    return f"{Path(place).expanduser().resolve() if place.endswith('.py') else place}:{attribute}"


def environment_from_words(name: str, written: Sequence[tuple[str, str]]) -> EnvironmentSpec:
    """The environment with settings as they were written on the line or in a recipe. SettingsError
    names every mistake.
    """
    name, behind = _taken_apart(name)
    written = [*behind, *written]
    cls = _find(name)
    table = settings_table(cls, name)
    if table is None:
        return _tried(EnvironmentSpec(name, cls, dict(written), _address(name)))
    fields = {item.name: item for item in dataclasses.fields(table)}
    problems: list[str] = []
    given: dict[str, Given] = {}
    for key, text in written:
        if key in fields:
            given[key] = Given(tuple(shlex.split(text)), f"--environment.{key}")
        elif key.startswith("no_") and key[3:] in fields and text == "True":
            given[key[3:]] = Given(("False",), f"--environment.{key}")
        else:
            problems.append(_unknown(name, key, fields))
    built = build(table, given, problems, prefix="environment.")
    if problems:
        raise SettingsError(problems)
    return _tried(
        EnvironmentSpec(name, cls, {key: getattr(built, key) for key in given}, _address(name))
    )


def settings_table(cls: type, name: str) -> type | None:
    """A dataclass with the settings of an environment as fields; None where `__init__` takes any
    names (**settings).
    """
    if dataclasses.is_dataclass(cls):
        found = _of_dataclass(cls)
    else:
        parameters = inspect.signature(cls).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        found = _of_arguments(cls, [p for p in parameters if p.kind is not p.VAR_POSITIONAL])
    try:
        table = dataclasses.make_dataclass(cls.__name__, found, frozen=True, kw_only=True)
        build(table, {}, [])
    except TypeError as error:
        raise UserError(
            f"the settings of environment {name!r} cannot be written on a line: {error}"
        ) from error
    table.__doc__ = inspect.cleandoc(cls.__doc__ or name).split("\n\n")[0]
    return table


def show_help(name: str | None) -> None:
    """Prints the settings of an environment, as --environment.NAME; or which environments there
    are.
    """
    if name is None:
        print(
            f"\nEnvironments (--environment NAME; NAME --help shows its settings)\n  {', '.join(registered_environments())}"
        )
        return
    import tyro

    name = _taken_apart(name)[0]
    cls = _find(name)
    table = settings_table(cls, name)
    if table is None:
        print(f"\nThe environment {name} takes any settings: --environment.NAME VALUE")
        return
    for item in dataclasses.fields(table):
        if (said := _said_of(cls, item.name)) is not None:
            table.__annotations__[item.name] = Annotated[
                table.__annotations__[item.name], tyro.conf.arg(help=said)
            ]
    page = dataclasses.make_dataclass("Page", [("environment", table)])
    try:
        tyro.cli(
            page,
            prog=f"train.py METHOD --environment {name}",
            description=f"Settings of the environment {name}.",
            args=["--help"],
        )
    except SystemExit:
        return  # tyro leaves after its page


def _said_of(cls: type, name: str) -> str | None:
    """The string under a setting's field, in the class's source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    lines = body.body if isinstance(body, ast.ClassDef) else []
    for field_, under in itertools.pairwise(lines):
        named = (
            isinstance(field_, ast.AnnAssign)
            and isinstance(field_.target, ast.Name)
            and field_.target.id == name
        )
        if (
            named
            and isinstance(under, ast.Expr)
            and isinstance(under.value, ast.Constant)
            and isinstance(under.value.value, str)
        ):
            return under.value.value
    return None


def _of_dataclass(cls: type) -> list[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    made: Any = dataclasses.field  # its overloads do not take a default that may be missing
    return [
        (
            item.name,
            hints[item.name],
            made(default=item.default, default_factory=item.default_factory),
        )
        for item in dataclasses.fields(cls)
        if item.init
    ]


def _of_arguments(cls: type, parameters: Sequence[inspect.Parameter]) -> list[tuple[str, Any, Any]]:
    """Types that are not written are those of the defaults, else text."""
    hints = (
        typing.get_type_hints(vars(cls)["__init__"], include_extras=True)
        if "__init__" in vars(cls)
        else {}
    )
    found = []
    for p in parameters:
        annotation = hints.get(p.name, str if p.default in (p.empty, None) else type(p.default))
        default = (
            dataclasses.field()
            if p.default is p.empty
            else dataclasses.field(default_factory=partial(_given_back, p.default))
        )
        found.append((p.name, annotation, default))
    return found


def _given_back(value: Any) -> Any:
    return value


def _required(item: dataclasses.Field) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _unknown(name: str, key: str, known: Mapping[str, Any]) -> str:
    near = nearest(key, known)
    hint = f"did you mean --environment.{near}?" if near else f"it has {', '.join(known) or 'none'}"
    return f"--environment.{key}: no such setting of the environment {name}; {hint}"


def _find(spec: str) -> type:
    if not isinstance(spec, str) or not spec:
        raise UserError(f"an environment is a name, 'module:Class' or a class, got {spec!r}")
    if spec in _REGISTERED:
        return _REGISTERED[spec]
    address = BUILT_IN.get(spec, spec)
    if ":" not in address:
        names = registered_environments()
        near = nearest(spec, names)
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(
            f"no environment is named {spec!r}: {hint}there are {', '.join(names)}; your own is given as 'file.py:Class'"
        )
    place, _, attribute = address.rpartition(":")
    file = place.endswith(".py")
    module = (
        load_file(str(Path(place).expanduser().resolve()), "environment")
        if file
        else _load_module(spec, place)
    )
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) and (made := class_of(found, attribute)) is not None:
        return made
    if not isinstance(found, type) or not (
        issubclass(found, Environment) or hasattr(found, "reset")
    ):
        classes = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, type) and value is not Environment
        }
        found_here = sorted(key for key, value in classes.items() if issubclass(value, Environment))
        here = [
            key for key in found_here if classes[key].__module__ == module.__name__
        ] or found_here
        near = nearest(attribute, here)
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(
            f"environment {spec!r}: {attribute!r} is no environment there; {hint}it has {', '.join(here) or 'none'}"
        )
    return found


def load_object(spec: str, what: str) -> Any:
    """The object at "module:name" or "path/to/file.py:name". UserError where there is none."""
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{what} is given as 'module:name' or 'file.py:name', got {spec!r}")
    file = place.endswith(".py")
    found: Any = (
        load_file(str(Path(place).expanduser().resolve()), "environment")
        if file
        else _load_module(spec, place)
    )
    if not hasattr(found, attribute):
        near = nearest(attribute, [name for name in vars(found) if not name.startswith("_")])
        raise UserError(
            f"{spec!r}: there is no {attribute} in {place}"
            + (f"; did you mean {near}?" if near else "")
        )
    return getattr(found, attribute)


def _load_module(spec: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        if spec in _REQUIREMENTS and isinstance(error, ModuleNotFoundError):
            raise UserError(
                f"environment {spec!r} needs the package {error.name}: pip install -r {_REQUIREMENTS[spec]}"
            ) from error
        raise UserError(
            f"environment {spec!r}: importing {place!r} failed ({type(error).__name__}: {error}); it must be importable from where you "
            "run (PYTHONPATH), or be given as 'path/to/file.py:Class'"
        ) from error
