"""Measure whole runs for the GPU campaign (see gpu.py). Models have random weights and a small
tokenizer of this project, saved to a temporary folder. The product's scripts run in separate
processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_kernels import device_of
from bench.gpu_models import SIZES, free_gpu_memory, make_model, seconds_of
from bench.harness import REPO
from bench.kernels import floor_ms


def save(size: str, folder: Path, device: str) -> Path:
    """Save a model folder as users have it: weights, config, and the tokenizer of tiny:addition."""
    from rl.models import load_model

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    make_model(size, device, dtype).save_pretrained(folder)
    load_model("tiny:addition", seed=0).tokenizer.save_pretrained(folder)
    return folder


def part_learner(table: Any, dry: bool) -> None:
    """Measure optimizer steps over 16k tokens in a single micro-batch:
    tokens per second, and peak memory compared with `--plan`.
    """
    size, length, count = ("tiny", 32, 2) if dry else ("0.6B", 2048, 8)
    case = f"{size}, {count} x {length} tokens"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = table.attempt(case, "model", save, size, folder / "model", device_of(dry))
        if model is None:
            return
        free_gpu_memory(device_of(dry))
        # First with recomputed scores, then with the default.
        for name, kept in (("kept 0", 0), ("ours", None)):
            inputs = table, case, name, model, count, length, kept
            peak = table.attempt(case, name, measure_learner_step, *inputs, dry)
            table.attempt(case, f"{name}, --plan", compare_plan, *inputs, peak)


def measure_learner_step(
    table: Any, case: str, name: str, model: Path, count: int, length: int, kept: int | None,
    dry: bool,
) -> int:  # fmt: skip
    """Measure the second of two steps and return its peak memory in bytes. `kept`: bytes of logits
    that the output head may keep.
    """
    from rl import AdamParams, Datum, ModelInput, ServiceClient
    from rl.learner import LearnerSettings
    from rl.runtime import WorkerSettings

    device, rng, datums = device_of(dry), np.random.default_rng(0), []
    size = "tiny" if dry else "0.6B"
    vocab, weights = SIZES[size][1]["vocab_size"], make_model(size, "meta").num_parameters()
    for _ in range(count):
        ids = rng.integers(0, vocab, length + 1)
        fields = {"target_tokens": ids[1:], "weights": np.ones(length, np.float32)}
        datums.append(Datum(ModelInput.from_ints(ids[:-1].tolist()), fields))
    learner = LearnerSettings(token_budget=count * length, layout="padded", kept_bytes=kept)
    settings = WorkerSettings(learner=learner)
    with ServiceClient(output_dir=model.parent / "run", settings=settings) as service:
        client = service.create_full_training_client(str(model))

        def step() -> None:
            calls = [(datums, "cross_entropy", {}, 1.0)]
            client.train_step(calls, AdamParams(learning_rate=1e-5))[1].result()

        step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, _ = seconds_of(step, device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    note, tokens = f"{seconds:.3f} s, the second of two steps", count * length
    floor = 1e3 * tokens / floor_ms(6.0 * weights * tokens)  # forward and backward
    table.row(case, name, "tokens_per_s", tokens / seconds, "", floor, note)
    table.row(case, name, "peak_bytes", peak)
    gc.collect()  # the next measurement starts without this learner
    free_gpu_memory(device)
    return peak


def plan_of(model: Path, count: int, length: int, kept: int | None = 0) -> Any:
    """Return the plan of `train.py sft --plan` for batches of `count` rows of `length` tokens, each
    batch a micro-batch.

    `kept`: bytes of logits that the output head may keep; None: the default on this device. Raises
    RuntimeError if the plan is for a different step.
    """
    from rl.algorithms import METHODS
    from rl.config import RunSettings, read_run
    from rl.trainer.memory_requirements import compute_stage_needs, resolve_launch

    words = ["sft", "--base-model", str(model), "--dataset", "addition", "--lora-rank", "0"]
    words += ["--layout", "padded", "--eval-every", "0"]
    words += ["--batch-size", str(count), "--token-budget", str(count * length)]
    words += [] if kept is None else ["--kept-logits-gib", str(kept / 2**30)]
    words += ["--plan-prompt-tokens", str(length - 1), "--max-tokens", "1"]
    run = read_run(words, METHODS, REPO / "recipes" / "addition.yaml", RunSettings)
    launch, _ = resolve_launch(run)
    needs = compute_stage_needs(run, launch, run.options.plan_prompt_tokens)[0]
    batch = needs.work.batch
    if (batch.rows, batch.length, needs.work.samples) != (count, length, False):
        raise RuntimeError(f"the plan is of another step: {needs.work}")
    return needs.plan


def compare_plan(
    table: Any, case: str, name: str, model: Path, count: int, length: int, kept: int | None,
    peak: int | None,
) -> None:  # fmt: skip
    """Compare planned with measured bytes. `peak`: of the measured step, None if it was not run.
    `kept`: see `plan_of`.

    Device memory that libraries take is not held in tensors, so the plan's assumption of it is
    excluded.
    """
    from rl.memory_plan import MemoryPlan

    result = plan_of(model, count, length, kept)
    items = tuple(item for item in result.items if not item.name.startswith("CUDA context"))
    planned = MemoryPlan(items, result.host).peak
    sizes = ", ".join(f"{item.name} {item.train / 2**20:.0f}" for item in items if item.train)
    note = f"MiB in a micro-batch: {sizes}"
    table.row(case, f"{name}, --plan", "planned_bytes", int(planned), note=note)
    if peak is not None:
        table.row(case, f"{name}, --plan", "measured/planned", peak / planned)


def seconds_left(runs: int) -> float | None:
    """Return the seconds for each of `runs` commands in the part's remaining time, with some spared
    for rows; None without a limit.
    """
    end = os.environ.get("WHETSTONE_GPU_END")
    return None if end is None else max((float(end) - time.time() - 3.0) / runs, 1.0)


def require_packages(*packages: str) -> None:
    """Raise ModuleNotFoundError unless the packages are installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def grpo(
    table: Any, case: str, dry: bool, launcher: list[str], sizes: list[str],
    seconds: float | None, profile: bool = False,
) -> None:  # fmt: skip
    """Run five GRPO steps with train.py and record each time of the last step. With `profile`, the
    second step is profiled: record the time of each of its parts, and copy the trace and the table
    next to the rows. Raises RuntimeError if the command fails or takes more than `seconds`, after
    the last of the steps that ended has been recorded.
    """
    require_packages("tyro")  # train.py reads its options with it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save("tiny" if dry else "0.5B", folder / "model", device_of(dry))
        free_gpu_memory(device_of(dry))
        command = [*launcher, "train.py", "grpo", "--base-model", str(model)]
        command += ["--dataset", "addition", "--reward", "exact_match", "--steps", "5"]
        command += ["--eval-every", "0", "--save-every", "0", *sizes]
        command += [*(["--profile", "1"] if profile else []), "--output-dir", str(folder / "run")]
        try:
            _run_command(command, seconds)
        finally:
            _record_last_step(table, case, folder, sizes)
        if profile:
            _record_profile(table, case, folder / "run")


