"""Generate rows of digits to sort, "50412=" -> "01245", for models of a few 100,000 parameters."""

from __future__ import annotations

import dataclasses
import math
import random
import zlib
from collections import Counter
from collections.abc import Mapping
from itertools import combinations_with_replacement

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.noise_config import parse_noise
from rl.errors import UserError
from rl.types import Problem

_DEFAULTS = {"digits": 5, "size": 10_000}
_RANGES = {"digits": (2, 9), "size": (1, 1_000_000)}


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
    system_prompt: str | None = None,
) -> ProblemSet:
    """Generate different rows of the "train" or "test" split (disjoint), deterministically.

    Options: digits=5 (of a row), size=10000 (rows of train; test has 1/10).
    Option `noise` (0 to 1): the share of responses that hold the digits in a random order, for
    supervised training of a model that knows the form of an answer, but not which order is right.
    Option `from`: the first epoch with noise (default 0).
    meta["answer"] is always sorted.
    Raises UserError for an unknown split or option, or if too few rows exist.
    """
    digits, size, noise, first = _parse_options(options or {})
    if split not in ("train", "test"):
        raise UserError(f"sorting has the splits 'train' and 'test', got {split!r}")
    count = size if split == "train" else -(-size // 10)
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
    system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    problems = [
        Problem(
            messages=(*system, {"role": "user", "content": f"{row}="}),
            meta={"answer": "".join(sorted(row))},
            response="".join(sorted(row)),
            tag=tag,
            index=index,
        )
        for index, row in enumerate(rows)
    ]

    def variant(problem: Problem, epoch: int) -> Problem:
        rng = random.Random(f"sorting noise {problem.index} {epoch}")
        if epoch < first or rng.random() >= noise:
            return problem
        order = "".join(rng.sample(problem.meta["answer"], digits))
        return dataclasses.replace(problem, response=order)

    return ProblemSet(problems, name=f"sorting/{split}", variant=variant if noise else None)


def _parse_options(options: Mapping[str, str]) -> tuple[int, int, float, int]:
    """Return (digits, size, share of noisy responses, first epoch that has them).

    Raises UserError for unknown or invalid options.
    """
    noise = parse_noise(options)
    numbers = {key: options.get(key, str(value)) for key, value in _DEFAULTS.items()}
    valid = all(
        numbers[key].isdecimal() and low <= int(numbers[key]) <= high
        for key, (low, high) in _RANGES.items()
    )
    if noise is None or not valid or set(options) - {"noise", "from", *_DEFAULTS}:
        received = ",".join(f"{key}={value}" for key, value in options.items())
        ranges = ", ".join(f"{key} from {low} to {high}" for key, (low, high) in _RANGES.items())
        raise UserError(
            f"sorting takes the options {ranges}, noise=P with P from 0 to 1, and from=EPOCH, "
            f"e.g. 'sorting:digits=4,noise=1'; got {received!r}"
        )
    return int(numbers["digits"]), int(numbers["size"]), *noise
