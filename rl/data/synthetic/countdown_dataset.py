"""Generate countdown problems: reach a target from a few numbers, each used at most once, with
+ - * /. For models that can already calculate.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping

from rl.data.problem_set import ProblemSet
from rl.errors import UserError
from rl.types import Problem

_DEFAULTS = {"numbers": 4, "high": 99, "size": 10_000}
_LEAST = {"numbers": 2, "high": 9, "size": 1}
_MOST = {"numbers": 6, "high": 999, "size": 1_000_000}
_TARGETS = range(10, 1000)


def is_test(numbers: list[int], target: int) -> bool:
    """Return whether a problem is held out: 1/10, by a hash of its sorted numbers and target."""
    return zlib.crc32(f"countdown {sorted(numbers)} {target}".encode()) % 10 == 0


def countdown(
    split: str = "train",
    options: Mapping[str, str] | None = None,
    *,
    tag: str = "countdown",
    system_prompt: str | None = None,
) -> ProblemSet:
    """Generate solvable problems of the "train" or "test" split (disjoint), deterministically.

    The reward is `countdown`.
    Options: numbers=4 (count of numbers), high=99 (the largest), size=10000 (problems of train;
    test has 1/10).
    meta: numbers, target, level (count of the numbers that the generating solution uses). The
    response is that solution, in \\boxed{}.
    Raises UserError for an unknown split or option, or if too few problems exist.
    """
    resolved = _options(options or {})
    if split not in ("train", "test"):
        raise UserError(f"countdown has the splits 'train' and 'test', got {split!r}")
    rng = random.Random(f"countdown {split} {sorted(resolved.items())}")
    system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    count = resolved["size"] if split == "train" else -(-resolved["size"] // 10)
    problems: list[Problem] = []
    seen: set[tuple[tuple[int, ...], int]] = set()
    for _ in range(200 * count + 10_000):
        if len(problems) == count:
            break
        numbers = [rng.randint(1, resolved["high"]) for _ in range(resolved["numbers"])]
        solution, value, used = _expression(numbers, rng)
        if value not in _TARGETS or is_test(numbers, value) != (split == "test"):
            continue
        key = (tuple(sorted(numbers)), value)
        if key in seen:
            continue
        seen.add(key)
        meta = {"numbers": numbers, "target": value, "answer": str(value), "level": used}
        message = {"role": "user", "content": _prompt(numbers, value)}
        problems.append(
            Problem((*system, message), meta, f"\\boxed{{{solution}}}", tag, len(problems))
        )
    if len(problems) < count:
        problem_kind = (
            f"of {resolved['numbers']} numbers up to {resolved['high']} fewer than {count} "
            f"problems exist"
        )
        raise UserError(f"countdown: {problem_kind}; request a smaller size")
    return ProblemSet(problems, name=f"countdown/{split}")


def _options(options: Mapping[str, str]) -> dict[str, int]:
    """Return all options as numbers. Raises UserError for unknown or invalid options."""
    resolved = dict(_DEFAULTS)
    for key, value in options.items():
        if (
            key not in _DEFAULTS
            or not value.isdecimal()
            or not _LEAST[key] <= int(value) <= _MOST[key]
        ):
            ranges = ", ".join(f"{name} from {_LEAST[name]} to {_MOST[name]}" for name in _DEFAULTS)
            raise UserError(
                f"countdown takes the options {ranges}, e.g. 'countdown:numbers=3,high=20'; got "
                f"{key}={value}"
            )
        resolved[key] = int(value)
    return resolved


def _prompt(numbers: list[int], target: int) -> str:
    return (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}. Use + - * / and "
        f"brackets, and each number at most once."
        "\n\nThink step by step, then write the expression alone inside \\boxed{}."
    )


def _expression(numbers: list[int], rng: random.Random) -> tuple[str, int, int]:
    """Return a random expression of at least 2 of the numbers, its value, and the count of numbers.

    Divisions have no remainder.
    """
    used = rng.randint(2, len(numbers))
    parts = [(str(number), number) for number in rng.sample(numbers, used)]
    while len(parts) > 1:
        (a, x), (b, y) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        sign = rng.choice("+-*/" if y and x % y == 0 else "+-*")
        value = {"+": x + y, "-": x - y, "*": x * y}.get(sign)
        parts.append((f"({a}{sign}{b})", x // y if value is None else value))
    text, value = parts[0]
    return text[1:-1], value, used
