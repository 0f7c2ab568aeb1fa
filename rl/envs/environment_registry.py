"""Find environments by name, `module:Class` or `file.py:Class`, and read their settings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

from rl.config import RawValue, SettingsError, build_settings, format_help, nearest_name
from rl.envs.environment import Environment
from rl.errors import UserError, install_command
from rl.rewards import load_file
from rl.sanitize import describe_error

T = TypeVar("T", bound=type)

# rl.programs and rl.integrations are above this layer: imported by name only.
BUILT_IN: dict[str, str] = {
    "calculator": "rl.envs.calculator_env:CalculatorEnv",
    "endpoint": "rl.programs.program_env:Endpoint",
    "guess_number": "rl.envs.guess_number_env:GuessNumber",
    "tic_tac_toe": "rl.envs.tic_tac_toe_env:TicTacToeEnv",
    "mcp": "rl.integrations.mcp_tools:McpTools",
    "openenv": "rl.integrations.openenv_env:OpenEnv",
    "python": "rl.envs.python_env:Python",
    "reasoning_gym": "rl.integrations.reasoning_gym_env:ReasoningGym",
    "search": "rl.envs.search_env:Search",
    "skyrl_gym": "rl.integrations.skyrl_gym_env:SkyRLGym",
    "textarena": "rl.integrations.textarena_env:TextArena",
    "tinker": "rl.integrations.tinker_cookbook_env:Tinker",
}
# Extras of pyproject.toml with the packages that built-in environments import.
_EXTRAS = {"endpoint": "serve"}
# Addresses of earlier versions, as users and the files of runs name them.
_MOVED_MODULES = {
    "rl.envs.wrappers.": "rl.integrations.",
    "rl.envs.trl_env": "rl.integrations.trl_env",
    "rl.serve.program_env": "rl.programs.program_env",
}
# Built-in games of earlier versions, which are files of the repository now.
_EXAMPLES = {
    "debate": "examples/games/debate.py:DebateEnv",
    "debugging": "examples/games/debugging.py:DebuggingEnv",
    "twenty_questions": "examples/games/twenty_questions.py:TwentyQuestionsEnv",
}
_REGISTERED: dict[str, type] = {}


def register_environment(name: str, *, replace: bool = False) -> Callable[[T], T]:
    """Return a decorator that makes a class available as `name`.

    Raises UserError if the name is taken, unless `replace` is set or the same class is registered
    again.
    """
    if not name or ":" in name:
        raise UserError(
            "an environment's name must not be empty or contain ':' (reserved for 'module:Class'),"
            f" got {name!r}"
        )

    def decorate(cls: T) -> T:
        old = _REGISTERED.get(name)
        same = old is not None and (old.__module__, old.__qualname__) == (
            cls.__module__,
            cls.__qualname__,
        )
        if not (same or replace) and (old is not None or name in BUILT_IN):
            raise UserError(
                f"an environment is called {name!r} already: choose another name, or use"
                " register_environment(..., replace=True)"
            )
        _REGISTERED[name] = cls
        return cls

    return decorate


def list_environments() -> list[str]:
    """Return the names that `resolve_environment` knows, sorted."""
    return sorted({*BUILT_IN, *_REGISTERED})


@dataclass(frozen=True)
class EnvironmentSpec:
    """Describe a class of environments with its settings. `make()` returns an instance for an
    episode.

      address      import location of the class, as named by the user; used by other processes too
      own_rows     no data set is named, and the environment works without it (see `can_make_rows`)
      fork_server  `rl.envs.fork_server.ForkServer` that forks processes for episodes; None:
                   episodes run in this process
    """

    name: str
    cls: type
    settings: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None
    own_rows: bool = False
    fork_server: Any = field(default=None, compare=False, repr=False)

    @property
    def seed_stream(self) -> str:
        """Return the name that the seeds of episodes are derived from; it does not depend on the
        folder of a file.
        """
        return self.name.rpartition("/")[2]

    def make(self) -> Environment:
        """Return an environment for an episode."""
        instance = self.cls(**self.settings)
        if isinstance(instance, Environment):
            return instance
        return _import_trl_adapter().TrlEnvironment(instance)

    @property
    def has_shared_data(self) -> bool:
        """Return True if the environment defines `share`."""
        return issubclass(self.cls, Environment) and self.cls.share is not Environment.share

    @property
    def needs_rows(self) -> bool:
        """Return True if each episode needs a row of a data set."""
        return not self.own_rows and bool(self.make().needs_rows)  # settings may decide

    @property
    def can_make_rows(self) -> bool:
        """Return True if a data set is optional: objects of other libraries do not declare it, and
        may work without rows.
        """
        return not issubclass(self.cls, Environment)

    @property
    def make_token_level_group(self) -> Callable[..., Any] | None:
        """Return the function that makes a group of token-level environments; None if the class has
        none.
        """
        if not issubclass(self.cls, Environment) or self.cls.make_token_level_group is None:
            return None
        return self.cls(**self.settings).make_token_level_group


def resolve_spec(
    spec: str | type | EnvironmentSpec, settings: Mapping[str, Any]
) -> EnvironmentSpec:
    """Return the environment with settings as values, which are used unchanged. See
    `resolve_environment`.
    """
    if isinstance(spec, EnvironmentSpec):
        if settings:
            raise UserError(
                f"the environment {spec.name!r} is already resolved and takes no settings, got"
                f" {sorted(settings)}: pass its name"
            )
        return spec
    if isinstance(spec, str):
        spec, program = _split_program(spec)
        settings = {**{key: shlex.split(text)[0] for key, text in program}, **settings}
    cls = spec if isinstance(spec, type) else _load_class(spec)
    name = spec if isinstance(spec, str) else cls.__name__
    address = None if isinstance(spec, type) else _find_address(spec)
    table, takes_any = _make_settings_class(cls, name)
    fields = {item.name: item for item in dataclasses.fields(table)}
    problems = [
        _unknown_setting_error(name, key, fields)
        for key in settings
        if key not in fields and not takes_any
    ]
    problems += [
        f"environment {name!r} needs the setting {key!r}: set --environment.{key}"
        for key, item in fields.items()
        if key not in settings and item.default is item.default_factory is dataclasses.MISSING
    ]
    if problems:
        raise SettingsError(problems)
    return _check_settings(EnvironmentSpec(name, cls, settings, address))


def _check_settings(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return the spec after making an environment from it. Raises UserError if that fails, such as
    for settings that contradict each other.
    """
    try:
        spec.make()
    except UserError:
        raise
    except Exception as error:  # boundary: checks of the environment
        message = str(error) if isinstance(error, ValueError) else describe_error(error, 500)
        raise UserError(
            f"the environment {spec.name} cannot be made with these settings: {message}"
        ) from error
    return spec


