"""What a stage's policy is made from: a base model, or weights that were trained before, in this
run or another.

An adapter that was trained before is gone on with, or merged into its base first and trained
further under a fresh adapter (or in full). Which of the two is a setting, `lora_start`; what it
came to is said on the console and stands in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.learner import saving
from rl.models import LATER_PARTS, PARTS, adapter_base, is_adapter
from rl.run.beginnings import begins_after
from rl.run.reopen import Weights, open_weights
from rl.settings import ModelSettings, Run, StagePlan

ORIGINS = "origins"  # in config.json: what each stage that begins from trained weights began from
_SHAPE = ("lora_rank", "lora_alpha", *PARTS)


@dataclass(frozen=True)
class Origin:
    """`base`: the weights that are loaded, an adapter among them merged; `continued`: the
    checkpoint whose adapter goes on instead.
    """

    base: str
    continued: str | None = None


def origin_of(model: ModelSettings, previous: str | None) -> Origin:
    """Of a stage's policy. `previous`: the final checkpoint of the stage that it begins from; None:
    it begins from its base_model.
    """
    source = str(Path(previous) / "model") if previous is not None else model.base_model
    if is_adapter(source) and model.lora_start != "merge":
        folder = Path(source).expanduser()
        saved = _saved_shape(folder)
        if saved is not None and _same_shape(saved, model):
            return Origin(source, str(folder.parent if folder.name == "model" else folder))
    return Origin(source)


def goes_on(before: ModelSettings, model: ModelSettings) -> bool:
    """Whether a stage that begins from another's end goes on with its adapter."""
    return bool(before.lora_rank) and model.lora_start != "merge" and _same_shape(before, model)


def settled(run: Run, noted: Sequence[Mapping[str, Any]] = ()) -> tuple[Run, list[dict[str, Any]]]:
    """The run with each stage's weights found and the shape of its adapter known, and a note of
    each that begins from trained weights.

    `noted`: those notes of the run that is resumed: what it began from then it begins from now,
    whatever was saved there since. UserError where a stage asks for what its beginning has not.
    """
    earlier = [note for note in noted if note.get("asked") and Path(note["base_model"]).is_dir()]
    # a run that is resumed by its folder asks for what was found then, as config.json has it
    known = {
        word: note["base_model"] for note in earlier for word in (note["base_model"], note["asked"])
    }
    stages = list(run.stages)
    notes: list[dict[str, Any]] = []
    for index, stage in enumerate(run.stages):
        before = begins_after(run.stages, index)
        try:
            if before is None:
                model, note = _from_weights(stage, known)
            else:
                model, note = _from_stage(stage.settings.model, stages[before])
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
        if model.base_dtype in ("bf16", "4bit") and not model.lora_rank:
            raise UserError(
                f"stage {stage.name}: base_dtype {model.base_dtype} is of the frozen weights under a LoRA adapter, and all weights are "
                "trained: give --lora-rank, or leave base_dtype out"
            )
        stages[index] = replace(stage, settings=replace(stage.settings, model=model))
        notes += [{"stage": stage.name, **note}] if note else []
    # The model that is named for all stages is the one that the first begins from, in all of them.
    found = {note["asked"]: note["base_model"] for note in notes if note.get("asked")}
    for index, stage in enumerate(stages):
        model = stage.settings.model
        if model.base_model in found:
            model = replace(model, base_model=found[model.base_model])
            stages[index] = replace(stage, settings=replace(stage.settings, model=model))
    return replace(run, stages=tuple(stages)), notes


