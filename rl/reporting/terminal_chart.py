"""Draw curves in a terminal, with rich: two by four dots of a Braille character in each cell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from rl.reporting.console import format_count

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # column, row: a bit of U+2800
_LABEL_WIDTH = 8  # of the values beside a chart
ALARM_COLOUR = "red"
# bits of the dots and colour of a cell by its column and its row from the bottom
_Cells = dict[tuple[int, int], tuple[int, str]]


@dataclass(frozen=True)
class ChartCurve:
    """Hold the points of a line: steps in ascending order, and their values."""

    steps: Sequence[float]
    values: Sequence[float]
    colour: str


@dataclass(frozen=True)
class TerminalChart:
    """Draw lines over steps, as wide as the console allows and `height` rows high.

    A column that has several points shows their mean. The title is followed by the last value of
    each line. `bands`: first and last steps that are marked on the axis. `log`: draw log10 of
    positive values. `from_zero`: the axis includes 0.
    """

    title: str
    lines: Sequence[ChartCurve]
    height: int = 8
    bands: Sequence[tuple[float, float]] = ()
    log: bool = False
    from_zero: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        width = max(4, options.max_width - _LABEL_WIDTH - 2)
        yield self._format_title(options.max_width)
        series = [self._list_points(line) for line in self.lines]
        steps = [step for points in series for step, _ in points]
        rows = max(1, self.height - 3)
        if not steps:
            yield Text("no values yet", style="dim")
            return
        first, last = min(steps), max(steps)
        columns = [_average_columns(points, first, last, 2 * width) for points in series]
        means = [value for line in columns for _, value in line]
        low, high = min(means), max(means)
        if self.from_zero and not self.log:
            low, high = min(low, 0.0), max(high, 0.0)
        # a range beyond that of floats is drawn flat, as a constant is
        span = high - low if math.isfinite(high - low) else 0.0
        cells: _Cells = {}
        for line, averaged in zip(self.lines, columns, strict=True):
            dots = [
                (x, round((value - low) / span * (4 * rows - 1)) if span else 2 * rows)
                for x, value in averaged
            ]
            for x, y in _connect_dots(dots):
                bits, _ = cells.get((x // 2, y // 4), (0, ""))
                cells[x // 2, y // 4] = bits | _DOTS[x % 2][3 - y % 4], line.colour
        labels = {0: self._format_value(high), rows - 1: self._format_value(low)}
        for i in range(rows):
            text = _render_row(cells, rows - 1 - i, width, options.ascii_only)
            bar = "|" if options.ascii_only else "┤" if i in labels else "│"
            label = labels.get(i, "") if high > low or i == 0 else ""
            yield Text(f"{label:>{_LABEL_WIDTH}}{bar}", style="dim") + text
        yield self._format_axis(first, last, width, options.ascii_only)
        yield self._format_ends(first, last, width)

    def _list_points(self, line: ChartCurve) -> list[tuple[float, float]]:
        """Return the points of a line that can be drawn, in the scale of the axis."""
        return [
            (step, math.log10(value) if self.log else float(value))
            for step, value in zip(line.steps, line.values, strict=True)
            if math.isfinite(value) and (value > 0 or not self.log)
        ]

    def _format_title(self, width: int) -> Text:
        title = Text(self.title, style="bold")
        for line in self.lines:
            if line.values:
                title.append(f"  {format_axis_value(line.values[-1])}", style=line.colour)
        title.truncate(width, overflow="ellipsis")
        return title

    def _format_value(self, value: float) -> str:
        """Format a value of the axis in at most eight characters."""
        return format_axis_value(10**value if self.log and value < 300 else value)

    def _format_ends(self, first: float, last: float, width: int) -> Text:
        """Return the first and the last step, below the ends of the axis."""
        start, end = f"{first:g}", f"{last:g}" if last > first else ""
        gap = max(1, width - len(start) - len(end))
        return Text(f"{'':{_LABEL_WIDTH + 1}}{start}{'':{gap}}{end}", style="dim", no_wrap=True)

    def _format_axis(self, first: float, last: float, width: int, ascii_only: bool) -> Text:
        """Return the axis, on which the bands are marked."""
        plain, marked, corner = ("-", "=", "+") if ascii_only else ("─", "━", "└")
        axis = Text(" " * _LABEL_WIDTH + corner, style="dim")
        spans = [
            [_find_column(step, first, last, width) for step in band]
            for band in self.bands
            if band[1] >= first and band[0] <= last
        ]
        for column in range(width):
            is_marked = any(start <= column <= end for start, end in spans)
            axis.append(marked if is_marked else plain, style=ALARM_COLOUR if is_marked else "dim")
        return axis


def _connect_dots(dots: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Yield the dots and those on the lines between them."""
    for (x0, y0), (x1, y1) in itertools.pairwise(dots):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(count):
            yield x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)
    yield from dots[-1:]


def _render_row(cells: _Cells, row: int, width: int, ascii_only: bool) -> Text:
    """Return a row of cells."""
    text = Text(no_wrap=True)
    for column in range(width):
        bits, colour = cells.get((column, row), (0, ""))
        mark = "*" if ascii_only else chr(0x2800 + bits)
        text.append(mark if bits else " ", style=Style.parse(colour) if bits else None)
    return text


def format_axis_value(value: float) -> str:
    """Format a value in at most eight characters: 12.3k, 0.512, 3e-05."""
    if 999.5 <= abs(value) < 1e12:
        return ("-" if value < 0 else "") + format_count(abs(value))
    text = f"{value + 0.0:.3g}"  # + 0.0: not -0
    return text if len(text) <= _LABEL_WIDTH else f"{value:.0e}"


def _find_column(step: float, first: float, last: float, width: int) -> int:
    """Return the column of a step."""
    share = (step - first) / (last - first) if last > first else 0.0
    return round(min(max(share, 0.0), 1.0) * (width - 1))


def _average_columns(
    points: Sequence[tuple[float, float]], first: float, last: float, width: int
) -> list[tuple[int, float]]:
    """Return the mean value of each column of dots that has points."""
    values: dict[int, list[float]] = {}
    for step, value in points:
        values.setdefault(_find_column(step, first, last, width), []).append(value)
    return [(column, sum(items) / len(items)) for column, items in sorted(values.items())]
