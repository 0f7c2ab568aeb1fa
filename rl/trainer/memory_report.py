"""Run `train.py ... --plan`: report the memory that each GPU of a run would hold, whether it fits,
and what to change, before weights are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from rl.algorithms import METHODS
from rl.config import RunConfig
from rl.errors import UserError
from rl.memory_plan import USABLE_FRACTION, LaunchShape
from rl.trainer.cache_size import fit_cache_size
from rl.trainer.initial_weights import describe_tied_heads, resolve_initial_weights
from rl.trainer.memory_requirements import (
    UnsupportedTensorParallel,
    compute_stage_needs,
    measure_nothing,
    resolve_launch,
)
from rl.trainer.memory_savings import find_savings, select_listed
from rl.trainer.memory_table import DeviceMemory, StageNeeds, format_gib, print_plans

# least Python memory of an answer, its tokens, logprobs and advantages; twice as much is usual
ANSWER_BYTES = 2048


def report_memory(run: RunConfig) -> None:
    """Print the plan of a run on rank 0. Raises UserError (on every rank) if the run cannot fit."""
    run, _ = resolve_initial_weights(run)
    options = run.options
    _check_batches(run)
    launch, device = resolve_launch(options, run.stages[0].settings.model.precision)
    run = fit_cache_size(run, launch, device)
    stages = compute_stage_needs(run, launch, options.plan_prompt_tokens)
    largest = max(stages, key=lambda needs: needs.plan.peak)
    prints = os.environ.get("RANK", "0") == "0"
    if prints:
        print_plans(stages, device)
        for text in describe_tied_heads(run):
            print(text)
    if largest.plan.peak <= USABLE_FRACTION * device.memory:
        return
    # only rank 0 prints its message
    advice = _suggest_changes(run, launch, options.plan_prompt_tokens, device) if prints else ""
    if largest.plan.peak > device.memory:
        raise UserError(
            _describe_shortage(largest, device) + advice + _describe_sampler_limit(largest, device)
        )
    if prints:
        print(advice.strip())


def check_memory(run: RunConfig, warn: Callable[[str], None]) -> list[StageNeeds]:
    """Check the memory plan at the start of a run on a GPU, before weights are loaded. Call `warn`
    with what may not fit. Return the needs of each stage on a GPU; none on a CPU.

    Raises UserError if weights, optimizer and the sampler's copy alone cannot fit, whatever the
    lengths of prompts and answers; on any device also if the requested number of processes cannot
    share a sampler. A model that cannot be planned is accepted.
    """
    _check_batches(run)
    options = run.options
    launch, device = resolve_launch(options, run.stages[0].settings.model.precision)
    cuda = torch.cuda.is_available()
    if not cuda and all(stage.settings.sampling.sampler_tp == 1 for stage in run.stages):
        return []
    try:
        stages = compute_stage_needs(
            run, launch, options.plan_prompt_tokens, measure=None if cuda else measure_nothing
        )
    except UnsupportedTensorParallel:
        raise
    except UserError:
        return []
    for needs in stages if cuda else ():
        stays = sum(min(item.sample, item.train, item.update) for item in needs.plan.items)
        if stays > device.memory:
            raise UserError(
                _describe_shortage(needs, device)
                + " --plan says what to change."
                + _describe_sampler_limit(needs, device)
            )
        if needs.plan.peak > device.memory:
            warn(f"{_describe_shortage(needs, device)} --plan says what to change.")
    return stages if cuda else []


def _check_batches(run: RunConfig) -> None:
    """Raise UserError if a batch's answers, ANSWER_BYTES each, exceed the driver's memory."""
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for stage in run.stages:
        method = METHODS[stage.method](stage.settings)
        group, batch = (method.group_size if method.online else 1), stage.settings.loop.batch_size
        if batch * group * ANSWER_BYTES > machine:
            product = f"batch_size {batch}" + (f" x group_size {group}" if group > 1 else "")
            raise UserError(
                f"stage {stage.name}: {product} are {batch * group} answers a batch, at the very "
                f"least {format_gib(batch * group * ANSWER_BYTES)} of the {format_gib(machine)} "
                f"that this machine has: lower batch_size{' or group_size' if group > 1 else ''}"
            )


def _describe_shortage(needs: StageNeeds, device: DeviceMemory) -> str:
    peak, moment = max((size, name) for name, size in needs.plan.sums.items())
    when = {
        "sample": "while it samples",
        "train": "in a micro-batch",
        "update": "at the optimizer's step",
    }[moment]
    return (
        f"stage {needs.stage} with {needs.model} needs {format_gib(peak)} on each {device.name}, "
        f"which has {format_gib(device.memory)} (most {when})."
    )


def _suggest_changes(run: RunConfig, launch: LaunchShape, prompt: int, device: DeviceMemory) -> str:
    """Return the changes that would lower the peak, each alone, the most effective first."""
    limit = USABLE_FRACTION * device.memory
    changes = find_savings(run, launch, prompt)
    if not changes:
        return " No setting lowers it: use a smaller model, or larger GPUs."
    lines = [
        f"  {change.command}: {format_gib(change.peak)}"
        + (", fits" if change.peak <= limit else "")
        for change in select_listed(changes, limit)
    ]
    text = "\nWhat would lower it, the most effective first:\n" + "\n".join(lines)
    if any(change.peak <= limit for change in changes):
        return text
    return text + (
        "\nNo single change is enough: plan again with several of them, with a smaller model, or"
        " with larger GPUs."
    )


def _describe_sampler_limit(needs: StageNeeds, device: DeviceMemory) -> str:
    copy = next(item.train for item in needs.plan.items if item.name.startswith("sampler"))
    if copy <= USABLE_FRACTION * device.memory:
        return ""
    if needs.launch.sampler_tp > 1:
        return (
            f"\nA GPU's part of the sampler's copy alone is {format_gib(copy)}: a larger "
            "--sampler-tp helps, or larger GPUs."
        )
    advice = "no sharding of the learner helps; --sampler-tp does, or larger GPUs"
    return f"\nThe sampler's copy alone is {format_gib(copy)}, whole on every GPU: {advice}."
