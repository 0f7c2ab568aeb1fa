"""Plot a run's curves, or compare several runs: `python plot.py runs/sorting [runs/other ...] [-o
curves.png]`.

The picture is written to curves.png in the run's folder; for several runs, to curves.png in the
current folder. -o, or a last name that ends with .png, .svg or .pdf, sets another file; if it is a
folder, the picture is curves.png in it. The seeds of a run are drawn as their mean and a band of a
standard deviation; --each-run draws a curve of each.
"""

import argparse
import sys
from pathlib import Path

from rl.config import parse_script
from rl.errors import UserError
from rl.reporting import AXES, CURVES, PICTURE_SUFFIXES, draw_curves

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("runs", nargs="+", type=Path, help="folders of runs (or their metrics.jsonl)")
parser.add_argument(
    "-o",
    "--out",
    type=Path,
    help=f"picture to write (default: {CURVES} in the run's folder; for several runs, in the "
    "current folder)",
)
parser.add_argument(
    "--labels",
    nargs="+",
    help="names in the legend, in the order of the runs (default: the folders' names)",
)
parser.add_argument(
    "--axis", choices=list(AXES), default="steps", help="horizontal axis (default: steps)"
)
parser.add_argument(
    "--metrics",
    nargs="+",
    help="metrics of metrics.jsonl to draw, such as optim/entropy (default: the usual panels)",
)
parser.add_argument(
    "--each-run",
    action="store_true",
    help="draw a curve of each run, also of several seeds",
)


def main() -> int:
    args = parse_script(parser, "nothing was plotted")
    if (
        len(args.runs) > 1
        and args.runs[-1].suffix.lower() in PICTURE_SUFFIXES
        and not args.runs[-1].is_dir()
    ):
        *args.runs, last = args.runs
        if args.out is not None:
            parser.error(f"{last} and -o {args.out} both name the picture: pass only one of them")
        args.out = last
    first = args.runs[0] if args.runs[0].is_dir() else args.runs[0].parent
    default = first / CURVES if len(args.runs) == 1 else Path(CURVES)
    out = args.out or default
    try:
        path = out / CURVES if out.is_dir() else out
        chosen = {"axis": args.axis, "metrics": args.metrics, "each_run": args.each_run}
        print(draw_curves(args.runs, path, args.labels, **chosen))
    except (OSError, ImportError, UserError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
