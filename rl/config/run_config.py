"""Define a `RunConfig` of stages, and convert it to config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rl.config.fields import flatten_settings, format_value, get_defaults

# Options of a single launch: a run that is resumed by its folder alone does not keep them.
LAUNCH_OPTIONS = (
    "resume",
    "auto_resume",
    "overwrite",
    "output_dir",
    "plan",
    "change",
    "trust_run",
)
# These, and options of output and reporting.
CHANGEABLE_OPTIONS = (
    *LAUNCH_OPTIONS,
    "quiet",
    "tracker",
    "tracker_project",
    "wandb_project",
    "timeout",
    "stop_grace",
    "reward_env",
    "self_test",
    "reward_check",
    "profile",
    "replay",
    "plan_gpus",
    "plan_gpu_memory",
    "plan_zero",
    "plan_prompt_tokens",
)
# Settings of a stage for micro-batching, memory, evaluation, checkpoints and timeouts. No gradient
# and no sample depends on them (except for rounding).
CHANGEABLE_SETTINGS = (
    "token_budget",
    "layout",
    "context_parallel_size",
    "expert_parallel_size",
    "gradient_checkpointing",
    "offload_activations",
    "fused_logprobs",
    "kept_logits_gib",
    "kv_cache_tokens",
    "max_rows",
    "sampler_cache",
    "sampler_tp",
    "num_speculative_tokens",
    "sampler_url",
    "sampler_folder",
    "sampler_timeout",
    "sampler_command",
    "sampler_memory",
    "sampler_ranks",
    "eval_every",
    "save_every",
    "rollouts_every",
    "keep_last",
    "keep_best",
    "keep_best_mode",
    "reward_timeout",
    "reward_workers",
    "reward_machines",
    "reward_env",
)


class MethodEntry(Protocol):
    """Specify a method for the command line: its settings class and a summary line."""

    Settings: type
    summary: str
    # for each value of the setting `variant`, the flat settings that it implies unless they are set
    variants: Mapping[str, Mapping[str, Any]]


Methods = Mapping[str, MethodEntry]


@dataclass(frozen=True)
class StageConfig:
    """Hold a stage of a run. `settings` is an instance of the method's settings class."""

    method: str
    name: str
    settings: Any

    def with_section(self, section: str, **values: Any) -> StageConfig:
        """Return the stage with other values in a section of its settings."""
        changed = replace(getattr(self.settings, section), **values)
        return replace(self, settings=replace(self.settings, **{section: changed}))


@dataclass(frozen=True)
class RunConfig:
    """Hold a requested run: its stages in order, the run-level `options`, and the recipe file, if
    any.
    """

    name: str
    stages: tuple[StageConfig, ...]
    options: Any
    recipe: str | None = None


def resolve_config(run: RunConfig) -> dict[str, Any]:
    """Return the complete configuration of `run` as JSON: `name`, `recipe`, `options` and `stages`,
    with settings by flat name.
    """
    stages = [
        {"method": s.method, "name": s.name, "settings": flatten_settings(s.settings)}
        for s in run.stages
    ]
    return {
        "name": run.name,
        "recipe": run.recipe,
        "options": flatten_settings(run.options),
        "stages": stages,
    }


def diff_configs(
    saved: Mapping[str, Any],
    requested: Mapping[str, Any],
    *,
    ignore: Collection[str] = (),
    methods: Methods | None = None,
    options: type | None = None,
) -> list[str]:
    """Return a line for each setting that differs between two `resolve_config` runs ("stage grpo:
    learning_rate 0.0003 -> 0.001").

    `methods`, `options`: the classes that supply the default of a setting that `saved` lacks
    because it was saved before the setting existed.
    """
    lines: list[str] = []

    def compare(
        prefix: str, old: Mapping[str, Any], new: Mapping[str, Any], cls: type | None
    ) -> None:
        old = {**({} if cls is None else get_defaults(cls, new.keys() - old.keys())), **old}
        for key in dict.fromkeys([*old, *new]):
            if key in ignore or (key in old and key in new and old[key] == new[key]):
                continue
            before, after = (
                "(not set)" if table.get(key) is None else format_value(table[key])
                for table in (old, new)
            )
            lines.append(f"{prefix}{key} {before} -> {after}")

    compare("", saved["options"], requested["options"], options)
    old_stages, new_stages = saved["stages"], requested["stages"]
    old_names, new_names = (
        [f"{s['name']} ({s['method']})" for s in stages] for stages in (old_stages, new_stages)
    )
    if old_names != new_names:
        return [*lines, f"stages {', '.join(old_names)} -> {', '.join(new_names)}"]
    for old, new in zip(old_stages, new_stages, strict=True):
        prefix = f"stage {old['name']}: " if len(old_stages) > 1 else ""
        method = None if methods is None else methods.get(new["method"])
        cls = None if method is None else method.Settings
        compare(prefix, old["settings"], new["settings"], cls)
    return lines
