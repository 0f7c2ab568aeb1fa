"""Train an agent that is a program (agent.py) and calls a model through OpenAI's API.

    pip install -e ".[serve]"
    python examples/agent/train.py

Each episode is a process that runs agent.py. The policy answers its requests, those of all episodes
in a batch. Its score is the reward, and every sampled token is trained exactly once.
docs/endpoint.md lists the environment variables that the program gets.

Seen with seed 0, in 195 s of a CPU core: held-out reward 0.56 -> 0.96, all rules met 0.03 -> 0.84.

With a chat model on a GPU:

    python train.py grpo --environment "endpoint:python examples/agent/agent.py" \
        --base-model Qwen/Qwen3-0.6B --lora-rank 32 --max-tokens 64
"""

import argparse
import shlex
import sys
from pathlib import Path

import rl

AGENT = Path(__file__).resolve().parent / "agent.py"


def main(tiny: bool, folder: Path) -> None:
    program = shlex.join([sys.executable, "-S", str(AGENT)])  # -S: starts faster
    trained = rl.train(
        "grpo",
        base_model="tiny:ascii-small",
        environment=f"endpoint:{program}",
        max_turns=2,
        max_tokens=6,
        temperature=1.0,
        steps=2 if tiny else 40,
        batch_size=2 if tiny else 4,
        group_size=2 if tiny else 8,
        learning_rate=3e-3,
        eval_every=2 if tiny else 20,
        eval_limit=2 if tiny else 32,
        rollouts_every=1 if tiny else 39,
        output_dir=folder,
        overwrite=True,
    )
    all_met = trained.series("test/env/all/correct")
    for step, reward in trained.series("test/env/all/reward/total").items():
        print(f"step {step:3d}  reward {reward:.2f}  all rules met {all_met[step]:.2f}")
    for turn in trained.rollouts[-1].get("turns", []):
        print(f"{turn['role']:9} {turn['text']!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/agent"))
    args = parser.parse_args()
    main(args.tiny, args.folder)
