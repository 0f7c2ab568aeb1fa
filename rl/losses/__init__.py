"""Export the losses: sums over tokens, pairs or answers."""

from rl.losses.loss_terms import KL_KINDS, MASK_FIELDS, check_term_config, list_enabled_terms
from rl.losses.losses import CUSTOM_LOSS, CUSTOM_VALUE_LOSS, LOSSES, LossSpec, get_loss
from rl.losses.token_gradients import TokenGradients, compute_token_gradients

__all__ = [
    "CUSTOM_LOSS",
    "KL_KINDS",
    "LOSSES",
    "LossSpec",
    "MASK_FIELDS",
    "TokenGradients",
    "CUSTOM_VALUE_LOSS",
    "check_term_config",
    "compute_token_gradients",
    "get_loss",
    "list_enabled_terms",
]
