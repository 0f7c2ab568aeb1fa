"""Run code in a Python interpreter that keeps its state over turns, for the tool "python" of an
episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl.sandbox.inside import reply_parser
from rl.sandbox.inside.value_display import make_printable
from rl.sandbox.worker_pool import SandboxLost, SandboxWorker, WorkerJob, WorkerPool


@dataclass(frozen=True)
class SessionTurn:
    """Hold the output of a turn.

    `value`: the repr of its last expression, None if that is None or missing. `ended_by`: "" if the
    state is kept, else the reason of its loss (timeout, cpu, memory, processes, output, exit,
    signal, forged, lost).
    """

    stdout: str
    stderr: str
    value: str | None
    ended_by: str
    wall_s: float

    @property
    def text(self) -> str:
        """Return the whole output in the form that an interpreter prints."""
        return self.stdout + self.stderr + (f"{self.value}\n" if self.value is not None else "")


@dataclass(eq=False)
class PythonSession:
    """Run turns in an interpreter, from a single thread.

    A turn that ends the interpreter (by a limit or an exit) leaves a new, empty interpreter for the
    next turn. Close the session: it holds an interpreter besides the sandbox's workers.
    """

    _pool: WorkerPool
    _worker: SandboxWorker
    _message: dict[str, Any]
    _job: WorkerJob | None = None

    def run(self, code: str, *, wall_s: float | None = None) -> SessionTurn:
        """Run a turn within `wall_s` seconds (default: the limit `wall_s`)."""
        seconds = wall_s or self._message["limits"]["wall_s"]
        try:
            self._job = self._job or self._worker.open(self._message)
            reply = self._job.request(
                {"do": "call", "request": {"do": "session", "code": code}, "wall_s": seconds},
                seconds,
            )
        except SandboxLost as error:
            self._end(lost=True)
            return SessionTurn("", str(error), None, "lost", seconds)
        if "ended" in reply:
            by, value = reply["ended_by"] or ("signal" if reply["signal"] else "exit"), None
        else:
            by, value = _read_value(reply)
        if by:
            self._end()
        return SessionTurn(reply["stdout"], reply["stderr"], value, by, reply["wall_s"])

    def _end(self, lost: bool = False) -> None:
        job, self._job = self._job, None
        if job is not None:
            self._worker.close(job)
        if lost:
            self._worker.kill_zygote()

    def close(self) -> None:
        """End the interpreter and remove its worker. A second call does nothing."""
        self._end()
        self._pool.remove_worker(self._worker)

    def __enter__(self) -> PythonSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _read_value(reply: dict[str, Any]) -> tuple[str, str | None]:
    """Return the reason to end the interpreter ("" to keep it) and the text of a turn's value."""
    try:
        answer = reply_parser.read_answer(reply_parser.parse(reply["reply"]), reply["number"], None)
    except reply_parser.ForgedMessageError:
        return "forged", None
    if isinstance(answer, reply_parser.ErrorReply):
        return ("exit" if answer.name == "SystemExit" else ""), None
    if answer.value is not None and type(answer.value) is not str:
        return "forged", None
    return "", None if answer.value is None else make_printable(answer.value)
