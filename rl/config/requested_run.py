"""Read which stages a run has, and their settings: from the words of a command line, a recipe, or
the config.json of an existing run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.config import aliases
from rl.config.fields import (
    RawValue,
    SettingField,
    SettingsError,
    convert_value,
    get_saved_values,
    nearest_name,
)
from rl.config.flag_parser import Flag
from rl.config.recipe import RecipeStage, RequestedRun, read_recipe
from rl.config.recorded_files import (
    LAUNCH_FOLDER_KEY,
    find_source_file,
    is_method_address,
    locate_recorded_files,
)
from rl.config.run_config import LAUNCH_OPTIONS, Methods, RunConfig
from rl.config.sources import merge_run


def relative_path(path: Path) -> Path:
    """Return `path` relative to the working folder if it lies below it, as a user would type it."""
    return (
        path.relative_to(Path.cwd())
        if path.is_absolute() and path.is_relative_to(Path.cwd())
        else path
    )


def list_recipes(folder: Path) -> list[Path]:
    """Return the recipe files in `folder`, sorted."""
    return sorted(
        path for path in [*folder.glob("*.yaml"), *folder.glob("*.yml")] if path.is_file()
    )


def _unknown_word_message(word: str, methods: Collection[str], folder: Path) -> str:
    """Return the problem text for a word that is neither a method nor a recipe."""
    folders = [place for place in (folder, Path(word).parent) if os.path.isdir(place)]
    paths = (path for place in folders for path in list_recipes(place))
    recipes = [str(path) for path in {path.resolve(): path for path in paths}.values()]
    by_stem = {Path(name).stem: name for name in recipes}

    def find_recipe(stem: str) -> str | None:
        return by_stem.get(nearest_name(stem, by_stem) or "")

    if word.endswith((".yaml", ".yml")):
        near = find_recipe(Path(word).stem)
        what = f"no recipe file {word!r}"
        known = f"recipes: {', '.join(recipes) or f'none in {folder}'}"
    elif "=" in word:
        hint = aliases.find_alias_hint(word.partition("=")[0]) or ": a setting is --name value"
        return f"{word!r} is no method and no recipe{hint}"
    else:
        near = nearest_name(word.lower(), methods) or find_recipe(word)
        what = f"unknown method {word!r}"
        known = f"methods: {', '.join(methods)}; a recipe's name ends in .yaml"
    return what + (f"; did you mean {near}?" if near else f" ({known})")


def read_resumed_run(
    words: Sequence[str], flags: Sequence[Flag], options: Mapping[str, SettingField]
) -> RequestedRun | None:
    """Return the saved run that --output-dir and --resume (or --auto-resume) name, if no word names
    a method or recipe and the folder has the config.json of a run; else None. Raises SettingsError
    if resuming the run would import code of another folder.

    `options`: the run-level settings that exist today.
    """
    values = dict(flags)

    def is_on(name: str) -> bool:
        if name not in values or name not in options:
            return False
        try:
            return convert_value(options[name], values[name]) is True
        except ValueError:  # reported with the other settings
            return False

    output_dir = values.get("output_dir", RawValue((), ""))
    if words or not (is_on("resume") or is_on("auto_resume")) or len(output_dir.words) != 1:
        return None
    path = Path(os.path.expanduser(output_dir.words[0]), "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        requested = _parse_config(locate_recorded_files(config), str(path))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None  # the code that opens the folder reports the problem
    if not requested.stages or not isinstance(requested.saved_name, str):
        return None
    if not is_on("trust_run"):
        _check_resumed_code(path, config.get(LAUNCH_FOLDER_KEY), requested.stages, values)
    # Saved options that no longer exist are dropped; unknown settings of stages are reported later.
    shared = {
        key: raw
        for key, raw in requested.shared.items()
        if key in options and key not in LAUNCH_OPTIONS
    }
    return replace(requested, shared=shared)


def parse_leading_words(
    words: Sequence[str],
    methods: Methods,
    default_recipe: Path,
    problems: list[str],
) -> RequestedRun:
    """Return the run that the leading words request: a method, a recipe, or both."""
    remaining = list(words)
    method = remaining.pop(0) if remaining and remaining[0] in methods else None
    is_file = (
        bool(remaining)
        and remaining[0].endswith((".yaml", ".yml"))
        and Path(remaining[0]).is_file()
    )
    path = Path(remaining.pop(0)) if is_file else default_recipe if not words else None
    for word in remaining:
        if word in methods or (word.endswith((".yaml", ".yml")) and Path(word).is_file()):
            problems.append(
                f"{word!r} is not expected: the line holds at most a method, then at most a "
                "recipe, then --flags"
            )
        else:
            problems.append(_unknown_word_message(word, list(methods), default_recipe.parent))
    if path is None:
        return RequestedRun([RecipeStage(method)] if method else [])
    if not path.is_file():
        problems.append(
            f"no method on the line, and the default recipe {path} does not exist; name a method: "
            f"{', '.join(methods)}"
        )
        return RequestedRun()
    before = len(problems)
    recipe = read_recipe(path, problems)
    # An unreadable file has no stages; a second problem about that would mislead.
    if recipe.stages or len(problems) == before:
        _check_method(recipe, method, problems)
    return recipe


def _check_method(recipe: RequestedRun, method: str | None, problems: list[str]) -> None:
    """Check the method on the line against the recipe, or set it as that of the recipe."""
    path, stages = recipe.recipe, recipe.stages
    if not stages:
        if method is None:
            problems.append(
                f"{path}: no `method:` and no `stages:`; add one, or put the method before the "
                "recipe"
            )
        else:
            stages.append(RecipeStage(method))
    elif method is not None and len(stages) > 1:
        names = ", ".join(str(stage.method) for stage in stages)
        problems.append(
            f"{path} runs {len(stages)} stages ({names}); leave out {method!r} before it"
        )
    elif method is not None and stages[0].method != method:
        problems.append(
            f"{path} is a recipe for {stages[0].method}, not {method}; leave out {method!r} before "
            "it"
        )


def load_resolved_config(
    config: Mapping[str, Any],
    methods: Methods,
    *,
    options: type,
    place: str = "config.json",
) -> RunConfig:
    """Return the run of a saved configuration, the inverse of `resolve_config`.

    Raises SettingsError for methods or settings that no longer exist and for values of a wrong
    type.
    """
    missing = [key for key in ("name", "options", "stages") if key not in config]
    if missing:
        raise SettingsError(
            [f"{place}: no key {key!r}; is this file the config.json of a run?" for key in missing]
        )
    requested = replace(_parse_config(config, place), place=place)
    return replace(merge_run(requested, (), methods, options, []), recipe=config.get("recipe"))


def _parse_config(config: Mapping[str, Any], place: str) -> RequestedRun:
    """Return the run that a config.json at `place` records."""
    stages = [
        RecipeStage(
            stage["method"],
            stage["name"],
            place,
            get_saved_values(
                aliases.drop_replaced_pairs(stage["settings"]), f"{place} stage {stage['name']}"
            ),
        )
        for stage in config["stages"]
    ]
    return RequestedRun(
        stages, get_saved_values(config["options"], place), saved_name=config["name"]
    )


def _check_resumed_code(
    path: Path, start: Any, stages: Sequence[RecipeStage], replaced: Collection[str]
) -> None:
    """Raise SettingsError if code that the config.json at `path` names lies outside of the current
    folder, and the run was started in another folder, `start`: resuming the run would import it.

    `replaced`: the settings that the command line names instead.
    """
    here = Path.cwd().resolve()
    if not isinstance(start, str) or Path(start).resolve() == here:
        return
    names = {"environment", "reward", "rewards"}.difference(replaced)
    if "reward" not in names or "rewards" not in names:  # each replaces the other
        names -= {"reward", "rewards"}
    for stage in stages:
        values = [value for key, value in stage.raw_values.items() if key in names]
        for word in (stage.method or "", *(word for value in values for word in value.words)):
            file = find_source_file(word) if is_method_address(word) else None
            if file is not None and not file.is_relative_to(here):
                raise SettingsError(
                    [
                        f"{path} names {word}, which is {file}: not in the current folder, and "
                        f"importing it runs it. Change to {start}, where the run was started, or "
                        "give --trust-run if you know that file"
                    ]
                )
