"""What a sandbox takes and gives: limits, the outcome of a run, the outcome of a candidate's tests."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from rl.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Of one program: of a run, a test case, a call, an assert, a turn. A number that is not
    positive is a UserError.

    `wall_s`, `cpu_s`: seconds by the clock, and of processor time of all its processes together.
    `memory_mb`: of all its processes together, beyond what the interpreter itself holds.
    `processes`: at a time, threads included where the kernel counts them. `file_mb`: its /tmp
    altogether (which is memory), so also the longest file. `files`: how many it may make.
    `output_kb`: stdout and stderr together, and a returned value. `total_s`: all tests of a
    candidate by the clock.
    """

    wall_s: float = 6.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    processes: int = 64
    file_mb: int = 64
    files: int = 1000
    output_kb: int = 1024
    total_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int | float) or not value > 0 or value == float("inf"):
                raise UserError(f"a sandbox's limit {name} is a positive number, got {value!r}")


@dataclass(frozen=True)
class Run:
    """How a program ended. `ended_by`: "" where it ended by itself, else the limit that ended it
    (timeout, cpu, memory, processes, output), or "lost" where the sandbox itself was. `returncode`:
    its exit code, None where a signal ended it (`signal`).
    """

    stdout: str
    stderr: str
    returncode: int | None
    signal: int | None
    timed_out: bool
    ended_by: str
    wall_s: float
    cpu_s: float
    memory_mb: float = 0.0

    @property
    def ok(self) -> bool:
        """It ended by itself with exit code 0. Says nothing about whether it was right."""
        return self.returncode == 0 and not self.ended_by


@dataclass(frozen=True)
class Grade:
    """A candidate's tests. `passed`: a verdict for each test, False also for those not run after an
    early stop. `reasons`: for each, "ok", or a word and what happened: wrong, error, load, timeout,
    cpu, memory, processes, output, exit, signal, forged, lost, skipped.
    """

    passed: list[bool]
    reasons: list[str]
    wall_s: float
    cached: bool = field(default=False, compare=False)

    @property
    def all(self) -> bool:
        """Every test passed, and there was one."""
        return bool(self.passed) and all(self.passed)

    @property
    def fraction(self) -> float:
        """The share of tests that passed; 0 without tests."""
        return sum(self.passed) / len(self.passed) if self.passed else 0.0
