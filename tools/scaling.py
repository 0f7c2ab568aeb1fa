"""Model step time, memory and traffic of a GRPO step on 1 to 1,024 GPUs.

    python tools/scaling.py              # scaling.csv, scaling.png, expert_parallel.csv: a minute
    python tools/scaling.py --sampling-rate 7B:2500 --mfu 0.35 --reward-seconds 0.05

Memory is that of `train.py --plan`. Sampling, arithmetic, traffic and the driver's work add up,
because the loop runs them in sequence. The number of answers per GPU is fixed. The rates are inputs,
not measurements. Where a sampler's whole copy fits no GPU, the fewest GPUs of a machine that can
hold it together do so (`--sampler-tp`). A mixture of experts computes with the parameters that a
token is routed to, and holds, sends and gathers all of them. expert_parallel.csv has the bytes that
a rank sends for a micro-batch under FSDP2, with and without `--expert-parallel-size`.
tests/memory_plan/test_scaling_models.py compares the modelled bytes with those that real processes
send. Symbols: W ranks, L layers, D hidden size, V vocabulary, k GPUs of a team.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.harness import RESULTS, make_parser, write_table  # noqa: E402
from rl.distributed import FP32, Sharding, ZeroSharding  # noqa: E402
from rl.distributed.sharding import REUSE_DISTANCE  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.memory_plan import (  # noqa: E402
    GIB,
    USABLE_FRACTION,
    ComputeConfig,
    LaunchShape,
    MicroBatchMemory,
    ModelShape,
    ModelSkeleton,
    StepWork,
    plan_memory,
)
from rl.memory_plan.byte_counts import PREFILL_TOKENS  # noqa: E402
from rl.memory_plan.shapes import (  # noqa: E402
    compute_concurrent_rows,
    count_pool_pages,
    largest_micro_batch,
)
from rl.runtime.weight_sync import GPU_CHUNK_BYTES, TRANSFER_SHARE  # noqa: E402

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STAGES: dict[str, int | None] = {"ddp": None, "zero1": 1, "zero2": 2, "zero3": 3}
TEAM_SIZES = (1, 2, 4, 8)
DRAWN = 2 * 8  # bytes of a sampled token and its logprob, as sent
# The dense Qwen2.5 models: hidden size, layers, heads, key heads, MLP size, vocabulary, tied head.
SIZES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "14B": (5120, 48, 40, 8, 13_824, 152_064, False),
    "32B": (5120, 64, 40, 8, 27_648, 152_064, False),
}
# Sampled tokens per second of an H100 with a batch of 64: an assumption.
RATES = {"0.5B": 20000, "1.5B": 12000, "3B": 8000, "7B": 4500, "14B": 2500, "32B": 1200, "30B-A3B": 6000}  # fmt: skip
_COLUMNS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "tie_word_embeddings")  # fmt: skip


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
class DriverRates:
    """Hold the rates of the work that rank 0 does, and of reward workers.

    reward_machines   on how many machines `reward_workers` workers each compute rewards, whose
                      answers rank 0 hands out; 0: each machine scores what it sampled
    score_seconds     rank 0's time to hand out an answer, which bench/reward_machines.py measures
    answer_seconds    rank 0's other time for an answer: from the messages of the ranks with samples
                      and scores to those with each rank's share of the batch, and from the ranks'
                      outputs to the metrics
    bytes_per_answer  of these messages
    unpack_seconds    a rank's time for an answer of its share
    chunk_rate        and verb_seconds: what tools/weight_chunks.py measures on a CPU, rounded

    tools/answer_path.py measures what an answer takes, for the lengths of `Load`.
    """

    reward_seconds: float = 0.005
    reward_workers: int = 8
    reward_machines: int = 0
    score_seconds: float = 100e-6
    answer_seconds: float = 170e-6
    bytes_per_answer: float = 24_800.0
    unpack_seconds: float = 46e-6
    network: float = 1.5e9  # bytes/s of the messages, which gloo sends over TCP
    pcie: float = 50e9  # bytes/s between a GPU and pinned memory
    chunk_rate: float = 10.5e9  # bytes/s of chunks that get a checksum, by one thread
    verb_seconds: float = 2.1e-3  # of a chunk's verb, besides its bytes


@dataclass(frozen=True, kw_only=True)
class Load:
    """Hold the work of a GPU in a step. `patches`: image patches per prompt, whose tokens `prompt`
    includes. `budget`: tokens of a micro-batch.
    """

    answers: int = 64
    group: int = 8
    prompt: int = 512
    answer: int = 1024
    budget: int = 16_384
    patches: int = 0

    @property
    def tokens(self) -> int:
        return self.answers * (self.prompt + self.answer)


# ------------------------------------------------------------------------------------------- models


def config_of(name: str) -> Any:
    """Return a config: Qwen2.5, or Qwen3's mixture that routes a token to 8 of 128 experts."""
    import transformers

    if name == "30B-A3B":
        return transformers.Qwen3MoeConfig(
            hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[], vocab_size=151_936,
            tie_word_embeddings=False, max_position_embeddings=32_768,
        )  # fmt: skip
    sizes = dict(zip(_COLUMNS, SIZES[name], strict=True))
    return transformers.Qwen2Config(**sizes, max_position_embeddings=32_768)