def _record_last_step(table: Any, case: str, folder: Path, sizes: list[str]) -> None:
    """Record samples per second and each time of the last step that ended, if any did."""
    lines = [line for path in folder.glob("run/**/metrics.jsonl") for line in path.open()]
    metrics = [json.loads(line) for line in lines if line.endswith("}\n")]
    steps = [row for row in metrics if "time/step" in row]
    if not steps:
        return
    last, flags = steps[-1], ("--batch-size", "--group-size")
    prompts, group = (int(sizes[sizes.index(flag) + 1]) for flag in flags)
    note = f"{last['time/step']:.2f} s a step, the last of {len(steps)}"
    table.row(case, "ours", "samples_per_s", prompts * group / last["time/step"], note=note)
    for key, value in last.items():
        shown = key.startswith(("time/", "memory/", "optim/kl_sample_train"))
        if shown and isinstance(value, int | float):
            table.row(case, "ours", key, float(value))


def _run_command(command: list[str], seconds: float | None = None) -> None:
    """Run a command in the repository. Raises RuntimeError with its last error if it fails, or if
    it takes more than `seconds`, when it and its children are killed.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": REPO}
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, text=True, errors="replace", env=env, **options)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        # Not a process group: killing the part has to end the command too.
        import psutil  # accelerate requires it

        family = psutil.Process(process.pid)
        for member in [*family.children(recursive=True), family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        print(process.communicate()[0][-4000:])
        raise RuntimeError(f"stopped after {seconds:.0f} s") from error
    print(output[-8000:])
    if process.returncode:
        lines = [line for line in output.splitlines() if line.strip()]
        last = lines[-1] if lines else "no output"
        raise RuntimeError(next((line for line in reversed(lines) if "Error" in line), last))


def _record_profile(table: Any, case: str, folder: Path) -> None:
    """Record the parts of a step from the table of `--profile`, and copy it and the trace."""
    for path in sorted((folder / "profile").iterdir()):
        name = f"profile_{case.split(',')[0].replace(' ', '_')}_{path.name}"
        shutil.copy(path, Path(table.path).with_name(name))
    text = (folder / "profile" / "grpo.txt").read_text().split("\n\n")[0]
    title, *lines = text.splitlines()
    columns = title[34:].replace(" ms", "_ms").split()
    for line in lines:
        for column, value in zip(columns, line[34:].split(), strict=True):
            if column != "share":
                table.row(f"{case}, profiled", line[:34].strip(), column, float(value), "ms")


def part_step(table: Any, dry: bool) -> None:
    sizes = ["--batch-size", "2", "--group-size", "2", "--max-tokens", "4"]
    sizes = sizes if dry else ["--batch-size", "32", "--group-size", "8", "--max-tokens", "256"]
    kinds: list[tuple[str, list[str]]] = [("LoRA", ["--lora-rank", "16"]), ("full", [])]
    for i, (kind, flags) in enumerate(kinds):
        case = f"{kind}, {'tiny' if dry else '0.5B, 32 x 8 answers of 256 tokens'}"
        limit, words = seconds_left(len(kinds) - i), [*sizes, *flags]
        table.attempt(case, "ours", grpo, table, case, dry, [sys.executable], words, limit, True)


def part_sharded(table: Any, dry: bool) -> None:
    """Run DeepSpeed's ZeRO stage 3, and stage 3 with the optimizer in CPU memory, by `accelerate
    launch` on a single process.
    """
    sizes = ["--batch-size", "2", "--group-size", "2", "--max-tokens", "4"]
    sizes = sizes if dry else ["--batch-size", "8", "--group-size", "4", "--max-tokens", "64"]
    for runs, name in ((2, "zero3"), (1, "zero3_offload")):
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        launcher += [f"accelerate_configs/{name}.yaml", "--num_processes", "1"]
        launcher += ["--cpu"] if dry else []

        def sharded(name: str = name, runs: int = runs, launcher: list[str] = launcher) -> None:
            require_packages("deepspeed")
            grpo(table, name, dry, launcher, sizes, seconds_left(runs))

        table.attempt(name, "ours", sharded)
