"""Write the model card of exported weights: contents, training, held-out metrics, loading."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rl.config import StageConfig, flatten_settings
from rl.errors import UserError
from rl.jsonl import METRICS_FILE, read_metrics
from rl.reporting import load_saved_config
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
