"""Draw curves of runs from metrics.jsonl. matplotlib is imported only to draw."""

from __future__ import annotations

import difflib
import io
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from rl.errors import UserError
from rl.jsonl import METRICS_FILE, Row, read_metrics, write_atomically
from rl.reporting.seed_groups import average_rows, flatten_config, group_by_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS = ("optim/loss",)
REWARD = ("reward/total", "env/all/reward/total")
TOKENS_PER_SECOND = ("time/tokens_per_second",)
TEACHER_KL = ("teacher/kl_per_token", "optim/kl")
HELD_OUT = "test/env/all/correct"
HELD_OUT_PAIRS = "test/rewards/accuracies"  # accuracy on preference pairs
HELD_OUT_REWARD = "test/env/all/reward/total"
HELD_OUT_LOSS, TOKEN_ACCURACY = "test/loss", "test/token_accuracy"

# Axes of curves: name and label.
AXES = {"steps": "step of the run", "tokens": "tokens", "hours": "hours"}
EVALUATION_TIMES = (("time/test", "evaluation by samples"), ("time/test_rows", "evaluation, rows"))

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")  # supported file name suffixes


@dataclass(frozen=True)
class PlotPanel:
    """Define a panel. `names`: names of the metric, the first that occurs is drawn."""

    title: str
    names: tuple[str, ...]
    is_fraction: bool = False  # the axis runs from 0 to 1
    reward: bool = False  # the axis begins at 0 if all values are between 0 and 1
    log: bool = False
    smooth: bool = True
    hidden_if_present: tuple[str, ...] = ()  # skip rows with any of these metrics


PANELS = (
    PlotPanel("held-out accuracy", (HELD_OUT, HELD_OUT_PAIRS), is_fraction=True, smooth=False),
    PlotPanel(
        "held-out reward",
        (HELD_OUT_REWARD,),
        reward=True,
        smooth=False,
        hidden_if_present=(HELD_OUT,),
    ),
    PlotPanel("held-out loss (nats a token or pair)", (HELD_OUT_LOSS,), smooth=False),
    PlotPanel("held-out token accuracy", (TOKEN_ACCURACY,), is_fraction=True, smooth=False),
    PlotPanel("reward", REWARD, reward=True),
    # a policy-gradient loss measures nothing
    PlotPanel("loss, supervised (nats a token or pair)", LOSS, hidden_if_present=REWARD),
    PlotPanel("loss on stored answers", ("optim/policy_loss",), hidden_if_present=REWARD),
    PlotPanel("reward margin, chosen to rejected", ("rewards/margins",)),
    PlotPanel("KL, sampler to learner", ("optim/kl_sample_train_v1",)),
    PlotPanel("KL to reference (nats a token)", ("optim/kl_ref_k3", "optim/kl_ref_k1")),
    PlotPanel("KL to teacher (nats a token)", TEACHER_KL),
    PlotPanel("KL to behavior policy", ("optim/kl_behaviour_v1",)),
    PlotPanel("answer length (tokens)", ("env/all/ac_tokens_per_turn",)),
    PlotPanel("share of answers cut off", ("env/all/frac_truncated",), is_fraction=True),
    PlotPanel("entropy (nats a token)", ("optim/entropy",)),
    PlotPanel("gradient norm, before clipping", ("optim/grad_norm",), log=True),
    PlotPanel("tokens a second", TOKENS_PER_SECOND),
)
# Metrics under `env/all/` that are not parts of a reward.
_NOT_REWARD_PARTS = frozenset(
    (
        "turns_per_episode",
        "ac_tokens_per_turn",
        "ob_tokens_per_turn",
        "frac_truncated",
        "total_episodes",
        "total_groups",
        "distinct_beginnings",
        "ended",
    )
)
_MAX_REWARD_PANELS = 8  # maximum number of panels for parts of a reward
# Okabe and Ito's palette: distinguishable without red and green.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5a5a5a")
_SHADES = ("#eef2f6", "#f8f3ea", "#eef5ef", "#f5eef3")
SMOOTH_FROM = 40  # points; shorter series are not smoothed


