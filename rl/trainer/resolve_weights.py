"""Choose the initial weights of a stage's policy: a base model, or weights trained before, by this
run or another.

A trained adapter is either continued, or merged into its base first, and a fresh adapter (or all
weights) are trained on the result. The setting `lora_start` chooses. The choice is printed on the
console and stored in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rl.config import ModelSettings, RunConfig, StageConfig
from rl.errors import UserError
from rl.learner import learner_checkpoint
from rl.models import (
    find_adapter_base,
    is_adapter,
    is_head_tied,
    load_skeleton,
    read_base_name,
)
from rl.trainer.initial_weights import find_previous_stage
from rl.trainer.saved_weights import SavedWeights, open_weights
from rl.types import LoraConfig

ORIGINS_KEY = (
    "origins"  # key in config.json: the source of each stage that begins from trained weights
)


@dataclass(frozen=True)
class InitialWeights:
    """Name the initial weights.

    `base`: the weights to load, with a merged adapter if any; `continued_checkpoint`: the
    checkpoint with the adapter to continue instead.
    """

    base: str
    continued_checkpoint: str | None = None


def find_initial_weights(model: ModelSettings, previous: str | None) -> InitialWeights:
    """Return the initial weights of a stage's policy.

    `previous`: the final checkpoint of the stage that it begins from; None: it begins from its
    base_model.
    """
    source = str(Path(previous) / "model") if previous is not None else model.base_model
    if is_adapter(source) and model.lora_start != "merge":
        folder = Path(source).expanduser()
        if _has_same_shape(_read_lora(folder), model):
            return InitialWeights(source, str(folder.parent if folder.name == "model" else folder))
    return InitialWeights(source)


def continues_adapter(previous: ModelSettings, model: ModelSettings) -> bool:
    """Return whether a stage that begins from another stage's end continues its adapter."""
    return model.lora_start != "merge" and _has_same_shape(previous.make_lora(), model)


def resolve_initial_weights(
    run: RunConfig, recorded: Mapping[str, Any] | None = None
) -> tuple[RunConfig, list[dict[str, Any]]]:
    """Resolve each stage's weights and the shape of its adapter. Return (run, notes): a note for
    each stage that begins from trained weights.

    `recorded`: the config.json of the run that is resumed. Its stages begin from the same weights
    as before, whatever was saved there since, and their adapters hold the same matrices. Raises
    UserError if a stage requests settings that its initial weights do not fit.
    """
    recorded = recorded or {}
    earlier = [
        note
        for note in recorded.get(ORIGINS_KEY, ())
        if note.get("asked") and Path(note["base_model"]).is_dir()
    ]
    run = _restore_head_settings(run, recorded)
    # a run resumed by its folder requests the paths resolved before, as config.json has them
    known = {
        word: note["base_model"] for note in earlier for word in (note["base_model"], note["asked"])
    }
    stages = list(run.stages)
    notes: list[dict[str, Any]] = []
    for index, stage in enumerate(run.stages):
        predecessor = find_previous_stage(run.stages, index)
        try:
            if predecessor is None:
                model, note = _resolve_base_model(stage, known)
            else:
                model, note = _resolve_previous_stage(stage.settings.model, stages[predecessor])
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
        if model.base_dtype in ("bf16", "4bit") and not model.lora_rank:
            raise UserError(
                f"stage {stage.name}: base_dtype {model.base_dtype} applies to the frozen "
                "weights under a LoRA adapter, but all weights are trained: give --lora-rank, "
                "or leave base_dtype out"
            )
        if model.train_unembed is None:
            tied = bool(model.lora_rank) and _begins_with_tied_head(
                run.stages, stages, index, model
            )
            model = replace(model, train_unembed=not tied)
        stages[index] = replace(stage, settings=replace(stage.settings, model=model))
        notes += [{"stage": stage.name, **note}] if note else []
    # The model named for all stages is the model that the first stage begins from, in all stages.
    resolved_paths = {note["asked"]: note["base_model"] for note in notes if note.get("asked")}
    for index, stage in enumerate(stages):
        model = stage.settings.model
        if model.base_model in resolved_paths:
            model = replace(model, base_model=resolved_paths[model.base_model])
            stages[index] = replace(stage, settings=replace(stage.settings, model=model))
    return replace(run, stages=tuple(stages)), notes


