"""Weights for others: `python export.py runs/grpo exports/grpo --merge --dtype bf16`, a folder for
transformers, PEFT or vLLM.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a checkpoint, or a folder of
weights. OUT is a new folder. A LoRA result stays an adapter unless --merge. Merging is done in
fp32, and a head that is tied to the embedding becomes a matrix of its own where it was adapted:
logits stay those of the run.
"""

import argparse
import shlex
import sys
from pathlib import Path

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "weights", metavar="WEIGHTS", help="a run's folder, a checkpoint, or a folder of weights"
)
parser.add_argument(
    "out", metavar="OUT", type=Path, help="folder to write; new, or empty, unless --overwrite"
)
parser.add_argument(
    "--checkpoint", help="of a run: best, or a name in its checkpoints.jsonl (default: the newest)"
)
parser.add_argument(
    "--merge",
    action="store_true",
    help="merge a LoRA adapter into its base: weights that need nothing else",
)
parser.add_argument(
    "--overwrite",
    action="store_true",
    help="replace an earlier export in OUT, once the new one is whole; nothing else",
)
parser.add_argument(
    "--dtype",
    choices=["fp32", "bf16", "fp16"],
    default="fp32",
    help="of the numbers written (default fp32)",
)
parser.add_argument(
    "--push",
    metavar="REPO",
    help="also upload it to this repository of the Hugging Face hub (made private if it is new)",
)


def main(args: argparse.Namespace) -> None:
    from rich.console import Console

    from rl.run import described, export, push

    console = Console(highlight=False, soft_wrap=True)
    found = export(
        args.weights,
        args.out,
        name=args.checkpoint,
        merged=args.merge,
        dtype=args.dtype,
        overwrite=args.overwrite,
    )
    console.print(described(found), markup=False)
    if args.push:
        console.print(f"pushed to {push(args.out, args.push)}", markup=False)
    console.print(f"Next:\n  python sample.py {shlex.quote(str(args.out))}", markup=False)


if __name__ == "__main__":
    args = parser.parse_args()
    from rl.quick import quick

    quick()
    from rl.run import guarded

    sys.exit(
        guarded(lambda: main(args), see="python export.py --help", outcome="nothing was exported")
    )
