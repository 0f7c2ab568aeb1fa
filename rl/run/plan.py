"""`train.py ... --plan`: what each GPU of a run would hold, whether it fits, and what to change,
before weights are loaded.
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

# that Python needs at least for one answer, its tokens, logprobs and advantages: twice as much is
# usual
ANSWER_BYTES = 2048


def show(run: Run, beside: Sequence[Connection] = ()) -> None:
    """Prints the plan of a run on rank 0. Raises UserError (on every rank) where it cannot fit.
    `beside`: see `Traces.helped`.
    """
    gc.disable()  # of a process that lives for seconds and imports much, a tenth of its time
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
    # the others' words are not shown
    advice = _advice(run, launch, options.plan_prompt_tokens, device) if prints else ""
    if largest.plan.peak > device.memory:
        raise UserError(_shortage(largest, device) + advice + _ceiling(largest, device))
    if prints:
        print(advice.strip())


def check(run: Run, warn: Callable[[str], None]) -> None:
    """At the start of a run on a GPU, before weights are loaded: warns of what may not fit.

    Raises UserError for what cannot, whatever the prompts and answers: weights, optimizer and
    sampler's copy alone; on any device for a sampler that so many processes cannot hold together. A
    model that cannot be planned is let through.
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
    """Raises UserError where a batch's answers alone, counted as ANSWER_BYTES each, are more than
    the driver's memory.
    """
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for stage in run.stages:
        hooks = METHODS[stage.method].hooks(stage.settings)
        group, batch = (hooks.group_size if hooks.online else 1), stage.settings.loop.batch_size
        if batch * group * ANSWER_BYTES > machine:
            what = f"batch_size {batch}" + (f" x group_size {group}" if group > 1 else "")
            raise UserError(
                f"stage {stage.name}: {what} are {batch * group} answers a batch, at the very least "
                f"{gib(batch * group * ANSWER_BYTES)} of the {gib(machine)} that this machine has: "
                f"lower batch_size{' or group_size' if group > 1 else ''}"
            )


def _shortage(needs: StageNeeds, device: Device) -> str:
    peak, moment = max((size, name) for name, size in needs.plan.sums.items())
    when = {
        "sample": "while it samples",
        "train": "in a micro-batch",
        "update": "at the optimizer's step",
    }[moment]
    return f"stage {needs.stage} with {needs.model} needs {gib(peak)} on each {device.name}, of {gib(device.memory)} there (most {when})."


def _advice(run: Run, launch: Launch, prompt: int, device: Device) -> str:
    """What would lower the peak, the most effective first, and what to take together where nothing
    is enough alone.
    """
    room = ROOM * device.memory
    changes = remedies(run, launch, prompt)
    if not changes:
        return " No setting lowers it: take a smaller model, or larger GPUs."
    lines = [
        f"  {change.words}: {gib(change.peak)}" + (", fits" if change.peak <= room else "")
        for change in shown(changes, room)
    ]
    text = "\nWhat would lower it, the most effective first:\n" + "\n".join(lines)
    if any(change.peak <= room for change in changes):
        return text
    taken, peak = together(run, launch, prompt, changes, room)
    if not taken:
        return (
            text
            + f"\nAll of it together still needs {gib(peak)}: take a smaller model, or larger GPUs."
        )
    return (
        text
        + f"\nNone fits alone; together {gib(peak)}, which fits: "
        + ", ".join(change.words for change in taken)
    )


def _ceiling(needs: StageNeeds, device: Device) -> str:
    copy = next(item.train for item in needs.plan.items if item.name.startswith("sampler"))
    if copy <= ROOM * device.memory:
        return ""
    if needs.launch.team > 1:
        return f"\nA GPU's part of the sampler's copy alone is {gib(copy)}: a larger --sampler-tp helps, or larger GPUs."
    what = "no sharding of the learner helps; --sampler-tp does, or larger GPUs"
    return f"\nThe sampler's copy alone is {gib(copy)}, whole on every GPU: {what}."
