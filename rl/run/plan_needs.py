"""Compute what each stage of a run would hold, from the run's settings and its launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl.errors import UserError
from rl.learner import kept_of_gib
from rl.memory import (
    GIB,
    Arithmetic,
    Held,
    Launch,
    MicroBatch,
    ModelShape,
    Plan,
    Traces,
    Work,
    check_team_holds,
    kept_logits,
    micro_batch,
    plan,
    plan_sampler,
    pool_pages,
    sampled_at_once,
    staged,
)
from rl.methods import METHODS
from rl.models import PARTS, classifier_size, may_stay_unread, root_of
from rl.ranks import asks_for_fsdp, check_apart_from_roles, check_divides, zero_settings
from rl.run.beginnings import begins_after
from rl.run.origins import goes_on, origin_of
from rl.run.plan_page import Device, StageNeeds
from rl.run.reopen import is_run
from rl.settings import ModelSettings, Run, StagePlan
from rl.types import LoraConfig

_DEFAULT_GPU = 80.0  # GiB of a hypothetical GPU
TRACES = Traces()  # a process plans a single run, repeatedly with other settings
Holds = Callable[[ModelSettings, MicroBatch, Launch], Held]


def launch_of(options: Any, precision: str) -> tuple[Launch, Device]:
    """Return (launch, device): the processes of this launch, or of a hypothetical launch
    (--plan-gpus, --plan-zero), and the memory of each.
    """
    has_gpu = torch.cuda.is_available()
    hypothetical = options.plan_gpus is not None or options.plan_gpu_memory is not None
    cuda = has_gpu or hypothetical
    launched, zero, offload = int(os.environ.get("WORLD_SIZE", "1")), *zero_settings()
    world = options.plan_gpus or launched
    fsdp = asks_for_fsdp() and options.plan_zero is None
    if options.plan_zero is not None:
        zero, offload = (None if options.plan_zero == "none" else int(options.plan_zero)), False
    per_node = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", "8")) if world == launched else 8)
    bf16 = precision == "bf16" or (precision == "auto" and cuda)
    device = _device(options.plan_gpu_memory, asked=hypothetical, per_node=per_node)
    launch = Launch(
        cuda=cuda,
        bf16=bf16,
        world=world,
        per_node=per_node,
        zero=zero,
        offload=offload,
        fsdp=fsdp,
        memory=device.memory if cuda else 0.0,
    )
    return launch, device


def _device(gib: float | None, *, asked: bool, per_node: int) -> Device:
    """Return a device of `gib` GiB; by default the present GPU, a hypothetical GPU, or a process's
    part of this machine.
    """
    if gib is not None:
        return Device(f"GPU of {gib:g} GiB", gib * GIB)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        return Device(properties.name, float(properties.total_memory))
    if asked:
        return Device(f"GPU of {_DEFAULT_GPU:g} GiB", _DEFAULT_GPU * GIB)
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Device("CPU process", machine / per_node)


def needs_of(
    run: Run,
    launch: Launch,
    prompt: int,
    settings: Sequence[Any] | None = None,
    holds: Holds | None = None,
) -> list[StageNeeds]:
    """Return the needs of every stage, under `settings` (by default the run's).

    `holds`: function that returns what a micro-batch holds; None: trace the micro-batch, which
    takes long.
    """
    needs = []
    holds = holds or _held
    stage_settings = (
        [stage.settings for stage in run.stages] if settings is None else list(settings)
    )
    for i, stage in enumerate(run.stages):
        first, predecessor = i, begins_after(run.stages, i)
        while (earlier := begins_after(run.stages, first)) is not None:
            first = earlier
        model = replace(
            stage_settings[i].model,
            base_model=stage_settings[first].model.base_model,
            tokenizer=stage_settings[first].model.tokenizer,
        )
        continues_adapter = (
            origin_of(model, None).continued is not None
            if predecessor is None
            else goes_on(stage_settings[predecessor].model, model)
        )
        adapter = bool(model.lora_rank) and not continues_adapter
        if continues_adapter and predecessor is None:
            root = root_of(model.base_model)[0]
            model = replace(model, base_model=root.name, tokenizer=root.tokenizer)
        needs += _needs(
            stage, stage_settings[i], model, launch, prompt, fresh_adapter=adapter, holds=holds
        )
    return needs


def _needs(
    stage: StagePlan,
    settings: Any,
    model: ModelSettings,
    launch: Launch,
    prompt: int,
    *,
    fresh_adapter: bool,
    holds: Holds,
) -> list[StageNeeds]:
    """Return the needs of a stage: a single item, or two if some ranks only sample (the learner
    ranks', then the sampler ranks').

    `fresh_adapter`: whether the stage's initial policy is its base model, under an adapter that can
    be turned off.
    """
    samplers, launch = _sides(settings, launch)
    shape = TRACES.shape((model.base_model, model.tokenizer, _lora(model)))
    sampling, optim, loop = settings.sampling, settings.optim, settings.loop
    team = _team(sampling.sampler_tp, 0 if samplers is None else samplers.world, shape, launch)
    hooks = METHODS[stage.method].hooks(settings)
    group = hooks.group_size if hooks.online else 1
    if shape.max_context is not None:
        prompt = max(1, min(prompt, shape.max_context - sampling.max_tokens))
    layout = "padded" if shape.windowed and optim.layout == "auto" else optim.layout
    batch = micro_batch(
        groups=max(1, loop.batch_size // optim.num_substeps),
        group=group,
        prompt=prompt,
        answer=sampling.max_tokens,
        budget=optim.token_budget,
        layout=layout,
        world=launch.world,
        hidden=shape.hidden,
    )
    budgets = {
        "kv_cache_tokens": sampling.kv_cache_tokens,
        "max_rows": sampling.max_rows,
        "world": (samplers or launch).world // team,
    }
    in_pages = _in_pages(sampling, model, shape, launch, team)
    limits = {"prompt": prompt, "answer": sampling.max_tokens, **budgets}
    calls = [{"groups": settings.data.eval_limit, "group": 1}] if loop.eval_every else []
    calls += [{"groups": loop.batch_size, "group": group}] if hooks.online else []
    prompts, rows = max(
        (sampled_at_once(**call, **limits, paged=in_pages) for call in calls),
        key=lambda pair: pair[1],
        default=(0, 0),
    )
    streams = bool(getattr(getattr(settings, "flow", None), "continuous", False))
    pages = (
        max((pool_pages(**call, **limits, streams=streams) for call in calls), default=0)
        if in_pages
        else 0
    )
    work = Work(
        batch=batch,
        samples=bool(calls),
        prompts=prompts,
        prompt=prompt,
        rows=rows,
        answer=sampling.max_tokens,
        pages=pages,
    )
    unread = may_stay_unread(model.base_model)
    launch = replace(
        launch, base=_base(model, launch), optimizer=optim.optimizer, in_parts=unread, team=team
    )
    others, method = _others(stage.method, settings, shape), METHODS[stage.method]
    if method.keeps_beginning(settings) and not fresh_adapter:
        others.append(shape)
    critic = method.critic(settings)
    critics = (
        []
        if critic is None
        else [
            shape if critic == "policy" else TRACES.shape((critic, model.tokenizer, _lora(model)))
        ]
    )
    held = holds(model, batch, launch)
    kept_bytes = (
        kept_logits(shape, launch, batch, kept_of_gib(model.kept_logits_gib))
        if model.fused_logprobs
        else 0.0
    )
    if samplers is None:
        return [
            StageNeeds(
                stage.name,
                model.base_model,
                plan(shape, held, launch, work, others, critics, kept_bytes),
                work,
                launch,
            )
        ]
    learner_plan = plan(
        shape, held, launch, Work(batch=batch, samples=False), (), critics, kept_bytes
    )
    host = (
        *learner_plan.host,
        ("weights on their way to the ranks that sample, on rank 0", staged(shape)),
    )
    learner_needs = StageNeeds(
        f"{stage.name}, ranks that learn",
        model.base_model,
        Plan(learner_plan.items, host),
        replace(work, samples=False),
        launch,
    )
    sampler_plan = plan_sampler(shape, samplers, work, others)
    return [
        learner_needs,
        StageNeeds(
            f"{stage.name}, ranks that sample", model.base_model, sampler_plan, work, samplers
        ),
    ]


def _in_pages(
    sampling: Any, model: ModelSettings, shape: ModelShape, launch: Launch, team: int
) -> bool:
    """Return whether the sampler uses a paged KV cache, as `rl.sampler.make_engine` chooses.

    On a GPU the engine tries it; the plan assumes that it succeeds.
    """
    may = shape.fast and sampling.sampler != "hf" and team == 1 and not model.router_replay
    return may and (
        sampling.sampler_cache == "paged" or (sampling.sampler_cache == "auto" and launch.cuda)
    )


def _sides(settings: Any, launch: Launch) -> tuple[Launch | None, Launch]:
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
        zero=None,
        fsdp=False,
        offload=False,
    )
    return sampler_launch, replace(
        launch, world=launch.world - ranks, per_node=min(launch.world - ranks, launch.per_node)
    )


class CannotSplit(UserError):
    """Raised if the requested number of processes cannot share a sampler."""


def _team(sampler_tp: int, sampler_ranks: int, shape: ModelShape, launch: Launch) -> int:
    """Return the number of processes that share a sampler of this model. Raises CannotSplit if it
    is not possible.
    """
    if sampler_tp == 1:
        return 1
    try:
        check_apart_from_roles(sampler_tp, sampler_ranks)
        if launch.world == 1:
            raise UserError(
                f"sampler_tp {sampler_tp} splits the sampler's weights over {sampler_tp} "
                "processes of a machine, but only a single process was launched: launch as "
                f"many (--plan-gpus {sampler_tp} plans for them), or set it to 1"
            )
        check_divides(sampler_tp, launch.per_node)
        check_team_holds(shape, sampler_tp)
    except UserError as error:
        raise CannotSplit(str(error)) from error
    return sampler_tp


def _others(method: str, settings: Any, policy: ModelShape) -> list[ModelShape]:
    """Return the shapes of the models that a method's weights name. A name that is no model's name
    (a stage, a run's folder) counts as a model like the policy.

    A reward model is loaded like a learner, which tensor parallelism does not split.
    """
    learned = getattr(settings, "learned", None)
    read_whole = {name for name, _ in learned.scoring} if learned is not None else set()
    shapes = []
    for target in METHODS[method].other_weights(settings):
        folder = Path(target).expanduser()
        is_model = target.startswith("tiny:") or (
            (folder / "config.json").is_file() and not is_run(folder)
        )
        if is_model and target in read_whole and (size := classifier_size(target)) is not None:
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
        shape = TRACES.shape((target, settings.model.tokenizer, None)) if is_model else policy
        whole = replace(
            shape, unsplit=shape.parameters - shape.adapters, unsplit_adapters=shape.adapters
        )
        shapes.append(whole if target in read_whole else shape)
    return shapes


def _base(model: ModelSettings, launch: Launch) -> str:
    """Return the dtype of the frozen base (rl.learner.base)."""
    if not model.lora_rank:
        return "fp32"
    return ("bf16" if launch.bf16 else "fp32") if model.base_dtype == "auto" else model.base_dtype


def _lora(model: ModelSettings) -> LoraConfig | None:
    if not model.lora_rank:
        return None
    return LoraConfig(model.lora_rank, **{part: getattr(model, part) for part in PARTS})


def nothing(model: ModelSettings, batch: MicroBatch, launch: Launch) -> Held:
    """Return zero bytes for a micro-batch, which needs no tracing."""
    return Held()


def runs_of(run: Run, launch: Launch, prompt: int, settings: Sequence[Any]) -> list[Any]:
    """Return the micro-batches that a plan would trace, in the form that `Traces.want` accepts."""
    micro_batches = []

    def note(model: ModelSettings, batch: MicroBatch, launch: Launch) -> Held:
        micro_batches.append(_run(model, batch, launch))
        return Held()

    needs_of(run, launch, prompt, settings, note)
    return micro_batches


def _held(model: ModelSettings, batch: MicroBatch, launch: Launch) -> Held:
    return TRACES.held(_run(model, batch, launch))


def _run(model: ModelSettings, batch: MicroBatch, launch: Launch) -> Any:
    config = Arithmetic(
        dtype=torch.bfloat16
        if launch.compute_bytes == 2 and (launch.fsdp or launch.zero is not None)
        else torch.float32,
        autocast=launch.bf16 and launch.zero is None and not launch.fsdp,
        keeps_gradients=launch.zero in (None, 0) and not launch.fsdp,
        fused=model.fused_logprobs,
        checkpointing=model.gradient_checkpointing,
        cuda=launch.cuda,
        kept=None if launch.cuda else kept_of_gib(model.kept_logits_gib),
        low_base=launch.base != "fp32" and launch.zero is None and not launch.fsdp,
    )
    return (model.base_model, model.tokenizer, _lora(model)), batch, config
