"""ModelSpec: enough to make a model again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.types import LoraConfig


@dataclass(frozen=True)
class ModelSpec:
    """What makes a model: enough to make it again.

    elsewhere   whether `base_model` is a folder outside of what the same service writes (another
    run's): it is then where it was noted base_dtype  of the frozen matrices under an adapter: auto,
    fp32, bf16 or 4bit (rl.learner.base)
    """

    base_model: str
    tokenizer: str | None = None
    lora: LoraConfig | None = None
    seed: int = 0
    value_head: bool = False
    elsewhere: bool = False
    base_dtype: str = "auto"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSpec:
        lora = data.get("lora")
        return cls(**{**data, "lora": LoraConfig(**lora) if lora else None})
