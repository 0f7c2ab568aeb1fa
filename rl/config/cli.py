"""Parse the command line `train.py [METHOD] [RECIPE.yaml] [--flags]` to a `RunConfig`.

Later sources take precedence: a setting's default, a recipe's top level, a recipe's stage, the
flags. A top-level setting or a flag applies to every stage that has the setting, except stages in
which it has no effect (an error if it has no effect in any stage). All mistakes are printed in a
box (exit code 2). This module imports nothing slow, so that help appears at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from rl.config import aliases, format_help
from rl.config.environment_config import ENVIRONMENT_PREFIX, merge_environment_settings
from rl.config.fields import (
    RawValue,
    SettingsError,
    build_settings,
    convert_value,
    drop_unused,
    format_as_flags,
    get_fields,
    nearest_name,
    to_words,
)
from rl.config.flag_parser import ParsedFlag, merge_dotted_flags, split_flags
from rl.config.recipe import RecipeStage
from rl.config.requested_run import (
    RequestedRun,
    list_recipes,
    plan_from_folder,
    plan_from_words,
    relative_path,
)
from rl.config.run_config import MethodEntry, RunConfig, StageConfig
from rl.config.saved_config import group_by_stage, parse_changes
from rl.config.sources import check_two_rewards, drop_replaced

HELP_WORDS = ("-h", "--help")


def _resolve_flags(
    flags: Sequence[ParsedFlag],
    known: Collection[str],
    methods_by_setting: Mapping[str, str],
    problems: list[str],
) -> dict[str, RawValue]:
    """Return flags by setting; `--no-x` turns x off, and the last of several equal flags counts.
    The methods that have a setting are for error messages.
    """
    resolved: dict[str, RawValue] = {}
    for flag in flags:
        key, raw = flag.key, flag.raw
        if key not in known and key.startswith("no_") and key[3:] in known:
            if raw.words:
                problems.append(f"{raw.place}: takes no value, got {raw.display_text}")
            key, raw = key[3:], RawValue(("False",), raw.place)
        if _is_setting(key, known):
            resolved[key] = raw
            continue
        near = nearest_name(key, known)
        hint = f"; did you mean --{near.replace('_', '-')}?" if near else ""
        if key in methods_by_setting:
            hint = f" of this run (it is a setting of {methods_by_setting[key]})"
        hint = aliases.find_alias_hint(key, known, methods_by_setting) or hint
        problems.append(f"{raw.place}: no such setting{hint}")
    return resolved


def _is_setting(key: str, known: Collection[str]) -> bool:
    """Return whether `key` is a setting of the run or of an environment (the environment checks its
    settings later).
    """
    return key in known or (
        key.startswith(ENVIRONMENT_PREFIX) and key != ENVIRONMENT_PREFIX and "environment" in known
    )


def _check_keys(
    keys: Mapping[str, RawValue], known: Collection[str], owner: str, problems: list[str]
) -> None:
    """Append a problem for each key that is not a setting."""
    for key, raw in keys.items():
        if not _is_setting(key, known):
            near = nearest_name(key, known)
            hint = aliases.find_alias_hint(key, known) or (
                f"; did you mean {near}?" if near else ""
            )
            problems.append(f"{raw.place}: no setting of {owner}{hint}")


def _methods_by_setting(methods: Mapping[str, MethodEntry]) -> dict[str, str]:
    """Return, for each setting, the names of the methods that have it."""
    owners: dict[str, list[str]] = {}
    for name, method in methods.items():
        for key in get_fields(method.settings):
            owners.setdefault(key, []).append(name)
    return {key: ", ".join(names) for key, names in owners.items()}


def _variant_settings(method: MethodEntry, variant: RawValue | None) -> dict[str, RawValue]:
    """Return the settings that a variant implies, with the place of `variant`. An unknown variant
    is reported later.
    """
    if variant is None or len(variant.words) != 1:
        return {}
    return {
        key: RawValue(to_words(value), variant.place)
        for key, value in method.variants.get(variant.words[0], {}).items()
    }


def _name_stages(stages: Sequence[RecipeStage]) -> list[str]:
    """Return the stages' names, or their methods' names, numbered if they would repeat."""
    # the class of file.py:Class
    labels = [stage.name or str(stage.method).rpartition(":")[2] for stage in stages]
    return [
        f"{name}-{labels[:i].count(name) + 1}" if labels.count(name) > 1 else name
        for i, name in enumerate(labels)
    ]


def _names_earlier_stage(base_model: RawValue | None, names: Sequence[str]) -> bool:
    """Return whether a stage names an earlier stage as its base model; base_model on the line then
    applies to the first stage only.
    """
    return base_model is not None and len(base_model.words) == 1 and base_model.words[0] in names


def _select_known_stages(
    plan: RequestedRun, methods: Mapping[str, MethodEntry], problems: list[str]
) -> list[RecipeStage]:
    """Return the stages with a known method; append a problem for each other stage."""
    known = []
    for stage in plan.stages:
        if stage.method in methods:
            known.append(stage)
        elif stage.method is not None:
            near = nearest_name(stage.method, methods)
            hint = f"; did you mean {near}?" if near else f" (methods: {', '.join(methods)})"
            problems.append(
                f"{plan.recipe} line {stage.line}: unknown method {stage.method!r}{hint}"
            )
    return known


def read_run(
    argv: Sequence[str], methods: Mapping[str, MethodEntry], default_recipe: Path, options: type
) -> RunConfig:
    """Return the requested run, like `parse_run`. Raises SettingsError with every problem; help
    flags are not handled.
    """
    problems: list[str] = []
    words, flags = split_flags(argv, problems)
    flags = merge_dotted_flags(flags)
    option_table = get_fields(options)
    plan = plan_from_folder(words, flags, option_table) or plan_from_words(
        words, methods, default_recipe, problems
    )
    stages = _select_known_stages(plan, methods, problems)
    tables = _setting_tables(stages, methods, option_table)
    known = {*option_table, *(key for table in tables.values() for key in table)}
    owners = _methods_by_setting(methods)
    # If a method is unknown, so are its settings: then only keys that no method has are problems.
    accepted = known if len(stages) == len(plan.stages) > 0 else {*known, *owners}
    names = _name_stages(stages)
    stage_tables = {
        name: tables[str(stage.method)] for name, stage in zip(names, stages, strict=True)
    }
    command_line = _read_command_line_settings(
        flags, stage_tables, known, accepted, owners, problems
    )
    _check_keys(plan.shared, accepted, " or ".join(tables) or "any method", problems)

    # Settings that may come from a recipe keep their recipe names in messages.
    typed = (command_line.shared if plan.recipe else known) - methods.keys()
    options_value = _build_section(
        options,
        {k: v for k, v in {**plan.shared, **command_line.shared}.items() if k in option_table},
        problems,
        plan,
        typed,
    )
    built = _build_stages(stages, names, plan, command_line, methods, option_table, typed, problems)
    if problems:
        raise SettingsError(problems)
    run_name = (
        options_value.name or plan.folder or (plan.recipe.stem if plan.recipe else built[0].name)
    )
    return RunConfig(
        run_name, tuple(built), options_value, str(plan.recipe) if plan.recipe else None
    )


def _build_stages(
    stages: Sequence[RecipeStage],
    names: Sequence[str],
    plan: RequestedRun,
    command_line: _CommandLineSettings,
    methods: Mapping[str, MethodEntry],
    option_table: Collection[str],
    typed: Collection[str],
    problems: list[str],
) -> list[StageConfig]:
    """Merge the sources of each stage's settings, check them and build the stages."""
    built: list[StageConfig] = []
    used: set[str] = set()
    # A setting for all stages applies to those in which it has an effect; an error if none has.
    unused: dict[str, str] = {}
    for stage, name in zip(stages, names, strict=True):
        method = str(stage.method)
        for key in [key for key in stage.raw_values if key in option_table]:
            problems.append(
                f"{stage.raw_values[key].place}: applies to the whole run; move it to the "
                "recipe's top level"
            )
        stage_values = {
            key: value for key, value in stage.raw_values.items() if key not in option_table
        }
        _check_keys(stage_values, get_fields(methods[method].settings), method, problems)
        merged = _merge_stage(
            stage_values,
            plan,
            command_line,
            name,
            names[: len(built)],
            len(stages),
            methods[method],
        )
        prefix = f"stage {name}: " if len(stages) > 1 else ""
        unused |= {key: f"{prefix}{text}" for key, text in merged.unused.items()}
        used |= merged.values.keys()
        settings = _build_section(
            methods[method].settings, merged.values, problems, plan, typed, prefix
        )
        built.append(StageConfig(method, name, settings))
    problems += [
        *check_two_rewards(command_line.shared),
        *(format_as_flags(text, typed) for key, text in unused.items() if key not in used),
    ]
    return built


