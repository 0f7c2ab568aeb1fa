"""Compile the kernels of the GPU campaign (see gpu.py) in parallel processes, before other parts time
them one after another.

Triton's cache on the disk hands the variants on. A variant depends on the widths of a model and not
on its layers or on the number of rows, so a job runs a small batch once.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from bench.gpu_kernels import device_of, shapes

PROVIDERS = ("ours", "ours_entropy", "ours_saved", "ours_frozen")
Job = tuple[Callable[..., None], tuple[Any, ...]]


def run_head(shape: Any, name: str, dry: bool) -> None:
    """Run linear_logprob and its backward as a provider of bench/kernels.py does."""
    import torch

    from bench.kernels import PROVIDERS as providers
    from bench.kernels import LogprobBatch

    provider = next(provider for provider in providers if provider.name == name)
    tokens, dtype = (64, torch.float32) if dry else (1024, torch.bfloat16)
    problem = LogprobBatch.make(shape, tokens, device_of(dry), dtype, provider.frozen)
    provider.logprobs(problem).backward(problem.upstream)


def run_draw(shape: Any, dry: bool) -> None:
    """Sample tokens and score logits, with an LM head."""
    import torch

    from kernels import sample_tokens, token_logprob

    device, rows = device_of(dry), 64
    x = torch.zeros(rows, shape.D, device=device).bfloat16()
    w = torch.zeros(shape.V, shape.D, device=device).bfloat16()
    uniform = torch.zeros(rows, device=device, dtype=torch.float64)
    sample_tokens(x, w, torch.ones(rows, device=device), uniform)
    logits = torch.mm(x, w.t()).requires_grad_()
    target = torch.zeros(rows, device=device, dtype=torch.long)
    token_logprob(logits, target)[0].sum().backward()


def run_older(shape: Any, dry: bool) -> None:
    """Launch the score kernels of the branch that the device does not choose on Hopper."""
    import torch

    from bench.gpu_kernels import KernelInputs, scores_of
    from kernels.linear_logprob_torch import GradientCoefficients

    operands = KernelInputs.make(shape, dry)
    scores, row = scores_of(operands, False), torch.ones(len(operands.x), device=operands.x.device)
    for entropy in (False, True):
        scores.statistics(entropy)
    gradient = GradientCoefficients(row, row, None)
    scores.dlogits(operands.dz, 0, operands.dz.shape[1], row, gradient)


def run_decode(size: str, dry: bool) -> None:
    """Sample with two layers of a model, over pages."""
    from bench.gpu_models import engine_of, make_model, random_prompts
    from rl.sampler import make_decoder

    decoder = make_decoder(make_model(size, device_of(dry), num_hidden_layers=2), kind="fast")
    prompts = random_prompts(2 if dry else 8, 16 if dry else 256, decoder.vocab_size)
    engine_of(decoder, "paged", 8 * len(prompts), prompts, 12).run()


def list_jobs(dry: bool) -> dict[str, Job]:
    """Return the jobs by name, those that take longest first."""
    from bench.gpu_decode import SIZES_TIMED

    jobs: dict[str, Job] = {}
    for size in ("tiny",) if dry else SIZES_TIMED:
        jobs[f"{size}, decode"] = run_decode, (size, dry)
    for shape in shapes(dry):
        for name in PROVIDERS:
            jobs[f"{shape.model}, {name}"] = run_head, (shape, name, dry)
        jobs[f"{shape.model}, older branch"] = run_older, (shape, dry)
        jobs[f"{shape.model}, draw"] = run_draw, (shape, dry)
    return jobs


def time_job(function: Callable[..., None], arguments: tuple[Any, ...]) -> float:
    """Return the seconds of a job, in this process."""
    import torch

    from bench.gpu_models import free_gpu_memory, seconds_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds, _ = seconds_of(lambda: function(*arguments), device)
    free_gpu_memory(device)
    return seconds


def part_compile(table: Any, dry: bool) -> None:
    """Run every job, twelve at a time, and record the seconds of each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2 if dry else 12, mp_context=context) as pool:
        futures = {pool.submit(time_job, *job): name for name, job in list_jobs(dry).items()}
        for future in as_completed(futures):
            name = futures[future]
            seconds = table.attempt(name, "ours", future.result)
            if seconds is not None:
                table.row(name, "ours", "compiled_in", seconds, "s")
