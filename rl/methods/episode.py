"""An episode's action tokens as one array: what runs from token to token over turns (advantages,
discounts) works on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.methods.steps import with_fields
from rl.types import Datum


class EpisodeTokens:
    """The action tokens of one episode as one array in the order of its turns, however they lie in
    datums.

    `turns_D`: the turns whose actions each datum holds. An episode that goes back to an earlier
    conversation has turns that do not follow each other in one datum. `turns_N`: how many tokens
    each turn's action has. Raises ValueError if the datums' masks disagree.
    """

    def __init__(
        self, datums: Sequence[Datum], turns_D: Sequence[Sequence[int]], turns_N: Sequence[int]
    ):
        self.parts = list(datums)
        self.masks = [datum.loss_fn_inputs["mask"].array != 0 for datum in datums]
        self.ends_N = np.cumsum(turns_N)
        self.count = int(sum(mask.sum() for mask in self.masks))
        if self.count != self.ends_N[-1]:
            raise ValueError(
                f"the episode's turns have {self.ends_N[-1]} action tokens, its datums' masks {self.count}"
            )
        self.last_part = next(d for d, turns in enumerate(turns_D) if turns[-1] == len(turns_N) - 1)
        # for each action token in the order of the datums, its place in the order of the turns
        ranges = [
            range(self.ends_N[turn] - turns_N[turn], self.ends_N[turn])
            for turns in turns_D
            for turn in turns
        ]
        self.places = np.array([place for turn in ranges for place in turn], dtype=np.int64)

    def actions(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        """One field's values at the actions, float64; of each datum at least as many values as it
        has positions.
        """
        values = np.zeros(self.count)
        values[self.places] = np.concatenate(
            [
                np.asarray(f, dtype=np.float64)[: len(m)][m]
                for f, m in zip(fields, self.masks, strict=True)
            ]
        )
        return values

    def rewards(self, rewards_N: Sequence[float]) -> np.ndarray:
        """Each turn's reward on the last token of its action."""
        rewards = np.zeros(self.count)
        np.add.at(rewards, np.maximum(self.ends_N - 1, 0), rewards_N)
        return rewards

    def datums(self, **fields: np.ndarray) -> list[Datum]:
        """The datums with these fields at their actions, 0 elsewhere."""
        ends = np.cumsum([mask.sum() for mask in self.masks])[:-1]
        found = []
        columns = {name: np.split(values[self.places], ends) for name, values in fields.items()}
        for d, (datum, mask) in enumerate(zip(self.parts, self.masks, strict=True)):
            spread = {name: np.zeros(len(mask)) for name in fields}
            for name, column in columns.items():
                spread[name][mask] = column[d]
            found.append(with_fields(datum, **spread))
        return found
