"""`train.py ... --plan`: what each GPU of a run would hold, whether it fits, and what to change, before weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rl.errors import UserError
from rl.launch import asks_for_fsdp, zero_settings
from rl.memory_plan import GIB, ROOM, Held, Launch, MicroBatch, ModelShape, Work, micro_batch, plan, sampled_at_once
from rl.memory_trace import Arithmetic, Skeleton
from rl.methods import METHODS
from rl.plan_page import Device, StageNeeds, gib, print_plans
from rl.prepare import begins_after
from rl.reopen import is_run
from rl.run_plan import Run, StagePlan
from rl.settings import ModelSettings
from rl.types import LoraConfig

_DEFAULT_GPU = 80.0  # GiB, of a GPU that is only asked about


# --------------------------------------------------------------------------------------------------- from settings to a plan


def launch_of(options: Any, precision: str) -> tuple[Launch, Device]:
    """The processes of this launch (or those that --plan-gpus and --plan-zero ask about) and the memory of each."""
    here = torch.cuda.is_available()
    asked = options.plan_gpus is not None or options.plan_gpu_memory is not None
    cuda = here or asked
    launched, zero, offload = int(os.environ.get("WORLD_SIZE", "1")), *zero_settings()
    world = options.plan_gpus or launched
    fsdp = asks_for_fsdp() and options.plan_zero is None
    if options.plan_zero is not None:
        zero, offload = (None if options.plan_zero == "none" else int(options.plan_zero)), False
    per_node = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", "8")) if world == launched else 8)
    bf16 = precision == "bf16" or (precision == "auto" and cuda)
    launch = Launch(cuda=cuda, bf16=bf16, world=world, per_node=per_node, zero=zero, offload=offload, fsdp=fsdp)
    if options.plan_gpu_memory is not None:
        return launch, Device(f"GPU of {options.plan_gpu_memory:g} GiB", options.plan_gpu_memory * GIB)
    if here:
        found = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        return launch, Device(found.name, float(found.total_memory))
    if asked:
        return launch, Device(f"GPU of {_DEFAULT_GPU:g} GiB", _DEFAULT_GPU * GIB)
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return launch, Device("CPU process", machine / per_node)


def needs_of(run: Run, launch: Launch, prompt: int, settings: Sequence[Any] | None = None) -> list[StageNeeds]:
    """Every stage's needs, under `settings` (by default the run's own)."""
    found = []
    chosen = [stage.settings for stage in run.stages] if settings is None else list(settings)
    for i, stage in enumerate(run.stages):
        first, before = i, begins_after(run.stages, i)
        while (earlier := begins_after(run.stages, first)) is not None:
            first = earlier
        model = replace(chosen[i].model, base_model=chosen[first].model.base_model, tokenizer=chosen[first].model.tokenizer)
        adapter = bool(model.lora_rank) and (before is None or not chosen[before].model.lora_rank)
        found.append(_needs(stage, chosen[i], model, launch, prompt, fresh_adapter=adapter))
    return found


def _needs(
    stage: StagePlan, settings: Any, model: ModelSettings, launch: Launch, prompt: int, *, fresh_adapter: bool
) -> StageNeeds:
    """`fresh_adapter`: whether the policy as the stage begins is its base model, under an adapter that can be turned off."""
    skeleton = _skeleton(model.base_model, model.tokenizer, _lora(model))
    shape, sampling, optim, loop = skeleton.shape, settings.sampling, settings.optim, settings.loop
    hooks = METHODS[stage.method].hooks(settings)
    group = hooks.group_size if hooks.online else 1
    if shape.max_context is not None:
        prompt = max(1, min(prompt, shape.max_context - sampling.max_tokens))
    layout = "padded" if shape.windowed and optim.layout == "auto" else optim.layout
    batch = micro_batch(
        groups=max(1, loop.batch_size // optim.num_substeps), group=group, prompt=prompt, answer=sampling.max_tokens,
        budget=optim.token_budget, layout=layout, world=launch.world, hidden=shape.hidden,
    )  # fmt: skip
    budgets = {"kv_cache_tokens": sampling.kv_cache_tokens, "max_rows": sampling.max_rows, "world": launch.world}
    lengths = {"prompt": prompt, "answer": sampling.max_tokens}
    drawn = [sampled_at_once(groups=settings.data.eval_limit, group=1, **lengths, **budgets)] if loop.eval_every else []
    drawn += [sampled_at_once(groups=loop.batch_size, group=group, **lengths, **budgets)] if hooks.online else []
    prompts, rows = max(drawn, key=lambda pair: pair[1], default=(0, 0))
    work = Work(batch=batch, samples=bool(drawn), prompts=prompts, prompt=prompt, rows=rows, answer=sampling.max_tokens)
    others, method = _others(stage.method, settings, skeleton), METHODS[stage.method]
    if method.keeps_beginning(settings) and not fresh_adapter:
        others.append(shape)
    critic = method.critic(settings)
    critics = [] if critic is None else [shape if critic == "policy" else _skeleton(critic, model.tokenizer, _lora(model)).shape]
    found = plan(shape, _held(model, batch, launch), launch, work, others, critics)
    return StageNeeds(stage.name, model.base_model, found, work, launch)


def _others(method: str, settings: Any, policy: Skeleton) -> list[ModelShape]:
    """Models that a method's weights name; what is no model's own name (a stage, a run's folder) is taken to be like the policy."""
    shapes = []
    for target in METHODS[method].weights(settings):
        folder = Path(target).expanduser()
        named = target.startswith("tiny:") or ((folder / "config.json").is_file() and not is_run(folder))
        shapes.append((_skeleton(target, settings.model.tokenizer, None) if named else policy).shape)
    return shapes


def _lora(model: ModelSettings) -> LoraConfig | None:
    if not model.lora_rank:
        return None
    return LoraConfig(model.lora_rank, train_mlp=model.train_mlp, train_attn=model.train_attn, train_unembed=model.train_unembed)


@cache
def _skeleton(base_model: str, tokenizer: str | None, lora: LoraConfig | None) -> Skeleton:
    return Skeleton(base_model, tokenizer, lora)


def _held(model: ModelSettings, batch: MicroBatch, launch: Launch) -> Held:
    how = Arithmetic(
        dtype=torch.bfloat16 if launch.compute_bytes == 2 and (launch.fsdp or launch.zero is not None) else torch.float32,
        autocast=launch.bf16 and launch.zero is None and not launch.fsdp,
        keeps_gradients=launch.zero in (None, 0) and not launch.fsdp,
        fused=model.fused_logprobs,
        checkpointing=model.gradient_checkpointing,
    )
    return _held_once(model.base_model, model.tokenizer, _lora(model), batch, how)


@cache
def _held_once(base_model: str, tokenizer: str | None, lora: LoraConfig | None, batch: MicroBatch, how: Arithmetic) -> Held:
    return _skeleton(base_model, tokenizer, lora).held(batch, how)


# -------------------------------------------------------------------------------------------------------------- what to change


@dataclass(frozen=True)
class Change:
    """A remedy: what to type, what it makes of a stage's settings and of the launch, and the peak with it.

    `kind`: of several of a kind one is taken. `costly`: it changes what is learnt, or costs much time.
    """

    words: str
    settings: Callable[[Any], Any]
    launch: Callable[[Launch], Launch]
    kind: str
    costly: bool = False
    peak: float = 0.0


def _same(thing: Any) -> Any:
    return thing


def _setting(section: str, name: str, value: Any, costly: bool = False) -> Change:
    def apply(settings: Any) -> Any:
        return replace(settings, **{section: replace(getattr(settings, section), **{name: value})})

    flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
    return Change(flag, apply, _same, name, costly)


def _sharding(stage: int, gpus: int, offload: bool = False) -> Change:
    def apply(launch: Launch) -> Launch:
        return replace(launch, world=gpus, per_node=min(gpus, 8), zero=stage, offload=offload, fsdp=False)

    name = f"zero{stage}{'_offload' if offload else ''}"
    return Change(f"accelerate_configs/{name}.yaml on {gpus} GPUs", _same, apply, "launch", costly=offload)


def _candidates(run: Run, launch: Launch) -> list[Change]:
    model, optim, sampling = (getattr(run.stages[-1].settings, name) for name in ("model", "optim", "sampling"))
    found = [_setting("model", "gradient_checkpointing", True)] * (not model.gradient_checkpointing)
    found += [_setting("model", "fused_logprobs", True)] * (not model.fused_logprobs)
    found += [_setting("model", "lora_rank", 32, costly=True)] * (not model.lora_rank)
    found += [_setting("optim", "token_budget", max(1, optim.token_budget // divisor)) for divisor in (2, 4)]
    found.append(_setting("sampling", "max_rows", max(1, sampling.max_rows // 4)))
    found.append(_setting("sampling", "kv_cache_tokens", max(1, sampling.kv_cache_tokens // 4)))
    if launch.cuda:
        gpus = max(launch.world, 8)
        found += [_sharding(stage, gpus) for stage in (1, 2, 3) if stage > (3 if launch.fsdp else launch.zero or 0) or gpus > launch.world]
        found += [_sharding(3, gpus, offload=True)] * (not launch.offload)
    return found


def remedies(run: Run, launch: Launch, prompt: int) -> list[Change]:
    """Single changes that lower the peak of the run, the most effective first."""
    now = _peak(run, launch, prompt, [])
    tried = [replace(change, peak=_peak(run, launch, prompt, [change])) for change in _candidates(run, launch)]
    return sorted((change for change in tried if change.peak < 0.98 * now), key=lambda change: change.peak)


def together(run: Run, launch: Launch, prompt: int, changes: Sequence[Change], room: float) -> tuple[list[Change], float]:
    """Changes that make it fit when taken together, the costly ones only if the others are not enough; and the peak then.

    No changes where all of them are not enough.
    """
    taken: list[Change] = []
    peak = _peak(run, launch, prompt, [])
    for change in sorted(changes, key=lambda change: (change.costly, change.peak)):
        others = [other for other in taken if other.kind != change.kind]
        lower = _peak(run, launch, prompt, [*others, change])
        if lower < 0.98 * peak:
            taken, peak = [*others, change], lower
        if peak <= room:
            return taken, peak
    return [], peak


def _peak(run: Run, launch: Launch, prompt: int, changes: Sequence[Change]) -> float:
    settings = [stage.settings for stage in run.stages]
    for change in changes:
        settings, launch = [change.settings(one) for one in settings], change.launch(launch)
    return max(needs.plan.peak for needs in needs_of(run, launch, prompt, settings))


# ------------------------------------------------------------------------------------------------------------------- the page


def show(run: Run) -> None:
    """Prints the plan of a run on rank 0. Raises UserError (on every rank) where it cannot fit."""
    options = run.options
    launch, device = launch_of(options, run.stages[0].settings.model.precision)
    stages = needs_of(run, launch, options.plan_prompt_tokens)
    largest = max(stages, key=lambda needs: needs.plan.peak)
    prints = os.environ.get("RANK", "0") == "0"
    if prints:
        print_plans(stages, device)
    if largest.plan.peak <= ROOM * device.memory:
        return
    advice = _advice(run, launch, options.plan_prompt_tokens, device) if prints else ""  # the others' words are not shown
    if largest.plan.peak > device.memory:
        raise UserError(_shortage(largest, device) + advice + _ceiling(largest, device))
    if prints:
        print(advice.strip())


def check(run: Run, warn: Callable[[str], None]) -> None:
    """At the start of a run on a GPU, before weights are loaded: warns of what may not fit.

    Raises UserError for what cannot, whatever the prompts and answers: weights, optimizer and sampler's copy alone. A model that
    cannot be planned is let through.
    """
    options = run.options
    launch, device = launch_of(options, run.stages[0].settings.model.precision)
    if not torch.cuda.is_available():
        return
    try:
        stages = needs_of(run, launch, options.plan_prompt_tokens)
    except UserError:
        return
    for needs in stages:
        stays = sum(min(item.sample, item.train, item.update) for item in needs.plan.items)
        if stays > device.memory:
            raise UserError(_shortage(needs, device) + " --plan says what to change." + _ceiling(needs, device))
        if needs.plan.peak > device.memory:
            warn(f"{_shortage(needs, device)} --plan says what to change.")


def _shortage(needs: StageNeeds, device: Device) -> str:
    peak, moment = max((size, name) for name, size in needs.plan.sums.items())
    when = {"sample": "while it samples", "train": "in a micro-batch", "update": "at the optimizer's step"}[moment]
    return f"stage {needs.stage} with {needs.model} needs {gib(peak)} on each {device.name}, of {gib(device.memory)} there (most {when})."


def _advice(run: Run, launch: Launch, prompt: int, device: Device) -> str:
    """What would lower the peak, the most effective first, and what to take together where nothing is enough alone."""
    room = ROOM * device.memory
    changes = remedies(run, launch, prompt)
    if not changes:
        return " No setting lowers it: take a smaller model, or larger GPUs."
    lines = [f"  {change.words}: {gib(change.peak)}" + (", fits" if change.peak <= room else "") for change in changes]
    text = "\nWhat would lower it, the most effective first:\n" + "\n".join(lines)
    if any(change.peak <= room for change in changes):
        return text
    taken, peak = together(run, launch, prompt, changes, room)
    if not taken:
        return text + f"\nAll of it together still needs {gib(peak)}: take a smaller model, or larger GPUs."
    return text + f"\nNone fits alone; together {gib(peak)}, which fits: " + ", ".join(change.words for change in taken)


def _ceiling(needs: StageNeeds, device: Device) -> str:
    copy = next(item.train for item in needs.plan.items if item.name.startswith("sampler"))
    if copy <= ROOM * device.memory:
        return ""
    return f"\nThe sampler's copy alone is {gib(copy)}, whole on every GPU: no sharding of the learner helps, larger GPUs do."