def _setting_tables(
    stages: Sequence[RecipeStage],
    methods: Mapping[str, MethodEntry],
    option_table: Mapping[str, Any],
) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of each stage's method by method name. Raises TypeError if a method and
    the run share the name of a setting.
    """
    tables = {str(s.method): get_fields(methods[str(s.method)].settings) for s in stages}
    for method, table in tables.items():
        if both := set(table) & set(option_table):
            raise TypeError(
                f"settings of {method} and of the run share the names {sorted(both)}; flat names "
                "must be unique"
            )
    return tables


@dataclass(frozen=True)
class _CommandLineSettings:
    """Hold the settings of the command line, `--change` included."""

    shared: dict[str, RawValue]  # of every stage that has the setting
    by_stage: Mapping[str, Mapping[str, RawValue]]  # of the stage of this name (--stage.setting)


def _read_command_line_settings(
    flags: Sequence[ParsedFlag],
    stage_tables: Mapping[str, Mapping[str, Any]],
    known: Collection[str],
    accepted: Collection[str],
    owners: Mapping[str, str],
    problems: list[str],
) -> _CommandLineSettings:
    """Return the settings that the flags set.

    `stage_tables`: the settings of each stage by the stage's name. `known`: every setting of the
    run. `accepted`: the settings that cause no problem. `owners`: methods by setting.
    """

    def is_of_one_stage(key: str) -> bool:
        return "." in key and not key.startswith(ENVIRONMENT_PREFIX)

    stage_flags = {flag.key: flag.raw for flag in flags if is_of_one_stage(flag.key)}
    rest = [flag for flag in flags if flag.key not in stage_flags]
    shared = _resolve_flags(rest, accepted, owners, problems)
    if "change" in shared:
        changes = parse_changes(shared["change"].words, problems)
        stage_flags |= {key: raw for key, raw in changes.items() if is_of_one_stage(key)}
        rest = [ParsedFlag(key, raw) for key, raw in changes.items() if key not in stage_flags]
        shared |= _resolve_flags(rest, known, owners, problems)
    by_stage = group_by_stage(stage_flags, list(stage_tables), stage_tables, problems)
    return _CommandLineSettings(shared, by_stage)


@dataclass(frozen=True)
class _MergedStage:
    """Hold a stage's merged settings, and why each of the dropped settings has no effect."""

    values: Mapping[str, RawValue]
    unused: Mapping[str, str]


