"""Export weights for other libraries, with a model card, or push them to a hub."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rl.config import StageConfig, flatten_settings
from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.jsonl import METRICS_FILE, read_metrics
from rl.learner import ModelSpec, learner_checkpoint
from rl.models import (
    LoadedModel,
    check_model_weights,
    find_adapter_base,
    is_adapter,
    is_lora,
    merge_adapter,
)
from rl.reporting import load_saved_config
from rl.trainer.checkpoint_manager import CHECKPOINTS_FOLDER, WEIGHTS_FOLDER
from rl.trainer.initial_weights import find_previous_stage
from rl.trainer.saved_weights import SavedWeights, open_weights

_MODEL_USAGE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

With vLLM: `vllm serve {name}`. Only Whetstone reads `state.json` and `manifest.json`."""
_ADAPTER_USAGE = """```python
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```

If the base ties head and embedding in a single matrix and the head is adapted, PEFT's
`merge_and_unload` changes the embedding too. Merge the weights with `export.py --merge`, which
separates the two. vLLM needs merged weights as well: its LoRA does not support the head."""
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
    name = weights.run.name if weights.run is not None else "model"
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
    }
    front["tags"] = ["whetstone", *_list_methods(weights)]
    is_hub_name = base.count("/") == 1 and not base.startswith(("tiny:", "/", ".", "~"))
    if is_hub_name and not Path(base).exists():
        front["base_model"] = base
    random_weights = ", a small model with random weights" if base.startswith("tiny:") else ""
    parts = [
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items()) + "---",
        f"# {name}",
    ]
    parts.append(
        f"{description[0].upper()}{description[1:]}. Trained by Whetstone from `{base}`"
        f"{random_weights}; saved as `{weights.name}`{_describe_step(weights)}."
    )
    parts.append(
        "## Use\n\n" + (_ADAPTER_USAGE if adapter else _MODEL_USAGE).format(name="THIS_FOLDER")
    )
    if weights.run_folder is not None and weights.run is not None:
        parts += _training_sections(weights)
    return "\n\n".join(parts) + "\n"


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


def _list_methods(weights: SavedWeights) -> list[str]:
    """Return the methods of the run's stages, each once; [] without a run."""
    return (
        []
        if weights.run is None
        else list(dict.fromkeys(stage.method for stage in weights.run.stages))
    )


def _describe_step(weights: SavedWeights) -> str:
    """Return the step and stage of the weights as words; "" without a stage."""
    return (
        "" if weights.stage is None else f", after step {weights.step} (stage {weights.stage.name})"
    )


def _training_sections(weights: SavedWeights) -> list[str]:
    """Return the sections about the training of the weights.

    They list the data of each stage up to the weights' stage, the held-out metrics, and every
    setting that differs from its default.
    """
    assert (
        weights.run is not None
        and weights.run_folder is not None
        and weights.stage_index is not None
    )
    stages = weights.run.stages[: weights.stage_index + 1]
    rows = read_metrics(weights.run_folder / METRICS_FILE)
    lines = []
    for stage in stages:
        data = stage.settings.data
        reward = (
            " + ".join(f"{weight:g} {name}" for name, weight in data.rewards)
            or data.reward
            or "none"
        )
        lines.append(
            f"| {stage.name} | {stage.method} | {stage.settings.loop.steps} | `{data.dataset}` | "
            f"{reward} |"
        )
    table = "| stage | method | steps | data | reward |\n|---|---|---|---|---|\n" + "\n".join(lines)
    config = load_saved_config(weights.run_folder)
    origins = "".join(
        f"\n- {note['stage']} began from {note['from']}: {note['how']}"
        for note in config.get("origins", ())
    )
    sections = [
        f"## Training\n\nSeed {weights.run.options.seed}.\n\n{table}"
        + (f"\n{origins}" if origins else "")
    ]
    if figures := _metrics_table(rows, weights):
        sections.append("## Figures\n\n" + figures)
    sections.append(
        "## Settings\n\n```yaml\nstages:\n"
        + "\n".join(_format_recipe(stage) for stage in stages)
        + "\n```"
    )
    return sections


