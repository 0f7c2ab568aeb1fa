"""Run everything that takes minutes: the default recipe with three seeds, and comparisons with peer
libraries. `make campaign`.

    make campaign                               # all parts with installed peers; about two hours
                                                # on two cores
    make campaign ARGS="--list"                 # list the parts
    make campaign ARGS="--only default_recipe"  # a single part (repeatable)
    make campaign ARGS="--install"              # first create .venv-bench with TRL in it

Each part writes its table into bench/results/. For each part, campaign.csv records the command that
makes the table, the exit code, the seconds, and the machine. A part that fails does not stop the
other parts; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path: its kernels.py would shadow the package `kernels`.
sys.path[0] = str(HERE.parent)
from bench.harness import (  # noqa: E402
    GREEDY,
    HELD_OUT,
    REPO,
    RESULTS,
    SEEDS,
    format_command,
    machine,
    read_table,
    show,
    write_table,
)

PEER_PYTHON = REPO / ".venv-bench" / "bin" / "python"


@dataclass(frozen=True)
class Part:
    """Describe a part of the campaign. `words`: a script of this folder that writes a table into
    results/, and its flags; or `pytest` and its flags. `peers`: whether it needs the packages of
    the extra `bench`.
    """

    name: str
    says: str
    words: str
    peers: bool = False

    @property
    def command(self) -> list[str]:
        script, *flags = shlex.split(self.words)
        python = str(PEER_PYTHON if self.peers else sys.executable)
        start = ["-m", "pytest", "-q"] if script == "pytest" else [str(HERE / script)]
        return [python, *start, *flags]


PARTS = (
    Part(
        "default_recipe",
        "the default recipe, seeds 0, 1 and 2: time, accuracy before and after",
        "campaign.py --default-recipe",
    ),
    Part(
        "addition",
        "recipes/addition.yaml, seeds 0, 1 and 2: the same figures of a gain that is sharpening",
        "campaign.py --addition-recipe",
    ),
    Part(
        "methods", "each method learns: its recipe with seeds 0, 1 and 2, past a bar", "methods.py"
    ),
    Part(
        "campaign_tests",
        "tests too long for `make test-all`: kills, fuzz, random workloads, learning, layouts",
        "pytest -m campaign",
    ),
    Part(
        "kill_campaign",
        "kill -9 of a random rank of two, twenty seeds: resumed to the same bits",
        "pytest tests/trainer/test_crash_safety.py -m 'slow or campaign' -k random_rank",
    ),
    Part(
        "architectures",
        "every causal LM of transformers, tiny: layouts and sampler exact or refused, none wrong",
        "architectures.py",
    ),
    Part(
        "architectures_seeing",
        "every vision-language model: images exact, text alone, or refused",
        "architectures_seeing.py",
    ),
    Part(
        "images",
        "recipes/shapes.yaml, three seeds: past its bar as it sees, below it where pixels are "
        "permuted",
        "images.py",
    ),
    Part(
        "staleness",
        "GRPO on tokens 0, 1, 4 and 8 updates old under each correction, three seeds: accuracy",
        "staleness.py",
    ),
    Part("sampler", "the sampler against model.generate: tokens per second", "sampler.py"),
    Part("grpo_vs_trl", "one GRPO step against TRL: time, learning curve", "grpo_vs_trl.py", True),
    Part(
        "grpo_losses_vs_trl",
        "GRPO's loss types against TRL: losses and gradients equal to 1e-4",
        "grpo_losses_vs_trl.py",
        True,
    ),
    Part(
        "scaling",
        "a step on 1 to 1,024 GPUs, modelled; its traffic against two processes",
        "scaling.py --measure",
    ),
    Part("graders", "the math graders on real text: agreement with published grades", "graders.py"),
    Part(
        "code_sets",
        "reference solutions and empty bodies of HumanEval and MBPP through code_tests",
        "code_sets.py",
    ),
    Part(
        "kernel_cpu",
        "linear_logprob against plain torch: time, memory",
        "kernel_cpu.py --variants plain fused",
    ),
)


# -------------------------------------------------------------------------------- whole recipes


# The metrics of the picture.
PLOTTED_METRICS = (
    "step",
    "stage",
    "optim/loss",
    "optim/grad_norm",
    "optim/entropy",
    "optim/kl_sample_train_v1",
    "reward/total",
    HELD_OUT,
    GREEDY,
    "time/step",
    "time/tokens_per_second",
)


def run_recipe(table: str, recipe: list[str], seeds: tuple[int, ...]) -> None:
    """Run `accelerate launch train.py RECIPE` once for each seed and write `table`.csv.

    The plotted metrics of the first seed are written to `table`.jsonl.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix=f"{table}-") as name:
        for seed in seeds:
            folder = Path(name) / f"seed-{seed}"
            rows.append(one_seed(recipe, seed, folder))
            write_table(RESULTS / f"{table}.csv", rows)
            if seed == seeds[0]:
                write_plotted_metrics(folder, RESULTS / f"{table}.jsonl")
            show(rows[-1])


