"""Define ModelSpec: the data from which a model is built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.types import LoraConfig


@dataclass(frozen=True)
class ModelSpec:
    """Describe a model completely enough to build it again.

    elsewhere   whether `base_model` is a folder outside the folders that the same service writes
                (another run's); it is then read from the recorded path
    base_dtype  storage type of the frozen matrices under an adapter: auto, fp32, bf16 or 4bit
                (rl.learner.frozen_base)
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
        """Return the spec from its JSON dict. Raises TypeError for unknown or missing fields."""
        lora = data.get("lora")
        return cls(**{**data, "lora": LoraConfig(**lora) if lora else None})
