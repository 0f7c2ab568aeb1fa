"""Group the seeds of a run, and average their metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from rl.config import CHANGEABLE_OPTIONS, CHANGEABLE_SETTINGS

_MAX_VALUE = 1e300  # of which a mean over runs is a float


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all stages of a run, and the options that affect it, by one name
    each.
    """
    ignored = ("name", *CHANGEABLE_OPTIONS)
    flat = {key: value for key, value in config["options"].items() if key not in ignored}
    several = len(config["stages"]) > 1
    for i, stage in enumerate(config["stages"], start=1):
        prefix = f"stage {i}: " if several else ""
        flat[f"{prefix}method"] = stage["method"]
        flat |= {f"{prefix}{key}": value for key, value in stage["settings"].items()}
    return flat


def group_by_settings(configs: Sequence[Mapping[str, Any] | None]) -> list[int]:
    """Return a number for each run that runs share if they differ in nothing but the seed and
    settings that change no result, such as `token_budget`. Runs of a single seed that differ in
    such a setting compare it: they and the other seeds are grouped by it too. A run without a
    configuration (None) shares its number with no other run.
    """
    keys: list[str] = []
    full_keys: list[str] = []
    variants: dict[tuple[str, Any], set[str]] = {}
    for i, config in enumerate(configs):
        flat = {"run": i} if config is None else flatten_config(config)
        keys.append(_encode_settings(flat, ("seed", *CHANGEABLE_SETTINGS)))
        full_keys.append(_encode_settings(flat, ("seed",)))
        variants.setdefault((keys[i], flat.get("seed")), set()).add(full_keys[i])
    compared = {key for (key, _), full in variants.items() if len(full) > 1}
    numbers: dict[str, int] = {}
    return [
        numbers.setdefault(full if key in compared else key, len(numbers))
        for key, full in zip(keys, full_keys, strict=True)
    ]


def _encode_settings(settings: Mapping[str, Any], ignored: Collection[str]) -> str:
    """Return the settings of all stages as text, without those of the names `ignored`."""
    kept = {k: value for k, value in settings.items() if k.rpartition(": ")[2] not in ignored}
    return json.dumps(kept, sort_keys=True, default=str)


def average_rows(
    runs: Sequence[Sequence[Mapping[str, Any]]], places: Sequence[Sequence[float]]
) -> tuple[list[dict[str, Any]], ...]:
    """Return rows of the mean over runs, and of the mean less and plus a standard deviation (of a
    sample: divided by the number of runs less 1).

    A value is averaged where every run has it at the step of the stage. `places`: the position of
    each row on the axis; "step" of an averaged row is the mean of the positions.
    """
    tables = []
    for rows, positions in zip(runs, places, strict=True):
        table: dict[tuple[str, float], dict[str, Any]] = {}
        for row, position in zip(rows, positions, strict=True):
            merged = table.setdefault((row.get("stage", ""), row["step"]), {})
            merged.update({**row, "step": position})
        tables.append(table)
    averaged: tuple[list[dict[str, Any]], ...] = ([], [], [])
    for key, first in tables[0].items():
        if not all(key in table for table in tables):
            continue
        columns: dict[str, list[Any]] = {
            name: [table[key].get(name) for table in tables] for name in first
        }
        spreads = {
            name: _measure_spread(values)
            for name, values in columns.items()
            if all(isinstance(value, (int, float)) and abs(value) < _MAX_VALUE for value in values)
        }
        step, _ = spreads.pop("step")
        for rows, sign in zip(averaged, (0, -1, 1), strict=True):
            numbers = {name: mean + sign * sd for name, (mean, sd) in spreads.items()}
            rows.append({"step": step, "stage": key[0], **numbers})
    return averaged


def _measure_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of a sample of at least two values.

    `statistics.stdev` calculates with fractions: a plot of long runs would take 15 times as long.
    """
    mean = fmean(values)
    return mean, math.dist(values, [mean] * len(values)) / math.sqrt(len(values) - 1)
