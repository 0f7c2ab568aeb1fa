"""Define the configuration from which `ServiceClient.create_training_client` makes a client. This
module imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl.errors import UserError
from rl.types import LoraConfig
from rl.types.number_checks import validate_integer, validate_number

C = TypeVar("C")


def suggest_settings(config_class: type[C]) -> type[C]:
    """Decorate a keyword-only dataclass so that an unknown setting is a UserError. The message
    names the closest valid setting and all settings.
    """
    known = [f.name for f in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    original_init = config_class.__init__

    @functools.wraps(original_init)
    def checked_init(self: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                matches = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {matches[0]!r}? " if matches else ""
                raise UserError(
                    f"{config_class.__name__} has no setting {name!r}: {hint}it takes "
                    f"{', '.join(known)}"
                )
        original_init(self, **kwargs)

    signature = inspect.signature(original_init)
    checked_init.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            p if p.name == "self" else p.replace(kind=p.KEYWORD_ONLY)
            for p in signature.parameters.values()
        ]
    )
    config_class.__init__ = checked_init  # type: ignore[assignment]
    return config_class


@suggest_settings
@dataclass(frozen=True, kw_only=True)
class LoRAConfig(LoraConfig):
    """Configure a LoRA adapter (arXiv 2106.09685): the base weights stay frozen."""

    rank: int = 16
    """Rank of each matrix's update."""
    alpha: float = 32
    """The update is scaled by alpha / rank."""
    train_unembed: bool | None = True
    """Adapt the output head; None: unless the model ties it to the embedding."""

    def __post_init__(self) -> None:
        expected = "at least 1 (lora_config=None trains all weights)"
        validate_integer("rank", self.rank, expected, minimum=1)
        expected = "positive, such as twice the rank"
        validate_number("alpha", self.alpha, expected, minimum=0, open_ends=True)


@suggest_settings
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Configure a model and which of its weights are trained."""

    model_ref: str
    """A hub name, a model folder, or tiny:<preset>."""
    lora_config: LoRAConfig | None = field(default_factory=LoRAConfig)
    """The adapter; None trains all weights."""
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer; default: the model's."""
    seed: int = 0
    """Seed of the adapter's weights, if lora_config has none, and of a tiny:<preset>'s."""
    value_head: bool = True
    """Add PPO's value head: a scalar per position, hidden_size weights; unused by REINFORCE."""
    base_dtype: str = "auto"
    """Dtype of the frozen matrices: auto (bf16 if computation is in bf16), fp32, bf16, 4bit."""

    def __post_init__(self) -> None:
        if not isinstance(self.model_ref, str) or not self.model_ref:
            raise ValueError(
                f"model_ref is a hub name, a model folder or tiny:<preset>, got {self.model_ref!r}"
            )
        if self.lora_config is not None and not isinstance(self.lora_config, LoRAConfig):
            raise ValueError(
                "lora_config is a LoRAConfig(rank=16, alpha=32), or None to train all weights; "
                f"got {self.lora_config!r}"
            )