def make_skeleton(name: str) -> ModelSkeleton:
    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        return ModelSkeleton(folder, None, None)


# --------------------------------------------------------------------------- samplers of several GPUs


@dataclass(frozen=True)
class CollectiveTraffic:
    """Count the collectives of a team's rank and the bytes of their whole tensors."""

    calls: int = 0
    summed: float = 0.0
    gathered: float = 0.0
    copied: float = 0.0

    def __add__(self, other: CollectiveTraffic) -> CollectiveTraffic:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return CollectiveTraffic(*(a + b for a, b in pairs))

    def times(self, count: int) -> CollectiveTraffic:
        return CollectiveTraffic(*(count * number for number in astuple(self)))


def forward_traffic(shape: ModelShape, positions: int, rows: int, size: int) -> CollectiveTraffic:
    """Return the traffic of a forward over `positions` positions with logits for `rows` rows. `size`:
    bytes per element of the hidden states.

    A forward all-reduces [positions, D] after its embedding and after the attention and MLP of every
    layer ([rows, D] in the last one), and gathers fp32 logits [rows, V].
    """
    sums = 2 * shape.layers + 1
    summed = (sums - 2) * positions + 2 * rows
    return CollectiveTraffic(
        sums + 1, float(summed * shape.hidden * size), float(FP32 * rows * shape.vocab)
    )


def sampler_traffic(
    shape: ModelShape, launch: LaunchShape, load: Any, rows: int
) -> CollectiveTraffic:
    """Return the traffic of all answers that a team samples in a GRPO step: it prefills the prompts
    in batches, then decodes `rows` rows at once and sends their tokens and logprobs.
    """
    answers = launch.sampler_tp * load.answers
    prompts, at_once = answers // load.group, math.ceil(answers / rows)
    batches, size = math.ceil(prompts * load.prompt / PREFILL_TOKENS), launch.compute_bytes
    lengths = math.ceil(prompts * load.prompt / batches), math.ceil(prompts / batches)
    read = forward_traffic(shape, *lengths, size).times(batches)
    decoded = forward_traffic(shape, rows, rows, size).times((load.answer - 1) * at_once)
    drawn = CollectiveTraffic(1, copied=float(DRAWN * rows))
    return read + decoded + drawn.times(load.answer * at_once)


def compute_ring_seconds(sent: CollectiveTraffic, team: int, hardware: Any) -> float:
    """Return the seconds of rings over NVLink, including the fixed latency of each call."""
    if team == 1:
        return 0.0
    wire = (team - 1) / team * (2 * sent.summed + sent.gathered) + sent.copied
    return sent.calls * hardware.collective_seconds + wire / hardware.nvlink


def iterate_team_sizes(shape: ModelShape, launch: LaunchShape, hardware: Any) -> Iterator[int]:
    """Yield the team sizes that the GPUs of a machine, and the model's heads and columns allow."""
    for size in TEAM_SIZES:
        if size > 1 and (not launch.cuda or min(launch.world, hardware.per_node) % size):
            continue
        try:
            shape.check_tensor_parallel(size)
        except UserError:
            continue
        yield size


# ------------------------------------------------------------------------------------------- traffic


