"""Read the stages and options of an existing run for `train.py --resume --output-dir RUN`, and
parse the values of --change.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.config.aliases import current_name, current_settings, find_alias_hint
from rl.config.fields import RawValue, SettingsError, nearest_name, to_words
from rl.config.recipe import RecipeStage
from rl.config.recorded_files import (
    LAUNCH_FOLDER_KEY,
    find_source_file,
    is_method_address,
    locate_recorded_files,
)

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


def read_saved_run(
    folder: Path, options: Collection[str]
) -> tuple[str, list[RecipeStage], dict[str, RawValue]] | None:
    """Return (name, stages, run-level options) from config.json in `folder`, or None if it is not
    that of a run.

    `options`: the run-level settings that exist today; other saved options are dropped. Unknown
    settings of stages are kept, so that the caller reports them.
    """
    path = folder.expanduser() / "config.json"
    try:
        config = locate_recorded_files(json.loads(path.read_text(encoding="utf-8")))
        stages = [_saved_stage(stage, path) for stage in config["stages"]]
        shared = {
            k: _saved_value(k, v, path)
            for k, v in config["options"].items()
            if k in options and k not in _LAUNCH_OPTIONS
        }
        name = config["name"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None  # the code that opens the folder reports the problem
    return (name, stages, shared) if stages and isinstance(name, str) else None


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


def _saved_stage(stage: Mapping[str, Any], path: Path) -> RecipeStage:
    """Return a saved stage as a `RecipeStage`."""
    values = {
        key: _saved_value(key, value, path)
        for key, value in current_settings(stage["settings"]).items()
    }
    return RecipeStage(stage["method"], stage["name"], 0, values)


def _saved_value(key: str, value: Any, path: Path) -> RawValue:
    """Return a saved JSON value as `RawValue`."""
    return RawValue(to_words(value), f"{path}, {key}", is_null=value is None)


def parse_changes(words: Sequence[str], problems: list[str]) -> dict[str, RawValue]:
    """Parse `NAME=VALUE` and `STAGE.NAME=VALUE` words to values by name. Several values of a
    setting are in the same word, quoted as for a shell.
    """
    changed = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            problems.append(
                f"--change {word!r}: expected NAME=VALUE, such as learning_rate=1e-4 or "
                "grpo.learning_rate=1e-4"
            )
            continue
        try:
            parts = tuple(shlex.split(value))
        except ValueError as error:
            problems.append(f"--change {word!r}: {error}")
            continue
        changed[to_setting_name(name)] = RawValue(
            parts, f"--change {name}", is_null=value in ("null", "None")
        )
    return changed


def to_setting_name(name: str) -> str:
    """Return a setting's name as a Python identifier under its current name. A stage name before a
    dot stays unchanged.
    """
    stage, dot, key = name.rpartition(".")
    return current_name(stage + dot + re.sub("-", "_", key))


def group_by_stage(
    stage_flags: Mapping[str, RawValue],
    names: Sequence[str],
    tables: Mapping[str, Collection[str]],
    problems: list[str],
) -> dict[str, dict[str, RawValue]]:
    """Return the `stage.setting` keys grouped by stage. `tables` holds the settings of each stage;
    mistakes are appended to `problems`.
    """
    by_stage: dict[str, dict[str, RawValue]] = {name: {} for name in names}
    for key, raw in stage_flags.items():
        stage, _, setting = key.rpartition(".")
        if stage not in by_stage:
            known = {setting for table in tables.values() for setting in table}
            if (alias_hint := find_alias_hint(key, known)) is not None:
                problems.append(f"{raw.place}: no such setting{alias_hint}")
                continue
            near = nearest_name(stage, names)
            hint = f"did you mean {near}?" if near else f"its stages are {', '.join(names)}"
            problems.append(f"{raw.place}: this run has no stage {stage!r}; {hint}")
            continue
        if (
            setting not in tables[stage]
            and setting.startswith("no_")
            and setting[3:] in tables[stage]
            and not raw.words
        ):
            setting, raw = setting[3:], RawValue(("False",), raw.place)
        if setting not in tables[stage]:
            near = nearest_name(setting, tables[stage])
            problems.append(
                f"{raw.place}: no such setting of stage {stage}"
                + (f"; did you mean {near}?" if near else "")
            )
            continue
        by_stage[stage][setting] = raw
    return by_stage
