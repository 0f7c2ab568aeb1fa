"""Collect what the report draws from metrics.jsonl: curves, axes, alarms, the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.jsonl import Row
from rl.reporting.metric_plots import (
    EVALUATION_TIMES,
    PlotPanel,
    RunCurve,
    collect_axes,
    find_panels,
    is_number,
    round_number,
)
from rl.reporting.rollout_report import select_evenly
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


def collect_curves(curves: Sequence[RunCurve]) -> dict[str, Any]:
    """Return the panels of the page, and of each run its label, stages, axes, series, alarms and
    times.
    """
    panels = find_panels(curves)
    runs = [
        {
            "label": sanitize_text(curve.label, _NAME_LIMIT),
            "stages": [
                {"name": sanitize_text(name, _NAME_LIMIT), "first": first, "last": last}
                for name, first, last in curve.stages()
            ],
            "axes": collect_axes(curve.rows),
            "series": collect_series(curve, panels, len(curves)),
            "alarms": collect_alarms(curve.rows),
            "times": collect_times(curve.rows),
        }
        for curve in curves
    ]
    return {"panels": [describe_panel(panel, curves) for panel in panels], "runs": runs}


def describe_panel(panel: PlotPanel, curves: Sequence[RunCurve]) -> dict[str, Any]:
    """Return the title of a panel, the metric of each run, its range and its scale."""
    names = [curve.find_metric(panel) for curve in curves]
    return {
        "title": sanitize_text(panel.title, _NAME_LIMIT),
        "metrics": [name and sanitize_text(name, _NAME_LIMIT) for name in names],
        "share": panel.is_fraction,
        "log": panel.log,
        "smooth": panel.smooth,
    }


def collect_series(
    curve: RunCurve, panels: Sequence[PlotPanel], num_runs: int
) -> dict[str, dict[str, Sequence[float]]]:
    """Return the curve of each metric: `rows`, the indices of its rows, and `values`.

    A long curve is thinned to rows at equal distances; metrics of panels keep more rows than the
    others. Every value is that of a row.
    """
    # of each metric of a panel, the metrics next to which it is left out
    panel_metrics = {
        name: panel.hidden_if_present
        for panel in panels
        if (name := curve.find_metric(panel)) is not None
    }
    indices: dict[str, list[int]] = {}
    for i, row in enumerate(curve.rows):
        for name, value in row.items():
            is_excluded = any(other in row for other in panel_metrics.get(name, ()))
            if name != "step" and is_number(value) and not is_excluded:
                indices.setdefault(name, []).append(i)
    limits = {
        True: max(200, _PANEL_POINTS // (max(len(panel_metrics), 1) * num_runs)),
        False: max(50, _OTHER_POINTS // (max(len(indices) - len(panel_metrics), 1) * num_runs)),
    }
    series: dict[str, dict[str, Sequence[float]]] = {}
    for name, places in indices.items():
        thinned = select_evenly(places, limits[name in panel_metrics])
        values = [round_number(curve.rows[i][name]) for i in thinned]
        series[sanitize_text(name, _NAME_LIMIT)] = {"rows": thinned, "values": values}
    return series


def collect_alarms(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return each period in which an alarm was on: `name`, `first` and `last` step."""
    periods: list[dict[str, Any]] = []
    active: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name in [name for name in row if name.startswith("alarm/")]:
            if not row[name]:
                active.pop(name, None)
                continue
            if name not in active:
                title = sanitize_text(name.removeprefix("alarm/"), _NAME_LIMIT)
                active[name] = {"name": title, "first": row["step"]}
                periods.append(active[name])
            active[name]["last"] = row["step"]
    return periods


def collect_times(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the mean seconds of the parts of a step, in at most 60 bins of steps.

    `steps` has the first step of each bin, `parts` the mean seconds of each part per step, and
    `total` the seconds of each part in the whole run.
    """
    trained = [row for row in rows if row.get("time/step") is not None]
    size = max(1, -(-len(trained) // _TIME_BINS))
    starts = range(0, len(trained), size)
    split = [split_time(row) for row in trained]
    parts: dict[str, list[float]] = {}
    totals: dict[str, float] = {}
    for label in split[0] if split else ():
        seconds = [item[label] for item in split]
        if any(seconds):
            bins = [seconds[i : i + size] for i in starts]
            parts[label] = [round_number(sum(item) / len(item)) for item in bins]
            totals[label] = round_number(sum(map(sum, bins)))
    return {"steps": [trained[i]["step"] for i in starts], "parts": parts, "total": totals}


def split_time(row: Row) -> dict[str, float]:
    """Return the seconds of the parts of a step by label.

    Parts that overlap with the update (asynchronous rollouts) can exceed the step; then no rest
    remains.
    """
    parts = {label: float(row.get(name) or 0) for name, label in TIME_PARTS}
    parts[REST] = max(0.0, float(row.get("time/step") or 0) - sum(parts.values()))
    return parts | {label: float(row.get(name) or 0) for name, label in EVALUATION_TIMES}
