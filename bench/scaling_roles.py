"""Model a GRPO step where some GPUs sample and the others learn, by rank.

The comparison is with all GPUs sampling and learning in turn.

    python bench/scaling_roles.py                  # table, results/scaling_roles.csv

The work, the rates and the learner's costs are those of scaling.py. Its settings apply here too.
With concurrent sides (`--max-steps-off-policy`), a step takes as long as the slowest of:
  - sampling all answers on the sampler GPUs;
  - rewards and the learners' step, with the answers of all GPUs;
  - sending the new weights through a copy in rank 0's memory.
In turn, these times are added; they are also added where the samplers wait (`waiting_s`). The
script chooses the number of samplers: the fastest of all splits that fit.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from scaling import (  # noqa: E402
    GPUS,
    STAGES,
    Driver,
    Hardware,
    Load,
    Step,
    arguments,
    launch_name,
    step,
    work_of,
)
from scaling_models import skeletons  # noqa: E402

from rl.memory_plan import plan_sampler_memory  # noqa: E402
from rl.memory_plan.byte_counts import GIB, USABLE_FRACTION  # noqa: E402
from rl.memory_plan.shapes import LaunchShape, MicroBatchMemory, ModelShape  # noqa: E402

TO_HOST = 25e9  # bytes/s from a GPU to its machine's memory


@dataclass(frozen=True)
class Sides:
    """Hold a row: seconds per step of each side and of both, and the speedup over taking turns.

    `samplers` is 0 if no split fits.
    """

    model: str
    gpus: int
    launch: str
    samplers: int
    sample_s: float
    learn_s: float
    hand_over_s: float
    step_s: float
    in_turn_s: float
    waiting_s: float
    times_faster: float
    limit: str


def hand_over_seconds(shape: ModelShape, driver: Driver, samplers: int) -> float:
    """Return the seconds to send the trained weights to the samplers.

    The weights move in fp32 to rank 0's memory, then down a tree to every sampler in the samplers'
    format (bf16; adapters in fp32).
    """
    crossing = 2.0 * (shape.trainable - shape.adapters) + 4.0 * shape.adapters
    return 4.0 * shape.trainable / TO_HOST + crossing / driver.network * max(
        1, math.ceil(math.log2(samplers + 1))
    )


def split(
    name: str,
    shape: ModelShape,
    held: MicroBatchMemory,
    launch: LaunchShape,
    samplers: int,
    load: Load,
    hardware: Hardware,
    driver: Driver,
    rate: float,
) -> tuple[float, float, float] | None:
    """Return the seconds (to sample, to learn, to send weights) with `samplers` sampler GPUs.

    Returns None if a side does not fit. `load` is per GPU of the whole launch: the learners, and
    the samplers, process the answers of all GPUs.
    """
    learners = launch.world - samplers
    answers = launch.world * load.answers
    more = replace(load, answers=math.ceil(answers / learners / load.group) * load.group)
    alone = replace(
        launch,
        world=learners,
        per_node=min(learners, hardware.per_node),
        zero_stage=launch.zero_stage if learners > 1 else None,
    )
    learns: Step = step(name, shape, held, alone, more, hardware, driver, rate, splits=False)
    drawing = replace(load, answers=math.ceil(answers / samplers / load.group) * load.group)
    draws = replace(launch, world=samplers, zero_stage=None)
    if (
        plan_sampler_memory(shape, draws, work_of(shape, draws, drawing)).peak / GIB
        > USABLE_FRACTION * hardware.memory_gib
        or not learns.fits
    ):
        return None
    learning = learns.train_s + learns.traffic_s + learns.driver_s
    return (
        drawing.answers * load.answer / rate,
        learning,
        hand_over_seconds(shape, driver, samplers),
    )


def sides(
    name: str,
    shape: ModelShape,
    held: MicroBatchMemory,
    launch: LaunchShape,
    load: Load,
    hardware: Hardware,
    driver: Driver,
    rate: float,
) -> Sides:
    """Return the best split of a launch's GPUs."""
    turns = step(name, shape, held, launch, load, hardware, driver, rate)
    found = {}
    for samplers in range(1, launch.world):
        if launch.world > 16 and samplers % (launch.world // 16):
            continue  # consider only whole sixteenths
        if (
            parts := split(name, shape, held, launch, samplers, load, hardware, driver, rate)
        ) is not None:
            found[samplers] = parts
    if not found:
        return Sides(
            name, launch.world, launch_name(launch), 0, 0, 0, 0, 0, turns.step_s, 0, 0, "memory"
        )
    best = min(found, key=lambda n: max(found[n]))
    parts = found[best]
    limit = ("sampling", "learning", "hand-over")[parts.index(max(parts))]
    return Sides(
        name,
        launch.world,
        launch_name(launch),
        best,
        *parts,
        max(parts),
        turns.step_s,
        sum(parts),
        turns.step_s / max(parts),
        limit,
    )


def table(
    names: Any,
    gpus: Any,
    load: Load,
    hardware: Hardware,
    driver: Driver,
    rates: Mapping[str, float],
) -> list[Sides]:
    import torch

    from rl.memory_plan.tracing import ComputeConfig

    rows = []
    for name, skeleton in skeletons(names).items():
        batch = work_of(skeleton.shape, LaunchShape(cuda=True, bf16=True), load).batch
        whole = skeleton.measure_micro_batch(
            batch, ComputeConfig(autocast=True, checkpointing=True)
        )
        sharded = skeleton.measure_micro_batch(
            batch, ComputeConfig(dtype=torch.bfloat16, keeps_gradients=False, checkpointing=True)
        )
        for world in gpus:
            for stage in STAGES.values():
                if world > 1:
                    launch = LaunchShape(
                        cuda=True,
                        bf16=True,
                        world=world,
                        per_node=min(world, hardware.per_node),
                        zero_stage=stage,
                    )
                    held = whole if stage is None else sharded
                    rows.append(
                        sides(
                            name, skeleton.shape, held, launch, load, hardware, driver, rates[name]
                        )
                    )
    return rows


def main() -> None:
    given = arguments()
    hardware, driver, load = (
        kind(**{name: getattr(given, name) for name in asdict(kind())})
        for kind in (Hardware, Driver, Load)
    )
    rates = {name: float(rate) for name, rate in (pair.split(":") for pair in given.sampling_rate)}
    rows = table(
        given.models, [n for n in given.gpus if n in GPUS and n > 1], load, hardware, driver, rates
    )
    with (given.out / "scaling_roles.csv").open("w", newline="") as file:
        file.write(f"# python {' '.join(sys.argv)}\n")
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(
            {key: round(v, 3) if isinstance(v, float) else v for key, v in asdict(row).items()}
            for row in rows
        )
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
