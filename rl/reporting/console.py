"""Print the progress of a run: a progress bar on a terminal, plain lines elsewhere (a log file, a
scheduler's output).

On a terminal: panels, and a bar with the step, the headline metrics, tokens a second, elapsed and
remaining time. Elsewhere: a line every few steps, without control characters. `quiet` prints only
warnings and the end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from rl.reporting.metric_plots import (
    HELD_OUT,
    HELD_OUT_LOSS,
    HELD_OUT_PAIRS,
    HELD_OUT_REWARD,
    LOSS,
    REWARD,
    TEACHER_KL,
    TOKEN_ACCURACY,
    TOKENS_PER_SECOND,
)
from rl.sanitize import sanitize_message

_FAILED, _SCORED, _GROUPS = "reward/failed", "env/all/total_episodes", "env/all/total_groups"
_MIXED_GROUPS = "env/all/by_group/frac_mixed"
_SAMPLER_CHECK = "optim/kl_sample_train_v1"
_SAMPLER_CHECK_FROM = 1e-3  # nats a token: below it, sampler and learner agree
# Metrics of held-out problems: label, names of the metric (the first that is present), and metrics
# next to which it is left out.
_HELD_OUT: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("accuracy", (HELD_OUT, HELD_OUT_PAIRS), ()),
    ("reward", (HELD_OUT_REWARD,), (HELD_OUT, HELD_OUT_PAIRS)),
    ("loss", (HELD_OUT_LOSS,), ()),
    ("token accuracy", (TOKEN_ACCURACY,), ()),
)
_BAR_COLUMNS = 7  # of a terminal line: the shortest bar, and spaces between the columns
_LINES_PER_STAGE = 25  # maximum number of plain lines of a stage


def format_duration(seconds: float) -> str:
    """Format seconds as 0:07, 2:05 or 1:02:05."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def format_count(count: float) -> str:
    """Format a count with three figures: 950, 12.3k, 4.51M."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size * 0.9995:
            return (
                f"{count / size:.3g}{suffix}"
                if count / size < 999.5
                else f"{count / size:.0f}{suffix}"
            )
    return f"{count:.3g}"


def round_interval(total: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... steps that makes at most _LINES_PER_STAGE
    lines of `total` steps.
    """
    scale = 1
    while True:
        for interval in (scale, 2 * scale, 5 * scale):
            if total <= interval * _LINES_PER_STAGE:
                return interval
        scale *= 10


def format_score(value: float) -> str:
    """Format a reward, a share or a loss with three decimals; a value below 0.0005 as 1e-05."""
    if 0 < abs(value) < 0.0005:
        return f"{value:.0e}"
    return f"{value + 0.0:.3f}"  # + 0.0: not -0.000


_format_kl = "{:.1e}".format
# Metrics of a step's line: label, names of the metric (the first name that occurs), format. A line
# that is too long for the terminal loses its last metrics.
_HEADLINES: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("loss", LOSS, format_score),
    ("reward", REWARD, format_score),
    ("policy loss", ("optim/policy_loss",), format_score),  # loss on stored answers
    ("KL to teacher", TEACHER_KL, _format_kl),
    ("length", ("env/all/ac_tokens_per_turn",), format_count),  # tokens of an answer
    ("cut off", ("env/all/frac_truncated",), "{:.0%}".format),
    ("mixed groups", (_MIXED_GROUPS,), "{:.0%}".format),  # groups with unequal rewards
    ("KL to reference", ("optim/kl_ref_k3",), _format_kl),  # if the run has a reference model
    ("KL sampler-learner", (_SAMPLER_CHECK,), _format_kl),
    ("KL to behaviour", ("optim/kl_behaviour_v1",), _format_kl),
)


