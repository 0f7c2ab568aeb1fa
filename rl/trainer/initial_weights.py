"""Choose the initial weights of a stage's policy: a base model, or weights trained before, by this
run or another.

A stage begins from its base model or from an earlier stage (`find_previous_stage`). A trained
adapter is either continued, or merged into its base first, and a fresh adapter (or all weights) are
trained on the result. The setting `lora_start` chooses. The choice is printed on the console and
stored in config.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rl.algorithms import METHODS, ModelRequests
from rl.config import ModelSettings, RunConfig, StageConfig, nearest_name
from rl.data import GENERATED_REWARDS
from rl.errors import UserError
from rl.learner import learner_checkpoint
from rl.models import (
    find_adapter_base,
    is_adapter,
    is_head_tied,
    load_skeleton,
    read_base_name,
)
from rl.trainer.saved_weights import open_weights
from rl.types import LoraConfig

ORIGINS_KEY = (
    "origins"  # key in config.json: the source of each stage that begins from trained weights
)
# tiny models learn little below this rate: the recipes train them with 3e-4 to 3e-3
_TINY_MODEL_RATE = 1e-4
_DATA_SOURCES = ("dataset", "more_datasets", "eval_dataset", "more_eval_datasets")


def _continuable_stages(stages: Sequence[StageConfig], index: int) -> list[int]:
    """Return the indices of the stages from which a stage may continue.

    A policy cannot continue from a reward model, which scores responses and generates none.
    """
    is_reward_model = stages[index].method == "reward_model"
    return [
        i
        for i, stage in enumerate(stages[:index])
        if is_reward_model or stage.method != "reward_model"
    ]


def find_previous_stage(stages: Sequence[StageConfig], index: int) -> int | None:
    """Return the index of the stage from which a stage takes its initial weights.

    It is the stage named as base_model, else the previous stage; a policy skips reward models. None
    if the stage begins from a base model. That holds for the first stage, and for a stage that
    names a base model different from those of the stages before it. A model named for all stages
    (at a recipe's top level or on the command line) is the base model of the first.
    """
    default, earlier = ModelSettings().base_model, [stage.name for stage in stages[:index]]
    base_model = stages[index].settings.model.base_model
    if base_model in earlier:
        return earlier.index(base_model)
    continuable = _continuable_stages(stages, index)
    earlier_models = [stages[i].settings.model.base_model for i in continuable]
    named_models = [base for base in earlier_models if base != default and base not in earlier]
    if continuable and base_model in (default, *named_models[-1:]):
        return continuable[-1]
    return None


def check_initial_weights(stages: Sequence[StageConfig]) -> None:
    """Check the weights that the stages need.

    Raises UserError if weights of a method (a teacher, a reference) are neither an earlier stage's
    nor existing weights, or if a policy would have to begin from a reward model.
    """
    for i, plan in enumerate(stages):
        base = plan.settings.model.base_model
        previous_base = stages[i - 1].settings.model.base_model
        is_default = base == ModelSettings().base_model != previous_base
        if i and is_default and not _continuable_stages(stages, i):
            raise UserError(
                f"stage {plan.name} comes after a reward model, which scores responses and cannot "
                f"be a policy: name the model to begin from, base_model: {previous_base} to begin "
                "from the reward model's base model"
            )
        earlier = [stage.name for stage in stages[:i]]
        _check_stage_name(base, plan, earlier)
        for target in ModelRequests(METHODS.create(plan)).weights:
            if target not in earlier:
                _check_stage_name(target, plan, earlier)
                open_weights(target)


def describe_random_weights(stages: Sequence[StageConfig]) -> list[str]:
    """Return a line for each stage that learns from the rewards of a model with random weights."""
    lines = []
    for i, plan in enumerate(stages):
        base = plan.settings.model.base_model
        needs_reward = METHODS.create(plan).needs_reward
        begins_anew = find_previous_stage(stages, i) is None
        if not (base.startswith("tiny:") and needs_reward and begins_anew):
            continue
        rate = getattr(plan.settings, "learning_rate", None)  # a user's method may have none
        advice = "train it with sft first (docs/models.md#tiny-models)"
        if rate is not None and rate < _TINY_MODEL_RATE:
            advice += f", and with --learning-rate 1e-3 instead of {rate:g}"
        lines.append(
            f"stage {plan.name}: the weights of {base} are random, so hardly any answer earns a "
            f"reward; {advice}"
        )
    return lines


def _check_stage_name(target: str, plan: StageConfig, earlier: Sequence[str]) -> None:
    """Raise UserError if `target` is a single word close to the name of an earlier stage.

    Otherwise the typing error would surface late, as a model that the hub does not have.
    """
    if target in earlier or target.startswith("tiny:") or "/" in target:
        return
    if Path(target).expanduser().exists():
        return
    if (near := nearest_name(target, earlier)) is not None:
        raise UserError(
            f"stage {plan.name}: neither an earlier stage nor a folder is called {target}; did you "
            f"mean {near}?"
        )


def find_initial_weights(model: ModelSettings, previous: str | None) -> tuple[str, str | None]:
    """Return (base, continued checkpoint) of a stage's policy. `base`: the weights to load, with a
    merged adapter if any. The second, unless None: the checkpoint whose adapter is continued.

    `previous`: the final checkpoint of the stage that it begins from; None: it begins from its
    base_model.
    """
    source = str(Path(previous) / "model") if previous is not None else model.base_model
    if is_adapter(source) and model.lora_start != "merge":
        folder = Path(source).expanduser()
        if _has_same_shape(_read_lora(folder), model):
            return source, str(folder.parent if folder.name == "model" else folder)
    return source, None


def find_base_model(stages: Sequence[StageConfig], index: int) -> tuple[str, str | None]:
    """Return (base model, tokenizer) of a stage's policy, following the stages that it begins
    from.
    """
    model, before = stages[index].settings.model, find_previous_stage(stages, index)
    if before is None:
        return model.base_model, model.tokenizer
    base, tokenizer = find_base_model(stages, before)
    if stages[before].settings.model.lora_rank:
        return base, tokenizer
    return base, model.tokenizer or tokenizer


def continues_adapter(stages: Sequence[StageConfig], index: int) -> bool:
    """Return whether a stage trains an adapter further that an earlier stage or another run
    trained.
    """
    model, before = stages[index].settings.model, find_previous_stage(stages, index)
    if before is None:
        return find_initial_weights(model, None)[1] is not None
    saved = stages[before].settings.model.make_lora()
    return model.lora_start != "merge" and _has_same_shape(saved, model)


def find_adapter_root(stages: Sequence[StageConfig], index: int) -> int:
    """Return the index of the stage that began the adapter (or the full weights) which a stage
    trains: the stage itself, unless it continues an earlier stage's adapter.
    """
    before = find_previous_stage(stages, index)
    if before is None or not continues_adapter(stages, index):
        return index
    return find_adapter_root(stages, before)


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
    # a resumed stage that does not set train_unembed has the recorded value
    heads = {saved["name"]: saved["settings"] for saved in recorded.get("stages", ())}
    stages = [
        stage.with_section("model", train_unembed=heads.get(stage.name, {}).get("train_unembed"))
        if stage.settings.model.train_unembed is None
        else stage
        for stage in run.stages
    ]
    run = replace(run, stages=tuple(stages))
    # a run resumed by its folder requests the paths resolved before, as config.json has them
    known = {
        word: note["base_model"] for note in earlier for word in (note["base_model"], note["asked"])
    }
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
        stages[index] = replace(stage, settings=replace(stage.settings, model=model))
        notes += [{"stage": stage.name, **note}] if note else []
        # The model named for all stages is the model that the first stage begins from, in all
        # stages.
        paths = {note["asked"]: note["base_model"] for note in notes if note.get("asked")}
        for i, resolved in enumerate(stages):
            if (path := paths.get(resolved.settings.model.base_model)) is not None:
                stages[i] = resolved.with_section("model", base_model=path)
        if model.train_unembed is None:
            tied = bool(model.lora_rank) and _begins_with_tied_head(stages, index)
            stages[index] = stages[index].with_section("model", train_unembed=not tied)
    return replace(run, stages=tuple(stages)), notes


def _begins_with_tied_head(stages: Sequence[StageConfig], index: int) -> bool:
    """Return whether the output head of a stage's initial weights is tied to the embedding.

    False if the base model cannot be read; whatever loads it reports that.
    """
    model, before = stages[index].settings.model, find_previous_stage(stages, index)
    if before is None:
        if continues_adapter(stages, index):
            base = find_adapter_base(Path(model.base_model))
            return _has_tied_head(base.name, model.tokenizer or base.tokenizer)
        return _has_tied_head(model.base_model, model.tokenizer)
    earlier = stages[before].settings.model
    # a merged adapter of the head makes it a separate matrix; a continued one has its old base
    is_separate = (
        earlier.lora_rank and earlier.train_unembed and not continues_adapter(stages, index)
    )
    return not is_separate and _begins_with_tied_head(stages, before)


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
        and _begins_with_tied_head(run.stages, index)
    ]


def check_outside_run_folder(
    run: RunConfig, notes: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Raise UserError if a run would read weights, data or recorded decisions in its own folder,
    which it is going to write to. A resumed run may read what it has written.
    """
    sources = {f"begin from {n['from']}": n["base_model"] for n in notes if n.get("asked")}
    if (replay := run.options.replay) is not None:
        sources[f"replay {replay}"] = replay
    if run.options.overwrite:
        sources |= {f"read {path}": path for path in _list_input_paths(run.stages)}
    for action, source in sources.items():
        if Path(os.path.expanduser(source)).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"the run would {action} and write into the same folder: give another --output-dir"
            )


