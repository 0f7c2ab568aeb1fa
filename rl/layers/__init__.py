"""Describe the layers of a model: their kinds, receptive fields and experts, read from the model.

Learner, sampler and memory plan use the same description.
"""

from rl.layers.balance import balance_loss, router_scores, routers
from rl.layers.describe import (
    Experts,
    Layers,
    cut_,
    describe,
    first_layers_,
    layer_list,
    rhythm,
    shallow,
    share_weights,
)
from rl.layers.reach import config_number, inner_model, shrunk, width
from rl.layers.routing import Replay, given, noted

__all__ = [
    "Experts",
    "Layers",
    "Replay",
    "balance_loss",
    "config_number",
    "cut_",
    "describe",
    "first_layers_",
    "given",
    "inner_model",
    "layer_list",
    "noted",
    "rhythm",
    "router_scores",
    "routers",
    "shallow",
    "share_weights",
    "shrunk",
    "width",
]