def _merge_stage(
    stage_values: Mapping[str, RawValue],
    plan: RequestedRun,
    command_line: _CommandLineSettings,
    name: str,
    earlier_names: Sequence[str],
    stage_count: int,
    method: MethodEntry,
) -> _MergedStage:
    """Merge the sources of a stage's settings; later sources take precedence: the variant, the
    recipe's top level, the recipe's stage (`stage_values`), the command line.
    """
    line_values = {
        key: value
        for key, value in command_line.shared.items()
        if key != "base_model" or not _names_earlier_stage(stage_values.get(key), earlier_names)
    }
    line_values |= command_line.by_stage[name]
    stage_values = {**drop_replaced(stage_values, line_values), **command_line.by_stage[name]}
    raw = {
        **drop_replaced(plan.shared, {**stage_values, **line_values}),
        **stage_values,
        **line_values,
    }
    table = get_fields(method.settings)
    merged = merge_environment_settings({k: v for k, v in raw.items() if _is_setting(k, table)})
    implied = {
        k: v for k, v in _variant_settings(method, merged.get("variant")).items() if k not in merged
    }
    # Implied settings of a variant without effect are dropped silently.
    shared = (
        merge_environment_settings({**plan.shared, **line_values}).keys()
        - (stage_values.keys() - line_values.keys())
        if stage_count > 1
        else set()
    )
    spare = {*implied, *shared} - command_line.by_stage[name].keys()
    # Older runs could save settings without effect.
    spare |= (merged.keys() - line_values.keys()) if plan.folder is not None else set()
    merged, unused = drop_unused(method.settings, {**implied, **merged}, spare)
    return _MergedStage(merged, {key: text for key, text in unused.items() if key not in implied})