def _restore_head_settings(run: RunConfig, recorded: Mapping[str, Any]) -> RunConfig:
    """Return `run` with the recorded `train_unembed` in each stage that does not set it."""
    saved = {stage["name"]: stage["settings"] for stage in recorded.get("stages", ())}
    stages = []
    for stage in run.stages:
        model = stage.settings.model
        if model.train_unembed is None:
            head = saved.get(stage.name, {}).get("train_unembed")
            model = replace(model, train_unembed=head)
        stages.append(replace(stage, settings=replace(stage.settings, model=model)))
    return replace(run, stages=tuple(stages))


def _begins_with_tied_head(
    requested: Sequence[StageConfig],
    stages: Sequence[StageConfig],
    index: int,
    model: ModelSettings,
) -> bool:
    """Return whether the output head of a stage's initial weights is tied to the embedding.

    `requested`: the stages as the user wrote them; `stages`: with resolved models before `index`.
    False if the base model cannot be read; whatever loads it reports that.
    """
    before = find_previous_stage(requested, index)
    if before is None:
        if find_initial_weights(model, None).continued_checkpoint is not None:
            base = find_adapter_base(Path(model.base_model))
            return _has_tied_head(base.name, model.tokenizer or base.tokenizer)
        return _has_tied_head(model.base_model, model.tokenizer)
    earlier = stages[before].settings.model
    # a merged adapter of the head makes it a separate matrix; a continued one has its old base
    is_separate = (
        earlier.lora_rank and earlier.train_unembed and not continues_adapter(earlier, model)
    )
    return not is_separate and _begins_with_tied_head(requested, stages, before, earlier)


@cache
def _has_tied_head(base_model: str, tokenizer: str | None) -> bool:
    try:
        with torch.device("meta"):
            return is_head_tied(load_skeleton(base_model, tokenizer=tokenizer).model)
    except (ValueError, OSError):
        return False


def describe_tied_heads(run: RunConfig) -> list[str]:
    """Return a line for each stage of a resolved run whose adapter holds a head that its model ties
    to the embedding.
    """
    return [
        f"stage {stage.name}: the adapter holds the output head, which "
        f"{stage.settings.model.base_model} ties to its embedding: vLLM cannot serve this adapter, "
        "only merged weights (export.py RUN OUT --merge); --no-train-unembed leaves the head out"
        for index, stage in enumerate(run.stages)
        if (model := stage.settings.model).lora_rank
        and model.train_unembed
        and _begins_with_tied_head(run.stages, run.stages, index, model)
    ]


