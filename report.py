"""Write a run, or several runs beside each other, as one HTML page: `python report.py runs/sorting
[runs/other ...] [-o report.html]`.

The page holds its scripts and data: it opens from disk without a network. It is written to
report.html in the run's folder; for several runs, to report.html in the current folder. -o sets
another file, or the folder of report.html. It needs plotly: pip install -e ".[report]" in the
checkout.
"""

import argparse
import sys
from pathlib import Path

from rl.config import parse_script
from rl.errors import UserError

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
parser.add_argument("-o", "--out", type=Path, help="page to write")
parser.add_argument(
    "--labels",
    nargs="+",
    help="names of the runs on the page, in their order (default: the folders' names)",
)


def main() -> int:
    args = parse_script(parser, "nothing was written")
    from rl.trainer import write_report  # imports torch, which --help does not need

    try:
        print(write_report(args.runs, args.out, args.labels))
    except (OSError, UserError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
