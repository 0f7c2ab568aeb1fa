"""Train recipes/shapes.yaml with its images and blind (every image's pixels permuted), to show what
is learned from the images.

    python bench/images.py --seeds 0 1 2    # into results/images.csv; --only seeing (or blind)

The table has a row for each stage of each run, written when the run has ended (a run's rows replace
its earlier rows): held-out accuracy (sampled and greedy) before and after, steps, CPU seconds of
the whole run, wall seconds. `pass`: the run with images ends above the bar, the blind run below it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    GREEDY,
    HELD_OUT,
    REPO,
    RESULTS,
    SEEDS,
    make_parser,
    replace_rows,
    show,
    train,
)

BAR = 0.7
PICTURES = ("seeing", "blind")


def write_recipe(blind: bool, folder: Path) -> Path:
    """Return the path of recipes/shapes.yaml; if `blind`, of a copy with every image's pixels
    permuted, in training and held out.
    """
    path = REPO / "recipes" / "shapes.yaml"
    if not blind:
        return path
    content = yaml.safe_load(path.read_text())
    for part in (content, *content["stages"]):
        if "dataset" in part:
            name, _, options = part["dataset"].partition(":")
            part["dataset"] = f"{name}:{','.join(filter(None, [options, 'blind=1']))}"
    (folder / "blind.yaml").write_text(yaml.safe_dump(content))
    return folder / "blind.yaml"


def run_once(pictures: str, seed: int, extra: list[str], folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run, a row for each stage."""
    recipe = write_recipe(pictures == "blind", folder)
    run = train([str(recipe), "--seed", str(seed), *extra], folder / "run")
    rows = []
    for stage in dict.fromkeys(row["stage"] for row in run.rows):
        metrics = [row for row in run.rows if row["stage"] == stage]
        names = HELD_OUT, GREEDY
        sampled, greedy = ([row[name] for row in metrics if name in row] for name in names)
        passes: int | str = ""
        if sampled:
            best = max(sampled[-1], *greedy[-1:])
            passes = int(best < BAR if pictures == "blind" else best > BAR)
        rows.append(
            {
                "pictures": pictures,
                "seed": seed,
                "stage": stage,
                "steps": max(row["step"] for row in metrics),
                "accuracy_first": sampled[0] if sampled else "",
                "accuracy_last": sampled[-1] if sampled else "",
                "greedy_last": greedy[-1] if greedy else "",
                "cpu_seconds": round(run.cpu_seconds),
                "wall_seconds": round(run.seconds),
                "pass": passes,
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--only", choices=PICTURES, nargs="+", default=PICTURES)
    parser.add_argument("--out", type=Path, default=RESULTS / "images.csv")
    args, extra = parser.parse_known_args()
    failed = False
    for seed in args.seeds:
        for pictures in args.only:
            with tempfile.TemporaryDirectory() as folder:
                rows = run_once(pictures, seed, extra, Path(folder))
            for row in rows:
                show(row)
            failed |= rows[-1]["pass"] == 0
            order = lambda row: (PICTURES.index(row["pictures"]), int(row["seed"]))  # noqa: E731
            replace_rows(args.out, rows, ("pictures", "seed"), order)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
