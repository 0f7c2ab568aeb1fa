"""Read a reward model's scores, in the same way for held-out pairs and for the policy's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.types import ModelInput

if TYPE_CHECKING:
    from rl.clients import TrainingClient

AT_ONCE = 512  # sequences per call


def scores_of(client: TrainingClient, inputs: Sequence[ModelInput]) -> list[float]:
    """Return the score of each input (`Renderer.judged`): the value at its last position, which the
    Bradley-Terry loss reads too.
    """
    scores: list[float] = []
    for i in range(0, len(inputs), AT_ONCE):
        scores += [
            float(values[-1]) for values in client.compute_values(inputs[i : i + AT_ONCE]).result()
        ]
    return scores
