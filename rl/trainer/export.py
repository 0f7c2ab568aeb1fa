"""Export weights for other libraries, with a model card, or push them to a hub."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import torch

from rl.config import DataSettings, StageConfig, flatten_settings
from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.jsonl import METRICS_FILE, read_metrics
from rl.learner import ModelSpec, learner_checkpoint
from rl.models import (
    LoadedModel,
    check_weight_names_and_shapes,
    find_adapter_base,
    is_adapter,
    is_lora,
    merge_adapter,
)
from rl.reporting import load_saved_config
from rl.trainer.checkpoint_manager import CHECKPOINTS_FOLDER, WEIGHTS_FOLDER
from rl.trainer.initial_weights import find_previous_stage
from rl.trainer.saved_weights import SavedWeights, open_weights

_CARD = Path(__file__).with_name("model_card.jinja")
# the rows of the table of figures: metric and label
_FIGURES = {
    "test/env/all/correct": "held-out accuracy",
    "test/env/all/reward/total": "held-out reward",
    "test/greedy/all/correct": "held-out accuracy, greedy",
    "test/greedy/all/reward/total": "held-out reward, greedy",
    "test/rewards/accuracies": "held-out accuracy on pairs",
    "test/loss": "held-out loss (nats a token or pair)",
    "test/token_accuracy": "held-out token accuracy",
    "test/env/all/ac_tokens_per_turn": "held-out answer length (tokens)",
    "test/env/all/frac_truncated": "held-out answers cut off (share)",
    "env/all/correct": "accuracy in training",
    "env/all/reward/total": "reward in training",
    "optim/kl_ref_k3": "KL to the reference (nats a token)",
}


def render_model_card(weights: SavedWeights, description: str, base: str, *, adapter: bool) -> str:
    """Return the README.md of an export, with the hub's front matter.

    `description` describes the weights in words; `base` is the model from which the training began,
    or the weights of an earlier run or stage, whose base model is then named.
    """
    base = _find_base_model(weights) or base
    stages = () if weights.run is None else weights.run.stages
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["whetstone", *dict.fromkeys(stage.method for stage in stages)],
    }
    is_hub_name = base.count("/") == 1 and not base.startswith(("tiny:", "/", ".", "~"))
    if is_hub_name and not Path(base).exists():
        front["base_model"] = base
    training: dict[str, Any] = {}
    if weights.run_folder is not None and weights.stage_index is not None:
        training["stages"] = stages[: weights.stage_index + 1]
        training["origins"] = load_saved_config(weights.run_folder).get("origins", ())
        training["figures"] = _collect_figures(weights)
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {
        "json": json.dumps,
        "reward": _describe_reward,
        "changed_settings": _list_changed_settings,
    }
    return environment.from_string(_CARD.read_text(encoding="utf-8")).render(
        front=front,
        name="model" if weights.run is None else weights.run.name,
        description=description,
        base=base,
        weights=weights,
        adapter=adapter,
        **training,
    )


def _describe_reward(data: DataSettings) -> str:
    weighted = " + ".join(f"{weight:g} {name}" for name, weight in data.rewards)
    return weighted or data.reward or "none"


def _find_base_model(weights: SavedWeights) -> str | None:
    """Return the base model with which the training began, over earlier stages and runs; None
    without a run.
    """
    base = None
    while weights.run is not None and weights.stage_index is not None:
        index: int | None = weights.stage_index
        while index is not None:
            base = weights.run.stages[index].settings.model.base_model
            index = find_previous_stage(weights.run.stages, index)
        assert base is not None
        try:
            earlier = open_weights(base)
        except UserError:  # the earlier run was moved or needs trust
            return base
        if earlier.run_folder == weights.run_folder:
            return base
        weights = earlier
    return base


def _collect_figures(weights: SavedWeights) -> dict[str, list[float]]:
    """Return the values of the stage's main metrics, up to the step of the weights, by label."""
    assert weights.stage is not None and weights.run_folder is not None
    rows = [
        row
        for row in read_metrics(weights.run_folder / METRICS_FILE)
        if row.get("stage") == weights.stage.name and row["step"] <= (weights.step or 0)
    ]
    figures = {
        label: [
            row[name]
            for row in rows
            if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
        ]
        for name, label in _FIGURES.items()
    }
    return {label: values for label, values in figures.items() if values}


def _list_changed_settings(stage: StageConfig) -> dict[str, Any]:
    """Return the settings of a stage that are not defaults."""
    defaults = flatten_settings(type(stage.settings)())
    settings = flatten_settings(stage.settings)
    return {key: value for key, value in settings.items() if value != defaults.get(key)}


Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class ExportResult:
    """Describe an export: its folder and, in words, its contents (`description`).

    `untied` tells whether the head became a separate matrix, because the adapter changed the head
    and not the embedding.
    """

    folder: Path
    description: str
    untied: bool = False


