"""Open saved weights with their training settings, and check the code that these name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS
from rl.client import SamplingClient, ServiceClient
from rl.config import (
    AsyncRolloutSettings,
    DataSettings,
    RunConfig,
    RunSettings,
    SamplingSettings,
    StageConfig,
    find_source_file,
    is_method_address,
    load_resolved_config,
    locate_recorded_files,
)
from rl.errors import UserError
from rl.reporting import CHECKPOINTS, CONFIG, contains_run, load_saved_config
from rl.runtime import WorkerSettings, make_sampler_settings, make_worker_settings
from rl.seed import derive_seed
from rl.trainer.checkpoint_manager import (
    CheckpointRow,
    complete_checkpoint_list,
    locate_checkpoint,
    read_checkpoint_list,
    read_stage_steps,
)
from rl.types.feature_table import check_features


def collect_worker_settings(stages: Sequence[StageConfig]) -> WorkerSettings:
    """Return the worker settings of the whole run. Raises UserError if those of stages differ."""
    per_stage = [
        make_worker_settings(item.model, item.sampling, item.optim)
        for item in (plan.settings for plan in stages)
    ]
    flows = [
        flow
        for plan in stages
        if isinstance(flow := getattr(plan.settings, "flow", None), AsyncRolloutSettings)
    ]
    if per_stage[0].sampler.kind == "vllm" and any(flow.recompute_cache for flow in flows):
        check_features(("vllm", "cache recomputation"))
    ranks = {flow.sampler_ranks for flow in flows}
    if len(ranks) > 1:
        raise UserError(
            "sampler_ranks applies to the whole run: set it at the recipe's top level or on the "
            "command line"
        )
    if any(settings != per_stage[0] for settings in per_stage):
        raise UserError(
            "precision, token_budget, layout, context_parallel_size, expert_parallel_size, "
            "fused_logprobs, kept_logits_gib, gradient_checkpointing, offload_activations, "
            "optimizer, router_replay, router_aux_loss_coef, kv_cache_tokens, max_rows, sampler, "
            "sampler_url, sampler_folder, sampler_timeout, sampler_command, sampler_memory, "
            "num_speculative_tokens, sampler_cache and sampler_tp apply to the whole run: set them "
            "at the recipe's top level or on the command line"
        )
    lora_rank = max(plan.settings.model.lora_rank for plan in stages)
    sampler = replace(per_stage[0].sampler, lora_rank=lora_rank)
    return replace(per_stage[0], sampler=sampler, sampler_ranks=max(ranks, default=0))


_SERVER_SETTINGS = (
    "sampler_url",
    "sampler_folder",
    "sampler_timeout",
    "sampler_command",
    "sampler_memory",
)


def list_environment_addresses(settings: Any) -> list[str]:
    """Return the environment that a stage's settings name by an address."""
    named = getattr(getattr(settings, "env", None), "environment", None) or ""
    return [named] if ":" in named else []


def list_reward_addresses(data: DataSettings) -> list[str]:
    """Return the rewards that settings name by an address. Registered rewards belong to the
    project.
    """
    named = [name for name, _ in data.rewards] or [data.reward or ""]
    return [name for name in named if ":" in name]


def list_method_addresses(stages: Sequence[StageConfig]) -> list[str]:
    """Return the methods of stages that are named by an address."""
    return [stage.method for stage in stages if is_method_address(stage.method)]


def check_method_code(address: str, source: str, trusted: bool) -> None:
    """Raise UserError if a method's code that a run's files name does not exist, or lies outside
    the current folder and is not trusted: opening the run would execute it.
    """
    file = find_source_file(address)
    if file is None or not file.exists():
        raise UserError(
            f"{source} names the method {address}, which is not available from this folder: "
            "change to its folder"
        )
    if not trusted and _is_elsewhere(file):
        raise UserError(
            f"{source} names the method {address}, which is {file}: only code in the current "
            "folder is imported for a run that is opened; change to its folder, or give "
            "--trust-run (sample.py, evaluate.py, export.py) or trusted=True (rl.sample, "
            "rl.open_run) if you know that file"
        )


def _is_elsewhere(file: Path) -> bool:
    return not file.is_relative_to(Path.cwd().resolve())


def is_outside_current_folder(addresses: list[str]) -> bool:
    """Return whether the code at one of the addresses lies outside the current folder:
    `check_trusted` then needs --trust-run.
    """
    files = map(find_source_file, addresses)
    return any(file is not None and _is_elsewhere(file) for file in files)


