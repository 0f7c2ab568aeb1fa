"""Recommend settings for a model by its name: the renderer, the learning rate of a LoRA."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from rl.errors import UserError
from rl.models.tiny_models import get_model_preset

Family = Literal["qwen", "llama"]
_EXPONENTS: dict[str, float] = {"qwen": 0.0775, "llama": 0.781}


# Families with base models unless the name says otherwise, as their publishers name them.
_BASE_FAMILIES = frozenset(
    "llama gemma codegemma mistral mixtral smollm smollm2 olmo gpt gpt2 distilgpt2 "
    "pythia opt falcon bloom mpt starcoder starcoder2".split()
)
_BASE_NAMES = frozenset(("phi-1", "phi-1_5", "phi-2"))
# Parts of such a name that tell size, version, format or layout: 8b, v0.1, 17b, 16e, e4b, hf,
# scout, neo, deduped ...
_SIZE_OR_FORMAT = re.compile(
    r"[vea]?\d[\w.]*|hf|scout|maverick|nemo|neo|neox|j|medium|large|xl|deduped"
)


# Hub names in the recipes and pages of this project, for "did you mean".
KNOWN_MODELS = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-VL-2B-Instruct",
)


def get_recommended_renderer_name(model_name: str) -> str:
    """Return the recommended renderer of a model; nothing is fetched from the hub.

    tiny:...    "plain" ("chat_template" for a model with a vision tower)
    a folder    "chat_template" if it has a template, else "plain"
    a hub name  "role_colon" for a base model by its name (Llama-3.1-8B, Qwen3-8B-Base), as on
                Tinker, even if it has a template, which it was not trained with. For other names
                the hub's cache decides: "chat_template" if the tokenizer has a template or is not
                in the cache, else "role_colon".
    """
    if model_name.startswith("tiny:"):
        return "plain" if get_model_preset(model_name).vision is None else "chat_template"
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        return "chat_template" if _has_template(folder) else "plain"
    if is_base_name(model_name):
        return "role_colon"
    settings = _cached_folder(model_name)
    return "chat_template" if settings is None or _has_template(settings) else "role_colon"


def is_base_name(model_name: str) -> bool:
    """Return whether a hub name is that of a base model, by publishers' naming conventions.

    A base model is not tuned to chat.
    """
    name = model_name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    parts = re.split(r"[-_]", name)
    if {"base", "pt"} & set(parts):
        return not {"instruct", "chat", "it"} & set(parts)
    return name in _BASE_NAMES or (
        parts[0] in _BASE_FAMILIES and all(_SIZE_OR_FORMAT.fullmatch(part) for part in parts[1:])
    )


def _cached_folder(model_name: str) -> Path | None:
    """Return the folder in the hub's cache that holds a hub name's tokenizer settings; None if not
    cached.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model_name, "tokenizer_config.json")
    except HFValidationError:  # a name that no hub repository can have
        return None
    return Path(path).parent if isinstance(path, str) else None


def get_recommended_lora_lr(hidden_size: int, family: Family) -> float:
    """Return the learning rate of a LoRA: 5e-5 * 10 * (2000 / hidden_size) ** p.

    p = 0.0775 (Qwen) or 0.781 (Llama). Source: Tinker's published rule; the 10 is the ratio of a
    LoRA's best rate to that of training all weights. Raises UserError for another family or a
    hidden_size below 1.
    """
    if hidden_size < 1:
        raise UserError(f"hidden_size must be at least 1, got {hidden_size}")
    if family.lower() not in _EXPONENTS:
        known = ", ".join(_EXPONENTS)
        raise UserError(
            f"the rule covers the families {known}; got {family!r}: set a learning rate explicitly"
        )
    return 5e-5 * 10.0 * (2000.0 / hidden_size) ** _EXPONENTS[family.lower()]


def _has_template(folder: Path) -> bool:
    """Return whether a model folder holds a chat template, anywhere that transformers reads it.

    Raises UserError if tokenizer_config.json is not JSON.
    """
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return False
    try:
        content: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{settings} is not JSON: {error}") from error
    return bool(content.get("chat_template"))
