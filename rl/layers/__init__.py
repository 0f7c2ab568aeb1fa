"""What a model is built of: the kinds of its layers, how far they look, its experts; read from the model itself, and by all rooms alike."""

from rl.layers.balance import balance_loss, router_scores, routers
from rl.layers.describe import Experts, Layers, cut_, describe, shallow
from rl.layers.reach import inner_model, shrunk
from rl.layers.routing import Replay, given, noted

__all__ = [
    "Experts",
    "Layers",
    "Replay",
    "balance_loss",
    "cut_",
    "describe",
    "given",
    "inner_model",
    "noted",
    "router_scores",
    "routers",
    "shallow",
    "shrunk",
]