def override_settings(
    sections: Sequence[Any], words: Sequence[str], script_flags: Collection[str] = ()
) -> tuple[Any, ...]:
    """Return the settings `sections` with the flags in `words` applied.

    `script_flags`: other flags of the calling script. They set nothing here, but an error may
    suggest them for a misspelled flag ("did you mean"). Raises SettingsError if a flag is unknown
    or its value is invalid.
    """
    problems: list[str] = []
    extra_words, flags = split_flags(words, problems)
    problems += [f"{word!r} is not expected: flags begin with two dashes" for word in extra_words]
    classes: list[Any] = [type(section) for section in sections]
    tables = [get_fields(cls) for cls in classes]
    values_by_name = _resolve_flags(
        merge_dotted_flags(flags),
        {*script_flags, *(key for table in tables for key in table)},
        {},
        problems,
    )
    built = []
    for section, table in zip(sections, tables, strict=True):
        section_values = {key: value for key, value in values_by_name.items() if key in table}
        values = {}
        for key, value in section_values.items():
            try:
                values[key] = convert_value(table[key], value)
            except ValueError as error:
                problems.append(str(error))
        try:
            built.append(replace(section, **values) if not problems else section)
        except ValueError as error:
            problems.append(format_as_flags(str(error), table))
    if problems:
        raise SettingsError(problems)
    return tuple(built)


def _build_section(
    cls: type,
    raw_values: Mapping[str, RawValue],
    problems: list[str],
    plan: RequestedRun,
    typed: Collection[str],
    prefix: str = "",
) -> Any:
    """Return `build_settings` of the settings, with names in `typed` written as flags in its
    messages.
    """
    messages: list[str] = []
    built = build_settings(cls, raw_values, messages, prefix)
    problems += [
        p
        if plan.recipe is not None and p.startswith(f"{plan.recipe} line")
        else format_as_flags(p, typed)
        for p in messages
    ]
    return built


def parse_run(
    argv: Sequence[str],
    methods: Mapping[str, MethodEntry],
    default_recipe: Path,
    *,
    options: type,
    environments: Callable[[str | None], None] | None = None,
) -> RunConfig:
    """Return the run that a command line requests.

    `methods`: methods by name. `default_recipe`: the recipe that runs if no word is given; help
    lists the recipes of its folder. `options`: the class of run-level settings (a `RunOptions`).
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
    methods: Mapping[str, MethodEntry],
    default_recipe: Path,
    options: type,
    environments: Callable[[str | None], None] | None,
    everything: bool,
) -> NoReturn:
    """Print the index, or the settings of the named method, recipe or environment; then exit.

    `everything`: print every setting of a method, instead of the most used ones.
    """
    words, flags = split_flags(argv, [])
    named = [flag.raw.words[0] for flag in flags if flag.key == "environment" and flag.raw.words]
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
