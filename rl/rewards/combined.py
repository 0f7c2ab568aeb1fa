"""Rewards that are made of rewards: what becomes of a part that fails, or says that it does not
apply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from rl.plain import says
from rl.rewards.calls import Item, NotApplicable, RewardResult, TookTooLong


def caught(call: Callable[..., RewardResult], *given: Any) -> RewardResult | BaseException:
    try:
        return call(*given)
    except (Exception, SystemExit) as error:  # boundary: the user's code
        return error


class PartFailed(Exception):
    """A part of a reward made of rewards failed: "in its part 'a', which raised ..."; its cause is
    what that part raised.
    """


class Combined(ABC):
    """A reward made of rewards. A part that fails fails the whole, and is named."""

    # whether a part that does not apply has None for a result, instead of failing the whole
    leaves_out = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.rewards() for name in part.columns))

    @abstractmethod
    def rewards(self) -> Sequence[Any]:
        """The parts."""

    @abstractmethod
    def put_together(self, item: Item, results: Sequence[Any]) -> RewardResult:
        """The whole's result from those of its parts, in their order."""

    def evaluate(self, item: Item) -> RewardResult:
        return self._whole(item, [caught(part.evaluate, *item) for part in self.rewards()])

    def evaluate_many(
        self, items: Sequence[Item], limit: float | None = None
    ) -> list[RewardResult | BaseException]:
        """Each part scores all items before the next does; an item that one of them fails on has
        failed.
        """
        columns = [part.evaluate_many(items, limit) for part in self.rewards()]
        return [caught(self._whole, item, row) for item, *row in zip(items, *columns, strict=True)]

    def _whole(self, item: Item, results: Sequence[RewardResult | BaseException]) -> RewardResult:
        found: list[RewardResult | None] = []
        for part, result in zip(self.rewards(), results, strict=True):
            if self.leaves_out and isinstance(result, NotApplicable):
                found.append(None)
            elif isinstance(result, TookTooLong):
                raise result
            elif isinstance(result, BaseException):
                how = (
                    str(result)
                    if isinstance(result, PartFailed)
                    else f"which raised {says(result)}"
                )
                raise PartFailed(f"in its part {part.name!r}, {how}") from (
                    result.__cause__ or result
                )
            elif not isfinite(result.reward):
                raise PartFailed(f"in its part {part.name!r}, which returned {result.reward}")
            else:
                found.append(result)
        return self.put_together(item, found)

    def __call__(
        self, prompt: str, response: str, meta: Mapping[str, Any] | None = None
    ) -> RewardResult:
        return self.evaluate((prompt, response, meta, None))
