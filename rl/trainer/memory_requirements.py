"""Compute what each stage of a run would hold, from the run's settings and its launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl.algorithms import METHODS, ModelRequests
from rl.config import ModelSettings, RunConfig, StageConfig
from rl.distributed import (
    Sharding,
    ZeroSharding,
    check_context_parallel_size,
    check_tensor_parallel_size,
    check_tensor_parallel_without_roles,
    get_launch_sharding,
)
from rl.errors import UserError
from rl.learner import kept_bytes_from_gib
from rl.memory_plan import (
    GIB,
    ComputeConfig,
    LaunchShape,
    MemoryItem,
    MemoryPlan,
    MicroBatch,
    MicroBatchMemory,
    ModelShape,
    StepWork,
    check_context_parallel_model,
    check_tensor_parallel,
    compute_concurrent_rows,
    constant_item,
    count_pool_pages,
    largest_micro_batch,
    load_shape,
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
from rl.sampler import DEFAULT_CACHE_TOKENS
from rl.trainer.initial_weights import continues_adapter, find_base_model, find_previous_stage
from rl.trainer.memory_table import DeviceMemory, StageNeeds
from rl.trainer.saved_weights import is_run_folder

_DEFAULT_GPU = 80.0  # GiB of a hypothetical GPU
MeasureMicroBatch = Callable[[ModelSettings, MicroBatch, LaunchShape], MicroBatchMemory]


def resolve_launch(options: Any, precision: str) -> tuple[LaunchShape, DeviceMemory]:
    """Return (launch, device): the processes of this launch, or of a hypothetical launch
    (--plan-gpus, --plan-zero), and the memory of each.
    """
    has_gpu = torch.cuda.is_available()
    hypothetical = options.plan_gpus is not None or options.plan_gpu_memory is not None
    cuda = has_gpu or hypothetical
    launched, sharding = int(os.environ.get("WORLD_SIZE", "1")), get_launch_sharding()
    world = options.plan_gpus or launched
    if world != launched:
        sharding = sharding.rescale()
    if options.plan_zero is not None:
        stage = options.plan_zero
        sharding = Sharding() if stage == "none" else ZeroSharding(stage=int(stage))
    per_node = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", "8")) if world == launched else 8)
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
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return DeviceMemory("CPU process", machine / per_node)


def compute_stage_needs(
    run: RunConfig,
    launch: LaunchShape,
    prompt: int,
    settings: Sequence[Any] | None = None,
    measure: MeasureMicroBatch | None = None,
) -> list[StageNeeds]:
    """Return the needs of every stage, under `settings` (by default the run's).

    `measure`: function that returns what a micro-batch holds; None: trace the micro-batch, which
    takes long.
    """
    needs = []
    measure = measure or _trace
    stages = [
        stage if settings is None else replace(stage, settings=settings[i])
        for i, stage in enumerate(run.stages)
    ]
    for i, stage in enumerate(stages):
        base, tokenizer = find_base_model(stages, i)
        model = replace(stage.settings.model, base_model=base, tokenizer=tokenizer)
        is_continued = continues_adapter(stages, i)
        adapter = bool(model.lora_rank) and not is_continued
        if is_continued and find_previous_stage(stages, i) is None:
            root = resolve_adapter_chain(model.base_model)[0]
            model = replace(model, base_model=root.name, tokenizer=root.tokenizer)
        needs += _compute_needs(
            stage, stage.settings, model, launch, prompt, fresh_adapter=adapter, measure=measure
        )
    return needs


def _compute_needs(
    stage: StageConfig,
    settings: Any,
    model: ModelSettings,
    launch: LaunchShape,
    prompt: int,
    *,
    fresh_adapter: bool,
    measure: MeasureMicroBatch,
) -> list[StageNeeds]:
    """Return the needs of a stage: a single item, or two if some ranks only sample (the learner
    ranks', then the sampler ranks').

    `fresh_adapter`: whether the stage's initial policy is its base model, under an adapter that can
    be turned off.
    """
    samplers, launch = _split_launch(settings, launch)
    shape = load_shape(model.base_model, model.tokenizer, model.make_lora())
    optim = settings.optim
    team = _tensor_parallel_size(
        settings.sampling.sampler_tp, 0 if samplers is None else samplers.world, shape, launch
    )
    _check_context_parallel(model, optim.context_parallel_size, launch)
    sampler_world = (samplers or launch).world // team
    in_pages = _uses_paged_cache(settings.sampling, model, shape, launch, team)
    work = _compute_step_work(
        stage.method, settings, shape, prompt, launch.world, sampler_world, in_pages
    )
    batch = work.batch
    launch = replace(
        launch,
        base_dtype=_base_dtype(model, launch),
        optimizer=optim.optimizer,
        loads_in_shards=supports_lazy_loading(model.base_model),
        sampler_tp=team,
    )
    others, critics = _list_other_shapes(stage.method, settings, model, shape, fresh_adapter)
    held = measure(model, batch, launch)
    kept_bytes = (
        saved_logits_bytes(shape, launch, batch, kept_bytes_from_gib(model.kept_logits_gib))
        if model.fused_logprobs
        else 0.0
    )
    offloaded = _list_offloaded(model, shape, batch, launch)
    if samplers is None:
        planned = work
        if settings.sampling.sampler == "vllm":  # servers sample
            work, planned = replace(work, samples=False), StepWork(batch=batch, samples=False)
        plan = plan_memory(shape, held, launch, planned, others, critics, kept_bytes)
        items = (*plan.items, *_list_server_memory(settings.sampling, launch))
        plan = MemoryPlan(items, (*plan.host, *offloaded))
        return [StageNeeds(stage.name, model.base_model, plan, work, launch)]
    learner_plan = plan_memory(
        shape, held, launch, StepWork(batch=batch, samples=False), (), critics, kept_bytes
    )
    host = (
        *learner_plan.host,
        *offloaded,
        ("weights on their way to the ranks that sample, on rank 0", staged_weight_bytes(shape)),
    )
    learner_needs = StageNeeds(
        f"{stage.name}, ranks that learn",
        model.base_model,
        MemoryPlan(learner_plan.items, host),
        replace(work, samples=False),
        launch,
    )
    sampler_plan = plan_sampler_memory(shape, samplers, work, others)
    return [
        learner_needs,
        StageNeeds(
            f"{stage.name}, ranks that sample", model.base_model, sampler_plan, work, samplers
        ),
    ]


def _check_context_parallel(model: ModelSettings, parts: int, launch: LaunchShape) -> None:
    """Raise UserError if the model or the launch cannot be divided into `parts`."""
    if parts > 1:
        check_context_parallel_size(parts, launch.world)
        check_context_parallel_model(model.base_model, model.tokenizer, model.make_lora(), parts)


def _list_offloaded(
    model: ModelSettings, shape: ModelShape, batch: MicroBatch, launch: LaunchShape
) -> list[tuple[str, float]]:
    """Return the CPU memory of a machine for offloaded activations."""
    if not (launch.cuda and model.offload_activations):
        return []
    size = offloaded_activation_bytes(shape, batch) * launch.per_node
    return [("inputs of layers, offloaded, at most", size)]


def _list_server_memory(sampling: Any, launch: LaunchShape) -> list[MemoryItem]:
    """Return the memory of a vLLM server that the run starts."""
    if sampling.sampler != "vllm" or sampling.sampler_url:
        return []
    return [constant_item("vLLM server (sampler_memory)", sampling.sampler_memory * launch.memory)]


def _compute_step_work(
    method_name: str,
    settings: Any,
    shape: ModelShape,
    prompt: int,
    world: int,
    sampler_world: int,
    in_pages: bool,
) -> StepWork:
    """Return the largest micro-batch of a learner rank and the largest batch of a sampler.

    `prompt`: tokens of the longest prompt. `world`: learner ranks. `sampler_world`: samplers.
    `in_pages`: whether the sampler uses a paged KV cache.
    """
    sampling, optim, loop = settings.sampling, settings.optim, settings.loop
    method = METHODS[method_name](settings)
    group = method.group_size if method.online else 1
    if shape.max_context is not None:
        prompt = max(1, min(prompt, shape.max_context - sampling.max_tokens))
    batch = largest_micro_batch(
        groups=max(1, loop.batch_size // optim.num_substeps),
        group=group,
        prompt=prompt,
        answer=sampling.max_tokens,
        budget=optim.token_budget,
        layout="padded" if shape.windowed and optim.layout == "auto" else optim.layout,
        world=world // optim.context_parallel_size,
        hidden=shape.hidden,
    ).divide(optim.context_parallel_size)
    limits = {
        "prompt": prompt,
        "answer": sampling.max_tokens,
        "kv_cache_tokens": sampling.kv_cache_tokens or DEFAULT_CACHE_TOKENS,
        "max_rows": sampling.max_rows,
        "world": sampler_world,
    }
    calls = [{"groups": settings.data.eval_limit, "group": 1}] if loop.eval_every else []
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
    method_name: str,
    settings: Any,
    model: ModelSettings,
    shape: ModelShape,
    fresh_adapter: bool,
) -> tuple[list[ModelShape], list[ModelShape]]:
    """Return the shapes of the frozen models beside the policy, and of the critics."""
    requests = ModelRequests(METHODS[method_name](settings))
    others = _other_model_shapes(method_name, settings, shape)
    if requests.needs_initial_policy and not fresh_adapter:
        others.append(shape)
    critic = requests.critic_model
    if critic is None:
        return others, []
    if critic == "policy":
        return others, [shape]
    return others, [load_shape(critic, model.tokenizer, model.make_lora())]


def _uses_paged_cache(
    sampling: Any, model: ModelSettings, shape: ModelShape, launch: LaunchShape, team: int
) -> bool:
    """Return whether the sampler uses a paged KV cache, as `rl.sampler.make_engine` chooses.

    On a GPU the engine tries it; the plan assumes that it succeeds.
    """
    may = shape.fast and sampling.sampler != "hf" and not model.router_replay
    chosen = sampling.sampler_cache == "auto" and launch.cuda and team == 1
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
        check_tensor_parallel_without_roles(sampler_tp, sampler_ranks)
        if launch.world == 1:
            raise UserError(
                f"sampler_tp {sampler_tp} splits the sampler's weights over {sampler_tp} "
                "processes of a machine, but only a single process was launched: launch as "
                f"many (--plan-gpus {sampler_tp} plans for them), or set it to 1"
            )
        check_tensor_parallel_size(sampler_tp, launch.per_node)
        check_tensor_parallel(shape, sampler_tp)
    except UserError as error:
        raise UnsupportedTensorParallel(str(error)) from error
    return sampler_tp


def _other_model_shapes(method: str, settings: Any, policy: ModelShape) -> list[ModelShape]:
    """Return the shapes of the models that a method's weights name. A name that is no model's name
    (a stage, a run's folder) counts as a model like the policy.

    A reward model is loaded like a learner, which tensor parallelism does not split.
    """
    learned = getattr(settings, "learned", None)
    read_whole = (
        {name for name, _ in learned.weighted_reward_models} if learned is not None else set()
    )
    shapes = []
    for target in ModelRequests(METHODS[method](settings)).weights:
        folder = Path(target).expanduser()
        is_model = target.startswith("tiny:") or (
            (folder / "config.json").is_file() and not is_run_folder(folder)
        )
        if (
            is_model
            and target in read_whole
            and (size := count_classifier_parameters(target)) is not None
        ):
            shapes.append(
                replace(
                    policy,
                    name=target,
                    parameters=size,
                    adapters=0,
                    unsplit=size,
                    unsplit_adapters=0,
                    fast=False,
                )
            )
            continue
        shape = load_shape(target, settings.model.tokenizer, None) if is_model else policy
        whole = replace(
            shape, unsplit=shape.parameters - shape.adapters, unsplit_adapters=shape.adapters
        )
        shapes.append(whole if target in read_whole else shape)
    return shapes


def _base_dtype(model: ModelSettings, launch: LaunchShape) -> str:
    """Return the dtype of the frozen base (rl.learner.frozen_base)."""
    if not model.lora_rank:
        return "fp32"
    return ("bf16" if launch.bf16 else "fp32") if model.base_dtype == "auto" else model.base_dtype


def measure_nothing(
    model: ModelSettings, batch: MicroBatch, launch: LaunchShape
) -> MicroBatchMemory:
    """Return zero bytes for a micro-batch, which needs no tracing."""
    return MicroBatchMemory()


def _trace(model: ModelSettings, batch: MicroBatch, launch: LaunchShape) -> MicroBatchMemory:
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
    )
    return trace_micro_batch(model.base_model, model.tokenizer, model.make_lora(), batch, config)
