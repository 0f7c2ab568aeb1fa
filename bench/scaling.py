"""Model step time, memory and traffic of a GRPO step on 1 to 1,024 GPUs.

Two real processes check the modelled traffic.

    # results/scaling.csv and results/scaling.png: under a minute
    python bench/scaling.py
    # first measure the bytes that two gloo processes really send, against the model
    python bench/scaling.py --measure
    python bench/scaling.py --sampling-rate 7:2500 --mfu 0.35 --reward-seconds 0.05

Memory is that of `train.py --plan` (rl.memory_plan.byte_counts). Nothing overlaps: the model adds sampling,
arithmetic, traffic and the driver's work, because the loop runs them in sequence (only ZeRO-2 may
overlap its sending, by a setting). The work grows with the GPUs: a fixed number of answers per GPU.
The output begins with the assumptions; the rates are inputs, not measurements. Where a sampler's
whole copy fits no GPU, the fewest GPUs of a machine that can hold the copy together do so
(`--sampler-tp`; scaling_models.py). A mixture of experts computes with the parameters that a token
is routed to; it holds, sends and gathers all parameters. A vision-language model runs its vision
tower over every image. The tower is frozen (LoRA trains only the language model) or trained. The
image's tokens count as prompt tokens too. Symbols: W ranks, N parameters of the model, Nt trained
parameters, m micro-batches per rank and step.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import scaling_models  # noqa: E402
from scaling_models import NAMES, skeletons  # noqa: E402

from rl.distributed import Sharding, ZeroSharding  # noqa: E402
from rl.distributed.sharding import REUSE_DISTANCE  # noqa: E402
from rl.memory_plan import (  # noqa: E402  # noqa: E402
    GIB,
    USABLE_FRACTION,
    LaunchShape,
    MicroBatchMemory,
    ModelShape,
    StepWork,
    plan_memory,
)
from rl.memory_plan.step_shapes import (  # noqa: E402
    compute_concurrent_rows,
    count_pool_pages,
    largest_micro_batch,
)

RESULTS = HERE / "results"
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STAGES: dict[str, int | None] = {"ddp": None, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hold the rates of a GPU and its links; bandwidths are unidirectional, as in rings."""

    flops: float = 989e12  # bf16, dense, from an H100's data sheet
    mfu: float = 0.35
    memory_gib: float = 80.0
    nvlink: float = 450e9 * 0.7  # bytes/s; the factor is the usual efficiency of collectives
    infiniband: float = 50e9 * 0.8  # bytes/s per GPU (400 Gb/s)
    per_node: int = 8
    collective_seconds: float = 20e-6  # latency of a call over NVLink, regardless of its size


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Hold the rates of the work that only rank 0 does.

    `bytes_per_token` and `pickle_rate` describe a batch on its way to the ranks; the defaults come
    from --measure.
    """

    reward_seconds: float = 0.005
    reward_workers: int = 8
    bytes_per_token: float = 16.0
    pickle_rate: float = 130e6  # bytes/s, packing and unpacking
    network: float = 1.5e9  # bytes/s of object broadcasts, which use gloo over TCP


@dataclass(frozen=True, kw_only=True)
class Load:
    """Hold the work of a GPU in a step, and its division into micro-batches."""

    answers: int = 64
    group: int = 8
    prompt: int = 512
    answer: int = 1024
    budget: int = 16_384
    # Image patches per prompt, as the vision tower reads them. `prompt` includes the resulting
    # tokens.
    patches: int = 0

    @property
    def tokens(self) -> int:
        return self.answers * (self.prompt + self.answer)


# ---------------------------------------------------------------------------- traffic


def payload(shape: ModelShape, launch: LaunchShape, micro_batches: int) -> dict[str, float]:
    """Return the bytes that a rank hands to collectives per optimizer step, by collective.

    The bytes are those of whole tensors.

    DDP, ZeRO-1  gradients once, fp32
    ZeRO-1, 2    updated weights, gathered once
    ZeRO-2       gradients at each micro-batch; DeepSpeed 0.19 all-reduces them in buckets and keeps
                 its share
    ZeRO-3       weights gathered for each forward, and for each backward except for the last
                 gathered weights, which are still in memory; gradients reduce-scattered at each
                 micro-batch; weights once more for the sampler
    """
    if launch.world == 1:
        return {"all_reduce": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0}
    gradients, weights = 4.0 * shape.trainable, float(launch.weight_bytes * shape.trainable)
    if launch.sharding.level == 0:
        return {"all_reduce": gradients, "all_gather": 0.0, "reduce_scatter": 0.0}
    if launch.sharding.level < 3:
        times = micro_batches if launch.sharding.level == 2 else 1
        return {"all_reduce": times * gradients, "all_gather": weights, "reduce_scatter": 0.0}
    large = shape.parameters - shape.small
    gathers = large + max(0, large - REUSE_DISTANCE)
    sampler = shape.parameters - shape.small if shape.trainable == shape.parameters else 0
    # Small parameters stay whole on every rank, and are gathered after the step.
    updated = shape.small
    return {
        "all_reduce": 0.0,
        "all_gather": float(launch.weight_bytes * (micro_batches * gathers + sampler + updated)),
        "reduce_scatter": micro_batches * gradients,
    }


def on_the_wire(sent: Mapping[str, float], world: int) -> float:
    """Return the bytes that a rank sends in rings.

    A ring sends 2 (W - 1) / W of all-reduced bytes, and (W - 1) / W of gathered or scattered bytes.
    """
    share = (world - 1) / world
    return share * (2 * sent["all_reduce"] + sent["all_gather"] + sent["reduce_scatter"])


# ---------------------------------------------------------------------------- step time


@dataclass(frozen=True)
class Step:
    """Hold a row of the table; seconds and GiB are per GPU.

    limit: the largest part of the step time, or the reason why the launch does not fit.
    sampler_tp: number of GPUs that hold a sampler together.
    sampler_traffic_s: the part of sample_s in which these GPUs send data to each other.
    """

    model: str
    gpus: int
    launch: str
    memory_gib: float
    fits: bool
    traffic_gib: float
    sample_s: float
    train_s: float
    traffic_s: float
    driver_s: float
    step_s: float
    tokens_per_second_per_gpu: float
    limit: str
    sampler_tp: int = 1
    sampler_traffic_s: float = 0.0


def step(
    name: str, shape: ModelShape, held: MicroBatchMemory, launch: LaunchShape, load: Load, hardware: Hardware, driver: Driver, sampling_rate: float,
    *, splits: bool = True,
) -> Step:  # fmt: skip
    """Model a GRPO step with gradient checkpointing. `sampling_rate`: sampled tokens/s per GPU.

    The fewest GPUs that fit hold a sampler together; where no number fits, each GPU holds a
    sampler. The model assumes that a team of GPUs samples at the sum of its GPUs' separate rates
    (each GPU reads its part of the weights, for the rows of all), less the time of the team's
    all-reduces. With `splits=False`, each GPU holds a sampler.
    """
    given = (name, shape, held, launch, load, hardware, driver, sampling_rate)
    tries = (
        _step(*given, team=team) for team in scaling_models.teams(shape, launch, hardware) if splits
    )
    return next((found for found in tries if found.fits), None) or _step(*given, team=1)


def _step(
    name: str, shape: ModelShape, held: MicroBatchMemory, launch: LaunchShape, load: Load, hardware: Hardware, driver: Driver, sampling_rate: float,
    *, team: int,
) -> Step:  # fmt: skip
    launch = replace(launch, sampler_tp=team)
    work = work_of(shape, launch, load)
    needs = plan_memory(shape, held, launch, work)
    memory = needs.peak / GIB
    fits = memory <= USABLE_FRACTION * hardware.memory_gib
    micro_batches = math.ceil(load.tokens / (work.batch.rows * work.batch.length))
    wire = on_the_wire(payload(shape, launch, micro_batches), launch.world)
    together = scaling_models.seconds(
        scaling_models.of_a_step(shape, launch, load, max(1, work.rows)), team, hardware
    )
    sample = load.answers * load.answer / sampling_rate + together
    train = arithmetic(shape, load) / (hardware.flops * hardware.mfu)
    link = hardware.nvlink if launch.world <= hardware.per_node else hardware.infiniband
    traffic = wire / link
    alone = driver_seconds(driver, load, launch.world)
    total = sample + train + traffic + alone
    parts = {"sampling": sample, "arithmetic": train, "traffic": traffic, "driver": alone}
    copy = next(item.sample for item in needs.items if item.name.startswith("sampler's")) / GIB
    limit = max(parts, key=lambda part: parts[part])
    if not fits:
        limit = (
            "memory: sampler's copy"
            if memory - copy <= USABLE_FRACTION * hardware.memory_gib
            else "memory: learner"
        )
    rate = load.tokens / total
    seconds = (sample, train, traffic, alone, total)
    return Step(
        name,
        launch.world,
        launch_name(launch),
        memory,
        fits,
        wire / GIB,
        *seconds,
        rate,
        limit,
        team,
        together,
    )


def arithmetic(shape: ModelShape, load: Load) -> float:
    """Return the floating-point operations of a GPU's learner in a step.

    Per parameter and token: 2 for the forward, 4 for the backward, and 2 for the recomputed forward
    (checkpointing). A frozen tower runs only the forward. The count omits the attention products,
    which grow with the square of the sequence length.
    """
    patches = load.answers * load.patches if shape.seeing else 0
    return (
        8 * shape.active_parameters * load.tokens
        + (2 * shape.seeing + 6 * shape.seeing_trained) * patches
    )


def driver_seconds(driver: Driver, load: Load, world: int) -> float:
    """Return the driver's seconds in a step.

    The sum covers the rewards on the driver's workers, and packing, sending down a tree and
    unpacking the batch, once for the learner.
    """
    rewards = world * load.answers * driver.reward_seconds / driver.reward_workers
    if world == 1:
        return rewards
    batch = world * load.tokens * driver.bytes_per_token
    return (
        rewards + batch / driver.pickle_rate + batch / driver.network * math.ceil(math.log2(world))
    )


def work_of(shape: ModelShape, launch: LaunchShape, load: Load) -> StepWork:
    groups = launch.world * load.answers // load.group
    lengths = {
        "group": load.group,
        "prompt": load.prompt,
        "answer": load.answer,
        "world": launch.world,
    }
    batch = largest_micro_batch(
        groups=groups, budget=load.budget, layout="padded", hidden=shape.hidden, **lengths
    )
    drawn = {
        **lengths,
        "groups": groups,
        "kv_cache_tokens": 262_144,
        "max_rows": 1024,
        "world": launch.world // launch.sampler_tp,
    }
    # Same condition as rl.trainer.memory_requirements: the run decides it by a trial on the device.
    in_pages = shape.fast and launch.cuda and launch.sampler_tp == 1
    prompts, rows = compute_concurrent_rows(**drawn, paged=in_pages)
    pages = count_pool_pages(**drawn, streams=False) if in_pages else 0
    return StepWork(
        batch=batch,
        samples=True,
        prompts=prompts,
        prompt=load.prompt,
        rows=rows,
        answer=load.answer,
        pages=pages,
    )


def sharding_of(stage: int | None) -> Sharding:
    return Sharding() if stage is None else ZeroSharding(stage=stage)


def launch_name(launch: LaunchShape) -> str:
    return f"zero{launch.sharding.level}" if launch.sharding.divides else "ddp"


def table(
    names: Sequence[str],
    gpus: Sequence[int],
    load: Load,
    hardware: Hardware,
    driver: Driver,
    rates: Mapping[str, float],
) -> list[Step]:
    """Return the rows of every model size, number of GPUs and launch.

    A single GPU is a process without a launch.
    """
    import torch

    from rl.memory_plan import ComputeConfig

    rows = []
    for name, skeleton in skeletons(names).items():
        shape = skeleton.shape
        alone = LaunchShape(cuda=True, bf16=True)
        batch = work_of(shape, alone, load).batch
        sharded = ComputeConfig(dtype=torch.bfloat16, keeps_gradients=False, checkpointing=True)
        held = {
            None: skeleton.measure_micro_batch(
                batch, ComputeConfig(autocast=True, checkpointing=True)
            )
        }
        held |= dict.fromkeys((1, 2, 3), skeleton.measure_micro_batch(batch, sharded))
        for world in gpus:
            for stage in STAGES.values():
                if world == 1 and stage is not None:
                    continue
                launch = LaunchShape(
                    cuda=True,
                    bf16=True,
                    world=world,
                    per_node=min(world, hardware.per_node),
                    sharding=sharding_of(stage),
                )
                rows.append(
                    step(name, shape, held[stage], launch, load, hardware, driver, rates[name])
                )
    return rows


# ---------------------------------------------------------------------------- measured traffic


def measure(folder: Path, launch: str, micro_batches: int = 3) -> dict[str, Any]:
    """Measure the bytes that two gloo processes hand to collectives in a step, and its seconds.

    See scaling_measure.py.
    """
    out = folder / f"{launch}.json"
    config = HERE.parent / "accelerate_configs" / f"{launch}.yaml"
    words = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        "--num_processes",
        "2",
    ]
    script = [str(HERE / "scaling_measure.py"), str(folder / "model"), str(out), str(micro_batches)]
    done = subprocess.run(
        [*words, *script], cwd=folder, capture_output=True, text=True, timeout=400
    )
    if done.returncode:
        raise RuntimeError(f"{launch} failed:\n{done.stderr[-3000:]}")
    return json.loads(out.read_text())


def compare(
    folder: Path, micro_batches: int = 3, launches: Sequence[str] = tuple(STAGES)
) -> list[dict[str, Any]]:
    """Compare measured with modelled bytes: a row for each launch and collective."""
    from scaling_measure import write_model

    from rl.memory_plan import ModelSkeleton

    shape = ModelSkeleton(write_model(folder / "model"), None, None).shape
    rows = []
    for name in launches:
        found = measure(folder, name, micro_batches)
        expected = payload(
            shape,
            LaunchShape(cuda=False, bf16=False, world=2, sharding=sharding_of(STAGES[name])),
            micro_batches,
        )
        for kind in sorted({*expected, *found["bytes"]}):
            measured = found["bytes"].get(kind, 0)
            rows.append(
                {
                    "launch": name,
                    "wrapped": found["wrapped"],
                    "collective": kind,
                    "measured": measured,
                    "modelled": round(expected.get(kind, 0.0)),
                    "seconds": round(found["seconds"], 3),
                }
            )
    return rows


def step_times(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare measured with modelled seconds of a step: a row for each launch.

    The model is arithmetic + bytes on the wire / link. Least squares over the launches fits the
    machine's two rates (the same arithmetic and link for all launches). The comparison therefore
    checks the model's form: with these rates, the bytes explain the differences between launches.
    """
    import numpy as np

    launches = list(dict.fromkeys(row["launch"] for row in compared))
    seconds = np.array(
        [next(row["seconds"] for row in compared if row["launch"] == name) for name in launches]
    )
    sent: dict[str, dict[str, float]] = {
        name: {"all_reduce": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0} for name in launches
    }
    for row in compared:
        sent[row["launch"]][row["collective"]] = row["modelled"]
    wire = np.array([on_the_wire(sent[name], 2) for name in launches])
    (arithmetic, per_byte), *_ = np.linalg.lstsq(
        np.stack([np.ones_like(wire), wire], 1), seconds, rcond=None
    )
    modelled = arithmetic + wire * per_byte
    return [
        {
            "launch": name,
            "wire_mb": round(w / 1e6, 1),
            "measured_s": round(s, 3),
            "modelled_s": round(m, 3),
            "ratio": round(m / s, 3),
            "arithmetic_s": round(arithmetic, 3),
            "link_mb_per_s": round(1e-6 / per_byte, 1),
        }
        for name, w, s, m in zip(
            launches, wire.tolist(), seconds.tolist(), modelled.tolist(), strict=True
        )
    ]


