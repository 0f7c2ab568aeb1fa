"""What every family of fuzz tests shares. A family is a module `tests/<package>/test_fuzz_<name>.py` with

    inputs(seed, count)   an iterable of `count` inputs, a function of `seed` alone
    check(item)           one input through the product's own entry point; returns an outcome, raises where a promise is broken

An outcome is ACCEPTED, REFUSED (one clean error that a user can read) or the name of an entry in
the module's own list of what is accepted although it is odd, which says why. Everything else
(another exception, a hang, silence) is a fault. tests/project/test_fuzzing.py runs every family
on many more inputs.
"""

from __future__ import annotations

import math
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

ACCEPTED, REFUSED = "accepted", "refused"

# Numbers as a person (or a program that a person wrote) may give them, and texts that look like
# numbers.
ODD_NUMBERS: tuple[str, ...] = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "-0.0",
    "1e22",
    "-1e22",
    "1e308",
    "1e-320",
    "0.5",
    "9" * 400,
    "-" + "9" * 400,
    "1_000",
    "0x10",
    "1e999",
    "٣",
    "½",
    "1,5",
    "1.",
    ".5",
    "+3",
    "True",
    "None",
    "null",
    "",
    " ",
    "1 2",
    "2**63",
    str(2**63),
    str(2**31),
    str(10**18),
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e22,
    math.nan,
    math.inf,
    -math.inf,
    "",
    " ",
    "0",
    "nan",
    "\x00",
    "\ud800",
    "\x1b[31mred\x1b[0m",
    "a\nb",
    "x" * 5000,
    "日本語",
    "🦊",
    [],
    {},
    [None],
    [[]],
    {"": ""},
    {"a": {"b": {}}},
    [1, "a", None],
)


class Hang(AssertionError):
    """An input took longer than its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises Hang in the main thread once `seconds` are over (elsewhere, and off POSIX, without
    effect).
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Report:
    """What came of a family's inputs. `outcomes`: how many of each; `faults`: (number of the input,
    input, what was raised).
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, str, str]] = field(default_factory=list)


def run_family(
    inputs: Callable[[int, int], Iterable[Any]],
    check: Callable[[Any], str],
    *,
    seed: int,
    count: int,
    seconds: float = 60.0,
) -> Report:
    """Every input of a family through its check, each within `seconds`; faults are collected, the
    first 100 kept.

    One that took longer is tried once more: a machine that others keep busy may have done nothing
    for so long; a hang does it again.
    """
    report = Report()
    for number, item in enumerate(inputs(seed, count)):
        try:
            try:
                with limit(seconds):
                    outcome = check(item)
            except Hang:
                with limit(seconds):
                    outcome = check(item)
            report.outcomes[outcome] += 1
        except Exception as error:  # whatever it is, it is what is looked for
            report.outcomes["fault"] += 1
            if len(report.faults) < 100:
                report.faults.append(
                    (number, repr(item)[:2000], f"{type(error).__name__}: {error}"[:2000])
                )
    return report


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with one damage: a flipped bit, bytes left out, doubled or replaced, a cut-off end, or
    noise in its place.
    """
    if not data:
        return rng.randbytes(rng.randrange(1, 32))
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    match rng.randrange(7):
        case 0:
            i = rng.randrange(len(data))
            return data[:i] + bytes([data[i] ^ (1 << rng.randrange(8))]) + data[i + 1 :]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:end] + data[at:]
        case 3:
            return data[:at] + rng.randbytes(max(1, min(16, end - at))) + data[end:]
        case 4:
            return data[:at]
        case 5:
            return data[:at] + bytes(end - at) + data[end:]
    return rng.randbytes(rng.randrange(1, 200))
