"""What is advised for a model by its name: the renderer, the learning rate of a LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from rl.errors import UserError
from rl.models.presets import get_preset

Family = Literal["qwen", "llama"]
_EXPONENTS: dict[str, float] = {"qwen": 0.0775, "llama": 0.781}


def get_recommended_renderer_name(model_name: str) -> str:
    """The renderer for a model: "plain" for "tiny:..." and for a folder without a chat template, else "chat_template".

    A hub name cannot be looked into, so it is taken for a model with a template; where it has none, `get_renderer` says so.
    """
    if model_name.startswith("tiny:"):
        return "plain" if get_preset(model_name).eyes is None else "chat_template"
    folder = Path(model_name).expanduser()
    if folder.is_dir() and not _has_template(folder):
        return "plain"
    return "chat_template"


def get_recommended_lora_lr(hidden_size: int, family: Family) -> float:
    """Learning rate of a LoRA: 5e-5 * 10 * (2000 / hidden_size) ** p, p = 0.0775 (Qwen) or 0.781 (Llama).

    Source: Tinker's published rule; the 10 is the ratio of a LoRA's best rate to that of training all weights.
    """
    if hidden_size < 1:
        raise UserError(f"hidden_size is at least 1, got {hidden_size}")
    if family.lower() not in _EXPONENTS:
        known = ", ".join(_EXPONENTS)
        raise UserError(f"the rule is known for the families {known}; got {family!r}: give a learning rate yourself")
    return 5e-5 * 10.0 * (2000.0 / hidden_size) ** _EXPONENTS[family.lower()]


def _has_template(folder: Path) -> bool:
    """Whether a model folder holds a chat template, in any of the places that transformers reads."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return False
    try:
        content: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{settings} is no JSON: {error}") from error
    return bool(content.get("chat_template"))
