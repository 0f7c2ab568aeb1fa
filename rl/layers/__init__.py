"""Describe the layers of a model: their kinds, receptive fields and experts, read from the model.

Learner, sampler and memory plan use the same description.
"""

from rl.layers.expert_balance import compute_router_aux_loss, find_routers, record_router_scores
from rl.layers.layer_kinds import (
    ExpertLayout,
    ModelLayers,
    describe_layers,
    find_layer_list,
    find_layer_period,
    keep_first_layers_,
    layers_share_tensors,
    replace_forward,
    truncate_layers_,
    truncated_layers,
)
from rl.layers.receptive_field import (
    find_max_context,
    get_config_number,
    get_hidden_size,
    shrink_window,
    unwrap_model,
)
from rl.layers.router_replay import ExpertReplay, record_experts, replay_experts

__all__ = [
    "ExpertLayout",
    "ModelLayers",
    "ExpertReplay",
    "compute_router_aux_loss",
    "find_max_context",
    "get_config_number",
    "truncate_layers_",
    "describe_layers",
    "keep_first_layers_",
    "replay_experts",
    "unwrap_model",
    "find_layer_list",
    "record_experts",
    "find_layer_period",
    "record_router_scores",
    "replace_forward",
    "find_routers",
    "truncated_layers",
    "layers_share_tensors",
    "shrink_window",
    "get_hidden_size",
]
