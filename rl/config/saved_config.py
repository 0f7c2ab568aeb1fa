"""Read the stages and options of an existing run from its config.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.config.fields import SettingsError, get_saved_values
from rl.config.recipe import RecipeStage, RequestedRun
from rl.config.recorded_files import (
    LAUNCH_FOLDER_KEY,
    find_source_file,
    is_method_address,
    locate_recorded_files,
)
from rl.config.run_config import MethodEntry, RunConfig
from rl.config.sources import merge_run

# options of a single launch, not of the run
_LAUNCH_OPTIONS = (
    "resume",
    "auto_resume",
    "overwrite",
    "output_dir",
    "plan",
    "change",
    "trust_run",
)


def read_saved_run(folder: Path, options: Collection[str]) -> RequestedRun | None:
    """Return the run that config.json in `folder` records, or None if it is not that of a run.

    `options`: the run-level settings that exist today; other saved options are dropped. Unknown
    settings of stages are kept, so that the caller reports them.
    """
    path = folder.expanduser() / "config.json"
    try:
        config = locate_recorded_files(json.loads(path.read_text(encoding="utf-8")))
        requested = _parse_config(config, str(path))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None  # the code that opens the folder reports the problem
    shared = {
        key: raw
        for key, raw in requested.shared.items()
        if key in options and key not in _LAUNCH_OPTIONS
    }
    return (
        replace(requested, shared=shared)
        if requested.stages and isinstance(requested.saved_name, str)
        else None
    )


def load_resolved_config(
    config: Mapping[str, Any],
    methods: Mapping[str, MethodEntry],
    *,
    options: type,
    place: str = "config.json",
) -> RunConfig:
    """Return the run of a saved configuration, the inverse of `resolve_config`. Raises SettingsError for
    methods or settings that no longer exist and for values of a wrong type.
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
            get_saved_values(stage["settings"], f"{place} stage {stage['name']}"),
        )
        for stage in config["stages"]
    ]
    return RequestedRun(
        stages, get_saved_values(config["options"], place), saved_name=config["name"]
    )


def check_resumed_code(
    folder: Path, stages: Sequence[RecipeStage], replaced: Collection[str]
) -> None:
    """Raise SettingsError if code that config.json in `folder` names lies outside of the current
    folder, and the run was started in another folder: resuming the run would import it.

    `replaced`: the settings that the command line names instead.
    """
    path = folder.expanduser() / "config.json"
    start = json.loads(path.read_text(encoding="utf-8")).get(LAUNCH_FOLDER_KEY)
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
