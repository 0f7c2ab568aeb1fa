"""Distil a teacher into a student of half its size, off-policy and then on-policy.

    python examples/distillation/train.py

The script runs recipes/addition_distill.yaml: a teacher learns two-digit addition, the student
learns the teacher's distribution on the data, then on its own answers. The script prints the
held-out accuracy of each stage and asks teacher and student the same questions.

Seen with seeds 0, 1, 2, in 6 to 9 minutes (bench/results/learning.csv): teacher 0.988, 0.961,
0.953; student 0.996, 0.973, 0.973; student after its own answers 0.994, 0.982, 0.971.

With real models on a GPU (both need the same vocabulary):

    python train.py distill --base-model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B --lora-rank 32 \
        --dataset gsm8k --reward gsm8k --max-tokens 512
"""

import argparse
from pathlib import Path

import rl

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "addition_distill.yaml"
STAGES = ("teacher", "student", "student-on-policy")
TINY = {f"{stage}.steps": 1 for stage in STAGES} | {"batch_size": 4, "eval_limit": 4}
QUESTIONS = ["12+34=", "58+67=", "99+99="]


def main(tiny: bool, folder: Path) -> None:
    trained = rl.train(RECIPE, output_dir=folder, overwrite=True, **(TINY if tiny else {}))
    for stage in STAGES:
        accuracy = list(trained.series("test/env/all/correct", stage).values())
        print(f"{stage}: held-out accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    for name in ("teacher-final", "student-on-policy-final"):
        answers = rl.sample(trained.folder, QUESTIONS, checkpoint=name, temperature=0)
        print(name, {prompt: answer for prompt, [answer] in zip(QUESTIONS, answers, strict=True)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    args = parser.parse_args()
    main(args.tiny, args.folder)
