"""Watch runs in a terminal while they train: `python watch.py runs/sorting [runs/other ...]`.

The screen shows progress, alarms, curves and the latest answers, and follows the files of the runs;
it changes none of them, so it works over ssh and beside any run. Keys: q ends it, n and p page
through the answers. --once prints the screen once, which is also what happens if the output is not
a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rl.config import parse_script
from rl.startup import reduce_gc

KEYS = "q quit   n/p next and previous answers"

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
parser.add_argument("--once", action="store_true", help="print the screen once and end")
parser.add_argument(
    "--interval",
    type=float,
    default=2.0,
    metavar="SECONDS",
    help="seconds between two readings of the files (default: 2; longer for long runs)",
)
parser.add_argument(
    "--labels",
    nargs="+",
    help="names of the runs on the screen, in their order (default: the folders' names)",
)


@contextlib.contextmanager
def read_single_keys() -> Iterator[bool]:
    """Make standard input deliver each key at once; yield whether it is a terminal."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    saved = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def wait_for_key(seconds: float, has_keys: bool) -> str:
    """Return the key that is pressed within `seconds`, or ""; q if the terminal is gone."""
    ready, _, _ = select.select([sys.stdin] if has_keys else [], [], [], seconds)
    return os.read(sys.stdin.fileno(), 32).decode(errors="replace") or "q" if ready else ""


def main() -> int:
    args = parse_script(parser, "nothing is watched")
    if not args.interval > 0:
        parser.error(f"--interval is a positive number of seconds, got {args.interval}")
    if args.labels is not None and len(args.labels) != len(args.runs):
        parser.error(f"{len(args.labels)} labels for {len(args.runs)} runs: give one for each run")
    for folder in args.runs:
        if not folder.is_dir():
            print(
                f"watch.py: {folder} is not a folder: give the folder of a run, such as "
                "runs/sorting",
                file=sys.stderr,
            )
            return 2
        inside = sorted(str(path.parent) for path in folder.glob("*/metrics.jsonl"))
        is_run = any((folder / name).exists() for name in ("config.json", "metrics.jsonl"))
        if inside and not is_run:
            names = ", ".join(inside[:8]) + (" ..." if len(inside) > 8 else "")
            print(f"watch.py: {folder} is no run but has runs: {names}", file=sys.stderr)
            return 2
    from rich.console import Console
    from rich.live import Live

    from rl.reporting import RunFollower, label_runs, render_runs

    labels = args.labels or label_runs(args.runs)
    runs = [RunFollower(folder, label) for folder, label in zip(args.runs, labels, strict=True)]
    console = Console(highlight=False)
    interactive = console.is_terminal and not console.is_dumb_terminal and not args.once

    def render(page: int = 0, live: bool = False):
        for run in runs:
            run.refresh()
        height = console.height if live else None
        return render_runs(
            runs, width=console.width, height=height, page=page, keys=KEYS if live else ""
        )

    if interactive:
        page = 0
        with (
            contextlib.suppress(KeyboardInterrupt),
            read_single_keys() as has_keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                start = time.process_time()
                live.update(render(page, live=True), refresh=True)
                # at most a tenth of a core, which the run may need: a long run is drawn less often
                pause = max(args.interval, 10 * (time.process_time() - start))
                key = wait_for_key(pause, has_keys)
                if key[:1] in ("q", "Q", "\x03", "\x04"):
                    break
                page = max(0, page + (key[:1] in ("n", " ")) - (key[:1] == "p"))
    console.print(render())
    return 0


if __name__ == "__main__":
    reduce_gc()
    sys.exit(main())