def check_trusted(
    addresses: list[str], source: str, trusted: bool, kind: str = "reward"
) -> list[str]:
    """Return messages that name the code which the files of a run import. Raises UserError if the
    code lies elsewhere and is not trusted.
    """
    messages = []
    for address in addresses:
        file, named = find_source_file(address), f"{source} names the {kind} {address}"
        if file is None:
            raise UserError(
                f"{named}, which is not available from this folder: give --{kind}, or change to "
                "its folder"
            )
        if not trusted and _is_elsewhere(file):
            raise UserError(
                f"{named}, which is {file}: not in the current folder, and importing it runs it. "
                f"Give --trust-run if you know that file, or --{kind} with another one"
            )
        messages.append(f"{named}: importing {file}")
    return messages


@dataclass(frozen=True)
class SavedWeights:
    """Describe weights that can be sampled from: a folder, or the name of a base model.

    name: for display

    path: their folder; None for a base model

    run, stage, stage_index: the run and the stage that made them; None if no run is known

    run_folder, step: the folder of that run, and its step at which they were saved
    """

    name: str
    path: Path | None = None
    run: RunConfig | None = None
    stage: StageConfig | None = None
    stage_index: int | None = None
    run_folder: Path | None = None
    step: int | None = None

    @property
    def evaluation_seed(self) -> int:
        """Return the seed of the random streams of the run's held-out evaluation."""
        stage_seed = (
            0 if self.run is None else derive_seed(self.run.options.seed, self.stage_index or 0)
        )
        return derive_seed(stage_seed, "test")

    @property
    def prompt_settings(self) -> tuple[DataSettings, SamplingSettings]:
        """Return the settings of data and sampling of the stage, else defaults at temperature 1.

        `sampler_tp` and the settings of vLLM servers are reset to their defaults: that launch and
        those servers may no longer exist.
        """
        if self.stage is None:
            return DataSettings(), SamplingSettings(temperature=1.0)
        sampling = replace(self.stage.settings.sampling, sampler_tp=1)
        if sampling.sampler == "vllm":
            defaults = {f.name: f.default for f in fields(sampling) if f.name in _SERVER_SETTINGS}
            sampling = replace(sampling, sampler="auto", **defaults)
        return self.stage.settings.data, sampling

    def create_service(
        self, seed: int = 0, sampler_tp: int = 1, sampling: SamplingSettings | None = None
    ) -> ServiceClient:
        """Create a service with the run's precision and sampler, so that the same weights generate
        the same samples.

        `sampling`: settings of the sampler, by default those of `prompt_settings`. The run's
        settings of its launch (`sampler_ranks`, `sampler_tp`) do not apply: this service may have a
        single process. Raises UserError if a vLLM server of the settings cannot be used.
        """
        settings = (
            WorkerSettings() if self.run is None else collect_worker_settings(self.run.stages)
        )
        # only training needs recorded experts
        sampler = make_sampler_settings(sampling or self.prompt_settings[1], router_replay=False)
        settings = replace(settings, sampler_ranks=0, sampler=replace(sampler, tp=sampler_tp))
        return ServiceClient(seed=seed, settings=settings)

    def create_sampler(
        self, service: ServiceClient, *, prefers_servers: bool = False
    ) -> SamplingClient:
        """Load the weights into a sampling client. `prefers_servers`: see
        `ServiceClient.create_sampling_client`. Raises UserError if they cannot be loaded.
        """
        if self.path is None:
            return service.create_sampling_client(
                base_model=self.name, prefers_servers=prefers_servers
            )
        return service.create_sampling_client(str(self.path), prefers_servers=prefers_servers)


def open_weights(
    target: str, checkpoint: str | None = None, *, trusted: bool = False
) -> SavedWeights:
    """Open what a word on the command line names: a run's folder, a folder of weights, a hub name,
    or tiny:<preset>.

    `checkpoint`: of a run's folder, "best" or a name in checkpoints.jsonl; None: the newest
    checkpoint of the training. `trusted`: a run's method may be imported from another folder.
    Raises UserError if the name does not exist, or nothing is saved yet.
    """
    folder = Path(os.path.expanduser(target))
    if contains_run(folder):
        return _open_run_weights(folder, checkpoint, trusted)
    if checkpoint is not None:
        raise UserError(
            f"--checkpoint {checkpoint} chooses a checkpoint of a run, but {target} is no "
            "folder of a run"
        )
    if os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        return _open_folder(folder, trusted)
    if target.startswith("tiny:") or not _looks_like_path(target):
        return SavedWeights(target)
    expected = "a run's folder, a folder of weights, a hub name or tiny:<preset>"
    if target.startswith("tinker://"):
        raise UserError(
            f"{target} is a path of a Tinker server: give {expected} (serve.py keeps the weights "
            "below its --output-dir)"
        )
    raise UserError(f"no folder {target}{_list_siblings(folder)}: give {expected}")