def load_spec(address: str, settings: Mapping[str, Any]) -> EnvironmentSpec:
    """Return the environment at an address (see `EnvironmentSpec`), with settings that were already
    checked.
    """
    return EnvironmentSpec(address, _load_class(address), dict(settings), address)


def _split_program(name: str) -> tuple[str, list[tuple[str, str]]]:
    """Split "endpoint:python agent.py" into "endpoint" and its setting `program`.

    `Environment.colon_setting` names the setting that may follow the colon.
    """
    head, colon, rest = name.partition(":") if isinstance(name, str) else (name, "", "")
    if (
        not colon
        or head not in list_environments()
        or (setting := getattr(_load_class(head), "colon_setting", None)) is None
    ):
        return name, []
    return head, [(setting, shlex.quote(rest))]


def _find_address(name: str) -> str | None:
    """Return module:Class, or a file's absolute path and the class.

    Return None for a name registered by code of this process.
    """
    if name in _REGISTERED:
        return None
    source, _, attribute = _expand_name(name).rpartition(":")
    return (
        f"{Path(source).expanduser().resolve() if source.endswith('.py') else source}:{attribute}"
    )


def _expand_name(name: str) -> str:
    """Return the address of a built-in environment, and the present address of a class that moved;
    any other name unchanged.
    """
    for earlier, present in _MOVED_MODULES.items():
        if name.startswith(earlier):
            return present + name.removeprefix(earlier)
    return BUILT_IN.get(name, name)