def payload(shape: ModelShape, launch: LaunchShape, micro_batches: int) -> dict[str, float]:
    """Return the bytes of whole tensors that a rank hands to collectives per optimizer step.

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
    if launch.sharding.level < 3:
        times = micro_batches if launch.sharding.level == 2 else 1
        gathered = weights if launch.sharding.level else 0.0
        return {"all_reduce": times * gradients, "all_gather": gathered, "reduce_scatter": 0.0}
    large = shape.parameters - shape.small
    gathers = large + max(0, large - REUSE_DISTANCE)
    sampler = large if shape.trainable == shape.parameters else 0
    # Small parameters stay whole on every rank, and are gathered after the step.
    gathered = float(launch.weight_bytes * (micro_batches * gathers + sampler + shape.small))
    return {"all_reduce": 0.0, "all_gather": gathered, "reduce_scatter": micro_batches * gradients}


RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def on_the_wire(sent: Mapping[str, float], world: int) -> float:
    """Return the bytes that a rank sends in rings: 2 (W - 1) / W of all-reduced bytes, (W - 1) / W of
    gathered or scattered bytes.
    """
    return (world - 1) / world * sum(RING[kind] * count for kind, count in sent.items())


def expert_traffic(
    shape: ModelShape, world: int, size: int, tokens: int, *, number: int = 4, recomputes: bool
) -> dict[str, float]:
    """Return the bytes that a rank sends for a micro-batch of a mixture under FSDP2, whose experts
    `size` ranks divide.

    `number`: bytes of a weight or an activation in messages. `recomputes`: gradient checkpointing
    runs each forward, with its messages, twice. Weights of layers are gathered for the forward and
    the backward, the rest once; gradients are scattered in fp32. Rows are sent to experts and back,
    in the forward and in the backward, evenly spread.
    """
    experts = shape.layers * shape.layer_experts
    dense = shape.layers * shape.layer - experts
    outside, local = shape.parameters - dense - experts, experts / size
    share, divided = (world - 1) / world, (world / size - 1) / (world / size)
    rows = shape.layers * tokens * shape.experts_per_token * shape.hidden * (size - 1) / size
    return {
        "all_gather": number * (share * (2 * dense + outside) + divided * 2 * local),
        "reduce_scatter": 4 * (share * (dense + outside) + divided * local),
        "all_to_all": number * rows * (6 if recomputes else 4),
    }


# ----------------------------------------------------------------------------------------- step time


@dataclass(frozen=True)
class Step:
    """Hold a row of the table; seconds and GiB are per GPU. rewards_s: the part of driver_s in which
    answers are scored.

    limit: the largest part of the step time, or the reason why the launch does not fit.
    sampler_tp: number of GPUs that hold a sampler together; sampler_traffic_s: the part of sample_s
    in which they send data to each other. transfer_s: time to send all weights to ranks that only
    sample (`--sampler-ranks`), which step_s does not include.
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
    rewards_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Model a GRPO step of a model with gradient checkpointing. `sampling_rate`: sampled tokens/s of
    a GPU.
    """

    name: str
    shape: ModelShape
    hardware: Hardware
    driver: DriverRates
    load: Load
    sampling_rate: float

    def step(self, held: MicroBatchMemory, launch: LaunchShape) -> Step:
        """Return the step of a launch with the smallest team that fits; where none fits, each GPU
        holds a sampler.

        A team samples at the sum of its GPUs' separate rates, less the time of its all-reduces.
        """
        sizes = iterate_team_sizes(self.shape, launch, self.hardware)
        rows = (self._of_team(held, launch, team) for team in sizes)
        return next((row for row in rows if row.fits), None) or self._of_team(held, launch, 1)

    def _of_team(self, held: MicroBatchMemory, launch: LaunchShape, team: int) -> Step:
        launch, load, hardware = replace(launch, sampler_tp=team), self.load, self.hardware
        work = work_of(self.shape, launch, load)
        needs = plan_memory(self.shape, held, launch, work)
        memory, room = needs.peak / GIB, USABLE_FRACTION * hardware.memory_gib
        micro_batches = math.ceil(load.tokens / (work.batch.rows * work.batch.length))
        wire = on_the_wire(payload(self.shape, launch, micro_batches), launch.world)
        sent = sampler_traffic(self.shape, launch, load, max(1, work.rows))
        together = compute_ring_seconds(sent, team, hardware)
        link = hardware.nvlink if launch.world <= hardware.per_node else hardware.infiniband
        machines = math.ceil(launch.world / hardware.per_node)
        rewards = compute_reward_seconds(self.driver, launch.world * load.answers, machines)
        parts = {
            "sampling": load.answers * load.answer / self.sampling_rate + together,
            "arithmetic": compute_flops(self.shape, load) / (hardware.flops * hardware.mfu),
            "traffic": wire / link,
            "driver": rewards + compute_batch_seconds(self.driver, load, launch.world),
        }
        total, limit = sum(parts.values()), max(parts, key=lambda part: parts[part])
        copy = next(item.sample for item in needs.items if item.name.startswith("sampler's")) / GIB
        if memory > room:
            limit = "memory: sampler's copy" if memory - copy <= room else "memory: learner"
        kind = f"zero{launch.sharding.level}" if launch.sharding.divides else "ddp"
        return Step(
            self.name, launch.world, kind, memory, memory <= room, wire / GIB, *parts.values(), total,
            load.tokens / total, limit, team, together, rewards,
            transfer_seconds(self.shape.parameters * launch.compute_bytes, link, self.driver),
        )  # fmt: skip


def compute_flops(shape: ModelShape, load: Load) -> float:
    """Return the floating-point operations of a GPU's learner in a step. Per parameter and token: 2
    for the forward, 4 for the backward, 2 for the recomputed forward. A frozen tower runs only the
    forward. Attention products, which grow with the square of the length, are left out.
    """
    patches = load.answers * load.patches if shape.vision_parameters else 0
    tower = (2 * shape.vision_parameters + 6 * shape.vision_trainable) * patches
    return 8 * shape.active_parameters * load.tokens + tower


def compute_reward_seconds(driver: DriverRates, answers: int, machines: int) -> float:
    """Return the seconds in which all answers are scored by the workers, whose number grows with the
    machines; or by those of a fixed number of machines, to which rank 0 hands out the answers.
    """
    workers = driver.reward_workers * (driver.reward_machines or machines)
    handed_out = driver.score_seconds if driver.reward_machines else 0.0
    return answers * max(driver.reward_seconds / workers, handed_out)


def compute_batch_seconds(driver: DriverRates, load: Load, world: int) -> float:
    """Return rank 0's seconds for all answers and for the messages of the other ranks, and those of
    a rank to read its share.
    """
    answers, others = world * load.answers, (world - 1) * load.answers
    sent = others * driver.bytes_per_answer / driver.network
    read = load.answers * driver.unpack_seconds if world > 1 else 0.0
    return answers * driver.answer_seconds + sent + read


def transfer_seconds(
    num_bytes: float, link: float, driver: DriverRates, share: float = TRANSFER_SHARE
) -> float:
    """Return the seconds to send weights of `num_bytes`, in the sampler's dtype, to GPUs that give
    `share` of their time to it: 1 if they sample nothing meanwhile. `link`: bytes/s between rank 0's
    GPU and theirs.

    The weights are copied to rank 0's host memory in chunks. Then rank 0 computes checksums while it
    sends the chunks before. A chunk is copied back to its GPU while the chunk before is sent over
    `link`, after its verb.
    """
    to_gpu = num_bytes / driver.pcie
    sent = num_bytes / link + num_bytes / GPU_CHUNK_BYTES * driver.verb_seconds
    return to_gpu + max(num_bytes / driver.chunk_rate, max(to_gpu, sent) / share)


def work_of(shape: ModelShape, launch: LaunchShape, load: Load) -> StepWork:
    groups = launch.world * load.answers // load.group
    lengths = {"group": load.group, "prompt": load.prompt, "answer": load.answer}
    batch = largest_micro_batch(
        groups=groups, budget=load.budget, layout="padded", hidden=shape.hidden, world=launch.world,
        **lengths,
    )  # fmt: skip
    world = launch.world // launch.sampler_tp
    drawn = {**lengths, "groups": groups, "world": world}
    drawn |= {"kv_cache_tokens": 262_144, "max_rows": 1024}
    # Same condition as rl.trainer.memory_requirements: the run decides it by a trial on the device.
    in_pages = shape.fast and launch.cuda
    prompts, rows = compute_concurrent_rows(**drawn, paged=in_pages)
    pages = count_pool_pages(**drawn, streams=False) if in_pages else 0
    return StepWork(
        batch=batch, samples=True, prompts=prompts, prompt=load.prompt, rows=rows,
        answer=load.answer, pages=pages,
    )  # fmt: skip


def sharding_of(stage: int | None) -> Sharding:
    return Sharding() if stage is None else ZeroSharding(stage=stage)


def table(
    rates: Mapping[str, float], load: Load, hardware: Hardware, driver: DriverRates
) -> Iterator[Step]:
    """Yield the rows of every model, number of GPUs and launch. One GPU is a process without launch."""
    for name, rate in rates.items():
        skeleton = make_skeleton(name)
        model = StepModel(
            name=name, shape=skeleton.shape, hardware=hardware, driver=driver, load=load,
            sampling_rate=rate,
        )  # fmt: skip
        batch = work_of(model.shape, LaunchShape(cuda=True, bf16=True), load).batch
        whole = ComputeConfig(autocast=True, checkpointing=True)
        sharded = ComputeConfig(dtype=torch.bfloat16, keeps_gradients=False, checkpointing=True)
        held = {divides: skeleton.measure_micro_batch(batch, options)
                for divides, options in ((False, whole), (True, sharded))}  # fmt: skip
        for world in GPUS:
            for stage in STAGES.values() if world > 1 else (None,):
                launch = LaunchShape(
                    cuda=True, bf16=True, world=world, per_node=min(world, hardware.per_node),
                    sharding=sharding_of(stage),
                )  # fmt: skip
                yield model.step(held[stage is not None], launch)


def list_expert_rows(shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Yield the modelled GB that a rank sends for a micro-batch of Qwen3-30B-A3B, in bf16 with
    gradient checkpointing.
    """
    for world, size in ((8, 1), (8, 8), (64, 1), (64, 8), (64, 64)):
        for tokens in (4096, 16_384):
            sent = expert_traffic(shape, world, size, tokens, number=2, recomputes=True)
            row = {"model": "30B-A3B", "ranks": world, "expert_parallel_size": size}
            columns = {f"{kind}_gb": round(count / 1e9, 1) for kind, count in sent.items()}
            total = round(sum(sent.values()) / 1e9, 1)
            yield {**row, "tokens": tokens, **columns, "total_gb": total}


