"""Read the settings of a command line and of the arguments of `rl.train`.

A flag is a pair of its key and its raw value, and so is an argument or a part of --change.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rl.config.aliases import current_name, find_alias_hint
from rl.config.fields import (
    ENVIRONMENT_PREFIX,
    PART_PREFIXES,
    TEMPLATE_PREFIX,
    RawValue,
    is_setting,
    nearest_name,
    suggest_setting,
    to_raw_value,
)
from rl.errors import UserError

Flag = tuple[str, RawValue]
ALTERNATIVES = {"reward": "rewards", "rewards": "reward"}  # each replaces the other


def split_flags(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[Flag]]:
    """Return (leading words, flags), each flag with the words that follow it. "-3" is a value; "-x"
    is appended to `problems`.
    """
    words: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            flags.append((name, [value] if equals else []))
        elif (
            token.startswith("-") and token[1:2].isalpha() and token.lower() not in ("-inf", "-nan")
        ):
            problems.append(f"{token}: flags begin with two dashes, like --{token.lstrip('-')}")
            flags.append((token, []))  # takes the words that follow it
        elif flags:
            flags[-1][1].append(token)
        else:
            words.append(token)
    return words, [
        (to_setting_name(name[2:]), RawValue(tuple(values), name))
        for name, values in flags
        if name.startswith("--")
    ]


def split_environment_flags(argv: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Return (settings of the environment as `environment_settings` holds them, other words)."""
    settings: list[tuple[str, list[str]]] = []
    others: list[str] = []
    values = others
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name.startswith(ENVIRONMENT_PREFIX) and name != ENVIRONMENT_PREFIX:
                values = [value] if equals else []
                key = name.removeprefix(ENVIRONMENT_PREFIX).replace("-", "_")
                settings.append((key, values))
                continue
            values = others
        values.append(word)
    return tuple((key, shlex.join(words or ["True"])) for key, words in settings), others


def find_ambiguous_flag(argv: Sequence[str], unknown: Sequence[str], first: str) -> str | None:
    """Return the first of the words `unknown` to argparse that is a flag before the positional
    argument `first`, or None. argparse would take the flag's value for a positional argument.
    """
    before = argv[: argv.index(first)]
    return next((w for w in before if w.startswith("--") and "=" not in w and w in unknown), None)


def parse_arguments(arguments: Mapping[str, Any]) -> list[Flag]:
    """Return the keyword arguments of `rl.train` as flags. Raises UserError for a value that is no
    setting.
    """
    flags = []
    for name, value in _expand_environment(arguments).items():
        if callable(value):
            raise UserError(_describe_callable(name, value))
        if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            raise UserError(
                f"{name} is a list of {len(value)} rows, expected the name of a file: write each "
                f"row as a line of JSON to rows.jsonl, and pass {name}='rows.jsonl'"
            )
        flags.append((to_setting_name(name), to_raw_value(value, f"--{name}")))
    return flags


def _describe_callable(name: str, value: Any) -> str:
    """Return the message for a setting that is a function, a class or another callable object."""
    kind = "class" if isinstance(value, type) else "function"
    known_name = getattr(value, "__name__", None)
    what = f"an object of class {type(value).__name__}"
    if known_name:
        what = f"the {kind} {known_name!r}"
    message = f"{name} is {what}; only reward may be a function of the script"
    if name != "environment":
        return message
    target = known_name if known_name and known_name.isidentifier() else "NAME"
    return f"{message}. Save it in a file, and pass its name, such as {name}='my_file.py:{target}'"


