"""Provide `Sandbox`, which runs and grades programs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rl.errors import UserError
from rl.sandbox import grade_tests
from rl.sandbox.inside.value_display import make_printable
from rl.sandbox.package_import import default_packages
from rl.sandbox.program_language import LANGUAGES, find_command
from rl.sandbox.python_session import PythonSession
from rl.sandbox.sandbox_service import SandboxService
from rl.sandbox.sandbox_types import (
    Grade,
    ProgramRun,
    Pytest,
    SandboxLimits,
    StdinStdoutTests,
    Tests,
)
from rl.sandbox.worker_pool import SandboxLost, WorkerPool
from rl.sandbox.zygote_launch import Zygote, find_sandbox

_MAX_CACHED_GRADES = 10_000  # grades kept


class Sandbox:
    """Run programs in isolation, safely from any number of threads.

    `workers` programs run at a time, each on a core (default: all cores). `mode`: "auto" is
    bubblewrap, or sandlock if bubblewrap is refused; raises UserError with the missing requirement
    and its remedy if both are refused. "bubblewrap" or "sandlock" select that mode. "http://..." is
    the URL of a service. "rlimits": only limits and seccomp, a weaker mode that is used only on
    request. `kind` names the selected mode. Close the sandbox or use it in a `with`; after a kill
    of its process all its processes end too.
    """

    def __init__(
        self,
        mode: str = "auto",
        limits: SandboxLimits | None = None,
        workers: int | None = None,
        *,
        packages: Sequence[str] | None = None,
        without: Sequence[str] = (),
    ):
        """Start the sandbox.

        `packages`: installed packages that programs may import in addition to the standard library,
        each with its requirements; by default numpy if it is installed. `without`: isolation layers
        to leave out, for tests of the other layers.
        """
        if workers is not None and workers < 1:
            raise UserError(f"a sandbox needs at least 1 worker, got {workers}")
        self.limits = limits or SandboxLimits()
        self.workers = workers or len(os.sched_getaffinity(0))
        self._service = SandboxService(mode) if mode.startswith(("http://", "https://")) else None
        self.packages = default_packages() if packages is None else tuple(packages)
        if self._service is not None:
            if packages is not None and self.packages != default_packages():
                raise UserError(
                    "a service provides its packages itself: leave out "
                    f"packages={self.packages!r}, or install them on the service"
                )
            self._service.probe()
            self.kind, self._worker_pool = self._service.kind, WorkerPool(_refuse_zygote, 0)
        else:
            self.kind, start = find_sandbox(mode, without, self.packages)
            self._worker_pool = WorkerPool(start, self.workers)
        self._lock = threading.Lock()
        # Of a grading that raised or lost its sandbox the future's result is None.
        self._cache: OrderedDict[str, Future[Grade | None]] = OrderedDict()

    # --------------------------------------------------------------------------------------- public

    def run(
        self,
        program: str,
        *,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramRun:
        """Run a program from start to end and return its output.

        `files`: names and texts of files next to it. Failures of the program are in the ProgramRun,
        never raised.
        """
        limits = limits or self.limits
        start = time.monotonic()
        try:
            if self._service is not None:
                return self._service.run(program, language, stdin, files or {}, limits)
            with self._worker_pool.open_job(
                self._build_job(program, language, files, limits)
            ) as job:
                built = grade_tests.compile_program(job, language, limits)
                reply = built or job.request(
                    grade_tests.build_case_message(language, stdin, limits), limits.wall_s
                )
        except SandboxLost as error:
            return ProgramRun(
                "", str(error), None, None, False, "lost", time.monotonic() - start, 0.0
            )
        by = reply["ended_by"]
        return ProgramRun(
            reply["stdout"],
            reply["stderr"],
            None if by else reply["code"],
            None if by else reply["signal"],
            by == "timeout",
            by,
            reply["wall_s"],
            reply["cpu_s"],
            reply["memory_mb"],
        )

    def grade(
        self,
        program: str,
        tests: Tests,
        *,
        limits: SandboxLimits | None = None,
        early_stop: bool = False,
        cache: bool = True,
    ) -> Grade:
        """Return the verdicts of `tests` on a program.

        `early_stop`: skip the remaining tests after the first failure, for all-or-nothing rewards.
        `cache`: grade the same program and tests under the same limits only once; concurrent
        requests wait for the first grading.
        """
        limits = limits or self.limits
        key = _cache_key(program, tests, limits, early_stop) if cache else None
        if key is None:
            return self._grade(program, tests, limits, early_stop)
        with self._lock:
            future = self._cache.get(key)
            if is_first := future is None:
                future = self._cache[key] = Future()
                if len(self._cache) > _MAX_CACHED_GRADES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(key)
        assert future is not None
        if not is_first:  # samples of a group are often the same program
            grade = future.result()
            if grade is not None:
                return dataclasses.replace(grade, cached=True)
            return self._grade(program, tests, limits, early_stop)
        grade = None
        try:
            grade = self._grade(program, tests, limits, early_stop)
            return grade
        finally:
            reasons = ["lost"] if grade is None else grade.reasons
            words = {reason.partition(":")[0] for reason in reasons}
            if words & {"lost", "timeout"}:  # these may not repeat
                with self._lock:
                    self._cache.pop(key, None)
            # Waiting threads share a timeout too; later requests grade again.
            future.set_result(None if "lost" in words else grade)

    def session(
        self, *, files: Mapping[str, str] | None = None, limits: SandboxLimits | None = None
    ) -> PythonSession:
        """Return a Python interpreter that keeps its state over turns, in addition to the workers.
        Close it.
        """
        if self._service is not None:
            raise UserError(f"a session needs a local sandbox, this sandbox is a {self.kind}")
        return PythonSession(
            self._worker_pool,
            self._worker_pool.add_worker(),
            self._build_job("", "python", files, limits or self.limits),
        )

    def close(self) -> None:
        """End all running programs. A second call does nothing."""
        self._worker_pool.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- internal

    def _build_job(
        self, program: str, language: str, files: Mapping[str, str] | None, limits: SandboxLimits
    ) -> dict[str, Any]:
        if language not in LANGUAGES:
            raise UserError(f"language {language!r} is unknown, expected: {', '.join(LANGUAGES)}")
        find_command(language)
        program_file = LANGUAGES[language].file
        for name in files or {}:
            if not name or name.startswith(("/", f"{program_file}/")) or ".." in name.split("/"):
                raise UserError(
                    f"a file next to a program needs a name within its folder, which has the "
                    f"program as {program_file}; got {name!r}"
                )
        return {
            "program": program,
            "files": {**(files or {}), program_file: program},
            "limits": dataclasses.asdict(limits),
        }

    def _grade(self, program: str, tests: Tests, limits: SandboxLimits, early_stop: bool) -> Grade:
        start = time.monotonic()
        language = tests.language if isinstance(tests, StdinStdoutTests) else "python"
        results: list[tuple[bool, str]] = []
        try:
            with contextlib.ExitStack() as stack:
                if self._service is not None:
                    verdicts = self._service.grade_tests(program, tests, limits)
                else:
                    job = self._build_job(program, language, None, limits)
                    opened = stack.enter_context(self._worker_pool.open_job(job))
                    verdicts = grade_tests.grade_tests(opened, tests, limits, early_stop)
                for verdict in verdicts:
                    results.append(verdict)
                    # pytest stops by itself
                    if early_stop and not verdict[0] and not isinstance(tests, Pytest):
                        break
        except SandboxLost as error:
            results.append((False, f"lost: {error}"))
        reason = "lost: no verdict"
        if results and not results[-1][0]:
            lost = results[-1][1] if results[-1][1].startswith("lost") else reason
            reason = "skipped" if early_stop else lost
        results += [(False, reason)] * (grade_tests.count_tests(tests) - len(results))
        return Grade(
            [ok for ok, _ in results],
            [make_printable(reason) for _, reason in results],
            time.monotonic() - start,
        )


def _refuse_zygote() -> Zygote:
    raise RuntimeError("a service has no zygotes")


def _cache_key(program: str, tests: Tests, limits: SandboxLimits, early_stop: bool) -> str | None:
    """Return the cache key of a grading.

    Return None if the comparer is a function, which has no stable name, or if the tests hold an int
    too long to print.
    """
    if callable(getattr(tests, "compare", None)):
        return None
    values = (dataclasses.astuple(tests), dataclasses.astuple(limits), early_stop)
    try:
        description = repr((type(tests).__name__, *values))
    except ValueError:
        return None
    return hashlib.sha256(json.dumps([program, description]).encode()).hexdigest()
