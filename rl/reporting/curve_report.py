"""Collect what the report draws from metrics.jsonl: curves, axes, alarms, the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.reporting.metric_plots import (
    EVALUATION_TIMES,
    PANELS,
    RunCurve,
    find_reward_panels,
    round_number,
)
from rl.sanitize import sanitize_text

# Seconds of a step that do not overlap; rl.reporting names them as docs/reference/metrics.md does.
TIME_PARTS = (
    ("time/sample", "sampling"),
    ("time/score", "waiting for rewards and environments"),
    ("time/sync", "new weights to the sampler"),
)
REST = "update, and the rest of the step"

_PANEL_POINTS, _OTHER_POINTS = 150_000, 60_000  # points of all curves: about 10 bytes each
_TIME_BINS = 60
_NAME_LIMIT = 200  # characters of a metric's or a stage's name


def _is_number(value: Any) -> bool:
    """Return whether the value of a row is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _thin(indices: list[int], limit: int) -> list[int]:
    """Return at most about `limit` of the indices at equal distances, with the last one."""
    stride = max(1, -(-len(indices) // max(limit, 1)))
    thinned = indices[::stride]
    return thinned if not indices or thinned[-1] == indices[-1] else [*thinned, indices[-1]]


def collect_panels(curves: Sequence[RunCurve]) -> list[dict[str, Any]]:
    """Return the panels that a run has values for: title, metric of each run, range and scale."""
    panels = []
    for panel in [*PANELS, *find_reward_panels(curves)]:
        names = [_find_metric(curve, panel.names, panel.unless) for curve in curves]
        if any(names):
            panels.append(
                {
                    "title": sanitize_text(panel.title, _NAME_LIMIT),
                    "metrics": [name and sanitize_text(name, _NAME_LIMIT) for name in names],
                    "share": panel.share,
                    "log": panel.log,
                    "smooth": panel.smooth,
                    "unless": list(panel.unless),
                }
            )
    return panels


def _find_metric(curve: RunCurve, names: Sequence[str], unless: Sequence[str]) -> str | None:
    """Return the first of the metrics that a row has; None if no row has one."""
    rows = [row for row in curve.rows if not any(name in row for name in unless)]
    return next((name for name in names if any(_is_number(row.get(name)) for row in rows)), None)


def collect_series(
    rows: Sequence[Mapping[str, Any]], panels: Sequence[Mapping[str, Any]], num_runs: int
) -> dict[str, dict[str, list[float]]]:
    """Return the curve of each metric: `rows`, the indices of its rows, and `values`.

    A long curve is thinned to rows at equal distances; metrics of panels keep more rows than the
    others. Every value is that of a row.
    """
    drawn = {name for panel in panels for name in panel["metrics"] if name}
    excluded = {
        name: panel["unless"]
        for panel in panels
        for name in panel["metrics"]
        if name and panel["unless"]
    }
    indices: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        for name, value in row.items():
            skipped = any(other in row for other in excluded.get(name, ()))
            if name != "step" and _is_number(value) and not skipped:
                indices.setdefault(name, []).append(i)
    limits = {
        True: max(200, _PANEL_POINTS // (max(len(drawn), 1) * num_runs)),
        False: max(50, _OTHER_POINTS // (max(len(indices) - len(drawn), 1) * num_runs)),
    }
    series: dict[str, dict[str, list[float]]] = {}
    for name, places in indices.items():
        thinned = _thin(places, limits[name in drawn])
        series[sanitize_text(name, _NAME_LIMIT)] = {
            "rows": list(thinned),
            "values": [round_number(rows[i][name]) for i in thinned],
        }
    return series


def collect_alarms(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each period in which an alarm was on: `name`, `first` and `last` step."""
    periods: list[dict[str, Any]] = []
    active: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name in [name for name in row if name.startswith("alarm/")]:
            if not row[name]:
                active.pop(name, None)
            elif name in active:
                active[name]["last"] = row["step"]
            else:
                active[name] = {
                    "name": sanitize_text(name.removeprefix("alarm/"), _NAME_LIMIT),
                    "first": row["step"],
                    "last": row["step"],
                }
                periods.append(active[name])
    return periods


def collect_times(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean seconds of the parts of a step, in at most 60 bins of steps.

    `steps` has the first step of each bin, `parts` the mean seconds of each part per step, and
    `total` the seconds of each part in the whole run.
    """
    trained = [row for row in rows if row.get("time/step") is not None]
    size = max(1, -(-len(trained) // _TIME_BINS))
    parts: dict[str, list[float]] = {}
    totals: dict[str, float] = {}
    labels = [*[label for _, label in TIME_PARTS], REST, *[label for _, label in EVALUATION_TIMES]]
    bins = [trained[i : i + size] for i in range(0, len(trained), size)]
    for label in labels:
        seconds = [[split_time(row).get(label, 0.0) for row in rows_of_bin] for rows_of_bin in bins]
        if any(map(any, seconds)):
            parts[label] = [round_number(sum(item) / len(item)) for item in seconds]
            totals[label] = round_number(sum(map(sum, seconds)))
    return {"steps": [item[0]["step"] for item in bins], "parts": parts, "total": totals}


def split_time(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the parts of a step by label.

    Parts that overlap with the update (asynchronous rollouts) can exceed the step; then no rest
    remains.
    """
    seconds = {label: float(row.get(name) or 0) for name, label in (*TIME_PARTS, *EVALUATION_TIMES)}
    used = sum(seconds[label] for _, label in TIME_PARTS)
    return {**seconds, REST: max(0.0, float(row.get("time/step") or 0) - used)}