def weak_scaling(rows: Sequence[Step], base: int) -> dict[str, dict[int, float]]:
    """Return by model and number of GPUs: tokens per second and GPU of the fastest launch that fits,
    divided by those of `base` GPUs, or of the fewest GPUs beyond that fit.
    """
    rates: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.fits and row.gpus >= base:
            of_model = rates.setdefault(row.model, {})
            rate = row.tokens_per_second_per_gpu
            of_model[row.gpus] = max(of_model.get(row.gpus, 0.0), rate)
    return {
        name: {gpus: rate / next(iter(of_model.values())) for gpus, rate in of_model.items()}
        for name, of_model in rates.items()
    }


# --------------------------------------------------------------------------------------------- files


def draw(rows: Sequence[Step], path: Path) -> None:
    """Plot tokens per second per GPU over the number of GPUs, with a panel for each model. Hollow
    markers show launches that do not fit.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.model for row in rows))
    figure, axes = plt.subplots(-(-len(names) // 3), 3, figsize=(12.6, 9.9), squeeze=False)
    for panel in axes.flat[len(names) :]:
        panel.set_visible(False)
    for panel, name in zip(axes.flat, names, strict=False):
        for launch, marker in zip(STAGES, "so^v", strict=True):
            mine = [row for row in rows if (row.model, row.launch) == (name, launch)]
            at, rate = [row.gpus for row in mine], [row.tokens_per_second_per_gpu for row in mine]
            (line,) = panel.plot(at, rate, linewidth=0.8, alpha=0.5)
            color = line.get_color()
            filled = [color if row.fits else "white" for row in mine]
            style = {"marker": marker, "edgecolors": color, "zorder": 3, "label": launch}
            panel.scatter(at, rate, 26, filled, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        panel.set_ylim(bottom=0)
        panel.set(title=name, xlabel="GPUs", ylabel="tokens/s of each GPU")
        panel.grid(alpha=0.25)
    axes[0][0].legend(fontsize=8, loc="lower left")
    figure.suptitle("A GRPO step, modelled (hollow: does not fit)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    parser.add_argument("--sampling-rate", nargs="+", default=[], metavar="MODEL:TOKENS_PER_S")
    kinds = (Hardware, DriverRates, Load)
    for name, value in {k: v for kind in kinds for k, v in asdict(kind()).items()}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    args = parser.parse_args()
    hardware, driver, load = (
        kind(**{name: getattr(args, name) for name in asdict(kind())}) for kind in kinds
    )
    changed = dict(pair.split(":") for pair in args.sampling_rate)
    rates = {name: float(changed.get(name, RATES[name])) for name in args.models}
    print("Assumed:", hardware, driver, load, f"sampled tokens/s of one GPU: {rates}", sep="\n  ")
    rows = list(table(rates, load, hardware, driver))
    cells = [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
        for row in rows
    ]
    write_table(args.out / "scaling.csv", cells)
    experts = list(list_expert_rows(make_skeleton("30B-A3B").shape))
    write_table(args.out / "expert_parallel.csv", experts)
    draw(rows, args.out / "scaling.png")
    for name, shares in weak_scaling(rows, hardware.per_node).items():
        shown = (f"{gpus}: {share:.0%}" for gpus, share in shares.items())
        print(f"  weak scaling of {name}, GPUs:", *shown)
    print(f"written to {args.out}: scaling.csv, scaling.png, expert_parallel.csv")


if __name__ == "__main__":
    main()
