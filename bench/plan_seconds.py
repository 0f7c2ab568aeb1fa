"""Measure the time of `train.py ... --plan`, the whole command: Python's start, imports, the model
without weights, the printed page.

    python bench/plan_seconds.py                          # into bench/results/plan_seconds.csv
    python bench/plan_seconds.py --beside before=../old   # also another checkout, in turns

Other checkouts run with this checkout's Python. Each case is run `--times` times. `answer_seconds`
is the least wall clock until the verdict is printed, `seconds` until the command has ended (for a
run that does not fit, after the advice that lowers the memory), and `cpu_seconds` the least user
and system time. `peak` is the verdict, which shows whether two checkouts agree. Models are only
their configs, at their published sizes. Rows of other cases stay in the table.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path: its kernels.py would shadow the package `kernels`.
sys.path[0] = str(HERE.parent)
from bench.campaign import RESULTS, machine, write_table  # noqa: E402

TABLE = RESULTS / "plan_seconds.csv"
QWEN2 = {"vocab_size": 152_064, "max_position_embeddings": 32_768, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5B": (
        "qwen2",
        {
            **QWEN2,
            "vocab_size": 151_936,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "tie_word_embeddings": True,
        },
    ),
    "7B": (
        "qwen2",
        {
            **QWEN2,
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18_944,
        },
    ),
    "32B": (
        "qwen2",
        {
            **QWEN2,
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "intermediate_size": 27_648,
        },
    ),
    "30B-A3B": (
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
}
ON_80 = "--plan-gpus 8 --plan-gpu-memory 80"
LAUNCHES = {
    "LoRA, one GPU": "--lora-rank 32 --plan-gpus 1 --plan-gpu-memory 80",
    "LoRA in 4 bit, one GPU": "--lora-rank 32 --base-dtype 4bit --plan-gpus 1 --plan-gpu-memory 80",
    "all weights, ZeRO-3 on 8 GPUs": f"--lora-rank 0 --plan-zero 3 {ON_80}",
    "all weights, FSDP2 on 8 GPUs": f"--lora-rank 0 {ON_80}",
    "all weights, a CPU process": "--lora-rank 0",
}
WORDS = (
    "grpo --dataset addition --reward exact_match --batch-size 64 --group-size 8 --max-tokens "
    "1024 --plan"
)


def one(tree: Path, folder: Path, launch: str) -> tuple[float, float, float, str]:
    """Run a command; return (seconds to the verdict, seconds, CPU seconds, verdict)."""
    words = [
        sys.executable,
        str(tree / "train.py"),
        *WORDS.split(),
        "--base-model",
        str(folder),
        *LAUNCHES[launch].split(),
    ]
    env = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    if "FSDP2" in launch:  # as accelerate launch sets it
        env.update(
            ACCELERATE_USE_FSDP="true",
            FSDP_VERSION="2",
            WORLD_SIZE="8",
            RANK="0",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="8",
        )
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    verdict, answered = "", 0.0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*words[:1], "-u", *words[1:]],
            cwd=tree,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        for line in process.stdout or ():
            if not verdict and (
                said := re.search(r"(fits|tight|does not fit): \S+ \S+ of \S+ \S+", line)
            ):
                verdict, answered = said[0], time.perf_counter() - begin
        process.wait(timeout=600)
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [str(process.returncode)])[-1][:80]
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return answered or seconds, seconds, cpu, verdict or f"no plan: {last}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", metavar="LABEL=CHECKOUT", nargs="+", default=[])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--launches", nargs="+", choices=list(LAUNCHES), default=list(LAUNCHES))
    args = parser.parse_args()
    trees = {
        "now": HERE.parent,
        **{word.partition("=")[0]: Path(word.partition("=")[2]).resolve() for word in args.beside},
    }
    with tempfile.TemporaryDirectory(prefix="plan_seconds-") as parent:
        from transformers import AutoConfig

        for name in args.only:
            kind, numbers = MODELS[name]
            AutoConfig.for_model(kind, **numbers).save_pretrained(Path(parent) / name)
        for name, launch in product(args.only, args.launches):
            best: dict[str, tuple[float, float, float, str]] = {}
            for label, tree in list(trees.items()) * args.times:
                answered, seconds, cpu, verdict = one(tree, Path(parent) / name, launch)
                least = best.get(label, (answered, seconds, cpu, verdict))
                best[label] = (
                    min(answered, least[0]),
                    min(seconds, least[1]),
                    min(cpu, least[2]),
                    verdict,
                )
                print(
                    f"{name}, {launch}, {label}: verdict {answered:.1f} s, {seconds:.1f} s, "
                    f"{cpu:.1f} s of CPU, {verdict}",
                    flush=True,
                )
            keep(name, launch, best)
    return 0


def keep(name: str, launch: str, found: dict[str, tuple[float, float, float, str]]) -> None:
    """Write a case's rows into the table, replacing its earlier rows."""
    rows: list[dict[str, Any]] = []
    if TABLE.is_file():
        with TABLE.open(newline="") as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if (row["model"], row["launch"]) != (name, launch)
            ]
    for label, (answered, seconds, cpu, verdict) in found.items():
        figures = {
            "answer_seconds": round(answered, 1),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "peak": verdict,
        }
        rows.append(
            {"model": name, "launch": launch, "checkout": label, **figures, "machine": machine()}
        )
    order, launches = list(MODELS), list(LAUNCHES)
    write_table(
        TABLE,
        sorted(
            rows,
            key=lambda row: (
                order.index(row["model"]),
                launches.index(row["launch"]),
                row["checkout"],
            ),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
