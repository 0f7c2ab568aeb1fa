"""Losses: sums over tokens, pairs and answers."""

from rl.losses.losses import CUSTOM, LOSSES, VALUES, LossSpec, get_loss
from rl.losses.terms import KL_KINDS, check_config

__all__ = ["CUSTOM", "KL_KINDS", "LOSSES", "LossSpec", "VALUES", "check_config", "get_loss"]
