"""Explain what an update did to each token of a problem's answers: `python why.py RUN --step 57
--problem 12`.

For each token: its logprob at sampling and at the update, the ratio, whether the ratio is clipped,
the advantage, and the token's share of the gradient. The run records this for the steps whose
samples it keeps: every rollouts_every steps and the last. No model is loaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("run", type=Path, help="folder of the run")
parser.add_argument(
    "--step", type=int, required=True, help="step of the run, as in metrics.jsonl and rollouts/"
)
parser.add_argument(
    "--problem", required=True, help="number of the problem, or DATASET:NUMBER for one of several"
)
parser.add_argument(
    "--answer", type=int, nargs="+", metavar="N", help="answers of the group (default: all)"
)
parser.add_argument(
    "--pass",
    type=int,
    default=1,
    dest="number",
    metavar="N",
    help="pass over the batch to print, of a method with several epochs (default: 1)",
)
parser.add_argument("-o", "--out", type=Path, help="write a page with all passes to this file")


def main(args: argparse.Namespace) -> int:
    from rl.errors import UserError
    from rl.reporting import format_explanation, render_explanation
    from rl.trainer import explain_update

    try:
        explanation = explain_update(args.run, args.step, args.problem)
        passes = max(group.num_passes for group in explanation.groups)
        if not 1 <= args.number <= max(1, passes):
            raise UserError(f"--pass is from 1 to {max(1, passes)} at this step, got {args.number}")
        known = sorted({a.index for group in explanation.groups for a in group.answers})
        if unknown := sorted(set(args.answer or ()) - set(known)):
            raise UserError(f"the group has no answer {unknown[0]}: its answers are {known}")
        if args.out is not None:
            title = f"{args.run.resolve().name}, step {args.step}, problem {args.problem}"
            args.out.write_text(render_explanation(explanation, title), encoding="utf-8")
    except (OSError, UserError) as error:
        print(f"why.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(format_explanation(explanation, args.number - 1, args.answer)))
    if args.out is not None:
        print(f"\n{args.out}")
    return 0


if __name__ == "__main__":
    from rl.config import parse_script

    sys.exit(main(parse_script(parser, "nothing was explained")))
