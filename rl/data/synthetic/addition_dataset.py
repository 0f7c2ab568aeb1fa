"""Generate two-digit addition, "12+34=" -> "46", for models of a few 100,000 parameters."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Mapping

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.noise_config import parse_noise
from rl.errors import UserError
from rl.types import Problem

_LOW, _HIGH = 10, 99


def is_test(a: int, b: int) -> bool:
    """Return whether a + b is held out: 1/10 of the sums, by a hash of the sorted operands.

    a + b and b + a are in the same split.
    """
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def _with_noise(problem: Problem, epoch: int, probability: float) -> Problem:
    """Resample a digit of the response with `probability`; the new digit may be the same.

    The result is a function of index and epoch.
    """
    rng = random.Random(f"addition noise {problem.index} {epoch}")
    response = problem.response or ""
    if rng.random() >= probability:
        return problem
    position = rng.randrange(len(response))
    noisy = response[:position] + str(rng.randrange(10)) + response[position + 1 :]
    return dataclasses.replace(problem, response=noisy)


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


def _noise(options: Mapping[str, str]) -> tuple[float, int]:
    """Return (share of noisy responses, first epoch that has them).

    Raises UserError for unknown or invalid options.
    """
    noise = parse_noise(options)
    if noise is None or set(options) - {"noise", "from"}:
        got = ",".join(f"{key}={value}" for key, value in options.items())
        raise UserError(
            "addition takes the options noise=P with P from 0 to 1, and from=EPOCH, e.g. "
            f"'addition:noise=0.7' or 'addition:noise=0.7,from=11'; got {got!r}"
        )
    return noise


def addition(
    split: str = "train",
    options: Mapping[str, str] | None = None,
    *,
    tag: str = "addition",
    system_prompt: str | None = None,
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
    noise, first = _noise(options or {})
    if split not in ("train", "test"):
        raise UserError(f"addition has the splits 'train' and 'test', got {split!r}")
    pairs = [
        (a, b)
        for a in range(_LOW, _HIGH + 1)
        for b in range(_LOW, _HIGH + 1)
        if is_test(a, b) == (split == "test")
    ]
    system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    problems = [
        Problem(
            messages=(*system, {"role": "user", "content": f"{a}+{b}="}),
            meta={"answer": str(a + b), "level": _carries(a, b)},
            response=str(a + b),
            tag=tag,
            index=index,
            rejected=_wrong(a, b),
        )
        for index, (a, b) in enumerate(pairs)
    ]

    def variant(problem: Problem, epoch: int) -> Problem:
        return _with_noise(problem, epoch, noise) if epoch >= first else problem

    return ProblemSet(problems, name=f"addition/{split}", variant=variant if noise else None)
