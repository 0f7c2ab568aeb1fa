"""The campaign's parts about whole runs: see gpu.py. Random weights with a small tokenizer of our own, saved to a folder that is gone
afterwards; the product's own scripts in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_kernels import REPO, device_of
from bench.gpu_models import SIZES, make_model, wait


def save(size: str, folder: Path, device: str) -> Path:
    """A model's folder as anyone would have one: weights, config, and the tokenizer of tiny:addition."""
    from rl.models import load_model

    make_model(size, device, torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(folder)
    load_model("tiny:addition", seed=0).tokenizer.save_pretrained(folder)
    return folder


def part_learner(table: Any, dry: bool) -> None:
    """forward_backward and an optimizer step over 16k tokens: tokens per second, peak memory, and what `--plan` would have said."""
    from rl import AdamParams, Datum, ModelInput, ServiceClient

    device, size, length = device_of(dry), "tiny" if dry else "0.6B", 32 if dry else 2048
    count, vocab = (2, 14) if dry else (8, SIZES[size][1]["vocab_size"])

    def run(folder: Path) -> None:
        rng = np.random.default_rng(0)
        datums = []
        for _ in range(count):
            ids = rng.integers(0, vocab, length + 1)
            fields = {"target_tokens": ids[1:], "weights": np.ones(length, np.float32)}
            datums.append(Datum(ModelInput.from_ints(ids[:-1].tolist()), fields))
        with ServiceClient(output_dir=folder / "run") as service:
            client = service.create_full_training_client(str(save(size, folder / "model", device)))
            for _ in range(2):
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                wait(device)
                began = time.perf_counter()
                client.forward_backward(datums, "cross_entropy").result()
                client.optim_step(AdamParams(learning_rate=1e-5)).result()
                wait(device)
                seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        case = f"{size}, {count} x {length} tokens"
        table.row(case, "ours", "tokens_per_s", count * length / seconds, "", "", f"{seconds:.3f} s, the second of two steps")
        table.row(case, "ours", "peak_bytes", peak)

    def planned(folder: Path) -> None:
        command = [sys.executable, "train.py", "sft", "--base-model", str(folder / "model"), "--dataset", "addition", "--plan"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        for line in done.stdout.splitlines():
            if "GiB" in line:
                table.row("--plan", "ours", "says", "", note=" ".join(line.split())[:200])
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no output"])[-1])

    with tempfile.TemporaryDirectory() as name:
        table.attempt("learner", "ours", lambda: run(Path(name)))
        table.attempt("--plan", "ours", lambda: planned(Path(name)))


def grpo(table: Any, case: str, dry: bool, launcher: list[str], sizes: list[str]) -> None:
    """Two GRPO steps through train.py; a row for each time of the second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save("tiny" if dry else "0.5B", folder / "model", device_of(dry))
        if not dry:
            torch.cuda.empty_cache()
        command = [*launcher, "train.py", "grpo", "--base-model", str(model), "--dataset", "addition", "--reward", "exact_match"]
        command += ["--steps", "3", "--eval-every", "0", "--save-every", "0", "--output-dir", str(folder / "run"), *sizes]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        print(done.stdout[-4000:], done.stderr[-4000:])
        if done.returncode:
            lines = [line for line in (done.stderr + done.stdout).strip().splitlines() if line.strip()]
            raise RuntimeError(next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output"))
        metrics = [json.loads(line) for line in next(folder.glob("run/**/metrics.jsonl")).read_text().splitlines()]
        last = [row for row in metrics if "time/step" in row][-1]
        groups = int(sizes[sizes.index("--batch-size") + 1]) * int(sizes[sizes.index("--group-size") + 1])
        table.row(case, "ours", "samples_per_s", groups / last["time/step"], note=f"{last['time/step']:.2f} s a step")
        for key, value in last.items():
            if key.startswith(("time/", "memory/", "optim/kl_sample_train")) and isinstance(value, int | float):
                table.row(case, "ours", key, float(value))


def part_step(table: Any, dry: bool) -> None:
    sizes = ["--batch-size", "2", "--group-size", "2", "--max-tokens", "4"]
    sizes = sizes if dry else ["--batch-size", "32", "--group-size", "8", "--max-tokens", "256"]
    case = "tiny" if dry else "0.5B, 32 x 8 answers of 256 tokens"
    table.attempt(case, "ours", lambda: grpo(table, case, dry, [sys.executable], sizes))


def part_sharded(table: Any, dry: bool) -> None:
    """DeepSpeed's stage 3, and with the optimizer in CPU memory, by `accelerate launch` on one process."""
    sizes = ["--batch-size", "2", "--group-size", "2", "--max-tokens", "4"]
    sizes = sizes if dry else ["--batch-size", "8", "--group-size", "4", "--max-tokens", "64"]
    for name in ("zero3", "zero3_offload"):
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{name}.yaml"]
        launcher += ["--num_processes", "1"] + (["--cpu"] if dry else [])
        table.attempt(name, "ours", lambda name=name, launcher=launcher: grpo(table, name, dry, launcher, sizes))