def _metrics_table(rows: list[dict[str, Any]], weights: SavedWeights) -> str:
    """Return a table of the stage's main metrics: the first value and the value when saved."""
    assert weights.stage is not None
    stage_rows = [
        row
        for row in rows
        if row.get("stage") == weights.stage.name and row["step"] <= (weights.step or 0)
    ]
    lines = []
    for name, label in _FIGURES.items():
        values = [
            row[name]
            for row in stage_rows
            if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
        ]
        if values:
            lines.append(f"| {label} | {values[0]:.4g} | {values[-1]:.4g} |")
    return "| figure | first | last |\n|---|---|---|\n" + "\n".join(lines) if lines else ""


def _format_recipe(stage: StageConfig) -> str:
    """Return a stage as an entry of a YAML recipe, with the settings that are not defaults."""
    settings = flatten_settings(stage.settings)
    defaults = flatten_settings(type(stage.settings)())
    changed = {key: value for key, value in settings.items() if value != defaults.get(key)}
    lines = [
        f"- method: {stage.method}",
        f"  name: {stage.name}",
        *(f"  {key}: {json.dumps(value)}" for key, value in changed.items()),
    ]
    return "\n".join(lines)


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
        problem = (
            "is no earlier export, and --overwrite replaces only exports"
            if overwrite
            else "is not empty"
        )
        remedy = (
            "name another folder"
            if overwrite or not _is_export(out)
            else "name another folder, or replace the earlier export with --overwrite"
        )
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
    try:
        if out.is_dir() and not replaces_export:
            out.rmdir()  # it is empty
        with checkpoint_folder.write_checkpoint(
            out,
            expected_bytes=learner_checkpoint.model_bytes(loaded.model),
            replace=replaces_export,
        ) as folder:
            _write_model_folder(loaded, spec, weights.path, folder)
        card_text = render_model_card(
            weights, exported.description, spec.base_model, adapter=adapter
        )
        (out / "README.md").write_text(card_text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written to ({error}): name another folder") from error
    return exported


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload an export to the hub and return the address of the repository.

    The repository is created (private) if it does not exist. Raises UserError if the upload fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        repository_url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            folder_path=str(folder),
            repo_id=repository_url.repo_id,
            commit_message="Weights, exported by Whetstone",
        )
    except (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        OSError,
        ValueError,
    ) as error:
        raise UserError(
            f"{folder} is written, but could not be pushed to {repository}: {error}"
        ) from error
    return str(repository_url)


def _is_export(folder: Path) -> bool:
    """Return whether a folder was written by `export_weights`, with its model card.

    Weights that a run or a server saved look similar and are no exports.
    """
    if folder.resolve().parent.name in (CHECKPOINTS_FOLDER, WEIGHTS_FOLDER):
        return False
    return all(
        (folder / name).is_file()
        for name in (checkpoint_folder.MANIFEST, "state.json", "README.md")
    )


def _merge_reason(source: Path) -> str:
    """Return why an adapter is not usable by itself; "" if its base can be loaded elsewhere."""
    base = find_adapter_base(source).name
    if base.startswith("tiny:"):
        return f"its base {base} is built at run time"
    folder = Path(base).expanduser()
    if (folder / "adapter_config.json").is_file():
        return "its base is itself a merged adapter"
    return ""


def _write_model_folder(loaded: LoadedModel, spec: ModelSpec, weights: Path, folder: Path) -> None:
    """Write the model as a plain folder, with the state.json that a run needs to begin from it."""
    learner_checkpoint.write_model(loaded.model, loaded.tokenizer, folder)
    if not is_adapter(folder):
        # an untied head may leave a tensor that the architecture ties under another name
        check_model_weights(folder)
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
