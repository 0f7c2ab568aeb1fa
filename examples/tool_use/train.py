"""Train a model to call a tool instead of guessing (price_list.py is the environment).

    python examples/tool_use/train.py

A tiny model first sees the form of calls and answers: half of the rows of the warm-up call the
tool, half guess. GRPO then learns from the reward that calling is better.

Seen with seed 0, in 174 s of a CPU core: held-out prices right 0.40 -> 0.94, tool used 0.38 ->
0.98. The most likely answer called the tool before GRPO too: most of this gain is sharpening.

A chat model knows the form of its calls and needs no warm-up:

    python train.py grpo --environment examples/tool_use/price_list.py:PriceList \
        --base-model Qwen/Qwen3-0.6B --lora-rank 32 --max-tokens 256 --max-turns 4
"""

import argparse
import json
import random
from pathlib import Path

import rl

HERE = Path(__file__).resolve().parent
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": %d}}\n</tool_call>'


def write_warm_up(path: Path, rows: int) -> None:
    """Write conversations that call the tool and copy its result, and conversations that guess."""
    rng = random.Random(0)
    with path.open("w") as file:
        for index in range(rows):
            item, cost = rng.randrange(10, 100), str(rng.randrange(10, 100))
            messages = [{"role": "user", "content": f"price of {item}?"}]
            if index % 2:
                messages.append({"role": "assistant", "content": CALL % item})
                messages.append({"role": "tool", "content": cost})
            messages.append({"role": "assistant", "content": cost})
            file.write(json.dumps({"messages": messages}) + "\n")


def main(tiny: bool, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_warm_up(folder / "warm_up.jsonl", 100 if tiny else 20_000)
    warm_up = rl.train(
        "sft",
        base_model="tiny:ascii",
        dataset=folder / "warm_up.jsonl",
        steps=2 if tiny else 400,
        batch_size=48,
        learning_rate=4e-3,
        warmup_steps=10,
        schedule="cosine",
        eval_every=0,
        output_dir=folder / "warm_up",
        overwrite=True,
    )
    trained = rl.train(
        "grpo",
        base_model=warm_up.folder,
        environment=f"{HERE / 'price_list.py'}:PriceList",
        max_turns=3,
        max_tokens=80,
        temperature=1.0,
        steps=2 if tiny else 30,
        batch_size=2 if tiny else 16,
        group_size=4 if tiny else 8,
        learning_rate=3e-4,
        eval_every=2 if tiny else 15,
        eval_limit=4 if tiny else 128,
        rollouts_every=1 if tiny else 29,
        output_dir=folder / "grpo",
        overwrite=True,
    )
    used_tool = trained.series("test/env/all/used_tool")
    for step, right in trained.series("test/env/all/correct").items():
        print(f"step {step:3d}  right {right:.2f}  used the tool {used_tool[step]:.2f}")
    for turn in trained.rollouts[-1].get("turns", []):
        print(f"{turn['role']:9} {turn['text']!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/tool_use"))
    args = parser.parse_args()
    main(args.tiny, args.folder)
