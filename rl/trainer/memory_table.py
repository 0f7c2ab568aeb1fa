"""Print a memory plan: a table for each stage, the assumptions, and whether it fits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.memory_plan import GIB, USABLE_FRACTION, LaunchShape, MemoryPlan, StepWork


@dataclass(frozen=True)
class DeviceMemory:
    """Hold the memory of the device in bytes. `name`: for display."""

    name: str
    memory: float


@dataclass(frozen=True)
class StageNeeds:
    """Hold a stage's plan and its inputs."""

    stage: str
    model: str
    plan: MemoryPlan
    work: StepWork
    launch: LaunchShape


def format_gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def print_plans(stages: Sequence[StageNeeds], device: DeviceMemory) -> None:
    """Print the plans to stdout, in GiB or (small models) MiB."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

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
        table.add_row(
            *(
                Text(word, style="bold")
                for word in ("together", *(f"{size / unit:,.2f}" for size in sums.values()))
            )
        )
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
    if batch.ranks > 1:
        layout += f" on each of the {batch.ranks} processes that share it"
    lines = [
        f"assumed: prompts of {work.prompt} tokens (--plan-prompt-tokens), answers of "
        f"{work.answer}; a micro-batch is {layout}"
    ]
    if work.samples:
        team = needs.launch.sampler_tp
        together = (
            f", by groups of {team} processes, each with its part of weights and cache of a sampler"
            if team > 1
            else ""
        )
        lines.append(f"sampled at once: {work.rows} answers to {work.prompts} prompts{together}")
    lines += [
        f"CPU memory of a machine: {format_gib(size)} for {purpose}"
        for purpose, size in needs.plan.host
    ]
    return lines


def _format_verdict(peak: float, device: DeviceMemory) -> Any:
    from rich.text import Text

    share = f"{format_gib(peak)} of {format_gib(device.memory)} ({peak / device.memory:.0%})"
    if peak > device.memory:
        return Text(f"does not fit: {share}", style="bold red")
    if peak > USABLE_FRACTION * device.memory:
        return Text(
            f"tight: {share}; above {USABLE_FRACTION:.0%} fragmentation may not leave enough",
            style="bold yellow",
        )
    return Text(f"fits: {share}", style="bold green")
