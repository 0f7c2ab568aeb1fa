"""Draw the screen of `whetstone watch`: progress, alarms, curves and latest answers of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rl.jsonl import Row
from rl.reporting.console import format_duration, format_headline, format_held_out, format_score
from rl.reporting.episode_html import StoredEpisode
from rl.reporting.metric_plots import PlotPanel, find_panels, is_number
from rl.reporting.run_follower import RunFollower, choose_answers, sanitize_name
from rl.reporting.terminal_chart import ALARM_COLOUR, ChartCurve, TerminalChart
from rl.sanitize import sanitize_text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "white")
# Mark and colour of a state, and its explanation.
_STATES = {
    "running": ("●", "green", ""),
    "finished": ("✓", "green", ""),
    "stopped": ("■", "yellow", "no process is working on it"),
    "killed": ("✗", "red", "its process was killed, or its host is gone"),
    "waiting": ("…", "dim", "no run in this folder yet"),
}
_MIN_CHART_WIDTH, _CHART_HEIGHT, _MAX_CHART_HEIGHT, _MAX_CHARTS = 38, 8, 16, 12
_TEXT_LIMIT = 1500  # characters of an answer


def render_runs(
    runs: Sequence[RunFollower],
    *,
    width: int,
    height: int | None = None,
    page: int = 0,
    keys: str = "",
) -> RenderableType:
    """Return the screen of some runs. `height`: rows of the terminal; None: as many as needed.

    `page`: page of answers. `keys`: a line on the keys, at the bottom.
    """
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(runs))]
    head: list[Any] = []
    for run, colour in zip(runs, colours, strict=True):
        head += _render_run(run, colour if len(runs) > 1 else "", width)
    footer = [Text(keys, style="dim", no_wrap=True)] if keys else []
    used = len(head) + len(footer)
    num_answers = 3 if len(runs) == 1 else 2
    columns = max(1, min(4, width // _MIN_CHART_WIDTH))
    limit, chart_height = _MAX_CHARTS, _CHART_HEIGHT
    if height is not None:
        spare = height - used - _CHART_HEIGHT
        num_answers = max(0, min(num_answers, (spare - len(runs)) // (2 * len(runs))))
    answers = _render_answers(runs, colours, num_answers, page, width)
    panels = find_panels([run.curve for run in runs])
    if height is not None:
        room = height - used - len(answers)
        limit = columns * max(0, room // _CHART_HEIGHT)
        grid_rows = -(-min(limit, _MAX_CHARTS, len(panels)) // columns)
        chart_height = min(_MAX_CHART_HEIGHT, room // grid_rows) if grid_rows else _CHART_HEIGHT
    panels = panels[: min(limit, _MAX_CHARTS)]
    charts = _render_charts(runs, colours, panels, columns, chart_height)
    return Group(*head, *charts, *answers, *footer)


def _render_run(run: RunFollower, colour: str, width: int) -> list[RenderableType]:
    """Return the lines on a run: its state, the newest metrics, its alarms."""
    state = run.get_state()
    mark, style, note = _STATES[state]
    parts = [
        (f"{mark} ", style),
        (run.label, f"bold {colour}".strip()),
        (f"  {state}", style),
    ]
    stage, scope = run.find_stage(), ""
    if stage is not None:
        name, done, steps = stage
        parts.append((f"  {name} {done}/{steps}", ""))
        if len(run.stages) > 1:
            parts.append((f" (step {run.step} of {run.last_step})", "dim"))
            scope = f" in {name}"
    if state == "running":
        if remaining := run.estimate_seconds():
            parts.append((f"  about {format_duration(remaining)} left{scope}", ""))
        if (age := run.get_age()) is not None:
            parts.append((f"  last step {format_duration(age)} ago", "dim"))
    elif note:
        parts.append((f"  {note}", "dim"))
    lines: list[RenderableType] = [_make_line(width, *parts)]
    if run.step is not None and run.last_step:
        bar_style = colour or ("green" if state == "finished" else "cyan")
        bar = Table.grid(expand=True)  # a bar alone does not end its line
        bar.add_row(
            ProgressBar(
                total=run.last_step,
                completed=run.step,
                complete_style=bar_style,
                finished_style=bar_style,
            )
        )
        lines.append(bar)
    metrics = format_headline(run.rows[-1], width=width) if run.rows else ""
    measured = [text for row in run.evaluations if (text := format_held_out(row))]
    first = f"  (first: {measured[0].removeprefix('held-out ')})" if len(measured) > 1 else ""
    texts = [metrics, measured[-1] + first if measured else ""]
    lines += [_make_line(width, (text, "")) for text in texts if text]
    return [*lines, *_render_alarms(run, width)]


def _make_line(width: int, *parts: tuple[str, str]) -> Text:
    """Return texts and their styles as a line of at most `width` columns."""
    line = Text.assemble(*parts, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _render_alarms(run: RunFollower, width: int) -> list[RenderableType]:
    """Return a line on the alarms that are on, and a line on the earlier ones."""
    periods = run.alarms
    last = next((r["step"] for r in reversed(run.rows) if any("alarm/" in k for k in r)), None)
    active = [f"{p['name']} since step {p['first']}" for p in periods if p["last"] == last]
    ended = [f"{p['name']} {p['first']}-{p['last']}" for p in periods if p["last"] != last]
    lines = []
    if active:
        lines.append((f"▲ alarm: {', '.join(active)}", f"bold {ALARM_COLOUR}"))
    if ended:
        lines.append((f"△ earlier alarms: {', '.join(ended[::-1])}", ALARM_COLOUR))
    return [_make_line(width, line) for line in lines]


def _render_charts(
    runs: Sequence[RunFollower],
    colours: Sequence[str],
    panels: Sequence[PlotPanel],
    columns: int,
    height: int,
) -> list[RenderableType]:
    """Return the charts of the panels as rows of `columns` charts."""
    bands = [(period["first"], period["last"]) for run in runs for period in run.alarms]
    charts = [
        TerminalChart(
            sanitize_name(panel.title),
            [
                ChartCurve(*run.curve.series(panel), colour)
                for run, colour in zip(runs, colours, strict=True)
            ],
            height=height,
            bands=bands,
            log=panel.log,
            from_zero=panel.is_fraction,
        )
        for panel in panels
    ]
    grids: list[RenderableType] = []
    for start in range(0, len(charts), columns):
        grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
        group = charts[start : start + columns]
        for _ in range(columns):
            grid.add_column(ratio=1)
        grid.add_row(*group, *[""] * (columns - len(group)))
        grids.append(grid)
    return grids


def _render_answers(
    runs: Sequence[RunFollower], colours: Sequence[str], count: int, page: int, width: int
) -> list[RenderableType]:
    """Return the latest answers of each run; a prompt once for the answers to it."""
    lines: list[RenderableType] = []
    for run, colour in zip(runs, colours, strict=True):
        rows = choose_answers(run.answers, count, page)
        if not rows:
            continue
        kind = "held-out answers" if run.are_held_out else "answers"
        choice = "best to worst" if page == 0 else f"page {page}"
        name = f"{run.label}: " if len(runs) > 1 else ""
        title = f"{name}{len(run.answers)} {kind} of step {run.answers_step}, {choice}"
        style = colour if len(runs) > 1 else "dim"
        lines.append(Rule(Text(title, style=style), align="left", style="dim"))
        previous = None
        for row in rows:
            prompt = _render_prompt(row, width)
            lines += [prompt] * (prompt != previous) + [_render_answer(row, width)]
            previous = prompt
    return lines


def _render_prompt(row: Row, width: int) -> Text:
    """Return a line with the end of the prompt, where a question mostly is, and the expected
    answer.
    """
    expected = f"  (expected {_flatten(str(row['answer']))[:60]})" if row.get("answer") else ""
    prompt = _flatten(str(row.get("prompt")))
    room = max(10, width - 9 - cell_len(expected))
    return _make_line(width, (" " * 8 + _cut(prompt, 0, room) + expected, "dim"))


def _render_answer(row: Row, width: int) -> Text:
    """Return a line with the reward, and with the beginning and the end of the answer."""
    turns = StoredEpisode(row).turns
    answer = _flatten(str(row.get("response") or (turns[-1]["response"] if turns else "")))
    reward = row.get("reward") if is_number(row.get("reward")) else None
    score = "n/a" if reward is None else format_score(float(reward))
    style = "green" if reward and reward > 0 else "red"
    text = _cut(answer, (width - 9) // 2, max(10, width - 9)) or "(empty)"
    return _make_line(width, (f"{score:>7} ", style), (text, ""))


def _cut(text: str, head: int, room: int) -> str:
    """Return the text in `room` columns, of which the first `head` show its beginning and the
    others its end.
    """
    if cell_len(text) <= room:
        return text
    end = text[-room:]
    while cell_len(end) > room - head - 1:
        end = end[1:]
    return f"{set_cell_size(text, head) if head else ''}…{end}"


def _flatten(text: str) -> str:
    """Return foreign text as a single line; a line break becomes a mark."""
    lines = sanitize_text(text, _TEXT_LIMIT).split("\n")
    return " ⏎ ".join(part for line in lines if (part := " ".join(line.split())))