def _expand_environment(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with `environment={"name": ..., key: value}`, the form of a recipe, as
    the name and settings environment.key.
    """
    environment = arguments.get("environment")
    if not isinstance(environment, Mapping):
        return arguments
    if "name" not in environment:
        raise UserError(
            f"environment has the keys {', '.join(map(str, environment))}, expected also 'name': "
            "environment={'name': 'calculator', 'digits': 4}"
        )
    others = {
        f"{ENVIRONMENT_PREFIX}{key}": item for key, item in environment.items() if key != "name"
    }
    return {**arguments, "environment": environment["name"], **others}


def parse_changes(words: Sequence[str], problems: list[str]) -> list[Flag]:
    """Parse the `NAME=VALUE` and `STAGE.NAME=VALUE` words of --change. Several values of a setting
    are in the same word, quoted as for a shell.
    """
    changes = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            problems.append(
                f"--change {word!r}: expected NAME=VALUE, such as learning_rate=1e-4 or "
                "grpo.learning_rate=1e-4"
            )
            continue
        try:
            is_null = value in ("null", "None")
            parts = ("None",) if is_null else tuple(shlex.split(value))
        except ValueError as error:
            problems.append(f"--change {word!r}: {error}")
            continue
        raw = RawValue(parts, f"--change {name}", is_null=is_null)
        changes.append((to_setting_name(name), raw))
    return changes


def list_changed_settings(words: Sequence[str], known: Collection[str] = ()) -> set[str]:
    """Return the settings that the words of --change name, of any stage, and those that these
    replace. `known`: the settings of the run.
    """
    holders = {"environment": "environment_settings", "template": "template"}
    changed = set()
    for key, _ in parse_changes(words, []):
        section, _, name = current_name(key, known).rpartition(".")
        changed.add(holders.get(section.rpartition(".")[2], name))
    return changed | {other for name, other in ALTERNATIVES.items() if name in changed}


def to_setting_name(name: str) -> str:
    """Return a setting's name as a Python identifier. A stage name before a dot stays unchanged."""
    stage, dot, key = name.rpartition(".")
    return stage + dot + key.replace("-", "_")


def resolve_flags(
    flags: Iterable[Flag],
    known: Collection[str],
    problems: list[str],
    *,
    tables: Mapping[str, Collection[str]] | None = None,
    owners: Mapping[str, str] | None = None,
) -> dict[str | None, dict[str, RawValue]]:
    """Return the settings of flags by stage (`--stage.setting`), and under None those for all
    stages. `--no-x` turns x off, and the last of several equal flags counts.

    `known`: the settings of the run. `tables`: those of each stage; None: there are no stages.
    `owners`: the methods that have a setting, for messages.
    """
    split, tables, owners = tables is not None, tables or {}, owners or {}
    resolved: dict[str | None, dict[str, RawValue]] = {stage: {} for stage in (None, *tables)}
    for key, raw in flags:
        of_stage, available = "", known
        is_part = key.startswith(tuple(PART_PREFIXES))
        stages = [name for name in tables if key.startswith(f"{name}.") and not is_part]
        stage = max(stages, key=len) if stages else None
        if stage is not None:
            key, of_stage, available = key[len(stage) + 1 :], f" of stage {stage}", tables[stage]
        elif split and "." in key and not is_part:
            if not tables:
                continue  # the methods are unknown, which is a problem already
            if find_alias_hint(key, known, owners) is None:
                unknown = key.rpartition(".")[0]
                near = nearest_name(unknown, tables)
                hint = f"did you mean {near}?" if near else f"its stages are {', '.join(tables)}"
                problems.append(f"{raw.place}: this run has no stage {unknown!r}; {hint}")
                continue
        key = current_name(key, available)
        if key.startswith(TEMPLATE_PREFIX):
            key = raw.place[len(raw.place) - len(key) :]  # templates distinguish - and _
        if key not in available and key.startswith("no_") and key[3:] in available:
            if raw.words:
                problems.append(f"{raw.place}: takes no value, got {raw.display_text}")
            key, raw = key[3:], RawValue(("False",), raw.place, is_negated=True)
        if is_setting(key, available):
            resolved[stage][key] = raw
            continue
        hint = suggest_setting(key, available, {} if stage else owners, as_flag=stage is None)
        if hint.startswith(" ("):
            of_stage = " of this run"
        problems.append(f"{raw.place}: no such setting{of_stage}{hint}")
    return resolved
