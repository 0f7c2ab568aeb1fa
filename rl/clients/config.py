"""What `ServiceClient.create_training_client` makes a client from. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl.errors import UserError

C = TypeVar("C")


def names_nearest(config: type[C]) -> type[C]:
    """Class decorator for a keyword-only dataclass: a name that it does not have is a UserError
    that says the nearest.
    """
    known = [f.name for f in dataclasses.fields(config)]  # type: ignore[arg-type]
    plain = config.__init__

    @functools.wraps(plain)
    def checked(self: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise UserError(
                    f"{config.__name__} has no setting {name!r}: {hint}it takes {', '.join(known)}"
                )
        plain(self, **given)

    config.__init__ = checked  # type: ignore[assignment]
    return config


@names_nearest
@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """A LoRA adapter (arXiv 2106.09685): the base stays as it is."""

    rank: int = 16
    """Rank of each matrix's update."""
    alpha: float = 32
    """The update is scaled by alpha / rank."""
    train_attn: bool = True
    """Adapt the attention matrices."""
    train_mlp: bool = True
    """Adapt the feed-forward matrices."""
    train_unembed: bool = True
    """Adapt the output head."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(
                f"rank is at least 1, got {self.rank}; lora_config=None trains all weights"
            )
        if not self.alpha > 0:
            raise ValueError(f"alpha is positive, such as twice the rank, got {self.alpha}")


@names_nearest
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A model and what of it is trained."""

    model_ref: str
    """A hub name, a model folder, or tiny:<preset>."""
    lora_config: LoRAConfig | None = field(default_factory=LoRAConfig)
    """The adapter; None trains all weights."""
    tokenizer: str | None = None
    """Where the tokenizer is; by default with the model."""
    seed: int = 0
    """Of the adapter's weights, and of those of a tiny:<preset>."""
    value_head: bool = True
    """A scalar for each position, which PPO learns values with: as many weights as the model is wide, unused by REINFORCE."""
    base_dtype: str = "auto"
    """What the frozen matrices under an adapter are held in: auto (bf16 where that is computed in), fp32, bf16, 4bit."""

    def __post_init__(self) -> None:
        if not isinstance(self.model_ref, str) or not self.model_ref:
            raise ValueError(
                f"model_ref is a hub name, a model folder or tiny:<preset>, got {self.model_ref!r}"
            )
        if self.lora_config is not None and not isinstance(self.lora_config, LoRAConfig):
            raise ValueError(
                f"lora_config is a LoRAConfig(rank=16, alpha=32), or None to train all weights; got {self.lora_config!r}"
            )
