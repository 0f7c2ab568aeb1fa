"""Combine rewards; handle parts that fail or do not apply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from rl.rewards.reward_calls import (
    Meta,
    NotApplicable,
    RewardItem,
    RewardResult,
    RewardTimeout,
    to_reward_result,
)
from rl.sanitize import describe_error


def try_call(call: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call of user code, or the exception that it raised."""
    try:
        return call(*args)
    except (Exception, SystemExit) as error:  # boundary: user code
        return error


class RewardPartError(Exception):
    """Raised when a part of a combined reward fails: "in its part 'a', which raised ...".

    `__cause__` is the exception that the part raised.
    """


class CombinedReward(ABC):
    """Compute a reward from other rewards. If a part fails, the whole fails and the error names the
    part.
    """

    # If true, a part that does not apply has the result None, instead of failing the whole.
    skips_not_applicable = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.part_rewards() for name in part.columns))

    @abstractmethod
    def part_rewards(self) -> Sequence[Any]:
        """Return the parts."""

    @abstractmethod
    def combine_results(self, item: RewardItem, results: Sequence[Any]) -> RewardResult:
        """Compute the whole's result from the results of its parts, in their order."""

    def evaluate_many(
        self, items: Sequence[RewardItem], coroutine_timeout: float | None = None
    ) -> list[RewardResult | BaseException]:
        """Score all items with each part in turn; an item fails if any part fails on it."""
        columns = [part.evaluate_many(items, coroutine_timeout) for part in self.part_rewards()]
        return [
            try_call(self._combine_or_raise, item, row)
            for item, *row in zip(items, *columns, strict=True)
        ]

    def _combine_or_raise(
        self, item: RewardItem, results: Sequence[RewardResult | BaseException]
    ) -> RewardResult:
        applicable: list[RewardResult | None] = []
        for part, result in zip(self.part_rewards(), results, strict=True):
            if self.skips_not_applicable and isinstance(result, NotApplicable):
                applicable.append(None)
            elif isinstance(result, RewardTimeout):
                raise result
            elif isinstance(result, BaseException):
                reason = (
                    str(result)
                    if isinstance(result, RewardPartError)
                    else f"which raised {describe_error(result)}"
                )
                raise RewardPartError(f"in its part {part.name!r}, {reason}") from (
                    result.__cause__ or result
                )
            elif not isfinite(result.reward):
                raise RewardPartError(f"in its part {part.name!r}, which returned {result.reward}")
            else:
                applicable.append(result)
        return to_reward_result(self.combine_results(item, applicable))

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        (outcome,) = self.evaluate_many([(prompt, response, meta, None)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
