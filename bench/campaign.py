"""Run everything that takes minutes: the default recipe with three seeds, and comparisons with peer
libraries. `make campaign`.

    make campaign                               # all parts with installed peers; many hours
                                                # on two cores
    make campaign ARGS="--list"                 # list the parts
    make campaign ARGS="--only default_recipe"  # a single part (repeatable)
    make campaign ARGS="--install"              # first create .venv-bench with TRL in it

Each part writes its table into bench/results/. For each part, campaign.csv records the command that
makes the table, the exit code, the seconds, and the machine. A part that fails does not stop the
other parts; the exit code is then 1.
"""

from __future__ import annotations

import json
import os
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
    Run,
    describe_machine,
    format_command,
    make_parser,
    replace_rows,
    show,
    train,
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


KILLS = "pytest tests/trainer/test_crash_safety.py -m 'slow or campaign' -k random_rank"
PARTS = (
    Part("default_recipe", "the default recipe: time, accuracy", "campaign.py --recipe default"),
    Part("addition", "recipes/addition.yaml: the same figures", "campaign.py --recipe addition"),
    Part("learning", "methods, games, images, an agent pass a bar", "learning.py"),
    Part("learning_seeds", "the tests that learn, three seeds", "learning_seeds.py"),
    Part("campaign_tests", "tests too long for `make test-all`", "pytest -m campaign"),
    Part("kill_campaign", "kill -9 of a random rank of two, resumed to the same bits", KILLS),
    Part("architectures", "every causal LM of transformers, tiny", "architectures.py"),
    Part("architectures_seeing", "every vision-language model, tiny", "architectures_seeing.py"),
    Part("staleness", "GRPO on tokens 0, 1, 4 and 8 updates old, each correction", "staleness.py"),
    Part("sampler", "the sampler against model.generate: tokens per second", "sampler.py"),
    Part("grpo_vs_trl", "a GRPO step against TRL: time, accuracy", "grpo_vs_trl.py", True),
    Part("grpo_losses_vs_trl", "losses and gradients against TRL", "grpo_losses_vs_trl.py", True),
    Part("scaling", "a modelled step on 1 to 1,024 GPUs", "scaling.py"),
    Part("kernels", "linear_logprob against plain torch", "kernels.py"),
)


# -------------------------------------------------------------------------------- whole recipes

# name -> (table, words of train.py)
RECIPES = {"default": ("default_recipe", []), "addition": ("addition", ["recipes/addition.yaml"])}
# The metrics of the picture of the default recipe.
PLOTTED_METRICS = (
    "step stage optim/grad_norm optim/entropy optim/kl_sample_train_v1 reward/total "
    f"{HELD_OUT} {GREEDY} time/step time/tokens_per_second"
).split()


def run_recipe(name: str) -> None:
    """Run `accelerate launch train.py RECIPE` once for each seed and write its table; draw the
    first seed of the default recipe.
    """
    table, recipe = RECIPES[name]
    launch, rows = ["accelerate", "launch", "--quiet"], []
    with tempfile.TemporaryDirectory(prefix=f"{table}-") as folder:
        for seed in SEEDS:
            words, load = [*recipe, "--seed", str(seed)], round(os.getloadavg()[0], 2)
            program = str(Path(sys.executable).parent / launch[0])
            run = train(words, Path(folder) / f"seed-{seed}", [program, *launch[1:]])
            command = shlex.join([*launch, "train.py", *words])
            about = {"load_at_start": load, "machine": describe_machine(), "command": command}
            rows.append({"seed": seed, **summarize(run), **about})
            write_table(RESULTS / f"{table}.csv", rows)
            if (name, seed) == ("default", SEEDS[0]):
                draw_run(run, RESULTS / table)
            show(rows[-1])


def summarize(run: Run) -> dict[str, Any]:
    """Return a row's figures. `seconds`: wall clock of the whole command, including start-up.
    `warm_up_seconds`: the steps before the last stage.
    """
    held_out, greedy, stage = run.values(HELD_OUT), run.values(GREEDY), run.rows[-1]["stage"]
    steps, every_step = run.values("time/step", stage), run.values("time/step")
    return {
        "before": round(held_out[0], 4),
        "after": round(held_out[-1], 4),
        "seconds": round(run.seconds, 1),
        "cpu_seconds": round(run.cpu_seconds, 1),
        "warm_up_seconds": round(sum(every_step) - sum(steps), 1),
        f"{stage}_step_mean_ms": round(1e3 * sum(steps) / len(steps), 1),
        f"{stage}_steps": len(steps),
        "greedy_before": round(greedy[0], 4),
        "greedy_after": round(greedy[-1], 4),
    }


def draw_run(run: Run, path: Path) -> None:
    """Write the plotted metrics of a run to `path`.jsonl, and draw them as `path`.png."""
    metrics, picture = path.with_suffix(".jsonl"), path.with_suffix(".png")
    rows = ({key: row[key] for key in PLOTTED_METRICS if key in row} for row in run.rows)
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["plot.py", str(metrics), "-o", str(picture), "--labels", "make train: digits to sort"]
    subprocess.run([sys.executable, *words], cwd=REPO, check=True)


# ---------------------------------------------------------------------------------------- all parts


def install_peers() -> None:
    """Create .venv-bench, a separate environment: the peers' pins must not touch the project's."""
    if not PEER_PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_PYTHON.parent.parent)], check=True)
    pins = ["-c", str(REPO / "constraints.txt"), "-e", f"{REPO}[bench]"]
    subprocess.run([str(PEER_PYTHON), "-m", "pip", "install", *pins], check=True)


def run(part: Part) -> dict[str, Any]:
    """Run a part and return its row of campaign.csv."""
    command = format_command(part.command)
    print(f"\n== {part.name}: {part.says}\n   {command}", flush=True)
    start = time.perf_counter()
    # Tests run with one thread; a script sets its own number of threads.
    env = {**os.environ, "OMP_NUM_THREADS": "1"} if "pytest" in part.command else None
    code = subprocess.run(part.command, cwd=REPO, env=env).returncode
    seconds = round(time.perf_counter() - start)
    outcome = "done" if code == 0 else f"FAILED with exit code {code}"
    print(f"== {part.name}: {outcome}, {seconds} s", flush=True)
    return {
        "part": part.name,
        "exit_code": code,
        "seconds": seconds,
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "command": command,
    }


def main() -> int:
    parser, names = make_parser(__doc__), [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="this part (repeatable)")
    parser.add_argument("--list", action="store_true", help="list the parts, run nothing")
    parser.add_argument("--install", action="store_true", help="first install TRL (2.5 GB)")
    parser.add_argument("--recipe", choices=RECIPES, help="the table of this recipe alone")
    args = parser.parse_args()
    if args.recipe:
        run_recipe(args.recipe)
        return 0
    if args.list:
        for part in PARTS:
            state = "needs --install" if part.peers and not PEER_PYTHON.exists() else "ready"
            print(f"{part.name:20s} {part.says} ({state})")
        return 0
    if args.install:
        install_peers()
    print(describe_machine())
    failed = False
    for part in (part for part in PARTS if not args.only or part.name in args.only):
        if part.peers and not PEER_PYTHON.exists():
            print(f"\n== {part.name}: left out, it needs TRL: make campaign ARGS=--install")
            continue
        row = run(part)
        failed |= row["exit_code"] != 0
        replace_rows(RESULTS / "campaign.csv", [row], ("part",), lambda row: row["date"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
