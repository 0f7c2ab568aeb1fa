"""Run `train.py ... --plan`: report the memory that each GPU of a run would hold, whether it fits,
and which changes of settings or launch would lower its peak, before weights are loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rl.algorithms import METHODS
from rl.config import RunConfig
from rl.distributed import ZeroSharding
from rl.errors import UserError
from rl.memory_plan import GIB, USABLE_FRACTION, LaunchShape
from rl.sampler import DEFAULT_CACHE_TOKENS
from rl.trainer.initial_weights import describe_tied_heads, resolve_initial_weights
from rl.trainer.memory_requirements import (
    DeviceMemory,
    StageNeeds,
    UnsupportedTensorParallel,
    compute_stage_needs,
    fit_cache_size,
    get_machine_memory,
    resolve_launch,
)

# least Python memory of an answer, its tokens, logprobs and advantages; twice as much is usual
ANSWER_BYTES = 2048
# settings, and kinds of change, of which only the smallest sufficient change is listed
CACHE, TENSOR_PARALLEL, CONTEXT_PARALLEL = "kv_cache_tokens", "sampler_tp", "context_parallel_size"
EXPERT_PARALLEL = "expert_parallel_size"
MIN_EFFECT = 0.98  # fraction of a peak: a change that leaves more than that fraction does not count


def report_memory(run: RunConfig) -> None:
    """Print the plan of a run on rank 0. Raises UserError (on every rank) if the run cannot fit."""
    run, _ = resolve_initial_weights(run)
    options = run.options
    _check_batches(run)
    launch, device = resolve_launch(run)
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
    launch, device = resolve_launch(run)
    cuda = torch.cuda.is_available()
    if not cuda and all(stage.settings.sampling.sampler_tp == 1 for stage in run.stages):
        return []
    try:
        stages = compute_stage_needs(run, launch, options.plan_prompt_tokens, traced=cuda)
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
    machine = get_machine_memory()
    for stage in run.stages:
        method = METHODS.create(stage)
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


@dataclass(frozen=True)
class MemorySaving:
    """Describe a change: the words to type, the value of a setting or the fields of the launch that
    it replaces, and the peak with it.

    `kind`: the setting that changes, or "launch". `section`: of the setting.
    """

    command: str
    kind: str = "launch"
    section: str = ""
    value: Any = None
    launch: Mapping[str, Any] = field(default_factory=dict)
    peak: float = 0.0

    def apply(self, run: RunConfig, launch: LaunchShape) -> tuple[RunConfig, LaunchShape]:
        """Return the run and its launch with the change."""
        if self.section:
            change = {self.kind: self.value}
            stages = [stage.with_section(self.section, **change) for stage in run.stages]
            run = replace(run, stages=tuple(stages))
        return run, replace(launch, **self.launch)


def _change_setting(section: str, name: str, value: Any, gpus: int | None = None) -> MemorySaving:
    """Return the change of a setting, and if `gpus` is given of the number of processes."""
    command = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
    if gpus is None:
        return MemorySaving(command, name, section, value)
    return MemorySaving(f"{command} on {gpus} GPUs", name, section, value, _launch_on(gpus))


def _launch_on(gpus: int) -> dict[str, int]:
    """Return the fields of a launch on machines of up to 8 GPUs."""
    return {"world": gpus, "per_node": min(gpus, 8)}


def _list_candidates(run: RunConfig, launch: LaunchShape) -> list[MemorySaving]:
    settings = run.stages[-1].settings
    model, optim, sampling = settings.model, settings.optim, settings.sampling
    is_whole = launch.cuda and not launch.sharding.divides
    checkpoints, offloads = model.gradient_checkpointing, model.offload_activations
    fuses_on_gpu = launch.cuda and model.fused_logprobs
    # (whether it is a change, section, setting, value)
    table: list[tuple[bool, str, str, Any]] = [
        (not checkpoints, "model", "gradient_checkpointing", True),
        (launch.cuda and checkpoints and not offloads, "model", "offload_activations", True),
        (not model.fused_logprobs, "model", "fused_logprobs", True),
        (fuses_on_gpu and model.kept_logits_gib != 0, "model", "kept_logits_gib", 0),
        (not model.lora_rank, "model", "lora_rank", 32),
        *((True, "optim", "token_budget", max(1, optim.token_budget // n)) for n in (2, 4)),
        (True, "sampling", "max_rows", max(1, sampling.max_rows // 4)),
        *((True, "sampling", CACHE, size) for size in _halved_cache_sizes(run)),
        # sharding excludes these changes
        (is_whole and bool(model.lora_rank), "model", "base_dtype", "4bit"),
        (is_whole, "optim", "optimizer", "adamw_8bit"),
    ]
    changes = [_change_setting(*change) for applies, *change in table if applies]
    if not launch.cuda:
        return changes
    gpus = max(launch.world, 8)
    # a tensor-parallel group consists of processes of a single machine
    fits = min(gpus, 8) % max(stage.settings.sampling.sampler_tp for stage in run.stages) == 0
    # only FSDP2 divides experts
    if fits and all(stage.settings.optim.expert_parallel_size == 1 for stage in run.stages):
        for stage, offload in ((1, False), (2, False), (3, False), (3, True)):
            sharding = ZeroSharding(stage=stage, offload=offload)
            is_larger = gpus > launch.world and not offload
            if is_larger or launch.sharding.can_change_to(sharding):
                command = f"{sharding.config_file} on {gpus} GPUs"
                fields = {**_launch_on(gpus), "sharding": sharding}
                changes.append(MemorySaving(command, launch=fields))
    for name in (TENSOR_PARALLEL, CONTEXT_PARALLEL, EXPERT_PARALLEL):
        section = "sampling" if name == TENSOR_PARALLEL else "optim"
        changes += _parallel_changes(run, launch, gpus, section, name)
    return changes


def _parallel_changes(
    run: RunConfig, launch: LaunchShape, gpus: int, section: str, name: str
) -> list[MemorySaving]:
    """Return samplers (sequences or experts of the learner) shared by 2, 4 or 8 processes of a
    machine, where the policy can be divided among them. `section`, `name`: of the setting.
    """
    current = max(getattr(getattr(stage.settings, section), name) for stage in run.stages)
    changes = []
    for size in (2, 4, 8):
        needs_more = launch.per_node % size  # more processes have to be launched
        change = _change_setting(section, name, size, gpus if needs_more else None)
        try:
            compute_stage_needs(*change.apply(run, launch), 1, traced=False)
        except ValueError:  # these settings, this model or so many processes do not fit together
            continue
        if size > current:
            changes.append(change)
    return changes


def _halved_cache_sizes(run: RunConfig) -> list[int]:
    """Return halvings of the KV cache, down to the size of the longest prompt and answer of any
    stage.
    """
    now = run.stages[-1].settings.sampling.kv_cache_tokens or DEFAULT_CACHE_TOKENS
    longest_answer = max(stage.settings.sampling.max_tokens for stage in run.stages)
    least = longest_answer + run.options.plan_prompt_tokens
    return [now >> i for i in range(1, 12) if now >> i >= least]


def find_savings(run: RunConfig, launch: LaunchShape, prompt: int) -> list[MemorySaving]:
    """Return single changes that lower the peak of the run, the most effective first."""

    def peak(change: MemorySaving, *, traced: bool) -> float:
        stages = compute_stage_needs(*change.apply(run, launch), prompt, traced=traced)
        return max(needs.plan.peak for needs in stages)

    bound = MIN_EFFECT * peak(MemorySaving(""), traced=True)
    savings = [
        replace(change, peak=peak(change, traced=True))
        for change in _list_candidates(run, launch)
        # without the trace of the micro-batch first, which takes long
        if peak(change, traced=False) < bound
    ]
    effective = [change for change in savings if change.peak < bound]
    return sorted(effective, key=lambda change: change.peak)


def select_listed(changes: Sequence[MemorySaving], limit: float) -> list[MemorySaving]:
    """Return the changes to list. Of several cache sizes or parallel sizes, list only the smallest
    change that fits, or the most effective if none fits.
    """
    several = (CACHE, TENSOR_PARALLEL, CONTEXT_PARALLEL, EXPERT_PARALLEL)
    selected = []
    for kind in several:
        least_first = sorted((c for c in changes if c.kind == kind), key=lambda c: -c.peak)
        if least_first:
            selected.append(next((c for c in least_first if c.peak <= limit), least_first[-1]))
    return [change for change in changes if change.kind not in several or change in selected]


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


def format_gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def print_plans(stages: Sequence[StageNeeds], device: DeviceMemory) -> None:
    """Print the plans to stdout, in GiB or (small models) MiB."""
    console = Console(file=sys.stdout, highlight=False)
    for needs in stages:
        sums = needs.plan.sums
        unit, name = (GIB, "GiB") if needs.plan.peak >= GIB else (2.0**20, "MiB")
        console.print(
            Text(f"{needs.stage}: {needs.model}, {_describe_launch(needs.launch)}", style="bold"),
            soft_wrap=True,
        )
        table = Table()
        table.add_column(f"{name} on each {device.name}")
        for moment in ("sampling", "a micro-batch", "the update"):
            table.add_column(moment, justify="right")
        for item in needs.plan.items:
            sizes = (item.sample, item.train, item.update)
            if any(sizes):
                table.add_row(item.name, *(f"{size / unit:,.2f}" if size else "" for size in sizes))
        table.add_section()
        totals = (f"{size / unit:,.2f}" for size in sums.values())
        table.add_row("together", *totals, style="bold")
        console.print(table)
        for line in _list_assumptions(needs):
            console.print(Padding(Text(line, style="dim"), (0, 0, 0, 2)))
        console.print(_format_verdict(needs.plan.peak, device))


def _describe_launch(launch: LaunchShape) -> str:
    processes = "one process" if launch.world == 1 else f"{launch.world} processes"
    sharding = launch.sharding.describe(launch.world)
    precision = "bf16" if launch.bf16 else "fp32"
    return ", ".join(filter(None, (processes, sharding, precision)))


def _list_assumptions(needs: StageNeeds) -> list[str]:
    work, batch = needs.work, needs.work.batch
    layout = f"{batch.rows} rows of {batch.length} positions" + (
        " with an explicit mask" if batch.masked else ""
    )
    if batch.sequences:
        layout = f"one row of {batch.length} positions for {batch.sequences} sequences"
    if batch.ranks > 1:
        layout += f" on each of the {batch.ranks} processes that share it"
    lines = [
        f"assumed: prompts of {work.prompt} tokens (--plan-prompt-tokens), answers of "
        f"{work.answer}; a micro-batch is {layout}"
    ]
    if work.samples:
        tp_size = needs.launch.sampler_tp
        together = (
            f", by groups of {tp_size} processes, each with its part of weights and cache of a "
            "sampler"
            if tp_size > 1
            else ""
        )
        lines.append(f"sampled at once: {work.rows} answers to {work.prompts} prompts{together}")
    lines += [
        f"CPU memory of a machine: {format_gib(size)} for {purpose}"
        for purpose, size in needs.plan.host
    ]
    return lines


def _format_verdict(peak: float, device: DeviceMemory) -> Text:
    share = f"{format_gib(peak)} of {format_gib(device.memory)} ({peak / device.memory:.0%})"
    if peak > device.memory:
        return Text(f"does not fit: {share}", style="bold red")
    if peak > USABLE_FRACTION * device.memory:
        return Text(
            f"tight: {share}; above {USABLE_FRACTION:.0%} fragmentation may not leave enough",
            style="bold yellow",
        )
    return Text(f"fits: {share}", style="bold green")
