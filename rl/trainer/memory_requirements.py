"""Compute what each stage of a run would hold, from the run's settings and its launch, and the size
of the sampler's KV cache that fits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl.algorithms import METHODS, Method, ModelRequests
from rl.config import ModelSettings, OptimSettings, RolloutSettings, RunConfig, StageConfig
from rl.distributed import (
    FSDPSharding,
    Sharding,
    ZeroSharding,
    check_context_parallel_size,
    check_expert_parallel_size,
    check_tensor_parallel_size,
    get_launch_sharding,
)
from rl.errors import UserError
from rl.learner import kept_bytes_from_gib
from rl.memory_plan import (
    GIB,
    USABLE_FRACTION,
    ComputeConfig,
    LaunchShape,
    MemoryItem,
    MemoryPlan,
    MicroBatch,
    MicroBatchMemory,
    ModelShape,
    ModelSkeleton,
    StepWork,
    compute_concurrent_rows,
    count_pool_pages,
    largest_micro_batch,
    load_model_skeleton,
    offloaded_activation_bytes,
    plan_memory,
    plan_sampler_memory,
    saved_logits_bytes,
    staged_weight_bytes,
    trace_micro_batch,
)
from rl.models import (
    count_classifier_parameters,
    resolve_adapter_chain,
    supports_lazy_loading,
)
from rl.reporting import contains_run
from rl.sampler import DEFAULT_CACHE_TOKENS
from rl.trainer.initial_weights import continues_adapter, find_base_model, find_previous_stage
from rl.types.feature_table import check_features
from rl.vllm import enables_sleep

# What a sleeping vLLM server holds (CUDA context, graphs): an allowance, not measured
_SLEEPING_SERVER_BYTES = 2 * GIB
_DEFAULT_GPU = 80.0  # GiB of a hypothetical GPU
# Of a device: more cache than the default is only used if the plan leaves the rest, because the
# cache then stays allocated, with its CUDA graphs, while the learner works.
_GROWTH_FRACTION = 0.8


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


def resolve_launch(run: RunConfig) -> tuple[LaunchShape, DeviceMemory]:
    """Return (launch, device): the processes of this launch, or of a hypothetical launch
    (--plan-gpus, --plan-zero), and the memory of each.
    """
    options, precision = run.options, run.stages[0].settings.model.precision
    has_gpu = torch.cuda.is_available()
    hypothetical = options.plan_gpus is not None or options.plan_gpu_memory is not None
    cuda = has_gpu or hypothetical
    launched, sharding = int(os.environ.get("WORLD_SIZE", "1")), get_launch_sharding()
    world = options.plan_gpus or launched
    per_node = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", "8")) if world == launched else 8)
    if world != launched:
        sharding = sharding.rescale(world, per_node)
        if any(stage.settings.optim.expert_parallel_size > 1 for stage in run.stages):
            sharding = FSDPSharding()  # the only one that divides experts
    if options.plan_zero is not None:
        stage = options.plan_zero
        sharding = Sharding() if stage == "none" else ZeroSharding(stage=int(stage))
    bf16 = precision == "bf16" or (precision == "auto" and cuda)
    device = _resolve_device(options.plan_gpu_memory, hypothetical=hypothetical, per_node=per_node)
    launch = LaunchShape(
        cuda=cuda,
        bf16=bf16,
        world=world,
        per_node=per_node,
        sharding=sharding,
        memory=device.memory if cuda else 0.0,
    )
    return launch, device


def _resolve_device(gib: float | None, *, hypothetical: bool, per_node: int) -> DeviceMemory:
    """Return a device of `gib` GiB; by default the present GPU, a hypothetical GPU, or a process's
    part of this machine.
    """
    if gib is not None:
        return DeviceMemory(f"GPU of {gib:g} GiB", gib * GIB)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        return DeviceMemory(properties.name, float(properties.total_memory))
    if hypothetical:
        return DeviceMemory(f"GPU of {_DEFAULT_GPU:g} GiB", _DEFAULT_GPU * GIB)
    return DeviceMemory("CPU process", get_machine_memory() / per_node)


def get_machine_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compute_stage_needs(
    run: RunConfig, launch: LaunchShape, prompt: int, *, traced: bool = True
) -> list[StageNeeds]:
    """Return the needs of every stage, with prompts of at most `prompt` tokens.

    `traced`: trace the micro-batches, which takes long; else they count as 0 B.
    """
    needs = []
    for i, stage in enumerate(run.stages):
        base, tokenizer = find_base_model(run.stages, i)
        is_continued = continues_adapter(run.stages, i)
        if is_continued and find_previous_stage(run.stages, i) is None:
            root = resolve_adapter_chain(base)[0]
            base, tokenizer = root.name, root.tokenizer
        model = replace(stage.settings.model, base_model=base, tokenizer=tokenizer)
        adapter = bool(model.lora_rank) and not is_continued
        needs += _compute_needs(stage, model, launch, prompt, fresh_adapter=adapter, traced=traced)
    return needs


def _compute_needs(
    stage: StageConfig,
    model: ModelSettings,
    launch: LaunchShape,
    prompt: int,
    *,
    fresh_adapter: bool,
    traced: bool,
) -> list[StageNeeds]:
    """Return the needs of a stage: a single item, or two if some ranks only sample (the learner
    ranks', then the sampler ranks').

    `fresh_adapter`: whether the stage's initial policy is its base model, under an adapter that can
    be turned off.
    """
    settings, method = stage.settings, METHODS.create(stage)
    sampling, optim = settings.sampling, settings.optim
    samplers, launch = _split_launch(settings, launch)
    skeleton = load_model_skeleton(model.base_model, model.tokenizer, model.make_lora())
    shape = skeleton.shape
    tp_size = _tensor_parallel_size(
        sampling.sampler_tp, 0 if samplers is None else samplers.world, shape, launch
    )
    _check_learner_groups(optim, launch, skeleton)
    sampler_world = (samplers or launch).world // tp_size
    in_pages = _uses_paged_cache(sampling, shape, launch)
    work = _compute_step_work(method, shape, prompt, launch, sampler_world, in_pages)
    batch = work.batch
    launch = replace(
        launch,
        base_dtype=_base_dtype(model, launch),
        optimizer=optim.optimizer,
        loads_in_shards=supports_lazy_loading(model.base_model),
        sampler_tp=tp_size,
        expert_parallel_size=optim.expert_parallel_size,
    )
    others, critics = _list_other_shapes(method, model, shape, fresh_adapter)
    held = _trace(skeleton, model, batch, launch) if traced else MicroBatchMemory()
    saved_logits = 0.0
    if model.fused_logprobs:
        max_bytes = kept_bytes_from_gib(model.kept_logits_gib)
        saved_logits = saved_logits_bytes(shape, launch, batch, max_bytes)
    items, host = _list_extra_memory(settings, shape, batch, launch)

    def plan_learner(work: StepWork, scorers: Sequence[ModelShape]) -> MemoryPlan:
        plan = plan_memory(shape, held, launch, work, scorers, critics, saved_logits)
        return MemoryPlan((*plan.items, *items), (*plan.host, *host))

    learning = StepWork(batch=batch, samples=False)
    name, base = stage.name, model.base_model
    if samplers is None:
        plan = plan_learner(learning if sampling.sampler == "vllm" else work, others)
        if sampling.sampler == "vllm":  # servers sample
            work = replace(work, samples=False)
        return [StageNeeds(name, base, plan, work, launch)]
    purpose = "weights on their way to the ranks that sample, on rank 0"
    host.append((purpose, staged_weight_bytes(shape)))
    plans = plan_learner(learning, ()), plan_sampler_memory(shape, samplers, work, others)
    learner_work = replace(work, samples=False)
    return [
        StageNeeds(f"{name}, ranks that learn", base, plans[0], learner_work, launch),
        StageNeeds(f"{name}, ranks that sample", base, plans[1], work, samplers),
    ]


def _check_learner_groups(
    optim: OptimSettings, launch: LaunchShape, skeleton: ModelSkeleton
) -> None:
    """Raise UserError if the ranks cannot divide the model's sequences or experts as requested."""
    if (size := optim.context_parallel_size) > 1:
        check_context_parallel_size(size, launch.world)
        skeleton.check_divisible(size)
    if (size := optim.expert_parallel_size) > 1:
        check_expert_parallel_size(size, launch.world, launch.sharding)
        skeleton.check_experts(size, launch.world)


