"""Export weights for transformers, PEFT or vLLM: `python export.py runs/grpo exports/grpo --merge
--dtype bf16`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a checkpoint, or a folder of
weights. OUT is a new folder. A LoRA adapter stays an adapter unless --merge. Merging is done in
fp32. A head that is tied to the embedding becomes a separate matrix if it was adapted, so the
logits equal those of the run.
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
    "out", metavar="OUT", type=Path, help="folder to write; new or empty, unless --overwrite"
)
parser.add_argument(
    "--checkpoint", help="of a run: best, or a name in its checkpoints.jsonl (default: the newest)"
)
parser.add_argument(
    "--merge",
    action="store_true",
    help="merge a LoRA adapter into its base model",
)
parser.add_argument(
    "--overwrite",
    action="store_true",
    help="replace an earlier export in OUT after the new export is complete; never replaces other "
    "folders",
)
parser.add_argument(
    "--dtype",
    choices=["fp32", "bf16", "fp16"],
    default="fp32",
    help="data type of the exported weights (default fp32)",
)
parser.add_argument(
    "--trust-run",
    action="store_true",
    help="import the run's custom method from the path in its config",
)
parser.add_argument(
    "--push",
    metavar="REPO",
    help="also upload to this repository of the Hugging Face hub (created as private if it is new)",
)


def main(args: argparse.Namespace, exported: list[Path]) -> None:
    """Export the weights, and push them. `exported` receives OUT when it is written."""
    from rich.console import Console

    from rl.trainer import (
        check_hub_login,
        describe_export,
        export_weights,
        format_script,
        push_to_hub,
    )

    console = Console(highlight=False, soft_wrap=True)
    if args.push:
        check_hub_login()
    summary = export_weights(
        args.weights,
        args.out,
        name=args.checkpoint,
        merged=args.merge,
        dtype=args.dtype,
        overwrite=args.overwrite,
        trusted=args.trust_run,
    )
    exported.append(args.out)
    console.print(describe_export(summary), markup=False)
    if args.push:
        console.print(f"pushed to {push_to_hub(args.out, args.push)}", markup=False)
    console.print(f"Next:\n  {format_script('sample')} {shlex.quote(str(args.out))}", markup=False)


if __name__ == "__main__":
    from rl.config import parse_script

    args = parse_script(parser, "nothing was exported")
    from rl.startup import reduce_gc

    reduce_gc()
    from rl.trainer import run_guarded

    exported: list[Path] = []
    sys.exit(
        run_guarded(
            lambda: main(args, exported),
            see="python export.py --help",
            outcome=lambda: "the export was not pushed" if exported else "nothing was exported",
        )
    )
