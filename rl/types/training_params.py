"""Define the settings of optimizer steps and adapters. Names and fields follow Tinker's client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rl.types.number_checks import validate_number
from rl.types.training_data import TensorData


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Hold the AdamW parameters of an optimizer step.

    grad_clip_norm: 0 means no clipping; the norm is reported in either case.
    Raises ValueError for a number that no update can use.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        validate_number(
            "learning_rate",
            self.learning_rate,
            "a finite number of at least 0, such as 1e-4",
            minimum=0,
        )
        for name in ("beta1", "beta2"):
            if (
                validate_number(
                    name,
                    getattr(self, name),
                    "at least 0 and below 1, such as 0.9",
                    minimum=0,
                    maximum=1,
                )
                == 1.0
            ):
                raise ValueError(
                    f"{name} is at least 0 and below 1, such as 0.9, got {getattr(self, name)}"
                )
        validate_number(
            "eps",
            self.eps,
            "at least 1e-30, such as 1e-8: a weight without a gradient is divided by it",
            minimum=1e-30,
        )
        validate_number(
            "weight_decay", self.weight_decay, "a finite number of at least 0 (0: none)", minimum=0
        )
        validate_number(
            "grad_clip_norm",
            self.grad_clip_norm,
            "a finite number of at least 0 (0: no clipping)",
            minimum=0,
        )


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