def _list_input_paths(stages: Sequence[StageConfig]) -> list[str]:
    """Return the existing files and folders that the stages read: data, tokenizers, and the models
    of methods. Names of earlier stages and of generated data are no paths, even if a folder has
    such a name.
    """
    paths: list[str] = []
    for i, stage in enumerate(stages):
        requests, settings = ModelRequests(METHODS.create(stage)), stage.settings
        words = [*requests.weights, requests.critic_model, settings.model.tokenizer]
        for name in _DATA_SOURCES:
            value = getattr(settings.data, name, None) or ()
            sets = [value] if isinstance(value, str) else value
            words += [word for word in sets if word.partition(":")[0] not in GENERATED_REWARDS]
        earlier = [other.name for other in stages[:i]]
        for word in words:
            if word and word not in earlier:
                # of a listed data set and a file, NAME:FILE, also the file
                parts = (word, word.partition(":")[2])
                paths += filter(os.path.exists, map(os.path.expanduser, parts))
    return paths


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
    if weights.stage is not None and weights.stage.method == "reward_model" != stage.method:
        raise UserError(
            f"{requested} was trained as a reward model, which scores answers and generates none: "
            f"give base_model {weights.stage.settings.model.base_model}, which it began from, or "
            "use it as --reward-model"
        )
    folder = Path(known.get(requested, requested))
    if requested not in known and weights.path is not None:
        folder = learner_checkpoint.model_folder(weights.path)
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
    then = "all weights are trained"
    if model.lora_rank:
        then = f"a fresh adapter of rank {model.lora_rank} is trained"
    return f"is merged into its base, in fp32, and {then}"


def _check_has_adapter(model: ModelSettings, source: str) -> None:
    if model.lora_start != "auto":
        raise UserError(
            f"lora_start {model.lora_start} has no effect: {source} has no LoRA adapter; leave "
            "lora_start out"
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