def write_plotted_metrics(folder: Path, out: Path) -> None:
    """Write the plotted metrics of a run to `out`."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with out.open("w") as file:
        for row in rows:
            metrics = {key: row[key] for key in PLOTTED_METRICS if key in row}
            if row["stage"] == "grpo":  # the value of its loss has no meaning
                metrics.pop("optim/loss", None)
            file.write(json.dumps(metrics) + "\n")


def draw_picture(table: str, title: str) -> None:
    """Draw `table`.jsonl as `table`.png."""
    metrics, picture = (RESULTS / f"{table}.{suffix}" for suffix in ("jsonl", "png"))
    words = [str(REPO / "plot.py"), str(metrics), "-o", str(picture), "--labels", title]
    subprocess.run([sys.executable, *words], cwd=REPO, check=True)


def one_seed(recipe: list[str], seed: int, folder: Path) -> dict[str, Any]:
    """Return a row of a recipe's table. `seconds`: wall clock of the whole command, including
    start-up. `warm_up_seconds`: the steps before the last stage.
    """
    launcher = Path(sys.executable).parent / "accelerate"
    words = ["launch", "--quiet", "train.py", *recipe, "--seed", str(seed)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    load, start = os.getloadavg()[0], time.perf_counter()
    subprocess.run(
        [str(launcher), *words, "--output-dir", str(folder), "--quiet"], cwd=REPO, check=True
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [row[HELD_OUT] for row in rows if HELD_OUT in row]
    greedy = [row[GREEDY] for row in rows if GREEDY in row]
    stage = rows[-1]["stage"]
    steps = [row["time/step"] for row in rows if row["stage"] == stage and "time/step" in row]
    warm_up = sum(row.get("time/step", 0.0) for row in rows if row["stage"] != stage)
    return {
        "seed": seed,
        "before": round(held_out[0], 4),
        "after": round(held_out[-1], 4),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "warm_up_seconds": round(warm_up, 1),
        f"{stage}_step_mean_ms": round(1e3 * sum(steps) / len(steps), 1),
        f"{stage}_steps": len(steps),
        "greedy_before": round(greedy[0], 4),
        "greedy_after": round(greedy[-1], 4),
        "load_at_start": round(load, 2),
        "machine": machine(),
        "command": shlex.join(["accelerate", *words]),
    }


# ---------------------------------------------------------------------------------------- all parts


def install_peers() -> None:
    """Create .venv-bench, a separate environment: the peers' pins must not touch the project's."""
    if not PEER_PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_PYTHON.parent.parent)], check=True)
    words = [
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        str(REPO / "constraints.txt"),
        "-e",
        f"{REPO}[bench]",
    ]
    subprocess.run([str(PEER_PYTHON), *words], check=True)


def run(part: Part) -> dict[str, Any]:
    """Run a part and return its row of campaign.csv."""
    command = format_command(part.command)
    print(f"\n== {part.name}: {part.says}\n   {command}", flush=True)
    start = time.perf_counter()
    # Tests run with one thread; a script sets its own number of threads.
    env = {**os.environ, "OMP_NUM_THREADS": "1"} if "pytest" in part.command else None
    code = subprocess.run(part.command, cwd=REPO, env=env).returncode
    seconds = round(time.perf_counter() - start)
    print(
        f"== {part.name}: {'done' if code == 0 else f'FAILED with exit code {code}'}, {seconds} s",
        flush=True,
    )
    today = time.strftime("%Y-%m-%d")
    return {
        "part": part.name,
        "exit_code": code,
        "seconds": seconds,
        "date": today,
        "machine": machine(),
        "command": command,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[part.name for part in PARTS],
        help="run this part alone (repeatable)",
    )
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    parser.add_argument(
        "--install", action="store_true", help="install TRL into .venv-bench first (2.5 GB)"
    )
    parser.add_argument("--default-recipe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--addition-recipe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=list(SEEDS),
        help="of the recipe (with --default-recipe or --addition-recipe)",
    )
    args = parser.parse_args()
    if args.default_recipe:
        run_recipe("default_recipe", [], tuple(args.seeds))
        draw_picture("default_recipe", f"make train: digits to sort, seed {args.seeds[0]}")
        return 0
    if args.addition_recipe:
        run_recipe("addition", ["recipes/addition.yaml"], tuple(args.seeds))
        return 0
    if args.list:
        for part in PARTS:
            state = "needs --install" if part.peers and not PEER_PYTHON.exists() else "ready"
            print(f"{part.name:20s} {part.says} ({state})")
        return 0
    if args.install:
        install_peers()
    print(machine())
    rows = []
    for part in (part for part in PARTS if not args.only or part.name in args.only):
        if part.peers and not PEER_PYTHON.exists():
            print(f"\n== {part.name}: left out, it needs TRL: make campaign ARGS=--install")
            continue
        rows.append(run(part))
        # A run of some parts keeps the rows of the others.
        names = {row["part"] for row in rows}
        earlier = (row for row in read_table(RESULTS / "campaign.csv") if row["part"] not in names)
        write_table(RESULTS / "campaign.csv", [*earlier, *rows])
    return int(any(row["exit_code"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