def batch_costs() -> tuple[float, float]:
    """Measure the cost of sending RL datums to the ranks, on this machine.

    Returns (bytes per token, bytes/s of packing and unpacking).
    """
    import numpy as np

    from rl.types import Datum, ModelInput

    rng = np.random.default_rng(0)
    datums = []
    for _ in range(256):
        tokens, values = (
            rng.integers(0, 150_000, 1536),
            rng.standard_normal(1536).astype(np.float32),
        )
        fields = {"target_tokens": tokens, "logprobs": values, "advantages": values, "mask": values}
        datums.append(Datum(ModelInput.from_ints(tokens.tolist()), fields))
    begin = time.perf_counter()
    packed = pickle.dumps(datums)
    pickle.loads(packed)  # noqa: S301  (made above)
    return len(packed) / (256 * 1536), len(packed) / (time.perf_counter() - begin)


# ---------------------------------------------------------------------------- files

COLOURS = {"ddp": "#444444", "zero1": "#1f77b4", "zero2": "#2ca02c", "zero3": "#d62728"}
MARKERS = {"ddp": "s", "zero1": "o", "zero2": "^", "zero3": "v"}


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    fields = [asdict(row) if is_dataclass(row) else dict(row) for row in rows]  # type: ignore[arg-type]
    short = [
        {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        for row in fields
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(short[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(short)


def draw(rows: Sequence[Any], path: Path, load: Any) -> None:
    """Plot tokens per second per GPU over the number of GPUs, with a panel for each model size.

    Hollow markers show launches that do not fit.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.model for row in rows))
    columns = min(3, len(names))
    figure, axes = plt.subplots(
        -(-len(names) // columns),
        columns,
        figsize=(4.2 * columns, 3.3 * -(-len(names) // columns)),
        squeeze=False,
    )
    for panel, name in zip(axes.flat, names, strict=False):
        for launch, colour in COLOURS.items():
            mine = [row for row in rows if row.model == name and row.launch == launch]
            at, rate = [row.gpus for row in mine], [row.tokens_per_second_per_gpu for row in mine]
            panel.plot(at, rate, color=colour, linewidth=0.8, alpha=0.5)
            for fits in (True, False):
                points = [
                    (row.gpus, row.tokens_per_second_per_gpu) for row in mine if row.fits is fits
                ]
                panel.scatter(
                    *zip(*points, strict=True) if points else ([], []),
                    s=26,
                    marker=MARKERS[launch],
                    color=colour if fits else "white",
                    edgecolors=colour,
                    zorder=3,
                    label=launch if fits else None,
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        panel.set_ylim(bottom=0)
        panel.set_title(name)
        panel.grid(alpha=0.25)
    for panel in list(axes.flat)[len(names) :]:
        panel.set_visible(False)
    for panel in axes[-1]:
        panel.set_xlabel("GPUs")
    for row_of_panels in axes:
        row_of_panels[0].set_ylabel("tokens/s of each GPU")
    axes[0][0].legend(fontsize=8, loc="lower left")
    what = f"{load.answers} answers of {load.answer} tokens for each GPU (hollow: does not fit)"
    figure.suptitle(f"A GRPO step, modelled: {what}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---------------------------------------------------------------------------- command line


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure two gloo processes first, into scaling_measured.csv",
    )
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    # An H100 sampling with a batch of 64. The real rate depends on engine, length and batch:
    # replace this assumption with a measured figure.
    parser.add_argument(
        "--sampling-rate",
        nargs="+",
        metavar="MODEL:TOKENS_PER_S",
        help="tokens/s that one GPU draws",
        default=[
            "30B-A3B:6000",
            "8B-VL:4000",
            "0.5B:20000",
            "1.5B:12000",
            "3B:8000",
            "7B:4500",
            "14B:2500",
            "32B:1200",
        ],
    )
    for kind in (Hardware, Driver, Load):
        for name, value in asdict(kind()).items():
            parser.add_argument(
                "--" + name.replace("_", "-"),
                type=type(value),
                default=value,
                help=kind.__name__.lower(),
            )
    return parser.parse_args()


def main() -> None:
    given = arguments()
    hardware, driver, load = (
        kind(**{name: getattr(given, name) for name in asdict(kind())})
        for kind in (Hardware, Driver, Load)
    )
    rates = {name: float(rate) for name, rate in (pair.split(":") for pair in given.sampling_rate)}
    print(
        "Assumed:",
        hardware,
        driver,
        load,
        f"sampling tokens/s of one GPU: {rates}",
        sep="\n  ",
        flush=True,
    )
    given.out.mkdir(parents=True, exist_ok=True)
    if given.measure:
        with tempfile.TemporaryDirectory() as folder:
            compared = compare(Path(folder))
        write_csv(given.out / "scaling_measured.csv", compared)
        times = step_times(compared)
        write_csv(given.out / "scaling_seconds.csv", times)
        for row in [*compared, *times]:
            print("  measured", *(f"{key} {value}" for key, value in row.items()), sep="  ")
        size, rate = batch_costs()
        print(
            f"  a token of a batch takes {size:.0f} bytes on its way to the ranks; packed and "
            f"unpacked at {rate / 1e6:.0f} MB/s here"
        )
    rows = table(given.models, given.gpus, load, hardware, driver, rates)
    write_csv(given.out / "scaling.csv", rows)
    draw(rows, given.out / "scaling.png", load)
    print(f"{given.out / 'scaling.csv'}, {given.out / 'scaling.png'}")


if __name__ == "__main__":
    main()
