"""Generate countdown problems: reach a target from a few numbers, each used at most once, with
+ - * /. For models that can already calculate.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.generated_set import build_set, make_options_error, parse_counts
from rl.errors import UserError

# option: (default, least, most)
_OPTIONS = {"numbers": (4, 2, 6), "high": (99, 9, 999), "size": (10_000, 1, 1_000_000)}
_TAKES = (
    ", ".join(f"{key} from {low} to {high}" for key, (_, low, high) in _OPTIONS.items())
    + ", e.g. 'countdown:numbers=3,high=20'"
)
_TARGETS = range(10, 1000)


def is_test(numbers: list[int], target: int) -> bool:
    """Return whether a problem is held out: 1/10, by a hash of its sorted numbers and target."""
    return zlib.crc32(f"countdown {sorted(numbers)} {target}".encode()) % 10 == 0


def countdown(
    split: str = "train",
    options: Mapping[str, str] | None = None,
    *,
    tag: str = "countdown",
) -> ProblemSet:
    """Generate solvable problems of the "train" or "test" split (disjoint), deterministically.

    The reward is `countdown`.
    Options: numbers=4 (count of numbers), high=99 (the largest), size=10000 (problems of train;
    test has 1/10).
    meta: numbers, target, level (count of the numbers that the generating solution uses). The
    response is that solution, in \\boxed{}.
    Raises UserError for an unknown split or option, or if too few problems exist.
    """
    if set(options or {}) - set(_OPTIONS):
        raise make_options_error("countdown", _TAKES, options or {})
    rows = _generate_rows(split, parse_counts("countdown", _TAKES, options or {}, _OPTIONS))
    return build_set("countdown", split, rows, tag)


def _generate_rows(
    split: str, options: Mapping[str, int]
) -> Iterator[tuple[str, dict[str, Any], str, None]]:
    """Yield different problems of a split. Raises UserError if too few exist."""
    rng = random.Random(f"countdown {split} {sorted(options.items())}")
    count = options["size"] if split == "train" else -(-options["size"] // 10)
    seen: set[tuple[tuple[int, ...], int]] = set()
    for _ in range(200 * count + 10_000):
        if len(seen) == count:
            return
        numbers = [rng.randint(1, options["high"]) for _ in range(options["numbers"])]
        solution, value, used = _expression(numbers, rng)
        key = (tuple(sorted(numbers)), value)
        if value not in _TARGETS or is_test(numbers, value) != (split == "test") or key in seen:
            continue
        seen.add(key)
        meta = {"numbers": numbers, "target": value, "answer": str(value), "level": used}
        yield _prompt(numbers, value), meta, f"\\boxed{{{solution}}}", None
    if len(seen) < count:
        raise UserError(
            f"countdown: of {options['numbers']} numbers up to {options['high']} fewer than "
            f"{count} problems exist; request a smaller size"
        )


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