def _import_trl_adapter() -> Any:
    """Return the module that adapts objects in TRL's form, from a package above this layer."""
    return importlib.import_module("rl.integrations.trl_env")


def parse_environment(name: str, settings: Sequence[tuple[str, str]]) -> EnvironmentSpec:
    """Return the environment with settings as written on the command line or in a recipe. Raises
    SettingsError, which names every mistake.
    """
    name, program = _split_program(name)
    settings = [*program, *settings]
    cls = _load_class(name)
    table, takes_any = _make_settings_class(cls, name)
    fields = {item.name: item for item in dataclasses.fields(table)}
    problems: list[str] = []
    values: dict[str, RawValue] = {}
    texts: dict[str, Any] = {}
    for key, text in settings:
        if key in fields:
            try:
                words = tuple(shlex.split(text))
            except ValueError as error:
                problems.append(f"--environment.{key} {text}: {error}")
                continue
            values[key] = RawValue(words, f"--environment.{key}")
        elif key.startswith("no_") and key[3:] in fields and text == "True":
            values[key[3:]] = RawValue(("False",), f"--environment.{key}", is_negated=True)
        elif takes_any:
            texts[key] = text
        else:
            problems.append(_unknown_setting_error(name, key, fields))
    built = build_settings(table, values, problems, prefix="environment.")
    if problems:
        raise SettingsError(problems)
    resolved = {**{key: getattr(built, key) for key in values}, **texts}
    return _check_settings(EnvironmentSpec(name, cls, resolved, _find_address(name)))


def _make_settings_class(cls: type, name: str) -> tuple[type, bool]:
    """Return a dataclass with an environment's settings as fields, and whether `__init__` takes
    further settings of any name (**settings).

    Raises UserError if a setting's type cannot be written as text; with **settings, all settings
    are then texts.
    """
    takes_any = False
    try:
        if dataclasses.is_dataclass(cls):
            fields = _dataclass_fields(cls)
        else:
            parameters = inspect.signature(cls).parameters.values()
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            fields = _argument_fields(cls, [p for p in parameters if p.kind not in variable])
        table = dataclasses.make_dataclass(cls.__name__, fields, frozen=True, kw_only=True)
        build_settings(table, {}, [])
    except (TypeError, NameError) as error:  # NameError: a hint that only type checkers import
        if takes_any:
            return dataclasses.make_dataclass(cls.__name__, ()), True
        raise UserError(
            f"the settings of environment {name!r} cannot be written on the command line: {error}"
        ) from error
    table.__doc__ = inspect.cleandoc(cls.__doc__ or name).split("\n\n")[0]
    return table, takes_any


