"""Merge the sources of a run's settings into one mapping, and validate it.

Later sources take precedence: a setting's default, a variant, a recipe's top level, a recipe's
stage (or that of a saved run), the flags, the flags of a stage. A top-level setting or a flag
applies to every stage that has the setting, except stages in which it has no effect (an error if it
has no effect in any stage).
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.config.aliases import current_name
from rl.config.fields import (
    ENVIRONMENT_PREFIX,
    PART_PREFIXES,
    RawValue,
    RawValues,
    SettingsError,
    Source,
    build_settings,
    check_names,
    format_as_flags,
    get_fields,
    is_setting,
    nearest_name,
    to_raw_value,
)
from rl.config.flag_parser import ALTERNATIVES, Flag, resolve_flags
from rl.config.recipe import RecipeStage, RequestedRun
from rl.config.run_config import MethodEntry, Methods, RunConfig, StageConfig

_OF_ALL_STAGES = frozenset({Source.TOP_LEVEL, Source.FLAG})


def merge_sources(
    layers: Mapping[Source, RawValues], known: Collection[str]
) -> dict[str, RawValue]:
    """Return the value of each setting in `known` with its source; later layers take precedence.

    The `environment.NAME` keys of a layer are added to environment_settings, and `template.NAME` to
    template, those of earlier layers included; environment_settings and template themselves replace
    all earlier ones.
    """
    merged: dict[str, RawValue] = {}
    for source, layer in layers.items():
        values = {
            key: replace(raw, sources=frozenset({source}))
            for key, raw in layer.items()
            if is_setting(key, known)
        }
        parts = {
            prefix: {key: values.pop(key) for key in [*values] if key.startswith(prefix)}
            for prefix in PART_PREFIXES
        }
        merged = {k: raw for k, raw in merged.items() if ALTERNATIVES.get(k) not in layer} | values
        for prefix, name in PART_PREFIXES.items():
            if parts[prefix]:
                merged[name] = _add_parts(merged.get(name), prefix, parts[prefix])
    return merged


def _add_parts(before: RawValue | None, prefix: str, parts: RawValues) -> RawValue:
    """Return a setting of pairs with its parts added, such as environment.NAME, in the place of
    earlier ones of the same name.
    """
    raw_values = [*([before] if before else []), *parts.values()]
    words = before.words if before else ()
    # An odd number of words is an error, which is reported later.
    pairs: dict[str, tuple[str, ...]] = {
        name: (value,) for name, value in zip(words[::2], words[1::2], strict=False)
    }
    odd = words[len(words) // 2 * 2 :]
    for key, raw in parts.items():
        value = raw.words or ("true",)
        if prefix == ENVIRONMENT_PREFIX:  # a single word, which the environment splits
            value = (shlex.join(raw.words or ("True",)),)
        pairs.pop(name := key.removeprefix(prefix), None)  # the new pair is the last
        pairs[name] = value
    words = (*odd, *(word for name, value in pairs.items() for word in (name, *value)))
    place = ", ".join(raw.place for raw in raw_values)
    sources = frozenset[Source]().union(*(raw.sources for raw in raw_values))
    return RawValue(words, place, sources=sources)


def merge_run(
    requested: RequestedRun,
    flags: Iterable[Flag],
    methods: Methods,
    options: type,
    problems: list[str],
) -> RunConfig:
    """Return the requested run with the flags over it. Raises SettingsError with `problems` and
    every further mistake.
    """
    stages = _select_known_stages(requested.stages, methods, problems)
    classes: dict[str | None, type] = {None: options}
    tables = {}
    for name, stage in stages.items():
        classes[name] = methods[str(stage.method)].Settings
        tables[name] = get_fields(classes[name])
        current = _use_current_names(stage.raw_values, tables[name], problems)
        stages[name] = replace(stage, raw_values=current)
    option_table = get_fields(options)
    known = {*option_table, *(key for table in tables.values() for key in table)}
    owners = _list_owners(methods)
    # If a method is unknown, so are its settings: then only keys that no method has are problems.
    accepted = known if len(stages) == len(requested.stages) > 0 else known | owners.keys()
    shared = _use_current_names(requested.shared, accepted, problems)
    requested = replace(requested, shared=shared)
    flag_values = resolve_flags(flags, accepted, problems, tables=tables, owners=owners)
    names = dict.fromkeys(str(stage.method) for stage in stages.values())
    check_names(requested.shared, accepted, " or ".join(names) or "any method", problems, owners)
    for name, stage in stages.items():
        _check_stage(stage, tables[name], option_table, problems, owners)

    layers = {Source.TOP_LEVEL: requested.shared, Source.FLAG: flag_values[None]}
    merged: dict[str | None, dict[str, RawValue]] = {None: merge_sources(layers, option_table)}
    for name, stage in stages.items():
        method = methods[str(stage.method)]
        merged[name] = _merge_stage(requested, stage, method, flag_values, name, [*merged])
    # Settings that may come from a recipe keep their recipe names in messages.
    flag_names = flag_values[None].keys() if requested.recipe or requested.place else known
    built = _build_settings(classes, merged, requested, flag_names - methods.keys(), problems)
    problems += _check_two_rewards(flag_values[None])
    if problems:
        raise SettingsError(problems)
    return _create_run(requested, stages, built)


def _create_run(
    requested: RequestedRun, stages: Mapping[str, RecipeStage], built: Mapping[str | None, Any]
) -> RunConfig:
    """Return the run of the stages, with the settings `built` of each (None: of the run)."""
    run = [StageConfig(str(stage.method), name, built[name]) for name, stage in stages.items()]
    default_name = requested.saved_name or (
        requested.recipe.stem if requested.recipe else run[0].name
    )
    recipe = str(requested.recipe) if requested.recipe else None
    return RunConfig(built[None].name or default_name, tuple(run), built[None], recipe)


def _select_known_stages(
    stages: Sequence[RecipeStage], methods: Methods, problems: list[str]
) -> dict[str, RecipeStage]:
    """Return the stages with a known method by name: their own, or their method's, numbered if it
    would repeat. Append a problem for each other stage.
    """
    known = []
    for stage in stages:
        if stage.method in methods:
            known.append(stage)
        elif stage.method is not None:
            near = nearest_name(stage.method, methods)
            hint = f"; did you mean {near}?" if near else f" (methods: {', '.join(methods)})"
            problems.append(f"{stage.place}: unknown method {stage.method!r}{hint}")
    # the class of file.py:Class
    labels = [stage.name or str(stage.method).rpartition(":")[2] for stage in known]
    named: dict[str, RecipeStage] = {}
    for label, stage in zip(labels, known, strict=True):
        name, number = label, 0
        while labels.count(label) > 1 and (name in labels or name in named):
            number += 1
            name = f"{label}-{number}"
        named[name] = stage
    return named


def _use_current_names(
    raw_values: RawValues, known: Collection[str], problems: list[str]
) -> dict[str, RawValue]:
    """Return the values under the current names of their settings, except the `known` settings.
    Append a problem for a former name beside the current one.
    """
    current: dict[str, RawValue] = {}
    for written, raw in raw_values.items():
        key = current_name(written, known)
        if key in current:
            former = next(n for n in raw_values if n != key and current_name(n, known) == key)
            place = raw.place.rpartition(", ")[0]
            problems.append(f"{place}: {former} and {key} are the same setting; keep {key}")
            continue
        current[key] = raw
    return current


def _list_owners(methods: Methods) -> dict[str, str]:
    """Return, for each setting, the names of the methods that have it."""
    owners: dict[str, list[str]] = {}
    for name, method in methods.items():
        for key in get_fields(method.Settings):
            owners.setdefault(key, []).append(name)
    return {key: ", ".join(names) for key, names in owners.items()}


def _check_stage(
    stage: RecipeStage,
    table: Collection[str],
    option_table: Collection[str],
    problems: list[str],
    owners: Mapping[str, str],
) -> None:
    """Append a problem for each setting of a stage that is of the whole run or unknown. Raises
    TypeError if the method and the run share the name of a setting.
    """
    if both := set(table) & set(option_table):
        raise TypeError(
            f"settings of {stage.method} and of the run share the names {sorted(both)}; flat names "
            "must be unique"
        )
    for key in [key for key in stage.raw_values if key in option_table]:
        problems.append(
            f"{stage.raw_values[key].place}: applies to the whole run; move it to the recipe's top "
            "level"
        )
    known = {key: raw for key, raw in stage.raw_values.items() if key not in option_table}
    check_names(known, table, str(stage.method), problems, owners)


def _merge_stage(
    requested: RequestedRun,
    stage: RecipeStage,
    method: MethodEntry,
    flag_values: Mapping[str | None, RawValues],
    name: str,
    earlier_names: Collection[str | None],
) -> dict[str, RawValue]:
    """Return the settings of a stage from all sources."""
    flags = dict(flag_values[None])
    base_model = stage.raw_values.get("base_model")
    if base_model is not None and base_model.words in [(name,) for name in earlier_names]:
        flags.pop("base_model", None)  # it applies to the first stage only
    layers = {
        Source.TOP_LEVEL: requested.shared,
        Source.STAGE: stage.raw_values,
        Source.FLAG: flags,
        Source.STAGE_FLAG: flag_values[name],
    }
    merged = merge_sources(layers, get_fields(method.Settings))
    variant = merged.get("variant")
    # A saved run has the settings of its variant. An unknown variant is reported later.
    if variant is None or len(variant.words) != 1 or requested.saved_name is not None:
        return merged
    implied = {
        key: replace(to_raw_value(value, variant.place), sources=frozenset({Source.VARIANT}))
        for key, value in method.variants.get(variant.words[0], {}).items()
    }
    return implied | merged


def _build_settings(
    classes: Mapping[str | None, type],
    merged: Mapping[str | None, RawValues],
    requested: RequestedRun,
    flag_names: Collection[str],
    problems: list[str],
) -> dict[str | None, Any]:
    """Return the settings of each stage, and those of the run under None.

    Settings without effect are left out: those that a variant implies, those of a saved run (older
    runs could save them), and in a run of several stages those for all stages, which are a problem
    if they have no effect in any stage.
    """
    built: dict[str | None, Any] = {}
    used: set[str] = set()
    unused: dict[str, str] = {}
    for name, values in merged.items():
        # a setting for all stages applies to those in which it has an effect
        shared_sources = (
            _OF_ALL_STAGES if name is not None and len(classes) > 2 else frozenset[Source]()
        )
        label = f"stage {name}" if name is not None and (shared_sources or requested.place) else ""
        prefix = f"{requested.place} {label}".strip()
        prefix += ": " if prefix else ""
        dropped: dict[str, str] = {}
        droppable_sources = {Source.VARIANT, *shared_sources}
        if requested.saved_name is not None:
            droppable_sources |= {Source.TOP_LEVEL, Source.STAGE}
        droppable = [key for key, raw in values.items() if raw.sources <= droppable_sources]
        built[name] = build_settings(
            classes[name],
            values,
            problems,
            prefix,
            droppable=droppable,
            unused=dropped,
            flags=flag_names,
        )
        used |= values.keys() - dropped.keys()
        unused |= {
            key: prefix + text
            for key, text in dropped.items()
            if values[key].sources & shared_sources
        }
    problems += [
        format_as_flags(text, flag_names) for key, text in unused.items() if key not in used
    ]
    return built


def _check_two_rewards(flag_values: RawValues) -> list[str]:
    """Return a problem if the line sets both rewards and reward to its default value. The settings
    class cannot detect this case, because the default looks like no value.
    """
    if flag_values.keys() >= ALTERNATIVES.keys() and flag_values["reward"].words == (
        "exact_match",
    ):
        return [
            "--reward exact_match has no effect: --rewards replaces it; add it to rewards with its "
            "weight"
        ]
    return []