@dataclass(frozen=True)
class RunCurve:
    """Hold the `rows` of a run's metrics.jsonl under a `label`. The mean of runs that differ only
    in their seed also has the lower and upper edge of its `band`.
    """

    label: str
    rows: list[dict[str, Any]]
    band: tuple[RunCurve, RunCurve] | None = None

    def series(self, panel: PlotPanel) -> tuple[list[float], list[float]]:
        """Return (steps, values) of the panel's metric, without null values."""
        points = self._list_points(panel)
        return [step for _, step, _ in points], [value for _, _, value in points]

    def _list_points(self, panel: PlotPanel) -> list[tuple[str, float, float]]:
        """Return (stage, step, value) of each row that has the panel's metric."""
        name = self.find_metric(panel)
        return [
            (row.get("stage", ""), row["step"], row[name])
            for row in self.select_rows(panel)
            if name is not None and is_number(row.get(name))
        ]

    def select_rows(self, panel: PlotPanel) -> list[dict[str, Any]]:
        """Return the rows without the metrics that exclude a row from the panel."""
        return [
            row for row in self.rows if not any(name in row for name in panel.hidden_if_present)
        ]

    def find_metric(self, panel: PlotPanel) -> str | None:
        """Return the first of the panel's metrics that a row has; None if no row has one."""
        rows = self.select_rows(panel)
        return next(
            (name for name in panel.names if any(is_number(row.get(name)) for row in rows)),
            None,
        )

    def stages(self) -> list[tuple[str, float, float]]:
        """Return (name, first step, last step) of each stage, in order. The stage of a row is its
        "stage" value.
        """
        spans: list[tuple[str, float, float]] = []
        for name, rows in itertools.groupby(self.rows, lambda row: row.get("stage", "")):
            steps = [row["step"] for row in rows]
            spans.append((name, spans[-1][2] if spans else steps[0], steps[-1]))
        return spans

    def parts(self, panel: PlotPanel) -> list[tuple[list[float], list[float]]]:
        """Return the series; one that is smoothed is split by stage, because a running mean across
        two stages would describe neither.
        """
        parts: dict[str, tuple[list[float], list[float]]] = {}
        for stage, step, value in self._list_points(panel):
            steps, values = parts.setdefault(stage if panel.smooth else "", ([], []))
            steps.append(step)
            values.append(value)
        return list(parts.values())


def read_curve(source: Path, label: str | None = None) -> RunCurve:
    """Read a run's folder, or its metrics.jsonl. Raises FileNotFoundError if the file does not
    exist.
    """
    path = source / METRICS_FILE if source.is_dir() else source
    if not path.is_file():
        raise FileNotFoundError(
            f"no metrics at {path}: expected a run's folder or its {METRICS_FILE}"
        )
    return RunCurve(label or path.resolve().parent.name, read_metrics(path))


def label_runs(sources: Sequence[Path]) -> list[str]:
    """Return the name of each run's folder, with as many parents as tell it from the others."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in sources]

    def label(folder: Path) -> str:
        others = [other.parts for other in folders if other != folder]
        length = 1
        while any(other[-length:] == folder.parts[-length:] for other in others):
            length += 1
        return "/".join(folder.parts[-length:])

    return list(map(label, folders))


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a file is a number that can be drawn: finite, and so far from the
    largest float that the range of an axis is a float too.
    """
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) < 1e300


def round_number(value: float) -> float:
    """Return the value with seven significant digits, which a page shows and a float32 has."""
    return float(f"{value:.7g}")