def _list_extra_memory(
    settings: Any, shape: ModelShape, batch: MicroBatch, launch: LaunchShape
) -> tuple[list[MemoryItem], list[tuple[str, float]]]:
    """Return the memory of a vLLM server that the run starts and of rows on their way between
    experts, and the CPU memory of a machine for offloaded activations.
    """
    items, host, sampling = [], [], settings.sampling
    if sampling.sampler == "vllm" and not sampling.sampler_url:
        size = asleep = sampling.sampler_memory * launch.memory
        flow = getattr(settings, "flow", RolloutSettings())
        is_streamed = flow.gradient_parts > 1 or flow.steps_off_policy > 0
        if enables_sleep(sampling.sampler_command, launch.cuda) and not is_streamed:
            asleep = min(size, _SLEEPING_SERVER_BYTES)
        items.append(MemoryItem("vLLM server (sampler_memory)", size, asleep, asleep))
    if launch.expert_parallel_size > 1:  # what a rank sends, and what it receives
        rows = 2 * batch.rows * batch.length * shape.experts_per_token
        size = float(launch.compute_bytes * rows * shape.hidden)
        items.append(MemoryItem("rows for experts of other ranks", train=size))
    if launch.cuda and settings.model.offload_activations:
        size = offloaded_activation_bytes(shape, batch) * launch.per_node
        host.append(("inputs of layers, offloaded, at most", size))
    return items, host