def load_run(folder: Path, *, trusted: bool) -> RunConfig:
    """Return the settings of the run in a folder. Raises UserError if they name a method's code in
    another folder and it is not `trusted`.
    """
    config = locate_recorded_files(load_saved_config(folder))
    for stage in config["stages"]:
        if is_method_address(stage["method"]):
            check_method_code(stage["method"], str(folder / CONFIG), trusted)
    return load_resolved_config(config, METHODS, options=RunSettings, place=str(folder / CONFIG))


def _open_run_weights(folder: Path, checkpoint: str | None, trusted: bool) -> SavedWeights:
    run = load_run(folder, trusted=trusted)
    row = _select_checkpoint(folder, _list_checkpoints(folder), checkpoint)
    # by name below this folder, not by the recorded path: the run's folder may have been moved
    path = locate_checkpoint(folder, row)
    names = [stage.name for stage in run.stages]
    if row["stage"] not in names:
        raise UserError(
            f"{folder / CHECKPOINTS} says that {row['name']} belongs to stage {row['stage']!r}; "
            f"the run's stages are {', '.join(names)}"
        )
    index = names.index(row["stage"])
    return SavedWeights(
        f"{folder}: {row['name']}", path, run, run.stages[index], index, folder, row["batch"]
    )


def _list_checkpoints(folder: Path) -> list[CheckpointRow]:
    """Return the run's checkpoints on disk. If none exists, return those of its list, so that an
    error can name what is missing.
    """
    stages = read_stage_steps(load_saved_config(folder)["stages"])
    return complete_checkpoint_list(folder, stages)[0] or read_checkpoint_list(folder)


def _select_checkpoint(
    folder: Path, rows: list[CheckpointRow], checkpoint: str | None
) -> CheckpointRow:
    """Return the row of a checkpoint.

    Best weights were chosen by held-out problems, so they are returned only if they are requested.
    """
    if not rows:
        raise UserError(
            f"the run in {folder} has saved no weights yet: wait for its first checkpoint (its "
            "setting save_every)"
        )
    best = [row for row in rows if row.get("kind") == "best"]
    if checkpoint is None:
        return max(
            (row for row in rows if row not in best), key=lambda row: row["batch"], default=rows[-1]
        )
    if checkpoint == "best" and best:
        return best[-1]
    named = [row for row in rows if row["name"] == checkpoint]
    if not named:
        available = ", ".join([*(["best"] if best else []), *(row["name"] for row in rows)])
        raise UserError(f"the run in {folder} has no checkpoint {checkpoint!r}; it has {available}")
    return named[0]


def _open_folder(folder: Path, trusted: bool) -> SavedWeights:
    """Open a folder of weights. If it lies in a run's folder, the run's settings are attached."""
    if folder.name == "model" and (folder.parent / "state.json").is_file():
        folder = folder.parent  # state.json of this folder records the base model
    run_folder = folder.resolve().parent.parent
    if (folder / "state.json").is_file() and contains_run(run_folder):
        if any(row["name"] == folder.name for row in _list_checkpoints(run_folder)):
            return _open_run_weights(run_folder, folder.name, trusted)
    if not any(
        (folder / name).is_file() for name in ("state.json", "config.json", "adapter_config.json")
    ):
        available = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise UserError(f"{folder} contains neither a run nor weights (it has {available})")
    return SavedWeights(str(folder), folder)


def _looks_like_path(target: str) -> bool:
    """Return whether a word means a path, since hub names look like paths: it begins like a path,
    has several levels, or names a run.
    """
    return (
        target.startswith((".", "/", "~", "runs/"))
        or target.count("/") > 1
        or os.path.isdir(os.path.join("runs", target))
    )


def _list_siblings(folder: Path) -> str:
    if Path("runs", folder).is_dir():
        return f" (did you mean {Path('runs', folder)}?)"
    siblings = (
        sorted(str(path) for path in folder.parent.iterdir() if path.is_dir())
        if folder.parent.is_dir()
        else []
    )
    return f" ({folder.parent} has {', '.join(siblings[:8])})" if siblings else ""
