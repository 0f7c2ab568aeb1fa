"""Define the settings of optimizer steps and adapters. Names and fields follow Tinker's client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rl.types.number_checks import bounded_field, validate_fields
from rl.types.training_data import TensorData

_BETA = "at least 0 and below 1, such as 0.9"
_BELOW_ONE = math.nextafter(1, 0)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Hold the AdamW parameters of an optimizer step.

    grad_clip_norm: 0 means no clipping; the norm is reported in either case.
    Raises ValueError for a number that no update can use.
    """

    learning_rate: float = bounded_field(1e-4, "a finite number of at least 0, such as 1e-4", 0)
    beta1: float = bounded_field(0.9, _BETA, 0, _BELOW_ONE)
    beta2: float = bounded_field(0.95, _BETA, 0, _BELOW_ONE)
    eps: float = bounded_field(
        1e-12, "at least 1e-30, such as 1e-8: a weight without a gradient is divided by it", 1e-30
    )
    weight_decay: float = bounded_field(0.0, "a finite number of at least 0 (0: none)", 0)
    grad_clip_norm: float = bounded_field(0.0, "a finite number of at least 0 (0: no clipping)", 0)

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(frozen=True, slots=True)
class AdamOptimizerConfig:
    """Select the optimizer of a training client; only AdamW exists."""

    type: Literal["adamw"] = "adamw"


OptimParams: TypeAlias = AdamParams
OptimizerConfig: TypeAlias = AdamOptimizerConfig
LossFnType: TypeAlias = str  # see rl.losses.LOSSES
LossFnInputs: TypeAlias = dict[str, TensorData]
LossFnOutput: TypeAlias = dict[str, TensorData]
ModelID: TypeAlias = str
TensorDtype: TypeAlias = Literal["int64", "float32"]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Select the matrices with a LoRA adapter, and its scale, `effective_alpha / rank`."""

    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    # None: unless the model ties the head to its embedding (rl.models.lora_targets.resolve_head)
    train_unembed: bool | None = None
    # extension; None: alpha = rank, so that the adapter's scale is 1, as in checkpoints that state
    # no alpha
    alpha: float | None = None
    # extension: also the vision tower and projector of a vision model
    train_vision: bool = False
    # extension: also the experts, if they are a single tensor [experts, .., ..]
    train_experts: bool = False

    @property
    def effective_alpha(self) -> float:
        """Return alpha, or the rank if alpha is None."""
        return self.alpha if self.alpha is not None else self.rank