def _compute_step_work(
    method: Method,
    shape: ModelShape,
    prompt: int,
    launch: LaunchShape,
    sampler_world: int,
    in_pages: bool,
) -> StepWork:
    """Return the largest micro-batch of a learner rank and the largest batch of a sampler.

    `prompt`: tokens of the longest prompt. `launch`: the learner ranks. `sampler_world`: samplers.
    `in_pages`: whether the sampler uses a paged KV cache.
    """
    settings = method.settings
    sampling, optim, loop = settings.sampling, settings.optim, settings.loop
    group = method.group_size if method.online else 1
    # a row of a preference method has two answers, which are trained on together
    answers = 2 if "rejected" in method.reads else group
    if shape.max_context is not None:
        prompt = max(1, min(prompt, shape.max_context - sampling.max_tokens))
    batch = largest_micro_batch(
        groups=max(1, loop.batch_size // optim.num_substeps),
        group=answers,
        prompt=prompt,
        answer=sampling.max_tokens,
        budget=optim.token_budget,
        layout="padded" if shape.windowed and optim.layout == "auto" else optim.layout,
        world=launch.world // optim.context_parallel_size,
        hidden=shape.hidden,
        varlen=shape.varlen and launch.cuda and launch.bf16,
    ).divide(optim.context_parallel_size)
    limits = {
        "prompt": prompt,
        "answer": sampling.max_tokens,
        "kv_cache_tokens": sampling.kv_cache_tokens or DEFAULT_CACHE_TOKENS,
        "max_rows": sampling.max_rows,
        "world": sampler_world,
    }
    # without anything that scores answers, held-out problems are not sampled
    data, environment = settings.data, getattr(getattr(settings, "env", None), "environment", None)
    is_scored = method.online or data.reward or data.rewards or environment is not None
    calls = [{"groups": data.eval_limit, "group": 1}] if loop.eval_every and is_scored else []
    calls += [{"groups": loop.batch_size, "group": group}] if method.online else []
    prompts, rows = max(
        (compute_concurrent_rows(**call, **limits, paged=in_pages) for call in calls),
        key=lambda pair: pair[1],
        default=(0, 0),
    )
    streams = bool(getattr(getattr(settings, "flow", None), "is_async", False))
    pages = [count_pool_pages(**call, **limits, streams=streams) for call in calls if in_pages]
    return StepWork(
        batch=batch,
        samples=bool(calls),
        prompts=prompts,
        prompt=prompt,
        rows=rows,
        answer=sampling.max_tokens,
        pages=max(pages, default=0),
    )


def _list_other_shapes(
    method: Method, model: ModelSettings, shape: ModelShape, fresh_adapter: bool
) -> tuple[list[ModelShape], list[ModelShape]]:
    """Return the shapes of the frozen models beside the policy, and of the critics."""
    requests = ModelRequests(method)
    learned = getattr(method.settings, "learned", None)
    reward_models = {name for name, _ in learned.weighted_reward_models} if learned else set()
    tokenizer = method.settings.model.tokenizer
    others = [
        _find_other_shape(target, tokenizer, shape, read_whole=target in reward_models)
        for target in requests.weights
    ]
    if requests.needs_initial_policy and not fresh_adapter:
        others.append(shape)
    critic = requests.critic_model
    if critic is None:
        return others, []
    if critic == "policy":
        return others, [shape]
    return others, [load_model_skeleton(critic, model.tokenizer, model.make_lora()).shape]


def _find_other_shape(
    target: str, tokenizer: str | None, policy: ModelShape, *, read_whole: bool
) -> ModelShape:
    """Return the shape of weights that a method names. A name that is no model's name (a stage, a
    run's folder) counts as a model like the policy.

    `read_whole`: for a reward model, which is loaded like a learner, and which tensor parallelism
    does not split.
    """
    folder = Path(target).expanduser()
    is_model = target.startswith("tiny:") or (
        (folder / "config.json").is_file() and not contains_run(folder)
    )
    if is_model and read_whole and (size := count_classifier_parameters(target)) is not None:
        sizes: dict[str, Any] = {"parameters": size, "unsplit": size}
        return replace(policy, name=target, fast=False, adapters=0, unsplit_adapters=0, **sizes)
    shape = load_model_skeleton(target, tokenizer, None).shape if is_model else policy
    if not read_whole:
        return shape
    base = shape.parameters - shape.adapters
    return replace(shape, unsplit=base, unsplit_adapters=shape.adapters)


def _uses_paged_cache(sampling: Any, shape: ModelShape, launch: LaunchShape) -> bool:
    """Return whether the sampler uses a paged KV cache, as `rl.sampler.make_engine` chooses.

    On a GPU the engine tries it; the plan assumes that it succeeds.
    """
    may = shape.fast and sampling.sampler != "hf"
    steps_on_device = launch.cuda and not sampling.num_speculative_tokens
    chosen = sampling.sampler_cache == "auto" and steps_on_device
    return may and (sampling.sampler_cache == "paged" or chosen)


def _split_launch(settings: Any, launch: LaunchShape) -> tuple[LaunchShape | None, LaunchShape]:
    """Return (sampler launch or None, learner launch). The sampler launch exists if some ranks only
    sample.

    Raises UserError if no rank remains to learn.
    """
    ranks = getattr(getattr(settings, "flow", None), "sampler_ranks", 0)
    if not ranks:
        return None, launch
    if ranks >= launch.world:
        raise UserError(
            f"sampler_ranks {ranks} of {launch.world} processes leaves no rank to learn: "
            "--plan-gpus sets the number of processes, or launch more"
        )
    sampler_launch = replace(
        launch,
        world=ranks,
        per_node=min(ranks, launch.per_node),
        sharding=Sharding(),
    )
    return sampler_launch, replace(
        launch, world=launch.world - ranks, per_node=min(launch.world - ranks, launch.per_node)
    )


class UnsupportedTensorParallel(UserError):
    """Raised if the requested number of processes cannot share a sampler."""


def _tensor_parallel_size(
    sampler_tp: int, sampler_ranks: int, shape: ModelShape, launch: LaunchShape
) -> int:
    """Return the number of processes that share a sampler of this model. Raises
    UnsupportedTensorParallel if it is not possible.
    """
    if sampler_tp == 1:
        return 1
    try:
        if sampler_ranks:
            received = f"sampler_tp {sampler_tp} and sampler_ranks {sampler_ranks}"
            check_features(("tensor parallelism", "sampler ranks"), received)
        if launch.world == 1:
            raise UserError(
                f"sampler_tp {sampler_tp} splits the sampler's weights over {sampler_tp} "
                "processes of a machine, but only a single process was launched: launch as "
                f"many (--plan-gpus {sampler_tp} plans for them), or set it to 1"
            )
        check_tensor_parallel_size(sampler_tp, launch.per_node)
        shape.check_tensor_parallel(sampler_tp)
    except UserError as error:
        raise UnsupportedTensorParallel(str(error)) from error
    return sampler_tp


def _base_dtype(model: ModelSettings, launch: LaunchShape) -> str:
    """Return the dtype of the frozen base (rl.learner.frozen_base)."""
    if not model.lora_rank:
        return "fp32"
    return ("bf16" if launch.bf16 else "fp32") if model.base_dtype == "auto" else model.base_dtype


def _trace(
    skeleton: ModelSkeleton, model: ModelSettings, batch: MicroBatch, launch: LaunchShape
) -> MicroBatchMemory:
    divides = launch.sharding.divides
    config = ComputeConfig(
        dtype=torch.bfloat16 if launch.bf16 and divides else torch.float32,
        autocast=launch.bf16 and not divides,
        keeps_gradients=launch.sharding.keeps_gradients,
        fused=model.fused_logprobs,
        checkpointing=model.gradient_checkpointing,
        offloads=model.offload_activations,
        cuda=launch.cuda,
        saved_bytes=None if launch.cuda else kept_bytes_from_gib(model.kept_logits_gib),
        bf16_base=launch.base_dtype != "fp32" and not divides,
        expert_parallel_size=launch.expert_parallel_size,
    )
    return trace_micro_batch(skeleton, batch, config)


def choose_cache_size(run: RunConfig) -> RunConfig:
    """Return the run with `kv_cache_tokens` for the devices of this launch in every stage.

    A run that cannot be planned, and a run on CPUs, has the default size.
    """
    if torch.cuda.is_available():
        with suppress(UserError):  # reported where the run is checked
            return fit_cache_size(run, *resolve_launch(run))
    return set_cache_size(run, DEFAULT_CACHE_TOKENS)


def fit_cache_size(run: RunConfig, launch: LaunchShape, device: DeviceMemory) -> RunConfig:
    """Return the run with `kv_cache_tokens` set in every stage, by a rule that depends only on
    settings, model and the device's memory.

    The default is doubled while that is less than `max_rows` answers take and the memory plan,
    with the cache at every moment, is at most 80% of the device. It is halved until what is held
    while sampling fits, if that leaves room for the longest answer; if not, it is not changed.
    """
    if not launch.cuda or all(stage.settings.sampling.kv_cache_tokens for stage in run.stages):
        return set_cache_size(run, DEFAULT_CACHE_TOKENS)
    prompt = run.options.plan_prompt_tokens
    samplings = [stage.settings.sampling for stage in run.stages]
    longest = prompt + max(sampling.max_tokens for sampling in samplings)
    most = max(sampling.max_rows for sampling in samplings) * longest

    def plan(size: int) -> list[StageNeeds]:
        return compute_stage_needs(set_cache_size(run, size), launch, prompt)

    tokens = DEFAULT_CACHE_TOKENS
    while tokens < most and _peak_with_cache(plan(2 * tokens)) <= _GROWTH_FRACTION * device.memory:
        tokens *= 2
    if tokens == DEFAULT_CACHE_TOKENS:
        usable = USABLE_FRACTION * device.memory
        for size in (tokens >> i for i in range(10)):
            if size < longest:
                break
            if max(needs.plan.sums["sample"] for needs in plan(size)) <= usable:
                return set_cache_size(run, size)
    return set_cache_size(run, tokens)


def set_cache_size(run: RunConfig, tokens: int) -> RunConfig:
    """Return the run with `kv_cache_tokens` in the stages that do not set it."""
    tokens = max(tokens, *(stage.settings.sampling.max_tokens for stage in run.stages))
    stages = [
        stage
        if stage.settings.sampling.kv_cache_tokens
        else stage.with_section("sampling", kv_cache_tokens=tokens)
        for stage in run.stages
    ]
    return replace(run, stages=tuple(stages))


def _peak_with_cache(stages: Sequence[StageNeeds]) -> float:
    """Return the largest sum of the plans in bytes if the KV cache stays while learning."""
    peaks = [0.0]
    for needs in stages:
        size = sum(item.sample for item in needs.plan.items if item.name == "KV cache")
        sums = needs.plan.sums
        peaks += [sums["sample"], sums["train"] + size, sums["update"] + size]
    return max(peaks)
