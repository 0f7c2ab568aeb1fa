"""Export the losses: sums over tokens, pairs or answers."""

from rl.losses.losses import CUSTOM, LOSSES, VALUES, LossSpec, get_loss
from rl.losses.terms import KL_KINDS, MASKS, check_config, switched_on

__all__ = [
    "CUSTOM",
    "KL_KINDS",
    "LOSSES",
    "LossSpec",
    "MASKS",
    "VALUES",
    "check_config",
    "get_loss",
    "switched_on",
]
