"""Run families of fuzz tests. A family is a module `tests/<package>/test_fuzz_<name>.py` with

    inputs(seed, count)   an iterable of `count` inputs, a function of `seed` only
    check(item)           runs an input through the product's entry point; returns an outcome,
                          and raises if a promise is broken

An outcome is ACCEPTED, REFUSED (a single clean error that a user can read) or the name of an entry
in the module's list of inputs that are accepted although they are odd, with the reason. Everything
else (another exception, a hang, silence) is a fault. tests/project/test_fuzzing.py runs every
family on many more inputs.
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

# Numbers as a person, or a program written by a person, may write them, and texts that look like
# numbers.
ODD_NUMBERS: tuple[str, ...] = (
    "nan", "inf", "-inf", "-1", "0", "-0.0", "1e22", "-1e22", "1e308", "1e-320", "0.5", "9" * 400,
    "-" + "9" * 400, "1_000", "0x10", "1e999", "٣", "½", "1,5", "1.", ".5", "+3", "True", "None",
    "null", "", " ", "1 2", "2**63", str(2**63), str(2**31), str(10**18),
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 10**400, 0.5, -0.0, 1e22, math.nan, math.inf, -math.inf,
    "", " ", "0", "nan", "\x00", "\ud800", "\x1b[31mred\x1b[0m", "a\nb", "x" * 5000, "日本語", "🦊",
    [], {}, [None], [[]], {"": ""}, {"a": {"b": {}}}, [1, "a", None],
)  # fmt: skip


class InputTimeoutError(AssertionError):
    """Raised if an input takes longer than its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise InputTimeoutError in the main thread after `seconds`. In other threads, and off POSIX,
    it has no effect.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise InputTimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class FuzzReport:
    """The results of a family. `outcomes`: the count of each outcome; `faults`: (number of the
    input, input, error).
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
) -> FuzzReport:
    """Check every input of a family, each within `seconds`. Faults are collected; the first 100 are
    kept.

    An input that exceeds the limit is tried once more: on a busy machine the process may not have
    run for that long, while a hang repeats.
    """
    report = FuzzReport()
    for number, item in enumerate(inputs(seed, count)):
        try:
            try:
                with limit(seconds):
                    outcome = check(item)
            except InputTimeoutError:
                with limit(seconds):
                    outcome = check(item)
            report.outcomes[outcome] += 1
        except Exception as error:  # any exception is a fault
            report.outcomes["fault"] += 1
            if len(report.faults) < 100:
                report.faults.append(
                    (number, repr(item)[:2000], f"{type(error).__name__}: {error}"[:2000])
                )
    return report


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with a single damage: a flipped bit, bytes removed, doubled or replaced, a
    cut-off end, or noise instead.
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
