"""Generate rows of digits to sort, "50412=" -> "01245", for models of a few 100,000 parameters."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations_with_replacement
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.generated_set import build_set, parse_counts, parse_noise
from rl.errors import UserError
from rl.types import Problem

_COUNTS = {"digits": (5, 2, 9), "size": (10_000, 1, 1_000_000)}  # default, least, most
_TAKES = (
    ", ".join(f"{key} from {low} to {high}" for key, (_, low, high) in _COUNTS.items())
    + ", noise=P with P from 0 to 1, and from=EPOCH, e.g. 'sorting:digits=4,noise=1'"
)


def is_test(digits: str) -> bool:
    """Return whether a row is held out: 1/10, by a hash of its sorted digits.

    All orders of the same digits are in the same split.
    """
    return zlib.crc32(f"sorting {''.join(sorted(digits))}".encode()) % 10 == 0


def _count_rows(digits: int, split: str) -> int:
    """Return the number of different rows in a split: of each multiset of digits all its orders."""
    return sum(
        math.factorial(digits) // math.prod(map(math.factorial, Counter(row).values()))
        for row in combinations_with_replacement("0123456789", digits)
        if is_test("".join(row)) == (split == "test")
    )


def sorting(
    split: str = "train",
    options: Mapping[str, str] | None = None,
    *,
    tag: str = "sorting",
) -> ProblemSet:
    """Generate different rows of the "train" or "test" split (disjoint), deterministically.

    Options: digits=5 (of a row), size=10000 (rows of train; test has 1/10).
    Option `noise` (0 to 1): the share of responses that hold the digits in a random order, for
    supervised training of a model that knows the form of an answer, but not which order is right.
    Option `from`: the first epoch with noise (default 0).
    meta["answer"] is always sorted.
    Raises UserError for an unknown split or option, or if too few rows exist.
    """
    noise = parse_noise("sorting", _TAKES, options or {}, _COUNTS)
    digits, size = parse_counts("sorting", _TAKES, options or {}, _COUNTS).values()

    def shuffle(problem: Problem, rng: random.Random) -> str:
        return "".join(rng.sample(problem.meta["answer"], digits))

    rows = _generate_rows(split, digits, size if split == "train" else -(-size // 10))
    return build_set("sorting", split, rows, tag, noise=noise, resample=shuffle)


def _generate_rows(
    split: str, digits: int, count: int
) -> Iterator[tuple[str, dict[str, Any], str, None]]:
    """Yield different rows of a split. Raises UserError if too few exist."""
    if count > (existing := _count_rows(digits, split)):
        raise UserError(
            f"sorting: of {digits} digits fewer than {count} rows exist in the split {split}: "
            f"{existing}; request a smaller size or more digits"
        )
    rng = random.Random(f"sorting {split} {digits}")
    rows: dict[str, None] = {}
    while len(rows) < count:
        row = "".join(rng.choices("0123456789", k=digits))
        if is_test(row) == (split == "test"):
            rows[row] = None
    for row in rows:
        answer = "".join(sorted(row))
        yield f"{row}=", {"answer": answer}, answer, None
