"""Train a tiny model in wrapped environments, past a bar that the untrained model misses.

The evaluation uses the held-out episodes of the training run.

    python bench/wrapper_learning.py textarena --seeds 0 1 2 \\
      --out bench/results/wrapper_learning.csv

textarena: its GuessTheNumber of 1 to 8 in four guesses, after SFT. In the SFT games, half of the
guesses halve the remaining range and the others are any number. The bar is the share of games won.
The reward pays only wins: textarena's reward for a lost game depends on the distance of the
last guess (about 0.8), and rises while games are lost.

reasoning_gym: its spell_backward by curriculum (--curriculum success over two levels, words of 3
letters and of up to 5), after two SFT stages. The first trains on right answers, so that every seed
can spell. In the second, a third of the answers have their letters in random order, so that GRPO
can still improve the model. The bar is the sampled share of right answers over both levels. All
words come from the same list: held-out questions are sampled independently, but training may have
used a word of theirs.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
FIELDS = (
    "task",
    "seed",
    "what",
    "bar",
    "untrained",
    "after warm-up",
    "trained",
    "passes",
    "steps",
    "seconds",
    "command",
)
MODEL = "tiny:ascii-small"

SETTINGS = {
    "textarena": {  # GuessTheNumber counts guesses from 0: 3 means four guesses
        "game": "GuessTheNumber-v0",
        "rules": False,
        "brackets": True,
        "wins_only": True,
        "config": '{"min_number": 1, "max_number": 8, "max_turns": 3}',
    },
    "reasoning_gym": {"task": "spell_backward", "levels": 2},
}


@dataclass(frozen=True)
class Task:
    """Describe a learning task.

    `first`: steps of SFT. `able`: steps of a preceding SFT on `rows` right answers. `words`: flags
    of GRPO, in addition to those of the environment.
    """

    metric: str
    bar: float
    max_tokens: int
    first: int
    steps: int
    words: str
    rows: int = 3000
    able: int = 0


TASKS = {
    "textarena": Task(
        "won",
        0.9,
        1,
        500,
        150,
        "--max-turns 6 --environment-rows 400 --batch-size 8 --group-size 16 --advantage mean_std "
        "--learning-rate 1e-3",
    ),
    "reasoning_gym": Task(
        "correct",
        0.7,
        8,
        300,
        350,
        "--curriculum success --curriculum-up 0.8 --curriculum-window 3 --environment-rows 4000 "
        "--batch-size 16 --group-size 16 "
        "--advantage mean_std --learning-rate 5e-4",
        rows=24000,
        able=2500,
    ),
}


def games(count: int, seed: int) -> Iterator[dict]:
    """Generate textarena games as conversations.

    Half of the guesses halve the remaining range; the others are any number.
    """
    from rl.envs import resolve_environment

    spec, draw = resolve_environment("textarena", **SETTINGS["textarena"]), random.Random(seed)
    for episode in range(count):
        game = spec.make()
        game.seed, game.member, game.row, game.rng = (
            10**7 + 10**5 * seed + episode,
            0,
            {},
            random.Random(0),
        )
        turn, messages, low, high = game.start(), [], 1, 8
        while not turn.done:
            heard = str(turn.messages)
            guess = messages[-1]["content"] if messages else ""
            if "higher" in heard:
                low = max(low, int(guess) + 1)
            elif "lower" in heard:
                high = min(high, int(guess) - 1)
            said = str((low + high) // 2 if draw.random() < 0.5 else draw.randint(1, 8))
            messages += [{"role": "user", "content": heard}, {"role": "assistant", "content": said}]
            turn = game.step(messages[-1])
        yield {"messages": messages}


def spelled(count: int, seed: int, careless: float = 1 / 3) -> Iterator[dict]:
    """Generate answers to both levels in alternation, from generators that training does not use.

    A share `careless` of the answers has its letters in random order.
    """
    from rl.envs import resolve_environment

    spec, draw = (
        resolve_environment("reasoning_gym", **SETTINGS["reasoning_gym"]),
        random.Random(seed),
    )
    for row in spec.make().rows(f"warm-up {seed}", count):
        one = spec.make()
        one.row = row
        question, answer = one.start(), str(one.entry["answer"])
        said = "".join(draw.sample(answer, len(answer))) if draw.random() < careless else answer
        yield {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": said},
            ]
        }


def run(task: str, seed: int, steps: int | None) -> dict:
    from bench.environments import untrained

    one, settings = TASKS[task], SETTINGS[task]
    steps = steps or one.steps
    begin = time.perf_counter()
    before = untrained(task, settings, one.metric, one.max_tokens, MODEL, seed, turns=6)
    words = " ".join(
        f"--environment.{name} {shlex.quote(str(value))}" for name, value in settings.items()
    )
    more = (
        "--eval-limit 256 --no-eval-greedy --save-every 0 --rollouts-every 0 --schedule linear "
        "--warmup-steps 5 --quiet"
    )
    line = (
        f"grpo --environment {task} {words} {one.words} --max-tokens {one.max_tokens} {more} "
        f"--steps {steps} --eval-every {steps}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = Path(scratch), MODEL
        if one.able:
            model = sft(
                model, one.able, spelled(one.rows, seed, careless=0.0), seed, folder / "able"
            )
        taught = (
            games(one.rows, seed) if task == "textarena" else spelled(32 * one.first, seed + 100)
        )
        sft(model, one.first, taught, seed, folder / "sft", rate=1e-3 if one.able else 3e-3)
        train(f"{line} --base-model {scratch}/sft --seed {seed} --output-dir {scratch}/run")
        found = [
            json.loads(text)
            for text in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    values = [
        row[f"test/env/all/{one.metric}"] for row in found if f"test/env/all/{one.metric}" in row
    ]
    passes = before < one.bar <= values[-1]
    shown = f"python bench/wrapper_learning.py {task} --seeds {seed} --steps {steps}"
    figures = [round(value, 4) for value in (before, values[0], values[-1])]
    row = (
        task,
        seed,
        one.metric,
        one.bar,
        *figures,
        passes,
        steps,
        round(time.perf_counter() - begin),
        shown,
    )
    return dict(zip(FIELDS, row, strict=True))


def sft(
    model: str, steps: int, taught: Iterator[dict], seed: int, folder: Path, rate: float = 3e-3
) -> str:
    """Train by SFT and return the folder of the weights."""
    rows = folder.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in taught))
    form = (
        f"sft --base-model {model} --dataset {rows} --steps {steps} --batch-size 32 "
        f"--learning-rate {rate} --schedule cosine"
    )
    train(
        f"{form} --warmup-steps 10 --eval-every 0 --save-every 0 --seed {seed} --output-dir "
        f"{folder} --quiet"
    )
    return str(folder)


def train(line: str) -> None:
    subprocess.run(
        [sys.executable, "train.py", *shlex.split(line)],
        check=True,
        cwd=REPO,
        stdout=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for seed in args.seeds:
        row = run(args.task, seed, args.steps)
        print(*(f"{field} {row[field]}" for field in FIELDS[:-1]), flush=True)
        if args.out is not None:
            new = not args.out.exists()
            with args.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()
