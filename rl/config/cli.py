"""Parse the command line `train.py [METHOD] [RECIPE.yaml] [--flags]` to a `RunConfig`.

rl.config.sources merges the settings. All mistakes are printed in a box (exit code 2). This module
imports nothing slow, so that help appears at once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from rl.config import format_help
from rl.config.fields import (
    SettingsError,
    Source,
    build_settings,
    flatten_settings,
    get_fields,
    get_saved_values,
    nearest_name,
    to_raw_value,
)
from rl.config.flag_parser import parse_arguments, parse_changes, resolve_flags, split_flags
from rl.config.requested_run import (
    list_recipes,
    parse_leading_words,
    read_resumed_run,
    relative_path,
)
from rl.config.run_config import Methods, RunConfig
from rl.config.sources import merge_run, merge_sources

HELP_WORDS = ("-h", "--help")


def read_run(
    argv: Sequence[str],
    methods: Methods,
    default_recipe: Path,
    options: type,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> RunConfig:
    """Return the requested run, like `parse_run`. Raises SettingsError with every problem; help
    flags are not handled.

    `arguments`: settings as Python values, which take precedence over the flags in `argv`.
    """
    problems: list[str] = []
    words, flags = split_flags(argv, problems)
    flags += parse_arguments(arguments)
    requested = read_resumed_run(words, flags, get_fields(options)) or parse_leading_words(
        words, methods, default_recipe, problems
    )
    changes = dict(flags).get("change")
    if changes is not None:
        flags += parse_changes(changes.words, problems)
    return merge_run(requested, flags, methods, options, problems)


def override_settings(
    sections: Sequence[Any],
    words: Sequence[str],
    script_flags: Mapping[str, Any] = MappingProxyType({}),
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, ...]:
    """Return the settings `sections` with the values of `overrides`, and the flags in `words` over
    them. Settings of `sections` that then have no effect return to their defaults.

    `script_flags`: values of the calling script's own flags; None: the settings decide. They set
    nothing here, but an error may suggest them for a misspelled flag ("did you mean"). Raises
    SettingsError if a flag is unknown, its value is invalid, or the script would ignore it, as its
    own flag in another spelling.
    """
    problems: list[str] = []
    extra_words, flags = split_flags(words, problems)
    problems += [f"{word!r} is not expected: flags begin with two dashes" for word in extra_words]
    classes: list[Any] = [type(section) for section in sections]
    table = {key for cls in classes for key in get_fields(cls)}
    known = {*script_flags, *table}
    flag_values = resolve_flags(flags, known, problems)[None]
    for key, raw in [*flag_values.items()]:
        is_read = key in table and script_flags.get(key) is None and not raw.is_negated
        if key in script_flags and not is_read:
            flag = f"{'-' if len(key) == 1 else '--'}{key.replace('_', '-')}"
            hint = f"; did you mean {flag}?" if flag != raw.place else ""
            problems.append(f"{raw.place}: no such setting{hint}")
            del flag_values[key]
    changed = {name: to_raw_value(value, f"--{name}") for name, value in overrides.items()}
    built = []
    for section, cls in zip(sections, classes, strict=True):
        values = get_saved_values(flatten_settings(section), cls.__name__)
        layers = {Source.TOP_LEVEL: values, Source.STAGE: changed, Source.FLAG: flag_values}
        merged = merge_sources(layers, get_fields(cls))
        saved = [key for key, raw in merged.items() if raw.sources == {Source.TOP_LEVEL}]
        built.append(build_settings(cls, merged, problems, droppable=saved, flags=known))
    if problems:
        raise SettingsError(problems)
    return tuple(built)


def parse_run(
    argv: Sequence[str],
    methods: Methods,
    default_recipe: Path,
    *,
    options: type,
    environments: Callable[[str | None], None] | None = None,
) -> RunConfig:
    """Return the run that a command line requests.

    `methods`: methods by name. `default_recipe`: the recipe that runs if no word is given; help
    lists the recipes of its folder. `options`: the class of run-level settings.
    `environments`: prints the help of the named environment, or the list of environments (None).

    Help is printed with exit code 0, mistakes in a box on stderr with exit code 2. With several
    processes (RANK is set), only rank 0 prints.
    """
    default_recipe = relative_path(default_recipe)
    try:
        if any(token in HELP_WORDS for token in argv):
            everything, rest = _split_help_words(argv)
            _print_help(rest, methods, default_recipe, options, environments, everything)
        return read_run(argv, methods, default_recipe, options)
    except SettingsError as error:
        # A set of names: `in methods` would import a user's module again.
        named = [word for word in split_flags(argv, [])[0] if word in {*methods}]
        format_help.exit_with_problems(
            error.problems, see=" ".join(["python train.py", *named[:1], "--help"])
        )


def parse_script(parser: argparse.ArgumentParser, outcome: str) -> argparse.Namespace:
    """Return the arguments of a script that takes no settings of train.py. Unknown flags, with the
    nearest names, are printed in a box titled `outcome`.
    """
    flags = [flag for action in parser._actions for flag in action.option_strings]
    names = [flag[2:] for flag in flags if flag.startswith("--")]
    problems = []
    words = list(itertools.takewhile(lambda word: word != "--", sys.argv[1:]))
    wants_help = "-h" in words or "--help" in words
    for word in [] if wants_help else words:
        name = word.partition("=")[0]
        # argparse takes a word with a space for a value, and accepts abbreviations
        is_flag = name.startswith("--") and " " not in word
        if is_flag and not any(known.startswith(name[2:]) for known in names):
            near = nearest_name(name[2:], names)
            problems.append(f"{name}: no such flag" + (f"; did you mean --{near}?" if near else ""))
    if problems:
        see = f"python {parser.prog} --help"
        format_help.exit_with_problems(problems, see=see, outcome=outcome)
    return parser.parse_args()


# --------------------------------------------------------------------------------------------- help


def _split_help_words(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Return (whether `--help all` is requested, the other words)."""
    everything, rest, after_help = False, list[str](), False
    for token in argv:
        if after_help and token == "all":
            everything = True
        elif token not in HELP_WORDS:
            rest.append(token)
        after_help = token in HELP_WORDS
    return everything, rest


def _print_help(
    argv: Sequence[str],
    methods: Methods,
    default_recipe: Path,
    options: type,
    environments: Callable[[str | None], None] | None,
    everything: bool,
) -> NoReturn:
    """Print the index, or the settings of the named method, recipe or environment; then exit.

    `everything`: print every setting of a method, instead of the most used ones.
    """
    words, flags = split_flags(argv, [])
    named = [raw.words[0] for key, raw in flags if key == "environment" and raw.words]
    pages: list[tuple[str, Any, Any]] = []
    if len(words) == 1 and words[0] in methods:
        pages = [(words[0], None, None)]
    elif words:
        run = read_run(words, methods, default_recipe, options)
        pages = [(stage.method, stage.settings, run.options) for stage in run.stages]
        environments_named = [
            getattr(getattr(stage.settings, "env", None), "environment", None)
            for stage in run.stages
        ]
        named = [name for name in dict.fromkeys(environments_named) if name is not None]
    if os.environ.get("RANK", "0") == "0":
        with format_help.ignore_closed_stdout():
            for method, settings, options_value in pages:
                show = (
                    format_help.print_method_help if everything else format_help.print_used_settings
                )
                show(method, methods[method], options, settings, options_value)
            if not pages:
                format_help.print_index(
                    methods, default_recipe, list_recipes(default_recipe.parent)
                )
            if environments is not None:
                for name in [*named, *([] if pages else [None])]:
                    environments(name)
    raise SystemExit(0)