def export_weights(
    target: str,
    out: Path,
    *,
    name: str | None = None,
    merged: bool = False,
    dtype: Dtype = "fp32",
    overwrite: bool = False,
    trusted: bool = False,
) -> ExportResult:
    """Write the weights of `target` (a run, a checkpoint, a folder of weights) to the folder `out`.

    `overwrite` replaces an earlier export in `out`, which is removed when the new one is complete.
    An adapter stays an adapter unless `merged` is set or its base cannot be loaded elsewhere (a
    tiny model built at run time, or a merged adapter). Merging and rounding are done in fp32.
    `trusted`: as for `open_weights`.
    Raises UserError if `out` is not empty or cannot be written to, or if nothing can be exported.
    """
    replaces_export = overwrite and _is_export(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not replaces_export:
        problem = "is not empty"
        remedy = "name another folder"
        if overwrite:
            problem = "is no earlier export, and --overwrite replaces only exports"
        elif _is_export(out):
            remedy += ", or replace the earlier export with --overwrite"
        raise UserError(
            f"{out} exists already and {problem}: an export is written to a new folder, {remedy}"
        )
    weights = open_weights(target, name, trusted=trusted)
    if replaces_export and weights.path is not None and weights.path.resolve() == out.resolve():
        raise UserError(f"{out} would be written from itself: name another folder")
    if weights.path is None:
        raise UserError(
            f"{target} is a base model, not trained by a run: name a run, a checkpoint or a folder "
            "of weights to export"
        )
    source = learner_checkpoint.model_folder(weights.path)
    loaded, _, spec = learner_checkpoint.load_for_sampling(str(weights.path), None)
    tied = bool(loaded.model.config.get_text_config().tie_word_embeddings)
    merge_reason = "" if not is_lora(loaded.model) or merged else _merge_reason(source)
    adapter = is_lora(loaded.model) and not merged and not merge_reason
    if not adapter and is_lora(loaded.model):
        loaded.model = merge_adapter(loaded.model)
    untied = tied and not loaded.model.config.get_text_config().tie_word_embeddings
    loaded.model = loaded.model.to(DTYPES[dtype])
    kind = f"a LoRA adapter of {spec.base_model}" if adapter else "all weights"
    exported = ExportResult(
        out,
        f"{kind}, {dtype}" + (f" (merged, since {merge_reason})" if merge_reason else ""),
        untied,
    )
    if not adapter:
        spec = ModelSpec(spec.base_model, value_head=spec.value_head)
        loaded.model.config.dtype = DTYPES[dtype]
    card_text = render_model_card(weights, exported.description, spec.base_model, adapter=adapter)
    try:
        if out.is_dir() and not replaces_export:
            out.rmdir()  # it is empty
        with checkpoint_folder.write_checkpoint(
            out,
            expected_bytes=learner_checkpoint.model_bytes(loaded.model),
            replace=replaces_export,
        ) as folder:
            _write_model_folder(loaded, spec, weights.path, folder)
        (out / "README.md").write_text(card_text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written to ({error}): name another folder") from error
    return exported


def check_hub_login() -> None:
    """Raise UserError if the hub accepts no token of this user, before work is done for a push."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except OSError as error:  # the hub's errors are OSErrors
        raise UserError(
            f"--push needs a login at the hub (hf auth login, or HF_TOKEN): {error}"
        ) from error


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload an export to the hub and return the address of the repository.

    The repository is created (private) if it does not exist. Raises UserError if the upload fails.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository_url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            folder_path=str(folder),
            repo_id=repository_url.repo_id,
            commit_message="Weights, exported by Whetstone",
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is written, but could not be pushed to {repository}: {error}"
        ) from error
    return str(repository_url)


def _is_export(folder: Path) -> bool:
    """Return whether a folder was written by `export_weights`, with its model card.

    Weights that a run or a server saved look similar and are no exports.
    """
    names = (checkpoint_folder.MANIFEST, "state.json", "README.md")
    return folder.resolve().parent.name not in (CHECKPOINTS_FOLDER, WEIGHTS_FOLDER) and all(
        (folder / name).is_file() for name in names
    )


def _merge_reason(source: Path) -> str:
    """Return why an adapter is not usable by itself; "" if its base can be loaded elsewhere."""
    base = find_adapter_base(source).name
    if base.startswith("tiny:"):
        return f"its base {base} is built at run time"
    if (Path(base).expanduser() / "adapter_config.json").is_file():
        return "its base is itself a merged adapter"
    return ""


def _write_model_folder(loaded: LoadedModel, spec: ModelSpec, weights: Path, folder: Path) -> None:
    """Write the model as a plain folder, with the state.json that a run needs to begin from it."""
    learner_checkpoint.write_model(loaded.model, loaded.tokenizer, folder)
    if not is_adapter(folder):
        # an untied head may leave a tensor that the architecture ties under another name
        check_weight_names_and_shapes(folder)
    # Remove PEFT's empty card; this project's card is written later, since it may be edited.
    (folder / "README.md").unlink(missing_ok=True)
    head = weights / learner_checkpoint.VALUE_FILE
    if head.is_file():
        shutil.copy(head, folder / head.name)
    state = {
        "format": learner_checkpoint.FORMAT,
        "spec": asdict(spec),
        "version": 0,
        "temperatures": [],
        "metadata": {},
        "user_metadata": {},
    }
    (folder / "state.json").write_text(json.dumps(state, indent=1))


def describe_export(result: ExportResult) -> str:
    """Return the console text about an export: folder, contents, and whether the head is untied."""
    text = f"{result.folder}: {result.description}"
    if result.untied:
        text += (
            "\nIts head is now a separate matrix: the adapter changed only the head, which the "
            "base ties to the embedding (train without --train-unembed to keep them tied)"
        )
    return text