def collect_axes(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the position of each row on three axes: step, tokens and hours.

    Tokens are those that `time/tokens_per_second` counts (sampled, otherwise trained). Hours are
    those of steps and evaluations, without the start of the run and its interruptions.
    """
    tokens = hours = 0.0
    axes: dict[str, list[float]] = {"steps": [], "tokens": [], "hours": []}
    for row in rows:
        seconds = float(row.get("time/step") or 0)
        tokens += seconds * float(row.get("time/tokens_per_second") or 0)
        hours += (seconds + sum(float(row.get(name) or 0) for name, _ in EVALUATION_TIMES)) / 3600
        axes["steps"].append(row["step"])
        axes["tokens"].append(round(tokens))
        axes["hours"].append(round_number(hours))
    return axes


def group_curves(curves: Sequence[RunCurve], groups: Sequence[int], axis: str) -> list[RunCurve]:
    """Return the curves on an axis; runs with the same number in `groups` as mean and band. Runs
    that have just started, without rows or with step 0 alone, are left out of a mean.
    """
    result = []
    for number in dict.fromkeys(groups):
        members = [c for c, group in zip(curves, groups, strict=True) if group == number]
        started = [c for c in members if any(row["step"] > 0 for row in c.rows)]
        members = started or [c for c in members if c.rows] or members[:1]
        label, rows = members[0].label, [member.rows for member in members]
        places = [collect_axes(item)[axis] for item in rows]
        if len(members) == 1:  # the positions on the axis in the place of the steps
            placed = [{**row, "step": x} for row, x in zip(rows[0], places[0], strict=True)]
            result.append(RunCurve(label, placed))
            continue
        label = f"mean of {len(members)}: {label} ..."
        mean, low, high = average_rows(rows, places)
        result.append(RunCurve(label, mean, (RunCurve(label, low), RunCurve(label, high))))
    return result


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the centered running mean over `window` points; at the ends over the available points
    (no padding).
    """
    kernel = np.ones(2 * (window // 2) + 1)
    sums, counts = (np.convolve(y, kernel, "same") for y in (values, np.ones(len(values))))
    return (sums / counts).tolist()


def find_reward_panels(curves: Sequence[RunCurve]) -> list[PlotPanel]:
    """Return a panel for each metric of a reward: the parts of a sum of rewards, and the metrics of
    a user's reward function.
    """
    metrics = dict.fromkeys(name for curve in curves for row in curve.rows for name in row)
    names = [name.removeprefix("env/all/") for name in metrics if name.startswith("env/all/")]
    parts = [name for name in names if "/" not in name and name not in _NOT_REWARD_PARTS]
    return [
        PlotPanel(f"reward: {name}", (f"env/all/{name}",)) for name in parts[:_MAX_REWARD_PANELS]
    ]


def find_panels(
    curves: Sequence[RunCurve], metrics: Sequence[str] | None = None
) -> list[PlotPanel]:
    """Return the panels that a run has values for: those of `metrics`, by default PANELS and the
    parts of rewards.
    """
    if metrics is None:
        panels = [*PANELS, *find_reward_panels(curves)]
    else:
        panels = [PlotPanel(name, (name,)) for name in metrics]
    return [panel for panel in panels if any(curve.find_metric(panel) for curve in curves)]


def _no_panel_message(
    sources: Sequence[Path], curves: Sequence[RunCurve], metrics: Sequence[str] | None
) -> str:
    """Return the message for runs that have none of `metrics` (None: those of PANELS)."""
    where = f"no curve in {', '.join(map(str, sources))}"
    if metrics is None:
        return f"{where}: no row has a metric with a panel"
    rows = [row for curve in curves for row in curve.rows]
    known = sorted({name for row in rows for name, value in row.items() if is_number(value)})
    near = dict.fromkeys(
        itertools.chain(*(difflib.get_close_matches(name, known, n=1) for name in metrics))
    )
    hint = f"; did you mean {', '.join(near)}?" if near else " (metrics.jsonl has the names)"
    return f"{where}: no row has a number for {', '.join(metrics)}{hint}"


def draw_curves(
    source: Path | Sequence[Path],
    out: Path,
    labels: Sequence[str] | None = None,
    *,
    axis: str = "steps",
    metrics: Sequence[str] | None = None,
    each_run: bool = False,
) -> Path:
    """Draw the curves of a run (or compare several runs) into `out`, and return `out`. The suffix
    of `out` sets the picture format. The file is written atomically.

    `axis`: steps, tokens or hours, see `collect_axes`. `metrics`: the metrics to draw, by default
    those of PANELS and the parts of rewards. A metric that no run has gets no panel. Stages are
    shaded if a single curve is drawn. The seeds of a run are drawn as their mean and a band of a
    standard deviation; `each_run` draws a curve of each. Raises UserError if no
    panel remains, and for a suffix that is not in PICTURE_SUFFIXES.
    """
    if out.suffix.lower() not in PICTURE_SUFFIXES:
        raise UserError(
            f"{out} is not a picture name: expected the suffix {', '.join(PICTURE_SUFFIXES)}"
        )
    sources = [source] if isinstance(source, Path) else list(source)
    if labels is not None and len(labels) != len(sources):
        raise UserError(
            f"{len(labels)} labels for {len(sources)} runs: expected a label for each run"
        )
    labels = labels or label_runs(sources)
    curves = [read_curve(path, label) for path, label in zip(sources, labels, strict=True)]
    groups = list(range(len(curves)))
    if not each_run and len(curves) > 1:
        groups = group_by_settings([_read_config(path) for path in sources])
    curves = group_curves(curves, groups, axis)
    panels = find_panels(curves, metrics)
    if not panels:
        raise UserError(_no_panel_message(sources, curves, metrics))
    figure = _build_figure(curves, panels, AXES[axis])
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix.lower()[1:], dpi=130, facecolor="white")
    write_atomically(out, picture.getvalue())
    return out


def _read_config(source: Path) -> dict[str, Any] | None:
    """Return the configuration of a run; None for a file of metrics, and a folder without one."""
    folder = source if source.is_dir() else source.parent
    try:
        config = json.loads((folder / "config.json").read_bytes())
        flatten_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return config


def _import_matplotlib() -> None:
    """Import matplotlib without MPLBACKEND. The import fails if the variable names an unknown
    backend, and this module uses no backend.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib  # noqa: F401
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def _build_figure(
    curves: Sequence[RunCurve], panels: Sequence[PlotPanel], label: str = AXES["steps"]
) -> Figure:
    """Return the figure of all panels."""
    _import_matplotlib()
    # Figure without pyplot: no global state, no display, no choice of backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    columns = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3}.get(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(3.7 * columns, 2.7 * rows + 0.7),
        layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.07),
    )
    FigureCanvasAgg(figure)
    several = len(curves) > 1
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, curves)
        axis.set_xlabel(label, fontsize=8.5)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    title = "runs compared" if several else curves[0].label
    smooth = any(
        panel.smooth and len(curve.series(panel)[0]) >= SMOOTH_FROM
        for panel in panels
        for curve in curves
    )
    # Dollar signs in a name do not start math text.
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left", parse_math=False)
    notes = ["band: standard deviation of the seeds"] if any(curve.band for curve in curves) else []
    if smooth and not all(curve.band for curve in curves):
        notes.append("pale: each step; line: running mean")
    elif smooth:
        notes.append("smoothed")
    note = "; ".join(notes)
    figure.text(0.99, 0.985, note, ha="right", va="top", fontsize=8, color="#666666")
    if several:
        legend = figure.legend(
            [Line2D([], [], color=pick_colour(i), lw=2) for i in range(len(curves))],
            [curve.label for curve in curves],
            loc="outside lower center",
            ncols=min(len(curves), 4),
            frameon=False,
            fontsize=9,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def pick_colour(i: int) -> str:
    """Return the colour of the curve `i`."""
    return COLOURS[i % len(COLOURS)]


def _draw_panel(axis: Axes, panel: PlotPanel, curves: Sequence[RunCurve]) -> None:
    """Draw the curves of all runs into a panel."""
    axis.set_title(panel.title, fontsize=10, loc="left", parse_math=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.grid(True, axis="y", color="#e3e3e3", lw=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8.5)
    series = [curve.series(panel) for curve in curves]
    if len(curves) == 1:
        _shade_stages(axis, curves[0], series[0][0])
    for i, curve in enumerate(curves):
        _draw_curve(axis, panel, curve, pick_colour(i))
    values = [value for _, curve_values in series for value in curve_values]
    if panel.is_fraction:
        axis.set_ylim(-0.03, 1.05)
    elif panel.reward and min(values) >= 0 and max(values) <= 1:
        # a zoomed axis would show noise as a trend
        top = 1.05 if max(values) > 0.5 else max(0.1, 1.25 * max(values))
        axis.set_ylim(-0.03 * top, top)
    _style_numbers(axis, panel, values)
    if len(curves) == 1 and panel.is_fraction:
        _annotate_ends(axis, *series[0])


def _style_numbers(axis: Axes, panel: PlotPanel, values: Sequence[float]) -> None:
    """Format the ticks as 0.2 and 15k instead of 2x10^-1 and 15000."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if panel.log and min(values) > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif max(values) >= 10_000:
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))


