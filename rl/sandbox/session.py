"""A Python with state over turns: what the tool "python" of an episode speaks to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl.sandbox.inside import replies
from rl.sandbox.inside.display import make_printable
from rl.sandbox.slots import Job, Lost, Slot, Slots


@dataclass(frozen=True)
class Turn:
    """What a turn printed; `value`: the repr of its last expression, None where that is None or
    there is none. `ended_by`: "" where the state lives on, else why it is lost (timeout, cpu,
    memory, processes, output, exit, signal, forged, lost).
    """

    stdout: str
    stderr: str
    value: str | None
    ended_by: str
    wall_s: float

    @property
    def text(self) -> str:
        """All of it as an interpreter shows it."""
        return self.stdout + self.stderr + (f"{self.value}\n" if self.value is not None else "")


class Session:
    """`run` a turn after another in one interpreter. One that ends it (a limit, an exit) leaves a
    new, empty one for the next turn. One thread at a time. Close it: it holds an interpreter of its
    own.
    """

    def __init__(self, slots: Slots, slot: Slot, job: dict[str, Any]):
        self._slots, self._slot, self._message = slots, slot, job
        self._job: Job | None = None

    def run(self, code: str, *, wall_s: float | None = None) -> Turn:
        """One turn, within `wall_s` seconds (default: the limits')."""
        seconds = wall_s or self._message["limits"]["wall_s"]
        try:
            self._job = self._job or self._slot.open(self._message)
            reply = self._job.ask(
                {"do": "call", "request": {"do": "session", "code": code}, "wall_s": seconds},
                seconds,
            )
        except Lost as error:
            self._end(lost=True)
            return Turn("", str(error), None, "lost", seconds)
        if "ended" in reply:
            self._end()
            by = reply["by"] or ("signal" if reply["signal"] else "exit")
            return Turn(reply["stdout"], reply["stderr"], None, by, reply["wall_s"])
        by, value = _read(reply)
        if by:
            self._end()
        return Turn(reply["stdout"], reply["stderr"], value, by, reply["wall_s"])

    def _end(self, lost: bool = False) -> None:
        job, self._job = self._job, None
        if job is not None:
            self._slot.close(job)
        if lost:
            self._slot.drop()

    def close(self) -> None:
        if not self._slots.closed:
            self._end()
            self._slots.forget(self._slot)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _read(reply: dict[str, Any]) -> tuple[str, str | None]:
    """Why the interpreter is to be ended ("" where it lives on), and the text of a turn's value."""
    try:
        answer = replies.read_answer(replies.parse(reply["reply"]), reply["number"], None)
    except replies.Forged:
        return "forged", None
    if isinstance(answer, replies.Raised):
        return ("exit" if answer.name == "SystemExit" else ""), None
    if answer.value is not None and type(answer.value) is not str:
        return "forged", None
    return "", None if answer.value is None else make_printable(answer.value)