def show_help(name: str | None) -> None:
    """Print the settings of an environment as --environment.NAME; without a name, print all
    environments.
    """
    if name is None:
        print(
            "\nEnvironments (--environment NAME; NAME --help shows its settings)\n"
            f"  {', '.join(list_environments())}"
        )
        return
    import tyro

    name = _split_program(name)[0]
    cls = _load_class(name)
    table, takes_any = _make_settings_class(cls, name)
    if takes_any:
        print(f"\nThe environment {name} takes any settings: --environment.NAME VALUE")
        if not dataclasses.fields(table):
            return
    for item in dataclasses.fields(table):
        if (help_text := format_help.read_field_help(cls, item.name)) is not None:
            table.__annotations__[item.name] = Annotated[
                table.__annotations__[item.name], tyro.conf.arg(help=help_text)
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
        return  # tyro exits after it has printed the help


def _dataclass_fields(cls: type) -> list[tuple[str, Any, Any]]:
    """Return (name, type, field) for each setting of a dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    make_field: Any = dataclasses.field  # its overloads do not take a default that may be missing
    return [
        (
            item.name,
            hints[item.name],
            make_field(default=item.default, default_factory=item.default_factory),
        )
        for item in dataclasses.fields(cls)
        if item.init
    ]


def _argument_fields(
    cls: type, parameters: Sequence[inspect.Parameter]
) -> list[tuple[str, Any, Any]]:
    """Return (name, type, field) for each argument of `__init__`.

    The type of an argument without a hint is the type of its default, else str.
    """
    initializer: Any = inspect.getattr_static(cls, "__init__")  # may be inherited
    hints = typing.get_type_hints(initializer, include_extras=True)
    fields = []
    for p in parameters:
        annotation = hints.get(p.name, str if p.default in (p.empty, None) else type(p.default))
        default = (
            dataclasses.field()
            if p.default is p.empty
            else dataclasses.field(default_factory=partial(lambda value: value, p.default))
        )
        fields.append((p.name, annotation, default))
    return fields


def _unknown_setting_error(name: str, key: str, known: Mapping[str, Any]) -> str:
    """Return the error message for an unknown setting, with the nearest known setting."""
    near = nearest_name(key, known)
    hint = f"did you mean --environment.{near}?" if near else f"it has {', '.join(known) or 'none'}"
    return f"--environment.{key}: no such setting of the environment {name}; {hint}"


def _load_class(spec: str) -> type:
    """Return the class that a name or address refers to. Raises UserError if it does not exist or
    is not an environment.
    """
    if not isinstance(spec, str) or not spec:
        raise UserError(f"an environment is a name, 'module:Class' or a class, got {spec!r}")
    if spec in _REGISTERED:
        return _REGISTERED[spec]
    address = _expand_name(spec)
    if ":" not in address:
        if spec in _EXAMPLES:
            raise UserError(
                f"the environment {spec!r} is an example now, no built-in: copy the file from the"
                f" repository and set --environment {_EXAMPLES[spec]}"
            )
        names = list_environments()
        closest = nearest_name(spec, names)
        hint = f"did you mean {closest!r}? " if closest else ""
        raise UserError(
            f"no environment is named {spec!r}: {hint}the known names are {', '.join(names)};"
            " name a class of a file as 'file.py:Class'"
        )
    source, _, attribute = address.rpartition(":")
    module = _load_module(spec, source)
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if (
        not isinstance(target, type)
        and (adapter := _import_trl_adapter().wrap_factory(target, attribute)) is not None
    ):
        return adapter
    if not isinstance(target, type) or not (
        issubclass(target, Environment) or hasattr(target, "reset")
    ):
        environments = {
            key: value.__module__ == module.__name__  # whether it is defined there
            for key, value in sorted(vars(module).items())
            if isinstance(value, type) and issubclass(value, Environment) and value != Environment
        }
        choices = [key for key, is_local in environments.items() if is_local] or list(environments)
        closest = nearest_name(attribute, choices)
        hint = f"did you mean {closest!r}? " if closest else ""
        raise UserError(
            f"environment {spec!r}: {attribute!r} is not an environment in it; {hint}it has"
            f" {', '.join(choices) or 'none'}"
        )
    return target


def load_object(spec: str, what: str) -> Any:
    """Return the object at "module:name" or "path/to/file.py:name". Raises UserError if it does not
    exist.
    """
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{what} is named as 'module:name' or 'file.py:name', got {spec!r}")
    module = _load_module(spec, place)
    if not hasattr(module, attribute):
        closest = nearest_name(
            attribute, [name for name in vars(module) if not name.startswith("_")]
        )
        raise UserError(
            f"{spec!r}: {place} has no {attribute}"
            + (f"; did you mean {closest}?" if closest else "")
        )
    return getattr(module, attribute)


def _load_module(spec: str, place: str) -> ModuleType:
    """Import a module or a file. Raises UserError, with the command that installs a missing package
    if it is known.
    """
    if place.endswith(".py"):
        return load_file(str(Path(place).expanduser().resolve()), "environment")
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:  # boundary: the user's module
        if spec in _EXTRAS and isinstance(error, ModuleNotFoundError):
            raise UserError(
                f"environment {spec!r} needs the package {error.name}:"
                f" {install_command(_EXTRAS[spec])}"
            ) from error
        raise UserError(
            f"environment {spec!r}: importing {place!r} failed ({type(error).__name__}: {error});"
            " it must be importable from the working directory (PYTHONPATH), or be named as"
            " 'path/to/file.py:Class'"
        ) from error
