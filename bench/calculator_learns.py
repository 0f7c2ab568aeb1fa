"""Train a tiny model to call the calculator: `python bench/calculator_learns.py --seeds 0 1 2
--csv bench/results/calculator_learns.csv`.

The script runs two stages of train.py. sft teaches the form of a call and of an answer: a third of
the rows call the tool, a third answer after a call, a third guess. No row repeats: a model that
sees only a few sums memorizes these and copies the numbers of other sums badly. grpo in the
environment `calculator` then learns from the reward which of calling and guessing is better. Bar:
after grpo at least BAR of the held-out sums are right (sampled); the model after sft misses the
bar, as does the untrained model.
"""

import argparse
import csv
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BAR = 0.85
SFT_BATCH = 48
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'


def warm_up_rows(count: int, digits: int, seed: int = 0) -> list[dict]:
    """Return sft conversations of three kinds: a question and a call; the same with the tool's
    answer and the final reply; a question and a guess.
    """
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        a, b, operation = rng.randrange(10**digits), rng.randrange(10**digits), rng.choice("+-*")
        asked = f"{a}{operation}{b}"
        right = str({"+": a + b, "-": a - b, "*": a * b}[operation])
        question = {"role": "user", "content": f"{asked}="}
        call = {"role": "assistant", "content": CALL % asked}
        rows.append({"messages": [question, call]})
        rows.append(
            {
                "messages": [
                    question,
                    call,
                    {"role": "tool", "content": right},
                    {"role": "assistant", "content": right},
                ]
            }
        )
        guess = str(rng.randrange(10 ** len(right.lstrip("-"))))
        rows.append({"messages": [question, {"role": "assistant", "content": guess}]})
    return rows[:count]


def command(folder: Path, seed: int, steps: int, sft_steps: int, digits: int) -> list[str]:
    """Write the rows and the recipe, and return the command-line arguments of train.py."""
    data = folder / "warm_up.jsonl"
    data.write_text(
        "".join(json.dumps(row) + "\n" for row in warm_up_rows(sft_steps * SFT_BATCH, digits))
    )
    recipe = folder / "calculator.yaml"
    recipe.write_text(f"""base_model: tiny:ascii
rollouts_every: 0
save_every: 0
stages:
  - method: sft
    dataset: {data}
    reward: null
    steps: {sft_steps}
    batch_size: {SFT_BATCH}
    learning_rate: 4e-3
    schedule: cosine
    warmup_steps: 10
    eval_every: 0
  - method: grpo
    environment: {{name: calculator, digits: {digits}}}
    max_tokens: 90
    max_turns: 3
    steps: {steps}
    batch_size: 16
    group_size: 8
    learning_rate: 3e-4
    schedule: linear
    warmup_steps: 5
    rollout_mode: async
    temperature: 1.0
    eval_every: {steps}
    eval_limit: 256
    eval_greedy: false
""")
    return [
        str(recipe),
        "--seed",
        str(seed),
        "--output-dir",
        str(folder / "run"),
        "--overwrite",
        "--quiet",
    ]


def learn(folder: Path, seed: int, steps: int, sft_steps: int, digits: int) -> dict[str, float]:
    """Train both stages and return the held-out figures before and after grpo."""
    from rl.algorithms import METHODS
    from rl.config import RunSettings, parse_run
    from rl.trainer import main

    begin = time.perf_counter()
    code = main(
        parse_run(
            command(folder, seed, steps, sft_steps, digits),
            METHODS,
            folder / "none.yaml",
            options=RunSettings,
        )
    )
    assert code == 0, code
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    print(
        [
            round(row["optim/loss"], 3)
            for row in rows
            if row["stage"] == "sft" and "optim/loss" in row
        ][::20],
        flush=True,
    )
    print(
        [
            round(row["reward/total"], 2)
            for row in rows
            if row["stage"] == "grpo" and "reward/total" in row
        ],
        flush=True,
    )
    held_out = [row for row in rows if "test/env/all/correct" in row]
    found: dict[str, float] = {"seed": seed}
    for when, row in (("before", held_out[0]), ("after", held_out[-1])):
        found |= {
            f"correct {when}": row["test/env/all/correct"],
            f"used tool {when}": row["test/env/all/used_tool"],
        }
        found |= {
            f"{name} {when}": row[f"test/env/all/tool/{name}"]
            for name in ("calls", "malformed", "failed")
        }
    return {**found, "seconds": time.perf_counter() - begin}


def write(path: Path, row: dict[str, str]) -> None:
    """Add a row to the table, in place of an older row of the same seed."""
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    rows = [one for one in rows if one["seed"] != row["seed"]] + [row]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda one: int(one["seed"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=120, help="of grpo")
    parser.add_argument("--sft-steps", type=int, default=1000)
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--csv", type=Path, help="rows of the same seeds are replaced")
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = learn(Path(folder), seed, args.steps, args.sft_steps, args.digits)
        row = {name: f"{value:.4g}" for name, value in found.items()}
        row |= {"passes": str(found["correct after"] >= BAR > found["correct before"])}
        row |= {
            "command": (
                f"python bench/calculator_learns.py --seeds {seed} --steps {args.steps} "
                f"--sft-steps {args.sft_steps}"
            )
        }
        print(row, flush=True)
        if args.csv:
            write(args.csv, row)
