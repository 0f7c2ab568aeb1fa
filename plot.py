"""Draw a run's curves, or compare several runs: `python plot.py runs/addition [runs/other ...] [-o curves.png]`."""

import argparse
import sys
from pathlib import Path

from rl.errors import UserError
from rl.report import CURVES, draw

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("runs", nargs="+", type=Path, help="folders of runs (or their metrics.jsonl)")
parser.add_argument("-o", "--out", type=Path, help=f"picture to write (default: {CURVES} in the first run's folder)")
parser.add_argument("--labels", nargs="+", help="names in the legend, one a run (default: the folders' names)")


def main() -> int:
    args = parser.parse_args()
    first = args.runs[0] if args.runs[0].is_dir() else args.runs[0].parent
    default = first / CURVES if len(args.runs) == 1 else Path(CURVES)
    try:
        print(draw(args.runs, args.out or default, args.labels))
    except (OSError, ImportError, UserError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
