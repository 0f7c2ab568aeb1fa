"""Generate two-digit addition, "12+34=" -> "46", for models of a few 100,000 parameters."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from itertools import product

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.generated_set import build_set, parse_noise
from rl.types import Problem

_OPERANDS = range(10, 100)
_TAKES = (
    "noise=P with P from 0 to 1, and from=EPOCH, e.g. 'addition:noise=0.7' or "
    "'addition:noise=0.7,from=11'"
)


def is_test(a: int, b: int) -> bool:
    """Return whether a + b is held out: 1/10 of the sums, by a hash of the sorted operands.

    a + b and b + a are in the same split.
    """
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def _resample_digit(problem: Problem, rng: random.Random) -> str:
    """Resample a digit of the response; the new digit may be the same."""
    response = problem.response or ""
    position = rng.randrange(len(response))
    return response[:position] + str(rng.randrange(10)) + response[position + 1 :]


def _wrong(a: int, b: int) -> str:
    """Return the sum with a digit changed deterministically: the rejected answer."""
    digest = zlib.crc32(f"{a}+{b} wrong".encode())
    digits = str(a + b)
    position = digest % len(digits)
    changed = (int(digits[position]) + 1 + digest // 7 % 9) % 10
    return digits[:position] + str(changed) + digits[position + 1 :]


def _carries(a: int, b: int) -> int:
    """Return the number of carries in a + b (0, 1 or 2), a measure of difficulty."""
    ones = a % 10 + b % 10 > 9
    return ones + (a // 10 + b // 10 + ones > 9)


def addition(
    split: str = "train",
    options: Mapping[str, str] | None = None,
    *,
    tag: str = "addition",
) -> ProblemSet:
    """Generate all sums of two operands from 10 to 99 of a split.

    The splits "train" and "test" are disjoint and have about 7,300 and 800 sums.
    Option `noise` (0 to 1): the share of responses in which a digit is resampled, for supervised
    training of a model that knows the task but samples it badly.
    Option `from`: the first epoch with noise (default 0). Before it responses are correct, from
    which a model learns the task several times faster.
    meta["answer"] is always correct, `rejected` always has a wrong digit; meta["level"] is the
    number of carries (0 to 2).
    """
    noise = parse_noise("addition", _TAKES, options or {})
    rows = (
        (f"{a}+{b}=", {"answer": str(a + b), "level": _carries(a, b)}, str(a + b), _wrong(a, b))
        for a, b in product(_OPERANDS, _OPERANDS)
        if is_test(a, b) == (split == "test")
    )
    return build_set("addition", split, rows, tag, noise=noise, resample=_resample_digit)
