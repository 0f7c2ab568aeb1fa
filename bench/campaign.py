"""Run everything that takes minutes: comparisons with peer libraries and with limits, the recipes
with three seeds, and the tests marked `campaign`. `make campaign`.

    make campaign                               # all parts with installed peers; many hours
                                                # on two cores
    make campaign ARGS="--list"                 # list the parts
    make campaign ARGS="--only default_recipe"  # a single part (repeatable)
    make campaign ARGS="--install"              # first create .venv-bench with TRL in it

Parts write their tables into bench/results/. For each part, campaign.csv records the command that
makes the table, the exit code, the seconds, and the machine. A part that fails does not stop the
other parts; the exit code is then 1.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Replace this folder on sys.path: its kernels.py would shadow the package `kernels`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench import harness  # noqa: E402

PEER_PYTHON = harness.REPO / ".venv-bench" / "bin" / "python"
PEERS = ("grpo_vs_trl", "grpo_losses_vs_trl")  # parts that need the packages of the extra `bench`
LOSSES = "tests/losses/test_losses_vs_trl.py"
LEARNING = "tests/trainer/test_recipes_learn.py"
CAMPAIGN = "-m pytest -q -m campaign"
KILLS = "-m pytest -q tests/trainer/test_crash_safety.py -m 'slow or campaign' -k random_rank"
# name -> (description, the words after `python`)
PARTS = {
    "default_recipe": ("the default recipe: time, accuracy", "tools/recipe_figures.py default"),
    "addition": ("recipes/addition.yaml: the same figures", "tools/recipe_figures.py addition"),
    "learning": ("methods, games, images, an agent pass a bar", f"{CAMPAIGN} {LEARNING}"),
    "campaign_tests": ("tests too long for `make test-all`", f"{CAMPAIGN} --ignore {LEARNING}"),
    "kill_campaign": ("kill -9 of a random rank of two, resumed to the same bits", KILLS),
    "mutants": ("300 mutants drawn by seed: does a test see them?", "tools/mutants.py"),
    "architectures": ("every causal LM of transformers, tiny", "bench/architectures.py"),
    "staleness": ("GRPO on tokens 0 to 8 updates old, each correction", "bench/staleness.py"),
    "sampler": ("the sampler against model.generate: tokens per second", "bench/sampler.py"),
    "grpo_vs_trl": ("a GRPO step against TRL: time, accuracy", "bench/grpo_vs_trl.py"),
    "grpo_losses_vs_trl": ("losses and gradients against TRL", f"{CAMPAIGN} {LOSSES}"),
    "scaling": ("a modelled step on 1 to 1,024 GPUs", "tools/scaling.py"),
    "kernels": ("linear_logprob against plain torch", "bench/kernels.py"),
}


def install_peers() -> None:
    """Create .venv-bench, a separate environment: the peers' pins must not touch the project's."""
    if not PEER_PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_PYTHON.parent.parent)], check=True)
    pins = ["-c", str(harness.REPO / "constraints.txt"), "-e", f"{harness.REPO}[bench,dev]"]
    subprocess.run([str(PEER_PYTHON), "-m", "pip", "install", *pins], check=True)


def run_part(name: str) -> dict[str, Any]:
    """Run a part and return its row of campaign.csv."""
    says, words = PARTS[name]
    command = [str(PEER_PYTHON) if name in PEERS else sys.executable, *shlex.split(words)]
    print(f"\n== {name}: {says}\n   {harness.format_command(command)}", flush=True)
    start, env = time.perf_counter(), {**os.environ, "WHETSTONE_TABLES": str(harness.RESULTS)}
    if "pytest" in command:  # a script sets its own number of threads
        env["OMP_NUM_THREADS"] = "1"
    code = subprocess.run(command, cwd=harness.REPO, env=env).returncode
    seconds = round(time.perf_counter() - start)
    outcome = "done" if code == 0 else f"FAILED with exit code {code}"
    print(f"== {name}: {outcome}, {seconds} s", flush=True)
    row = {"part": name, "exit_code": code, "seconds": seconds, "date": time.strftime("%Y-%m-%d")}
    row |= {"machine": harness.describe_machine(), "command": harness.format_command(command)}
    return row


def main() -> int:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="this part (repeatable)")
    parser.add_argument("--list", action="store_true", help="list the parts, run nothing")
    parser.add_argument("--install", action="store_true", help="first install TRL (2.5 GB)")
    args = parser.parse_args()
    if args.install and not args.list:
        install_peers()
    absent = () if PEER_PYTHON.exists() else PEERS
    failed = False
    for name in args.only or PARTS:
        if args.list:
            state = "needs --install" if name in absent else "ready"
            print(f"{name:20s} {PARTS[name][0]} ({state})")
        elif name in absent:
            print(f"\n== {name}: left out, it needs TRL: make campaign ARGS=--install")
        else:
            row = run_part(name)
            failed |= row["exit_code"] != 0
            harness.replace_rows(
                harness.RESULTS / "campaign.csv", [row], ("part",), lambda row: row["date"]
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
