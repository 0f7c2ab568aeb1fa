"""How a reward model's scores are read, the one way for its own held-out pairs and for what a
policy samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.types import ModelInput

if TYPE_CHECKING:
    from rl.clients import TrainingClient

AT_ONCE = 512  # sequences in one call


def scores_of(client: TrainingClient, inputs: Sequence[ModelInput]) -> list[float]:
    """The score of each input (`Renderer.judged`): the value at its last position, where the
    Bradley-Terry loss reads it too.
    """
    found: list[float] = []
    for i in range(0, len(inputs), AT_ONCE):
        found += [
            float(values[-1]) for values in client.compute_values(inputs[i : i + AT_ONCE]).result()
        ]
    return found
