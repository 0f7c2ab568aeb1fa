"""Define the inputs and outputs of a sandbox: limits, the outcome of a run, the outcome of a
candidate's tests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from rl.errors import UserError


@dataclass(frozen=True)
class SandboxLimits:
    """Limit a program: a run, a test case, a call, an assert or a turn. Raises UserError for a
    number that is not positive.

    `wall_s`, `cpu_s`: seconds of wall time, and of processor time of all its processes together.
    `memory_mb`: MB of all its processes together, beyond the memory of the interpreter itself.
    `processes`: processes at a time, threads included if the kernel counts them.
    `file_mb`: total size of its /tmp (which is memory), hence also the size of the longest file.
    `files`: number of files that it may create.
    `output_kb`: stdout and stderr together, and a returned value.
    `total_s`: wall time of all tests of a candidate.
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
                raise UserError(
                    f"the sandbox limit {name} must be a positive number, got {value!r}"
                )


@dataclass(frozen=True)
class ProgramRun:
    """Describe the end of a program.

    `ended_by`: "" if the program ended by itself, else the limit that ended it (timeout, cpu,
    memory, processes, output), or "lost" if the sandbox itself ended. `returncode`: its exit code,
    None if a signal ended it (`signal`).
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
        """Return whether the program ended by itself with exit code 0. Its output may still be
        wrong.
        """
        return self.returncode == 0 and not self.ended_by


@dataclass(frozen=True)
class Grade:
    """Hold the verdicts of a candidate's tests.

    `passed`: a verdict for each test, False also for tests not run after an early stop. `reasons`:
    for each test "ok", or a word with details: wrong, error, load, timeout, cpu, memory, processes,
    output, exit, signal, forged, lost, skipped.
    """

    passed: list[bool]
    reasons: list[str]
    wall_s: float
    cached: bool = field(default=False, compare=False)

    @property
    def all(self) -> bool:
        """Return whether every test passed; False without tests."""
        return bool(self.passed) and all(self.passed)

    @property
    def fraction(self) -> float:
        """Return the share of tests that passed; 0 without tests."""
        return sum(self.passed) / len(self.passed) if self.passed else 0.0
