"""Check that each method learns: its recipe with seeds 0, 1 and 2 passes a bar that the model
misses before.

    python bench/methods.py                        # all, about half an hour on two idle cores
    python bench/methods.py --only dpo --seeds 0   # a single run (both accept several values)
    python bench/methods.py --work runs/methods    # keep the runs and reuse their taught models

reinforce, ppo and dpo start from the same taught model per seed, trained by the first stage of
recipes/addition.yaml (the recipe of dpo teaches for 450 steps instead of 750); from their recipes
only the later stages are run. The other methods run their whole recipes. methods.csv has a row for
each seed and figure, written after every run: `before` at the first evaluation of the stage
(distill: of the student), `after` at the stage's last evaluation, on 512 held-out problems;
`passed` if before < bar <= after. `seconds` is the wall clock of the run, start-up included,
without the training of a shared model. Rows of other methods and seeds stay. The exit code is 1 if
a run fails or misses its bar.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    HELD_OUT,
    REPO,
    RESULTS,
    SEEDS,
    Run,
    describe_machine,
    make_parser,
    replace_rows,
    show,
    train,
)

PAIRS = "test/rewards/accuracies"
LEARNED = "test/env/all/reward/learned"


@dataclass(frozen=True)
class Check:
    """Hold a figure of a stage and its bar. `bar`: the value that the figure must reach at the
    stage's end, a number or a function of the run.

    `since`: the stage at the start of which the figure must miss the bar; by default the same
    stage.
    """

    stage: str
    metric: str
    bar: float | Callable[[Run], float]
    since: str = ""


@dataclass(frozen=True)
class MethodConfig:
    """Hold a method's recipe and its checks. `taught`: the method starts from the shared model
    instead of the recipe's first stage.
    """

    recipe: str
    checks: tuple[Check, ...]
    taught: bool = False


def nearly_right_sums(run: Run) -> float:
    """Return the score three quarters of the way from the reward model's mean score of held-out
    wrong sums to that of right sums.
    """
    sides = (f"test/rewards/{side}" for side in ("chosen", "rejected"))
    right, wrong = (run.values(side, "reward_model")[-1] for side in sides)
    return wrong + 0.75 * (right - wrong)


def as_the_teacher(run: Run) -> float:
    """Return the teacher's accuracy minus 0.02: two standard errors of the difference of two shares
    near 0.97 of 512 answers.
    """
    return run.values(HELD_OUT, "teacher")[-1] - 0.02


def better_than_its_data(run: Run) -> float:
    """Return the share of stored answers that are right, or the held-out accuracy of the policy
    that sampled the last of them, whichever is larger.
    """
    stored = run.values("env/all/correct", "grpo")
    return max(sum(stored) / len(stored), run.values(HELD_OUT, "grpo")[-1])


METHODS = {
    "dpo": MethodConfig("addition_dpo", (Check("dpo", PAIRS, 0.9),), taught=True),
    "reinforce": MethodConfig(
        "addition_reinforce", (Check("reinforce", HELD_OUT, 0.95),), taught=True
    ),
    "ppo": MethodConfig("addition_ppo", (Check("ppo", HELD_OUT, 0.95),), taught=True),
    # The reward model first, then the policy trained on it: the reward model's scores, and the true
    # reward, which the policy never sees.
    "rlhf": MethodConfig(
        "addition_rlhf",
        (
            Check("reward_model", PAIRS, 0.9),
            Check("rlhf", LEARNED, nearly_right_sums),
            Check("rlhf", HELD_OUT, 0.8),
        ),
    ),
    "code": MethodConfig("oneliners", (Check("grpo", HELD_OUT, 0.9),)),
    "offline": MethodConfig(
        "addition_offline", (Check("offline", HELD_OUT, better_than_its_data),)
    ),
    "distill": MethodConfig(
        "addition_distill",
        (
            Check("student", HELD_OUT, as_the_teacher),
            Check("student-on-policy", HELD_OUT, as_the_teacher, since="student"),
        ),
    ),
}


def stages_of(recipe: str, first: int, last: int | None, folder: Path) -> Path:
    """Write a recipe with only stages[first:last] of a recipe and its shared settings; return its
    path.
    """
    whole = yaml.safe_load((REPO / "recipes" / f"{recipe}.yaml").read_text())
    path = folder / f"{recipe}-{first}-{last or 'end'}.yaml"
    part = {**whole, "stages": whole["stages"][first:last]}
    path.write_text(yaml.safe_dump(part, sort_keys=False))
    return path


def taught_model(seed: int, work: Path) -> Path:
    """Return the weights of the first stage of recipes/addition.yaml, which answers sums, but
    badly. The model is trained once per seed.
    """
    folder = work / f"taught-{seed}"
    model = folder / "checkpoints" / "sft-final" / "model"
    if not model.is_dir():
        train([str(stages_of("addition", 0, 1, work)), "--seed", str(seed)], folder)
    return model


def one_run(name: str, seed: int, work: Path) -> list[dict[str, Any]]:
    """Return the rows of methods.csv for a run, a row for each check."""
    learner, folder = METHODS[name], work / f"{name}-{seed}"
    recipe, flags = REPO / "recipes" / f"{learner.recipe}.yaml", list[str]()
    if learner.taught:
        flags = ["--base-model", str(taught_model(seed, work))]
        recipe = stages_of(learner.recipe, 1, None, work)
    run = train([str(recipe), "--seed", str(seed), *flags], folder)
    return [judge(name, seed, check, run) for check in learner.checks]


def judge(name: str, seed: int, check: Check, run: Run) -> dict[str, Any]:
    """Return the row of a check."""
    before = run.values(check.metric, check.since or check.stage)[0]
    after = run.values(check.metric, check.stage)[-1]
    bar = check.bar if isinstance(check.bar, float) else check.bar(run)
    return {
        "method": name,
        "seed": seed,
        "stage": check.stage,
        "metric": check.metric,
        "before": round(before, 4),
        "after": round(after, 4),
        "bar": round(bar, 4),
        "passed": before < bar <= after,
        "seconds": round(run.seconds, 1),
        "machine": describe_machine(),
        "command": shlex.join(["python", "bench/methods.py", "--only", name, "--seeds", str(seed)]),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--work", type=Path, help="keep the runs in this folder")
    parser.add_argument("--output", type=Path, default=RESULTS / "methods.csv")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="methods-") as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            for name in args.only:
                try:
                    rows = one_run(name, seed, work)
                except RuntimeError as error:
                    print(f"{name}, seed {seed}: FAILED: {error}", flush=True)
                    bad += 1
                    continue
                order = lambda row: (list(METHODS).index(row["method"]), int(row["seed"]))  # noqa: E731
                replace_rows(args.output, rows, ("method", "seed"), order)
                bad += sum(not row["passed"] for row in rows)
                for row in rows:
                    show(row)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
