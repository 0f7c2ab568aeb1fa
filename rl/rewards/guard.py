"""The guard of one reward worker, or of one program: a small process between the trainer and the
process that runs the reward.

Run as a script, of the standard library alone: `python -P guard.py SOCKET PARENT SYS_PATH`, or for
a program, which has no socket, `python -P guard.py -1 PARENT "" PROGRAM ARGUMENTS...`. It forks the
worker (or program), passes on what that prints, and when the trainer ends or lets go, or the worker
ends, it kills all that the worker started and then ends as the worker did. It adopts what loses its
parent (Linux: a "child subreaper"), so a process that went into a session of its own is found as
well. Its standard output is a socket to the trainer, whose end is how it learns that the trainer is
gone. It is no sandbox: a reward is code that runs as the same user, and can do what that user can.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

MARK = "WHETSTONE_REWARD_WORKER"  # in the environment of a worker and of what it starts
PRINTED_BYTES = 64 * 1024  # of what one worker prints that are passed on
LAST_BYTES = 2048  # of it that are passed on in any case: why a worker ended stands there
# to find and kill what is left; only a reward that starts processes faster than they are killed
# needs so long
END_SECONDS = 3.0
_ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PARENT_DIED = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGHUP
_LIFE = 1  # its standard output: the socket to the trainer
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux's prctl; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(channel: int, parent: int, path: list[str], program: list[str]) -> NoReturn:
    """`channel`: the socket of items and replies, the worker's alone. `path`: the trainer's
    sys.path. `program`: in their place.
    """
    # Signals that ask a run to stop may reach all its processes (a scheduler's do), and it needs
    # its rewards to finish the step. Handlers that do nothing, since what a reward starts would
    # inherit SIG_IGN.
    for number in (*_ASKED_TO_STOP, signal.SIGCHLD, _PARENT_DIED):
        signal.signal(number, lambda *_: None)
    heard, hears = os.pipe()
    for fd in (heard, hears):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    prctl(_SET_CHILD_SUBREAPER, 1)
    # beside the socket, which a fork of the trainer may hold open
    prctl(_SET_PARENT_DEATH_SIGNAL, _PARENT_DIED)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    printed, prints = os.pipe()
    worker = os.fork()
    if worker == 0:
        _leave_guard(prints, parent=os.getppid(), closing=(heard, hears, printed))
        if program:
            _become_program(program)
        _become_worker(channel, path)
    for fd in (channel, prints):
        if fd >= 0:
            os.close(fd)
    code = _watch(worker, heard, printed)
    if code < 0:  # end as it did, without a second core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _leave_guard(prints: int, *, parent: int, closing: tuple[int, ...]) -> None:
    """In the fork: a session of its own, the guard's pipe for all that is printed, none of the
    guard's descriptors and handlers.
    """
    os.setsid()  # a reward that kills its process group kills itself
    prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, _PARENT_DIED):
        signal.signal(number, signal.SIG_DFL)
    for fd in closing:
        os.close(fd)
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    os.close(prints)


def _become_program(words: list[str]) -> NoReturn:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(127)


def _become_worker(channel: int, path: list[str]) -> NoReturn:
    os.set_inheritable(channel, False)  # what a reward starts must not hold it
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # text streams, both
    sys.path[:] = path
    sys.argv[:] = [""]
    code = 1
    try:
        from rl.rewards.serving import serve

        serve(channel)
        code = 0
    except (
        BaseException
    ):  # boundary: whatever ends a worker, its parent's code is not run a second time
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a reward may have closed it
                stream.flush()
        os._exit(code)


def _watch(worker: int, heard: int, printed: int) -> int:
    """Passes on what the worker prints until it or the trainer ends; then kills what is left.

    Returns the worker's exit code, -N where signal N killed it.
    """
    output = _Output(printed)
    os.set_blocking(_LIFE, False)
    poller = select.poll()
    for fd in (_LIFE, heard, printed):
        poller.register(fd, select.POLLIN)
    code: int | None = None
    gone = False
    while code is None and not gone:
        for fd, _ in poller.poll():
            if fd == printed and not output.pass_on():
                poller.unregister(printed)
            elif fd == _LIFE:  # the trainer sends nothing: its end closed
                gone = True
            elif fd == heard:
                gone = gone or int(_PARENT_DIED) in os.read(heard, 4096)
        code = _reap(worker)
    code = end_all(worker, code)
    output.finish()
    return code


class _Output:
    """What a worker prints: the first part is passed on, the rest is read and dropped but for its
    end.
    """

    def __init__(self, printed: int):
        self._printed, self._left, self._last, self._dropped = printed, PRINTED_BYTES, b"", 0
        os.set_blocking(printed, False)

    def pass_on(self) -> bool:
        """Reads once. False where nothing more can come."""
        try:
            data = os.read(self._printed, 1 << 16)
        except BlockingIOError:
            return True
        now, later = data[: self._left], data[self._left :]
        if now:
            self._left -= len(now)
            _send(now)
        if later:
            self._dropped += len(later)
            self._last = (self._last + later)[-LAST_BYTES:]
        return bool(data)

    def finish(self) -> None:
        """Once all who could print are dead: the rest that fits, and the end."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            before = self._left, self._dropped
            if not self.pass_on() or before == (self._left, self._dropped):
                break
        if self._dropped > len(self._last):
            _send(f"\n[{self._dropped - len(self._last)} bytes left out]\n".encode())
        _send(self._last)


def _send(data: bytes) -> None:
    """To the trainer, if it still listens and has room: a worker never waits for somebody to read
    what it prints.
    """
    try:
        os.write(_LIFE, data)
    except OSError:
        pass


# -------------------------------------------------------------------------- ending what was started


def _reap(worker: int) -> int | None:
    """Takes note of all children that ended. The worker's exit code if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)


def end_all(worker: int, code: int | None) -> int:
    """Kills the worker, its process group, and every descendant, adopted ones too. Returns the
    worker's exit code.
    """
    deadline = time.monotonic() + END_SECONDS
    kill(worker, group=True)
    while time.monotonic() < deadline:
        ended = _reap(worker)
        code = ended if ended is not None else code
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break  # no child is left, and an orphan would be ours
        for pid in descendants(os.getpid()):
            kill(pid)
        time.sleep(0.001)
    return code if code is not None else -int(signal.SIGKILL)


def kill(pid: int, *, group: bool = False) -> None:
    for end in (os.killpg, os.kill) if group else (os.kill,):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended, or made itself another user's


def descendants(of: int) -> list[int]:
    """The living processes below one, as /proc tells; [] where there is none."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, look = [], [of]
    while look:
        below = children.pop(look.pop(), [])
        found += below
        look += below
    return found


def marked(mark: str) -> list[int]:
    """The processes whose environment holds MARK=mark; [] where there is no /proc."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3] or "[]"), sys.argv[4:])
