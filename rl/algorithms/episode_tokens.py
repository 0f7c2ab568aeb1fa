"""Arrange an episode's action tokens as a single array, for computations that run from token to
token over turns (advantages, discounts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl.algorithms.update import add_loss_inputs
from rl.types import Datum


class EpisodeTokens:
    """Arrange the action tokens of an episode as a single array in the order of its turns,
    independent of their distribution over datums.

    `turns_D` are the turns of which each datum holds the actions. An episode that returns to an
    earlier conversation has datums with non-consecutive turns. `turns_N` is the number of action
    tokens of each turn. Raises ValueError if the datums' masks disagree.
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
                f"the episode's turns have {self.ends_N[-1]} action tokens, its datums' masks "
                f"{self.count}"
            )
        self.last_part = next(d for d, turns in enumerate(turns_D) if turns[-1] == len(turns_N) - 1)
        # position in the order of the turns of each action token in the order of the datums
        ranges = [
            range(self.ends_N[turn] - turns_N[turn], self.ends_N[turn])
            for turns in turns_D
            for turn in turns
        ]
        self.positions = np.array([place for turn in ranges for place in turn], dtype=np.int64)

    def gather_actions(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        """Return a field's values at the actions, float64 [tokens].

        Each datum's field has at least as many values as the datum has positions.
        """
        values = np.zeros(self.count)
        values[self.positions] = np.concatenate(
            [
                np.asarray(f, dtype=np.float64)[: len(m)][m]
                for f, m in zip(fields, self.masks, strict=True)
            ]
        )
        return values

    def place_rewards(self, rewards_N: Sequence[float]) -> np.ndarray:
        """Return rewards [tokens]: each turn's reward on the last token of its action.

        Raises ValueError unless there is a reward for each turn.
        """
        if len(rewards_N) != len(self.ends_N):
            raise ValueError(f"{len(rewards_N)} rewards for an episode of {len(self.ends_N)} turns")
        rewards = np.zeros(self.count)
        np.add.at(rewards, np.maximum(self.ends_N - 1, 0), rewards_N)
        return rewards

    def make_datums(
        self, fields_D: Sequence[Mapping[str, np.ndarray]], **fields: np.ndarray
    ) -> list[Datum]:
        """Return the datums with `fields_D` of each datum, and `fields` at the episode's actions, 0
        elsewhere.
        """
        ends = np.cumsum([mask.sum() for mask in self.masks])[:-1]
        datums = []
        columns = {name: np.split(values[self.positions], ends) for name, values in fields.items()}
        for d, (datum, mask) in enumerate(zip(self.parts, self.masks, strict=True)):
            spread = {name: np.zeros(len(mask)) for name in fields}
            for name, column in columns.items():
                spread[name][mask] = column[d]
            datums.append(add_loss_inputs(datum, **spread, **fields_D[d]))
        return datums
