"""Measure a recipe with seeds 0, 1 and 2: time, and held-out accuracy before and after.

python tools/recipe_figures.py default     # results/default_recipe.csv and its picture
python tools/recipe_figures.py addition    # results/addition.csv
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    GREEDY,
    HELD_OUT,
    REPO,
    RESULTS,
    SEEDS,
    Run,
    describe_machine,
    make_parser,
    show,
    train,
    write_table,
)

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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipe", choices=RECIPES)
    run_recipe(parser.parse_args().recipe)


if __name__ == "__main__":
    main()
