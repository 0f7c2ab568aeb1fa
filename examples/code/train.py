"""Train a model on programs that must pass their tests in a sandbox.

    python examples/code/train.py
    python train.py recipes/mbpp.yaml       # the same reward, a real model and MBPP, on a GPU

The script first grades two answers by hand with the reward of the run. It then runs
recipes/oneliners.yaml, in which a tiny model writes one-line functions, and grades answers of the
trained model.

Seen with seeds 0, 1, 2, under three minutes of two CPU cores (bench/results/learning.csv): held-out
programs right 0.46, 0.44, 0.44 -> 0.996, 0.996, 0.970.
"""

import argparse
from pathlib import Path

import rl

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "oneliners.yaml"
TESTS = {"style": "calls", "function": "f", "cases": [[[0], 3], [[3], 6], [[5], 1]]}
PROMPT = "add 3, mod 7:"
TINY = {"sft.steps": 2, "grpo.steps": 1, "batch_size": 4, "group_size": 2, "eval_limit": 4}


def grade(answers: list[str]) -> None:
    """Print the reward of each answer: 1 if every test passes."""
    reward = rl.resolve_reward("code_tests", block="any", seconds=2)  # any: without a ``` block too
    for answer in answers:
        print(f"{reward(PROMPT, answer, {'tests': TESTS}):.1f}  {answer!r}")


def main(tiny: bool, folder: Path) -> None:
    grade(["def f(x):return (x+3)%7", "def f(x):return x+3", "while True: pass"])
    trained = rl.train(RECIPE, output_dir=folder, overwrite=True, **(TINY if tiny else {}))
    for step, right in trained.series("test/env/all/correct").items():
        print(f"step {step:3d}  held-out programs right {right:.2f}")
    [answers] = rl.sample(trained.folder, [PROMPT], samples=4)
    grade(answers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/code"))
    args = parser.parse_args()
    main(args.tiny, args.folder)