def check_outside_run_folder(notes: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Raise UserError if a run would begin from weights in its own folder, which it is going to
    write to.
    """
    for note in notes:
        if note.get("asked") and Path(note["base_model"]).expanduser().resolve().is_relative_to(
            folder.resolve()
        ):
            raise UserError(
                f"the run would begin from {note['from']} and write into the same folder: give "
                "another --output-dir"
            )


def format_origin(note: Mapping[str, Any]) -> str:
    """Return the console line of a note of `resolve_initial_weights`."""
    return f"stage {note['stage']} begins from {note['from']}: {note['how']}"


def find_weights_folder(word: str) -> str:
    """Return the folder of the model or adapter that `word` refers to. Return a hub name and
    tiny:<preset> unchanged.
    """
    if word.startswith("tiny:") or not Path(word).expanduser().is_dir():
        return word
    weights = open_weights(word)
    return word if weights.path is None else str(learner_checkpoint.model_folder(weights.path))


def _resolve_base_model(
    stage: StageConfig, known: Mapping[str, str]
) -> tuple[ModelSettings, dict[str, Any] | None]:
    model = stage.settings.model
    requested = model.base_model
    if requested.startswith("tiny:") or not (
        requested in known or Path(requested).expanduser().is_dir()
    ):
        _check_has_adapter(model, requested)
        return model, None
    weights = open_weights(known.get(requested, requested))
    _check_not_reward_model(weights, stage, requested)
    folder = (
        Path(known[requested])
        if requested in known
        else learner_checkpoint.model_folder(weights.path)
        if weights.path is not None
        else Path(requested)
    )
    model = replace(model, base_model=str(folder))
    note: dict[str, Any] = {"asked": requested, "base_model": str(folder), "from": weights.name}
    if not is_adapter(folder):
        _check_has_adapter(model, requested)
        return model, ({**note, "how": "all of its weights"} if weights.stage is not None else None)
    saved = _read_lora(folder.expanduser())
    if saved is None:
        if model.lora_start == "continue":
            raise UserError(
                f"the adapter in {folder} was not saved by a run, so its shape is not known and "
                "it cannot be continued: --lora-start merge merges it into its base"
            )
        read_base_name(folder.expanduser())
        return replace(model, lora_start="merge"), {
            **note,
            "how": f"its LoRA adapter {_describe_merge(model)}",
        }
    model, description = _apply_lora(model, saved)
    return model, {**note, "how": description}


def _resolve_previous_stage(
    model: ModelSettings, previous: StageConfig
) -> tuple[ModelSettings, dict[str, Any] | None]:
    saved = previous.settings.model.make_lora()
    if saved is None:
        _check_has_adapter(model, f"stage {previous.name}")
        return model, None
    model, description = _apply_lora(model, saved)
    return model, {"from": f"stage {previous.name}", "how": description}


def _apply_lora(model: ModelSettings, saved: LoraConfig) -> tuple[ModelSettings, str]:
    """Return (settings, description): the settings request the saved adapter if it is continued,
    and the description says what happens to the adapter.
    """
    requested = model.make_lora()
    changed = [] if requested is None else _diff_lora(saved, requested)
    if model.lora_start == "merge" or (model.lora_start == "auto" and changed):
        return model, f"its LoRA adapter of rank {saved.rank} {_describe_merge(model)}"
    if changed:
        raise UserError(
            "lora_start continue continues a LoRA adapter unchanged, but other settings were "
            f"requested: {', '.join(changed)}. Leave out what differs, or set lora_start to "
            "merge, which merges it into its base and trains a fresh adapter on that"
        )
    return model.with_lora(saved), f"its LoRA adapter of rank {saved.rank} is continued"


def _describe_merge(model: ModelSettings) -> str:
    then = (
        f"a fresh adapter of rank {model.lora_rank} is trained"
        if model.lora_rank
        else "all weights are trained"
    )
    return f"is merged into its base, in fp32, and {then}"


def _check_has_adapter(model: ModelSettings, source: str) -> None:
    if model.lora_start != "auto":
        raise UserError(
            f"lora_start {model.lora_start} has no effect: {source} has no LoRA adapter; leave "
            "lora_start out"
        )


def _check_not_reward_model(weights: SavedWeights, stage: StageConfig, requested: str) -> None:
    if weights.stage is not None and weights.stage.method == "reward_model" != stage.method:
        raise UserError(
            f"{requested} was trained as a reward model, which scores answers and generates none: "
            f"give base_model {weights.stage.settings.model.base_model}, which it began from, or "
            "use it as --reward-model"
        )


def _read_lora(folder: Path) -> LoraConfig | None:
    """Return the settings of the adapter of a run's checkpoint (or of an exported checkpoint). None
    if no run saved it.
    """
    path = (folder.parent if folder.name == "model" else folder) / "state.json"
    if not path.is_file():
        return None
    try:
        lora = json.loads(path.read_text(encoding="utf-8"))["spec"]["lora"]
        return LoraConfig(lora.pop("rank"), **lora)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} does not describe the adapter next to it ({error!r}): it was changed or "
            "damaged"
        ) from error


def _has_same_shape(saved: LoraConfig | None, model: ModelSettings) -> bool:
    """Return whether the settings request the saved adapter."""
    requested = model.make_lora()
    return saved is not None and requested is not None and not _diff_lora(saved, requested)


def _diff_lora(saved: LoraConfig, requested: LoraConfig) -> list[str]:
    """Return "setting saved -> requested" for each setting of the adapter that differs."""
    expected, actual = asdict(saved), asdict(requested)
    if saved.effective_alpha == requested.effective_alpha:
        actual["alpha"] = saved.alpha
    if requested.train_unembed is None:
        actual["train_unembed"] = saved.train_unembed
    names = {"rank": "lora_rank", "alpha": "lora_alpha"}
    return [
        f"{names.get(name, name)} {expected[name]} -> {actual[name]}"
        for name in expected
        if name != "seed" and actual[name] != expected[name]
    ]