def _find_value(metrics: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first of the metrics that is present; None if none is."""
    return next((metrics[name] for name in names if metrics.get(name) is not None), None)


def format_headline(
    metrics: Mapping[str, Any], *, width: int | None = None, short: bool = False
) -> str:
    """Format the metrics as a single line of at most `width` columns. Absent metrics are omitted;
    the loss is omitted if there is a reward (the loss then measures nothing). `short`: for a narrow
    terminal, single spaces and "KL" for the KL to the reference.
    """
    parts, separator = [], " " if short else "  "
    rewarded = any(name in metrics for name in REWARD)
    # groups of a single answer cannot have unequal rewards
    grouped = metrics.get(_SCORED) != metrics.get(_GROUPS) or _GROUPS not in metrics
    for label, names, form in _HEADLINES:
        value = _find_value(metrics, names)
        hidden = (
            value is None
            or (label in ("loss", "policy loss") and rewarded)
            or (names[0] == _MIXED_GROUPS and not grouped)
            or (names[0] == _SAMPLER_CHECK and abs(value) < _SAMPLER_CHECK_FROM)
        )
        if not hidden:
            label = "KL" if short and label == "KL to reference" else label
            parts.append(f"{label} {form(value)}")
    if failed := metrics.get(_FAILED):  # the reward is the mean of the scored samples
        parts.insert(1, f"not scored {failed:.0f} of {failed + metrics.get(_SCORED, 0):.0f}")
    speed = _find_value(metrics, TOKENS_PER_SECOND)
    parts += [f"{format_count(speed)} tok/s"] if speed is not None else []
    while width is not None and len(parts) > 1 and len(separator.join(parts)) > width:
        parts.pop()
    return separator.join(parts)


def format_held_out(metrics: Mapping[str, Any]) -> str:
    """Format the metrics that this step measured on held-out problems; "" if none."""
    values = [
        (label, _find_value(metrics, names))
        for label, names, unless in _HELD_OUT
        if _find_value(metrics, unless) is None
    ]
    parts = [f"{label} {format_score(value)}" for label, value in values if value is not None]
    return f"held-out {', '.join(parts)}" if parts else ""


class Console:
    """Print all output of a run. Close it (or use `with`) at the end."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: IO[str] | None = None,
        terminal: bool | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream = stream or sys.stdout
        # A "dumb" terminal (an editor's shell) cannot move its cursor: print plain lines.
        dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        self._fancy = (self._stream.isatty() and not dumb) if terminal is None else terminal
        self._quiet = quiet
        self._clock = clock
        self._rich = RichConsole(
            file=self._stream,
            force_terminal=self._fancy,
            force_interactive=self._fancy,
            width=width,
            highlight=False,
        )
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._stage, self._first, self._total = "", 0, 0
        self._stage_start = self._run_start = clock()
        self._last_done = -1
        self._step_ends: list[tuple[int, float]] = []  # (steps of the stage, clock) of each update

    # --- progress of the run

    def start(self, title: str, facts: Mapping[str, Any]) -> None:
        """Print the settings of the run: `facts` in their order ("writes to": ..., "model": ...,
        "device": ...).
        """
        self._run_start = self._clock()
        if not self._quiet:
            self._print_panel(title, facts, (), "cyan")

    def end(
        self,
        title: str,
        *,
        results: Mapping[str, tuple[float | None, float | None]] | None = None,
        facts: Mapping[str, Any] | None = None,
        remarks: Sequence[str] = (),
        commands: Sequence[str] = (),
    ) -> None:
        """Print the results. `results`: name to (before, after), e.g. {"held-out accuracy": (0.35,
        0.97)}; None is unknown.

        `remarks`: caveats that belong next to the figures. `commands`: commands to run next.
        """
        self.close()
        rows = {
            name: " -> ".join("n/a" if value is None else format_score(value) for value in ends)
            for name, ends in (results or {}).items()
        }
        rows |= {"time": format_duration(self._clock() - self._run_start), **(facts or {})}
        lines = [*remarks]
        if commands:
            lines += ["Next:", *(f"  {command}" for command in commands)]
        self._print_panel(title, rows, lines, "green")

    def stage(self, name: str, total: int, *, first: int = 0, done: int = 0) -> None:
        """Start a stage of `total` optimizer steps at step `first` of the run; `done` of its steps
        were completed before.
        """
        self.close()
        self._stage, self._first, self._total = name, first, total
        self._stage_start, self._start_done, self._last_done = self._clock(), done, done
        self._step_ends = []
        if self._fancy and not self._quiet:
            self._bar = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[text]}", markup=False),
                TextColumn("{task.fields[times]}", style="dim", markup=False),
                console=self._rich,
                expand=True,
                refresh_per_second=8,
            )
            self._task = self._bar.add_task(name, total=total, completed=done, text="", times="")
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics at optimizer step `step` of the run."""
        done = step - self._first
        if self._quiet:
            return
        if done > self._start_done:
            self._step_ends.append((done, self._clock()))
            if len(self._step_ends) > 128:
                del self._step_ends[1::2]  # bounded in long runs; still spread over all steps
        measured = format_held_out(metrics)
        if self._bar is not None:
            times, narrow = self._format_times(done), self._rich.width < 100
            if narrow:  # leave space for the bar
                times = times.partition(", ")[2] or times
            counts = len(f"{done}/{self._total}")
            space = self._rich.width - len(self._stage) - counts - len(times) - _BAR_COLUMNS
            text = format_headline(metrics, width=space, short=narrow)
            self._bar.update(self._task, completed=done, text=text, times=times)
            if measured:
                self._rich.print(Text(f"{self._stage} {self._format_step(done)}  {measured}"))
        elif self._is_due(done) or measured:
            tail = f"  {measured}" if measured else ""
            parts = [
                f"{self._stage} {self._format_step(done)}",
                format_headline(metrics),
                self._format_times(done),
            ]
            self._write_line("  ".join(part for part in parts if part) + tail)
        self._last_done = done

    def _is_due(self, done: int) -> bool:
        """Return whether step `done` of the stage gets a plain line."""
        every = round_interval(self._total)
        return (
            done >= self._total
            or done // every > self._last_done // every
            or self._last_done == self._start_done
        )

    def _format_step(self, done: int) -> str:
        """Format the finished steps of the stage; after an earlier stage also those of the run, as
        in the metrics and in file names.
        """
        if done == 0:
            return "before the first step"
        text = f"{done:{len(str(self._total))}}/{self._total}"
        return text + (f" (step {self._first + done} of the run)" if self._first else "")

    def _format_times(self, done: int) -> str:
        """Format the elapsed time of this stage, and the remaining time once two steps ended.

        The remaining time is estimated from the later half of the steps so far, and never from the
        first step: the self-test, compilation and the evaluation before training would count as a
        part of every step.
        """
        now = self._clock()
        elapsed = format_duration(now - self._stage_start)
        if len(self._step_ends) < 2 or done >= self._total:
            return elapsed
        first, start = self._step_ends[(len(self._step_ends) - 1) // 2]
        remaining = (now - start) / (done - first) * (self._total - done)
        return f"{elapsed}, {format_duration(remaining)} left"

    # --- messages

    def note(self, text: str) -> None:
        """Print information."""
        if not self._quiet:
            self._print_message("note", text, "blue")

    def warn(self, text: str) -> None:
        """Print a warning, even if quiet."""
        self._print_message("warning", text, "yellow")

    def close(self) -> None:
        """Stop and remove the progress bar, if any."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- formatting

    def _sanitize(self, text: str) -> str:
        """Return the text without control characters: samples and libraries may print any text."""
        return sanitize_message(text, encoding=getattr(self._stream, "encoding", None) or "utf-8")

    def _write_line(self, text: str) -> None:
        """Write a plain line."""
        self._stream.write(self._sanitize(text) + "\n")
        self._stream.flush()

    def _print_message(self, kind: str, text: str, colour: str) -> None:
        """Print a message of a kind: a box on a terminal, a line elsewhere."""
        if self._fancy:
            self._rich.print(
                Panel(
                    Text(self._sanitize(text)),
                    title=kind,
                    title_align="left",
                    border_style=colour,
                    expand=False,
                )
            )
        else:
            self._write_line(f"{kind}: {text}")

    def _print_panel(
        self, title: str, facts: Mapping[str, Any], lines: Sequence[str], colour: str
    ) -> None:
        """Print a title, a table of facts and lines: a panel on a terminal, plain lines
        elsewhere.
        """
        if not self._fancy:
            width = max((len(name) for name in facts), default=0)
            rows = [f"{name:<{width}}  {value}" for name, value in facts.items()]
            self._write_line("\n".join([title, *(f"  {row}" for row in [*rows, *lines])]))
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in facts.items():
            table.add_row(Text(self._sanitize(name)), Text(self._sanitize(str(value))))
        body = Group(table, Text(self._sanitize("\n" + "\n".join(lines)))) if lines else table
        self._rich.print(
            Panel(
                body,
                title=Text(self._sanitize(title), style="bold"),
                title_align="left",
                border_style=colour,
            )
        )
