"""Measure the page of a long run: seconds, bytes, and the share of a run's time that pages take.

`python bench/report_page.py` writes a synthetic run of 10,000 steps and 200,000 rollouts (500 files
of 400 answers with tokens and logprobs, a record of the update of each, 50 evaluations of 200 problems) into a temporary folder,
writes its page, and prints a row of bench/results/report_page.csv. --keep FOLDER keeps the run.
It needs the extra `report`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.algorithms import METHODS
from rl.config import RunSettings, resolve_config
from rl.config.cli import read_run
from rl.reporting.update_files import write_update_file
from rl.trainer import write_report

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "sorting.yaml"
WORDS = ("grpo", "--dataset", "addition", "--reward", "exact_match")


def write_metrics(folder: Path, steps: int) -> None:
    rng = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            share = 1 - math.exp(-3 * step / steps)
            row = {
                "step": step, "stage": "grpo", "reward/total": share + rng.gauss(0, 0.05),
                "time/step": 30.0 + rng.random(), "time/sample": 20.0, "time/score": 1.0,
                "time/tokens_per_second": 1000 + rng.random(), "optim/entropy": 1.2 - share,
                "optim/grad_norm": 0.1 + rng.random(), "optim/kl_sample_train_v1": 1e-3 * rng.random(),
                "env/all/ac_tokens_per_turn": 80 + 40 * share, "env/all/frac_truncated": 0.1 * rng.random(),
                "alarm/length": float(step % 1000 < 30), "alarm/kl_0.01": 0.0,
                **{f"other/{i}": rng.random() for i in range(60)},
            }  # fmt: skip
            if step % (steps // 50) == 0:
                row |= {"test/env/all/correct": share, "time/test": 60.0}
            file.write(json.dumps(row) + "\n")


def make_answer(rng: random.Random, problem: int, tokens: int | None) -> dict:
    correct = float(rng.random() < 0.5)
    row = {
        "group": problem,
        "tag": f"set{problem % 3}",
        "problem": problem,
        "prompt": f"{problem} + 1 =",
    }
    row |= {
        "response": f"The answer is {problem + int(correct)}.",
        "reward": correct,
        "stop_reason": "stop",
    }
    row |= {
        "advantage": correct - 0.5,
        "metrics": {"correct": correct, "format": 1.0},
        "answer": str(problem + 1),
    }
    if tokens is not None:
        count = rng.randint(tokens // 2, tokens * 3 // 2)
        row["tokens"] = [f" word{rng.randint(0, 999)}" for _ in range(count)]
        row["logprobs"] = [-rng.expovariate(2.0) for _ in range(count)]
        row["response_tokens"] = [rng.randint(0, 999) for _ in range(count)]
    return row


def write_record(path: Path, rows: list[dict], rng: np.random.Generator) -> None:
    """Write the record of an update on all rows: learner logprobs and entropies of their tokens."""
    counts = [len(row["tokens"]) for row in rows]
    sampled = np.concatenate([row["logprobs"] for row in rows]).astype(np.float32)
    arrays = {
        "target_tokens": np.concatenate([row["response_tokens"] for row in rows]),
        "sampled": sampled,
        "datums": np.array(
            [[row["group"], row["index"], 0, n] for row, n in zip(rows, counts, strict=True)]
        ),
        "turns": np.zeros(len(rows), np.int64),
        "turn_counts": np.ones(len(rows), np.int64),
        "call/0/datums": np.arange(len(rows)),
        "call/0/logprobs": sampled + rng.normal(0, 0.1, len(sampled)).astype(np.float32),
        "call/0/entropies": rng.exponential(size=len(sampled)).astype(np.float32),
    }
    write_update_file(path, arrays, {"calls": [{}]})


def write_rollouts(folder: Path, steps: int, answers: int, files: int, tokens: int) -> None:
    rng, record_rng = random.Random(1), np.random.default_rng(1)
    (folder / "rollouts").mkdir()
    for i in range(files):
        count = answers // files
        rows = [{**make_answer(rng, j // 8, tokens), "index": j % 8} for j in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = folder / "rollouts" / f"step_{1 + i * steps // files:06d}.jsonl"
        path.write_text(text)
        write_record(path.with_suffix(".update.safetensors"), rows, record_rng)
    for step in range(0, steps + 1, steps // 50):
        text = "".join(json.dumps(make_answer(rng, j, None)) + "\n" for j in range(200))
        (folder / "rollouts" / f"grpo-eval-{step:06d}.jsonl").write_text(text)


def write_run(folder: Path, steps: int, answers: int, files: int, tokens: int) -> None:
    folder.mkdir(parents=True)
    config = resolve_config(read_run(list(WORDS), METHODS, RECIPE, RunSettings))
    (folder / "config.json").write_text(json.dumps(config))
    write_metrics(folder, steps)
    write_rollouts(folder, steps, answers, files, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=200_000)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=100, help="mean tokens of an answer")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary) / "run"
        if not folder.exists():
            write_run(folder, args.steps, args.answers, args.files, args.tokens)
        seconds, cpu = time.perf_counter(), time.process_time()
        path = write_report([folder])
        seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
        rollouts = sum(file.stat().st_size for file in (folder / "rollouts").iterdir())
        row = {
            "steps": args.steps, "rollouts": args.answers, "rollout_megabytes": round(rollouts / 1e6),
            "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
            "page_megabytes": round(path.stat().st_size / 1e6, 2),
            "peak_memory_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }  # fmt: skip
    writer = csv.DictWriter(sys.stdout, row)
    writer.writeheader()
    writer.writerow(row)


if __name__ == "__main__":
    main()
