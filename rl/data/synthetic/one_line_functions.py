"""Generate one-line functions, tested by calls: "add 3, mod 7:" -> "def f(x):return (x+3)%7". For
models of few parameters.
"""

from __future__ import annotations

import operator
import random
import zlib
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.generated_set import build_set, parse_noise
from rl.types import Problem

_CONSTANTS = range(2, 10)
# What a step adds to the program, and what it computes. {e}: the expression so far ({b}: in
# brackets); {c}: a constant.
_STEPS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("{b}+{c}", operator.add),
    "take": ("{b}-{c}", operator.sub),
    "times": ("{b}*{c}", operator.mul),
    "mod": ("{b}%{c}", operator.mod),
    "most": ("min({e},{c})", min),
    "least": ("max({e},{c})", max),
}
_INPUTS = (-7, 0, 3, 5, 12)
_TAKES = "noise=P with P from 0 to 1, and from=EPOCH, e.g. 'oneliners:noise=0.5,from=4'"

Step = tuple[str, int]


def is_test(steps: tuple[Step, Step]) -> bool:
    """Return whether a problem is held out: 1/10, by a hash of its sorted steps.

    Both orders of the steps are in the same split.
    """
    return zlib.crc32(f"oneliners {sorted(steps)}".encode()) % 10 == 0


def _apply(step: Step, x: int) -> int:
    name, c = step
    return _STEPS[name][1](x, c)


def _program(steps: tuple[Step, ...]) -> str:
    e = "x"
    for name, c in steps:
        e = _STEPS[name][0].format(e=e, b=e if e == "x" or e.endswith(")") else f"({e})", c=c)
    return f"def f(x):return {e}"


def _resample_step(steps: tuple[Step, Step], rng: random.Random) -> tuple[Step, ...]:
    """Resample a step's operation or constant; the new value may be the same."""
    changed = list(steps)
    position = rng.randrange(2)
    name, c = changed[position]
    changed[position] = (
        (rng.choice(list(_STEPS)), c) if rng.random() < 0.5 else (name, rng.choice(_CONSTANTS))
    )
    return tuple(changed)


def oneliners(
    split: str = "train",
    options: Mapping[str, str] | None = None,
    *,
    tag: str = "oneliners",
) -> ProblemSet:
    """Generate all functions of two steps of a split. The reward is `code_tests`.

    The splits "train" and "test" are disjoint and have about 2,070 and 230 functions.
    Option `noise` (0 to 1): the share of responses with a resampled step, for supervised training
    of a model that can write functions but makes errors. Option `from`: the first epoch with noise.
    meta["tests"] is always correct.
    """
    noise = parse_noise("oneliners", _TAKES, options or {})
    every = [*product(_STEPS, _CONSTANTS)]
    pairs = [pair for pair in product(every, every) if is_test(pair) == (split == "test")]

    def make_row(steps: tuple[Step, Step]) -> tuple[str, dict[str, Any], str, None]:
        cases = [[[x], _apply(steps[1], _apply(steps[0], x))] for x in _INPUTS]
        meta = {"tests": {"style": "calls", "function": "f", "cases": cases}}
        return ", ".join(f"{name} {c}" for name, c in steps) + ":", meta, _program(steps), None

    def resample(problem: Problem, rng: random.Random) -> str:
        return _program(_resample_step(pairs[problem.index], rng))

    return build_set(
        "oneliners",
        split,
        map(make_row, pairs),
        tag,
        noise=noise,
        resample=resample,
    )
