"""Combine rewards; handle parts that fail or do not apply."""

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
    except (Exception, SystemExit) as error:  # boundary: user code
        return error


class PartFailed(Exception):
    """Raised when a part of a combined reward fails: "in its part 'a', which raised ...".

    `__cause__` is the exception that the part raised.
    """


class Combined(ABC):
    """Compute a reward from other rewards. If a part fails, the whole fails and the error names the
    part.
    """

    # If true, a part that does not apply has the result None, instead of failing the whole.
    leaves_out = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.rewards() for name in part.columns))

    @abstractmethod
    def rewards(self) -> Sequence[Any]:
        """Return the parts."""

    @abstractmethod
    def put_together(self, item: Item, results: Sequence[Any]) -> RewardResult:
        """Compute the whole's result from the results of its parts, in their order."""

    def evaluate(self, item: Item) -> RewardResult:
        return self._whole(item, [caught(part.evaluate, *item) for part in self.rewards()])

    def evaluate_many(
        self, items: Sequence[Item], limit: float | None = None
    ) -> list[RewardResult | BaseException]:
        """Score all items with each part in turn; an item fails if any part fails on it."""
        columns = [part.evaluate_many(items, limit) for part in self.rewards()]
        return [caught(self._whole, item, row) for item, *row in zip(items, *columns, strict=True)]

    def _whole(self, item: Item, results: Sequence[RewardResult | BaseException]) -> RewardResult:
        applicable: list[RewardResult | None] = []
        for part, result in zip(self.rewards(), results, strict=True):
            if self.leaves_out and isinstance(result, NotApplicable):
                applicable.append(None)
            elif isinstance(result, TookTooLong):
                raise result
            elif isinstance(result, BaseException):
                reason = (
                    str(result)
                    if isinstance(result, PartFailed)
                    else f"which raised {says(result)}"
                )
                raise PartFailed(f"in its part {part.name!r}, {reason}") from (
                    result.__cause__ or result
                )
            elif not isfinite(result.reward):
                raise PartFailed(f"in its part {part.name!r}, which returned {result.reward}")
            else:
                applicable.append(result)
        return self.put_together(item, applicable)

    def __call__(
        self, prompt: str, response: str, meta: Mapping[str, Any] | None = None
    ) -> RewardResult:
        return self.evaluate((prompt, response, meta, None))
