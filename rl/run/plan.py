"""Run `train.py ... --plan`: report the memory that each GPU of a run would hold, whether it fits,
and what to change, before weights are loaded.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection

import torch

from rl.errors import UserError
from rl.memory import ROOM, Launch
from rl.methods import METHODS
from rl.run.origins import settled
from rl.run.plan_changes import ahead, remedies, shown, together
from rl.run.plan_needs import TRACES, CannotSplit, launch_of, needs_of, nothing
from rl.run.plan_page import Device, StageNeeds, gib, print_plans
from rl.settings import Run

# least Python memory of an answer, its tokens, logprobs and advantages; twice as much is usual
ANSWER_BYTES = 2048


def show(run: Run, beside: Sequence[Connection] = ()) -> None:
    """Print the plan of a run on rank 0. `beside`: connections to helper processes, see
    `Traces.helped`.

    Raises UserError (on every rank) if the run cannot fit.
    """
    # garbage collection takes a tenth of the time of this short process with many imports
    gc.disable()
    try:
        with TRACES.helped(beside) if beside else nullcontext():
            _show(run)
    finally:
        gc.enable()


def _show(run: Run) -> None:
    run, _ = settled(run)
    options = run.options
    _check_batches(run)
    launch, device = launch_of(options, run.stages[0].settings.model.precision)
    ahead(run, launch, options.plan_prompt_tokens)
    stages = needs_of(run, launch, options.plan_prompt_tokens)
    largest = max(stages, key=lambda needs: needs.plan.peak)
    prints = os.environ.get("RANK", "0") == "0"
    if prints:
        print_plans(stages, device)
    if largest.plan.peak <= ROOM * device.memory:
        return
    # only rank 0 prints its message
    advice = _advice(run, launch, options.plan_prompt_tokens, device) if prints else ""
    if largest.plan.peak > device.memory:
        raise UserError(_shortage(largest, device) + advice + _ceiling(largest, device))
    if prints:
        print(advice.strip())


def check(run: Run, warn: Callable[[str], None]) -> None:
    """Check the memory plan at the start of a run on a GPU, before weights are loaded. Call `warn`
    with what may not fit.

    Raises UserError if weights, optimizer and the sampler's copy alone cannot fit, whatever the
    lengths of prompts and answers; on any device also if the requested number of processes cannot
    share a sampler. A model that cannot be planned is accepted.
    """
    _check_batches(run)
    options = run.options
    launch, device = launch_of(options, run.stages[0].settings.model.precision)
    cuda = torch.cuda.is_available()
    if not cuda and all(stage.settings.sampling.sampler_tp == 1 for stage in run.stages):
        return
    try:
        stages = needs_of(run, launch, options.plan_prompt_tokens, holds=None if cuda else nothing)
    except CannotSplit:
        raise
    except UserError:
        return
    for needs in stages if cuda else ():
        stays = sum(min(item.sample, item.train, item.update) for item in needs.plan.items)
        if stays > device.memory:
            raise UserError(
                _shortage(needs, device) + " --plan says what to change." + _ceiling(needs, device)
            )
        if needs.plan.peak > device.memory:
            warn(f"{_shortage(needs, device)} --plan says what to change.")


def _check_batches(run: Run) -> None:
    """Raise UserError if a batch's answers, ANSWER_BYTES each, exceed the driver's memory."""
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for stage in run.stages:
        hooks = METHODS[stage.method].hooks(stage.settings)
        group, batch = (hooks.group_size if hooks.online else 1), stage.settings.loop.batch_size
        if batch * group * ANSWER_BYTES > machine:
            product = f"batch_size {batch}" + (f" x group_size {group}" if group > 1 else "")
            raise UserError(
                f"stage {stage.name}: {product} are {batch * group} answers a batch, at the "
                f"very least {gib(batch * group * ANSWER_BYTES)} of the {gib(machine)} that "
                f"this machine has: lower batch_size{' or group_size' if group > 1 else ''}"
            )


def _shortage(needs: StageNeeds, device: Device) -> str:
    peak, moment = max((size, name) for name, size in needs.plan.sums.items())
    when = {
        "sample": "while it samples",
        "train": "in a micro-batch",
        "update": "at the optimizer's step",
    }[moment]
    return (
        f"stage {needs.stage} with {needs.model} needs {gib(peak)} on each {device.name}, "
        f"which has {gib(device.memory)} (most {when})."
    )


def _advice(run: Run, launch: Launch, prompt: int, device: Device) -> str:
    """Return the changes that would lower the peak, the most effective first, and a combination of
    changes if no single change is enough.
    """
    limit = ROOM * device.memory
    changes = remedies(run, launch, prompt)
    if not changes:
        return " No setting lowers it: use a smaller model, or larger GPUs."
    lines = [
        f"  {change.words}: {gib(change.peak)}" + (", fits" if change.peak <= limit else "")
        for change in shown(changes, limit)
    ]
    text = "\nWhat would lower it, the most effective first:\n" + "\n".join(lines)
    if any(change.peak <= limit for change in changes):
        return text
    combination, peak = together(run, launch, prompt, changes, limit)
    if not combination:
        return text + (
            f"\nAll of it together still needs {gib(peak)}: use a smaller model, or larger GPUs."
        )
    return (
        text
        + f"\nNo single change is enough; together {gib(peak)}, which fits: "
        + ", ".join(change.words for change in combination)
    )


def _ceiling(needs: StageNeeds, device: Device) -> str:
    copy = next(item.train for item in needs.plan.items if item.name.startswith("sampler"))
    if copy <= ROOM * device.memory:
        return ""
    if needs.launch.team > 1:
        return (
            f"\nA GPU's part of the sampler's copy alone is {gib(copy)}: a larger "
            "--sampler-tp helps, or larger GPUs."
        )
    advice = "no sharding of the learner helps; --sampler-tp does, or larger GPUs"
    return f"\nThe sampler's copy alone is {gib(copy)}, whole on every GPU: {advice}."
