"""Hold a rank's share of a trained model: forward, backward, optimizer, sharding, saving."""

from rl.learner import learner_checkpoint
from rl.learner.activation_memory import offload_layer_inputs
from rl.learner.adamw import check_optimizer
from rl.learner.context_parallel import ContextParallel, SequenceShard, check_divisible
from rl.learner.expert_parallel import check_experts, keep_experts_, make_expert_group
from rl.learner.frozen_base import choose_base_dtype
from rl.learner.head_memory import (
    default_kept_bytes,
    kept_bytes_from_gib,
)
from rl.learner.learner import Learner, LearnerSettings
from rl.learner.learner_checkpoint import ModelSpec, read_learner_state
from rl.learner.logprob_head import HeadRequest, LogprobHead
from rl.learner.microbatches import RankBatch
from rl.learner.packing import KEYS_PER_POSITION
from rl.learner.varlen_attention import (
    SequenceBounds,
    VarlenAttention,
    attend_by_kernel,
    supports_varlen_attention,
)

__all__ = [
    "RankBatch",
    "ContextParallel",
    "SequenceBounds",
    "SequenceShard",
    "attend_by_kernel",
    "supports_varlen_attention",
    "KEYS_PER_POSITION",
    "VarlenAttention",
    "check_divisible",
    "check_experts",
    "keep_experts_",
    "make_expert_group",
    "HeadRequest",
    "Learner",
    "LearnerSettings",
    "offload_layer_inputs",
    "LogprobHead",
    "ModelSpec",
    "check_optimizer",
    "choose_base_dtype",
    "default_kept_bytes",
    "kept_bytes_from_gib",
    "read_learner_state",
    "learner_checkpoint",
]