def _draw_curve(axis: Axes, panel: PlotPanel, curve: RunCurve, colour: str) -> None:
    """Draw a curve and its band, if it has one. A long curve is a running mean, over a pale line of
    each step if it has no band.
    """
    lines = [item.parts(panel) for item in (curve, *(curve.band or ()))]
    for (steps, values), *edges in zip(*lines, strict=True):
        smooth = panel.smooth and len(values) >= SMOOTH_FROM
        window = max(3, len(values) // 20) if smooth else 1
        line, *band = (moving_average(y, window) for y in (values, *(edge for _, edge in edges)))
        if band:
            low, high = band
            if panel.log:  # a logarithmic axis has no values below 0
                low = [max(a, b / 10) for a, b in zip(low, line, strict=True)]
            axis.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
        elif smooth:
            axis.plot(steps, values, color=colour, lw=0.8, alpha=0.28)
        marker, size = None if smooth else "o", 4 if len(values) < 30 else 2
        axis.plot(steps, line, color=colour, lw=1.8, marker=marker, ms=size)


def _annotate_ends(axis: Axes, steps: Sequence[float], values: Sequence[float]) -> None:
    """Annotate the first and the last value of a share, beside the curve: below a point in the
    upper half, above one in the lower half, and to the right of the first point of a steep curve.
    """
    steep = len(values) > 1 and abs(values[1] - values[0]) > 0.1
    for i, side in [(0, "left"), (-1, "right")][: len(steps)]:
        step, value = steps[i], values[i]
        offset = (10, -4) if i == 0 and steep else (0, -15 if value > 0.5 else 8)
        style: dict[str, Any] = {"ha": side, "fontsize": 9, "fontweight": "bold"}
        axis.annotate(
            f"{value:.2f}", (step, value), xytext=offset, textcoords="offset points", **style
        )


def _shade_stages(axis: Axes, curve: RunCurve, steps: Sequence[float]) -> None:
    """Shade the stages that the series covers, and label each with its name."""
    stages = curve.stages()
    if len(stages) < 2 or not steps:
        return
    for i, (name, first, last) in enumerate(stages):
        start, end = max(first, steps[0]), min(last, steps[-1])
        if start >= end:
            continue
        axis.axvspan(start, end, color=_SHADES[i % len(_SHADES)], lw=0, zorder=0)
        axis.text(
            (start + end) / 2,
            0.02,
            name,
            ha="center",
            va="bottom",
            fontsize=8,
            color="#777777",
            transform=axis.get_xaxis_transform(),
            parse_math=False,
        )
