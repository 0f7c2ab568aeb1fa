"""Build generated data sets, with wrong responses for SFT of a model that knows a task but answers
badly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.errors import UserError
from rl.types import Problem


def make_options_error(name: str, takes: str, options: Mapping[str, str]) -> UserError:
    """Return the error for options that the set `name` does not take."""
    got = ",".join(f"{key}={value}" for key, value in options.items())
    return UserError(f"{name} takes the options {takes}; got {got!r}")


def parse_noise(
    name: str, takes: str, options: Mapping[str, str], others: Collection[str] = ()
) -> tuple[float, int]:
    """Return (share of noisy responses, first epoch that has them), by default (0, 0).

    others: the options besides `noise` and `from`. Raises UserError, with what the set `takes`, for
    an unknown option or an invalid value.
    """
    try:
        noise, first = float(options.get("noise", "0")), int(options.get("from", "0"))
    except ValueError:
        raise make_options_error(name, takes, options) from None
    if not 0 <= noise <= 1 or first < 0 or set(options) - {"noise", "from", *others}:
        raise make_options_error(name, takes, options)
    return noise, first


def parse_counts(
    name: str,
    takes: str,
    options: Mapping[str, str],
    ranges: Mapping[str, tuple[int, int, int]],
) -> dict[str, int]:
    """Return the options of `ranges`: (default, least, most) of each. Raises UserError for an
    invalid value.
    """
    counts = {key: options.get(key, str(default)) for key, (default, _, _) in ranges.items()}
    for key, (_, least, most) in ranges.items():
        if not counts[key].isdecimal() or not least <= int(counts[key]) <= most:
            raise make_options_error(name, takes, options)
    return {key: int(value) for key, value in counts.items()}


def build_set(
    name: str,
    split: str,
    rows: Iterable[tuple[Any, dict[str, Any], str, str | None]],
    tag: str,
    *,
    noise: tuple[float, int] = (0.0, 0),
    resample: Callable[[Problem, random.Random], str] | None = None,
    seed: Callable[[int, int], Any] | None = None,
) -> ProblemSet:
    """Return the problems of a split.

    rows: (content of the user message, meta, response, rejected answer) of each problem.
    noise: see `parse_noise`. resample: return a noisy response to a problem.
    seed: return the seed of a problem's noise by index and epoch; default: a text of the two.
    Raises UserError if the split is not "train" or "test".
    """
    if split not in ("train", "test"):
        raise UserError(f"{name} has the splits 'train' and 'test', got {split!r}")
    problems = [
        Problem(({"role": "user", "content": content},), meta, response, tag, index, rejected)
        for index, (content, meta, response, rejected) in enumerate(rows)
    ]
    share, first = noise

    def variant(problem: Problem, epoch: int) -> Problem:
        place = (problem.index, epoch)
        rng = random.Random(
            seed(*place) if seed is not None else "{} noise {} {}".format(name, *place)
        )
        if resample is None or epoch < first or rng.random() >= share:
            return problem
        return replace(problem, response=resample(problem, rng))

    return ProblemSet(problems, name=f"{name}/{split}", variant=variant if share else None)
