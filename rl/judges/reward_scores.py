"""Read a reward model's scores, in the same way for held-out pairs and for the policy's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.types import ModelInput

if TYPE_CHECKING:
    from rl.client import TrainingClient

JUDGE_BATCH_SIZE = 512  # sequences per call


def compute_reward_scores(client: TrainingClient, inputs: Sequence[ModelInput]) -> list[float]:
    """Return the score of each input (`Renderer.reward_model_input`): the value at its last
    position, which the Bradley-Terry loss reads too.
    """
    scores: list[float] = []
    for i in range(0, len(inputs), JUDGE_BATCH_SIZE):
        scores += [
            float(values[-1])
            for values in client.compute_values(inputs[i : i + JUDGE_BATCH_SIZE]).result()
        ]
    return scores
