"""The card of weights that leave: what they are, what made them, what they were measured at, how
they are loaded.
"""

from __future__ import annotations

import json
import math
from typing import Any

from rl.jsonl import METRICS, read_metrics
from rl.report import saved_config
from rl.run.reopen import Weights
from rl.settings import StagePlan, flatten

_ALONE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
```

With vLLM: `vllm serve {name}`."""
_ADAPTER = """```python
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```

Where head and embedding of the base are one matrix and the head is adapted, PEFT's own `merge_and_unload` changes the embedding with it:
have the weights merged by `export.py --merge`, which makes them two. So does vLLM need them, whose LoRA knows no head."""
_FIGURES = ("test/", "env/all/reward/total", "env/all/correct", "optim/loss", "optim/kl_ref")


def card(weights: Weights, what: str, base: str, *, adapter: bool) -> str:
    """README.md of an export, with the hub's front matter. `what`: it is, in words; `base`: the
    model it began from.
    """
    name = weights.run.name if weights.run is not None else "model"
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
    }
    front["tags"] = ["whetstone", *_methods(weights)]
    if not base.startswith(("tiny:", "/", ".", "~")) and base.count("/") == 1:
        front["base_model"] = base
    parts = [
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items()) + "---",
        f"# {name}",
    ]
    parts.append(
        f"{what[0].upper()}{what[1:]}. Begun from `{base}`; saved as `{weights.name}`"
        + _at(weights)
        + "."
    )
    parts.append("## Use\n\n" + (_ADAPTER if adapter else _ALONE).format(name="THIS_FOLDER"))
    if weights.run_folder is not None and weights.run is not None:
        parts += _made(weights)
    return "\n\n".join(parts) + "\n"


def _methods(weights: Weights) -> list[str]:
    return (
        []
        if weights.run is None
        else list(dict.fromkeys(stage.method for stage in weights.run.stages))
    )


def _at(weights: Weights) -> str:
    return (
        "" if weights.stage is None else f", after step {weights.step} (stage {weights.stage.name})"
    )


def _made(weights: Weights) -> list[str]:
    """How it was trained: data and figures of each stage up to this one, and every setting that is
    not the default.
    """
    assert (
        weights.run is not None
        and weights.run_folder is not None
        and weights.stage_index is not None
    )
    stages = weights.run.stages[: weights.stage_index + 1]
    rows = read_metrics(weights.run_folder / METRICS)
    lines = []
    for stage in stages:
        data = stage.settings.data
        reward = (
            " + ".join(f"{weight:g} {name}" for name, weight in data.rewards)
            or data.reward
            or "none"
        )
        lines.append(
            f"| {stage.name} | {stage.method} | {stage.settings.loop.steps} | `{data.dataset}` | {reward} |"
        )
    table = "| stage | method | steps | data | reward |\n|---|---|---|---|---|\n" + "\n".join(lines)
    config = saved_config(weights.run_folder)
    origins = "".join(
        f"\n- {note['stage']} began from {note['from']}: {note['how']}"
        for note in config.get("origins", ())
    )
    found = [
        f"## Training\n\nSeed {weights.run.options.seed}.\n\n{table}"
        + (f"\n{origins}" if origins else "")
    ]
    if figures := _figures(rows, weights):
        found.append("## Figures\n\n" + figures)
    found.append(
        "## Settings\n\n```yaml\nstages:\n"
        + "\n".join(_recipe(stage) for stage in stages)
        + "\n```"
    )
    return found


def _figures(rows: list[dict[str, Any]], weights: Weights) -> str:
    """Held-out figures of the weights' stage, first and as they were saved."""
    assert weights.stage is not None
    own = [
        row
        for row in rows
        if row.get("stage") == weights.stage.name and row["step"] <= (weights.step or 0)
    ]
    names = dict.fromkeys(
        key
        for row in own
        for key in row
        if key.startswith(_FIGURES) and isinstance(row[key], (int, float))
    )
    lines = []
    for name in names:
        seen = [
            row[name]
            for row in own
            if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
        ]
        if seen:
            lines.append(f"| {name} | {seen[0]:.4g} | {seen[-1]:.4g} |")
    return "| figure | first | last |\n|---|---|---|\n" + "\n".join(lines) if lines else ""


def _recipe(stage: StagePlan) -> str:
    given = flatten(stage.settings)
    usual = flatten(type(stage.settings)())
    own = {key: value for key, value in given.items() if value != usual.get(key)}
    lines = [
        f"- method: {stage.method}",
        f"  name: {stage.name}",
        *(f"  {key}: {json.dumps(value)}" for key, value in own.items()),
    ]
    return "\n".join(lines)