def check_apart(notes: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """UserError where a run is to begin from what lies in its own folder, which it is going to
    write to.
    """
    for note in notes:
        if note.get("asked") and Path(note["base_model"]).expanduser().resolve().is_relative_to(
            folder.resolve()
        ):
            raise UserError(
                f"the run would begin from {note['from']} and write into that very folder: give another --output-dir"
            )


def said(note: Mapping[str, Any]) -> str:
    """A note of `settled` as the console says it."""
    return f"stage {note['stage']} begins from {note['from']}: {note['how']}"


def weights_folder(word: str) -> str:
    """The folder of a model or an adapter that a word on the line means; a hub name and
    tiny:<preset> as they are.
    """
    if word.startswith("tiny:") or not Path(word).expanduser().is_dir():
        return word
    found = open_weights(word)
    return word if found.path is None else str(saving.model_folder(found.path))


def _from_weights(
    stage: StagePlan, known: Mapping[str, str]
) -> tuple[ModelSettings, dict[str, Any] | None]:
    model = stage.settings.model
    asked = model.base_model
    if asked.startswith("tiny:") or not (asked in known or Path(asked).expanduser().is_dir()):
        _needs_adapter(model, asked)
        return model, None
    found = open_weights(known.get(asked, asked))
    _check_policy(found, stage, asked)
    folder = (
        Path(known[asked])
        if asked in known
        else saving.model_folder(found.path)
        if found.path is not None
        else Path(asked)
    )
    model = replace(model, base_model=str(folder))
    note: dict[str, Any] = {"asked": asked, "base_model": str(folder), "from": found.name}
    if not is_adapter(folder):
        _needs_adapter(model, asked)
        return model, ({**note, "how": "all of its weights"} if found.stage is not None else None)
    saved = _saved_shape(folder.expanduser())
    if saved is None:
        if model.lora_start == "continue":
            raise UserError(
                f"the adapter in {folder} was not saved by a run, so it is not known how to go on with it: --lora-start merge merges it "
                "into its base"
            )
        adapter_base(folder.expanduser())
        return replace(model, lora_start="merge"), {
            **note,
            "how": f"its LoRA adapter {_merged(model)}",
        }
    model, how = _under(model, saved)
    return model, {**note, "how": how}


def _from_stage(
    model: ModelSettings, before: StagePlan
) -> tuple[ModelSettings, dict[str, Any] | None]:
    earlier = before.settings.model
    if not earlier.lora_rank:
        _needs_adapter(model, f"stage {before.name}")
        return model, None
    model, how = _under(model, earlier)
    return model, {"from": f"stage {before.name}", "how": how}


def _under(model: ModelSettings, saved: ModelSettings) -> tuple[ModelSettings, str]:
    """(the settings with the adapter's shape where it goes on, what becomes of it in words)."""
    fitting = _same_shape(saved, model)
    if model.lora_start == "merge" or (
        model.lora_start == "auto" and model.lora_rank and not fitting
    ):
        return model, f"its LoRA adapter of rank {saved.lora_rank} {_merged(model)}"
    if model.lora_rank and not fitting:
        changed = [
            f"{name} {getattr(saved, name)} -> {getattr(model, name)}"
            for name in _SHAPE
            if not _equal(saved, model, name)
        ]
        raise UserError(
            f"lora_start continue goes on with a LoRA adapter as it is, but another is asked for: {', '.join(changed)}. Leave out what "
            "differs, or set lora_start to merge, which merges it into its base and trains a fresh one on that"
        )
    return replace(
        model, **{name: getattr(saved, name) for name in _SHAPE}
    ), f"its LoRA adapter of rank {saved.lora_rank} goes on"


def _merged(model: ModelSettings) -> str:
    then = (
        f"a fresh one of rank {model.lora_rank} is trained"
        if model.lora_rank
        else "all weights are trained"
    )
    return f"is merged into its base, in fp32, and {then}"


def _needs_adapter(model: ModelSettings, what: str) -> None:
    if model.lora_start != "auto":
        raise UserError(
            f"lora_start {model.lora_start} has no effect: {what} has no LoRA adapter; leave lora_start out"
        )


def _check_policy(found: Weights, stage: StagePlan, asked: str) -> None:
    if found.stage is not None and found.stage.method == "reward_model" != stage.method:
        raise UserError(
            f"{asked} was trained as a reward model, which is a judge and answers nothing: give base_model "
            f"{found.stage.settings.model.base_model}, what it began from, or use it as --reward-model"
        )


def _saved_shape(folder: Path) -> ModelSettings | None:
    """The shape of the adapter of a run's checkpoint (or of one that was exported); None of
    anybody's else.
    """
    path = (folder.parent if folder.name == "model" else folder) / "state.json"
    if not path.is_file():
        return None
    try:
        lora = json.loads(path.read_text(encoding="utf-8"))["spec"]["lora"]
        lora = {**LATER_PARTS, **lora}
        return ModelSettings(
            lora_rank=lora["rank"], lora_alpha=lora["alpha"], **{name: lora[name] for name in PARTS}
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not say what adapter lies beside it ({error!r}): it was changed or damaged"
        ) from error


def _same_shape(one: ModelSettings, other: ModelSettings) -> bool:
    return all(_equal(one, other, name) for name in _SHAPE)


def _equal(one: ModelSettings, other: ModelSettings, name: str) -> bool:
    if name == "lora_alpha":  # by default the rank
        return (one.lora_alpha or one.lora_rank) == (other.lora_alpha or other.lora_rank)
    return bool(getattr(one, name) == getattr(other, name))
