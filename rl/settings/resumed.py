"""What a run's folder asks for: the words of `train.py --resume --output-dir RUN`, and settings
changed on the way with --change.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.settings.fields import Given, nearest, words_of
from rl.settings.other_words import current_name, current_settings
from rl.settings.recipe import RecipeStage

# of one start, not of the run
_HOW = ("resume", "auto_resume", "overwrite", "output_dir", "plan", "change")


def read_folder(
    folder: Path, options: Collection[str]
) -> tuple[str, list[RecipeStage], dict[str, Given]] | None:
    """(name, stages, options of the run) as the config.json in `folder` has them; None where it
    holds no run's.

    Settings that there are no more (`options`: those of a run that there are) are left to be found
    as unknown.
    """
    path = folder.expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        stages = [_stage(stage, path) for stage in config["stages"]]
        shared = {
            k: _given(k, v, path)
            for k, v in config["options"].items()
            if k in options and k not in _HOW
        }
        name = config["name"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None  # what is wrong with it is told where the folder is opened
    return (name, stages, shared) if stages and isinstance(name, str) else None


def _stage(stage: Mapping[str, Any], path: Path) -> RecipeStage:
    values = {
        key: _given(key, value, path) for key, value in current_settings(stage["settings"]).items()
    }
    return RecipeStage(stage["method"], stage["name"], 0, values)


def _given(key: str, value: Any, path: Path) -> Given:
    return Given(words_of(value), f"{path}, {key}", is_null=value is None)


def changes(words: Sequence[str], problems: list[str]) -> dict[str, Given]:
    """`NAME=VALUE` and `STAGE.NAME=VALUE` by name; several values of one setting in one word, as a
    shell quotes them.
    """
    changed = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            problems.append(
                f"--change {word!r}: NAME=VALUE is expected, such as learning_rate=1e-4 or grpo.learning_rate=1e-4"
            )
            continue
        try:
            parts = tuple(shlex.split(value))
        except ValueError as error:
            problems.append(f"--change {word!r}: {error}")
            continue
        changed[plain(name)] = Given(parts, f"--change {name}", is_null=value in ("null", "None"))
    return changed


def plain(name: str) -> str:
    """A setting's name as Python has it; what stands before a dot is a stage's, and stays."""
    stage, dot, key = name.rpartition(".")
    return current_name(stage + dot + re.sub("-", "_", key))


def of_stages(
    found: Mapping[str, Given],
    names: Sequence[str],
    tables: Mapping[str, Collection[str]],
    problems: list[str],
) -> dict[str, dict[str, Given]]:
    """`stage.setting` keys by stage. `tables`: the settings of each stage."""
    by_stage: dict[str, dict[str, Given]] = {name: {} for name in names}
    for key, raw in found.items():
        stage, _, setting = key.rpartition(".")
        if stage not in by_stage:
            near = nearest(stage, names)
            hint = f"did you mean {near}?" if near else f"its stages are {', '.join(names)}"
            problems.append(f"{raw.place}: this run has no stage {stage!r}; {hint}")
            continue
        if (
            setting not in tables[stage]
            and setting.startswith("no_")
            and setting[3:] in tables[stage]
            and not raw.words
        ):
            setting, raw = setting[3:], Given(("False",), raw.place)
        if setting not in tables[stage]:
            near = nearest(setting, tables[stage])
            problems.append(
                f"{raw.place}: no such setting of stage {stage}"
                + (f"; did you mean {near}?" if near else "")
            )
            continue
        by_stage[stage][setting] = raw
    return by_stage
