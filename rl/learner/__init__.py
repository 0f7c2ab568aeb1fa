"""Hold a rank's share of a trained model: forward, backward, optimizer, sharding, saving."""

from rl.learner import saving
from rl.learner.adamw import check_kind
from rl.learner.backend import reads_in_parts
from rl.learner.base import chosen
from rl.learner.keeping import (
    ADAM,
    ADAM_8BIT,
    Sharing,
    default_kept,
    gradient_bytes,
    kept_of_gib,
    optimizer_bytes,
)
from rl.learner.learner import Learner, LearnerSettings
from rl.learner.logprobs import HeadRequest, LogprobHead
from rl.learner.saving import read_state
from rl.learner.spec import ModelSpec

__all__ = [
    "ADAM",
    "ADAM_8BIT",
    "HeadRequest",
    "Learner",
    "LearnerSettings",
    "LogprobHead",
    "ModelSpec",
    "Sharing",
    "check_kind",
    "chosen",
    "default_kept",
    "gradient_bytes",
    "kept_of_gib",
    "optimizer_bytes",
    "read_state",
    "saving",
    "reads_in_parts",
]
