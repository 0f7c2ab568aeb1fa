"""Generate one-line functions, tested by calls: "add 3, mod 7:" -> "def f(x):return (x+3)%7". For
models of few parameters.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Mapping
from itertools import product

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.noise_config import parse_noise
from rl.errors import UserError
from rl.types import Problem

_CONSTANTS = range(2, 10)
# {e}: the expression so far ({b}: in brackets); {c}: a constant
_STEPS = {
    "add": "{b}+{c}",
    "take": "{b}-{c}",
    "times": "{b}*{c}",
    "mod": "{b}%{c}",
    "most": "min({e},{c})",
    "least": "max({e},{c})",
}
_INPUTS = (-7, 0, 3, 5, 12)

Step = tuple[str, int]


def is_test(steps: tuple[Step, Step]) -> bool:
    """Return whether a problem is held out: 1/10, by a hash of its sorted steps.

    Both orders of the steps are in the same split.
    """
    return zlib.crc32(f"oneliners {sorted(steps)}".encode()) % 10 == 0


def _apply(step: Step, x: int) -> int:
    name, c = step
    return {
        "add": x + c,
        "take": x - c,
        "times": x * c,
        "mod": x % c,
        "most": min(x, c),
        "least": max(x, c),
    }[name]


def _program(steps: tuple[Step, ...]) -> str:
    e = "x"
    for name, c in steps:
        e = _STEPS[name].format(e=e, b=e if e == "x" or e.endswith(")") else f"({e})", c=c)
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
    system_prompt: str | None = None,
) -> ProblemSet:
    """Generate all functions of two steps of a split. The reward is `code_tests`.

    The splits "train" and "test" are disjoint and have about 2,070 and 230 functions.
    Option `noise` (0 to 1): the share of responses with a resampled step, for supervised training
    of a model that can write functions but makes errors. Option `from`: the first epoch with noise.
    meta["tests"] is always correct.
    """
    noise, first = _noise(options or {})
    if split not in ("train", "test"):
        raise UserError(f"oneliners has the splits 'train' and 'test', got {split!r}")
    every = [*product(_STEPS, _CONSTANTS)]
    pairs = [pair for pair in product(every, every) if is_test(pair) == (split == "test")]
    system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    problems = []
    for index, steps in enumerate(pairs):
        message = {"role": "user", "content": ", ".join(f"{name} {c}" for name, c in steps) + ":"}
        cases = [[[x], _apply(steps[1], _apply(steps[0], x))] for x in _INPUTS]
        meta = {"tests": {"style": "calls", "function": "f", "cases": cases}}
        problems.append(Problem((*system, message), meta, _program(steps), tag, index))

    def variant(problem: Problem, epoch: int) -> Problem:
        draw = random.Random(f"oneliners noise {problem.index} {epoch}")
        if epoch < first or draw.random() >= noise:
            return problem
        return dataclasses.replace(
            problem, response=_program(_resample_step(pairs[problem.index], draw))
        )

    return ProblemSet(problems, name=f"oneliners/{split}", variant=variant if noise else None)


def _noise(options: Mapping[str, str]) -> tuple[float, int]:
    """Return (share of noisy responses, first epoch that has them).

    Raises UserError for unknown or invalid options.
    """
    noise = parse_noise(options)
    if noise is None or set(options) - {"noise", "from"}:
        got = ",".join(f"{key}={value}" for key, value in options.items())
        takes = "noise=P with P from 0 to 1, and from=EPOCH, e.g. 'oneliners:noise=0.5,from=4'"
        raise UserError(f"oneliners takes the options {takes}; got {got!r}")
    return noise
