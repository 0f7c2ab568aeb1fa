"""Run the reaper of a worker or a program.

The reaper is a small process between the trainer and the worker; it ends all the worker's
descendants.

Runs as a script that needs only the standard library, for a function of a module, which receives
its end of a socket: `python -P reaper.py PARENT SOCKET SYS_PATH MODULE:FUNCTION`, or for a program,
which inherits the socket (-1: none): `python -P reaper.py PARENT SOCKET "" PROGRAM ARGUMENTS...`.
It forks the worker (or program) and forwards its output. When the trainer ends or closes its
socket, or when the worker ends, it kills every process that the worker started, then ends with the
worker's exit status. It adopts orphaned descendants (Linux: a "child subreaper"), so it also finds
a process that started its own session. Its standard output is a socket to the trainer; the end of
that stream signals that the trainer has ended. It is not a sandbox: a worker runs as the same user,
with that user's permissions.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

# environment variable of a worker or program and of every process that it starts
MARK_VARIABLE = "WHETSTONE_PROCESS"
OUTPUT_BYTES = 64 * 1024  # bytes of a worker's output that are forwarded
# Bytes of the end of a worker's output, which are always forwarded: they usually hold the reason
# why the worker ended.
OUTPUT_TAIL_BYTES = 2048
# Time to find and kill all remaining processes. Only a worker that starts processes faster than
# they are killed needs this long.
KILL_SECONDS = 3.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PARENT_DEATH_SIGNAL = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGHUP
_OUTPUT_SOCKET = 1  # its standard output: the socket to the trainer
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def set_parent_death_signal(number: int) -> None:
    """Ask the system to send this process a signal when the thread that started it ends.

    Does nothing on systems other than Linux.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


def detach_from(parent: int, *, new_session: bool = True) -> None:
    """Begin a session, or only a process group, in a forked child. The child is killed when its
    parent ends.

    `parent`: process id of the parent, which may have ended already.
    """
    # a child that kills its process group kills only itself
    if new_session:
        os.setsid()
    else:
        os.setpgid(0, 0)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(parent: int, channel: int, path: str, command: list[str]) -> NoReturn:
    """Run the reaper; never return.

    `parent`: process id of the trainer. `channel`: socket of the worker, -1 for none. `path`: the
    trainer's sys.path in JSON, "" for a program. `command`: the worker's function, or the program's
    command line.
    """
    # A signal that asks a run to stop may reach all its processes (a scheduler sends it to all),
    # but the run needs its workers to finish the step. These handlers do nothing; SIG_IGN would be
    # inherited by the processes that a worker starts.
    for number in (*_STOP_SIGNALS, signal.SIGCHLD, _PARENT_DEATH_SIGNAL):
        signal.signal(number, lambda *_: None)
    wakeup_read, wakeup_write = os.pipe()
    for fd in (wakeup_read, wakeup_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    # In addition to the socket, which a fork of the trainer may keep open.
    set_parent_death_signal(_PARENT_DEATH_SIGNAL)
    if os.getppid() != parent:  # the trainer died before prctl was called
        os._exit(1)
    output_read, output_write = os.pipe()
    reaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        detach_from(reaper, new_session=False)  # the trainer knows the reaper's session
        _set_up_child(output_write, fds_to_close=(wakeup_read, wakeup_write, output_read))
        if not path:
            _exec_program(command)
        _run_worker(channel, json.loads(path), command[0])
    for fd in (channel, output_write):
        if fd >= 0:
            os.close(fd)
    code = _forward_output(parent, worker, wakeup_read, output_read)
    if code < 0:  # end with the worker's signal, without a second core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _set_up_child(output_fd: int, *, fds_to_close: tuple[int, ...]) -> None:
    """Set up the forked process: output to the reaper's pipe, and none of the reaper's descriptors
    and signal handlers.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, _PARENT_DEATH_SIGNAL):
        signal.signal(number, signal.SIG_DFL)
    for fd in fds_to_close:
        os.close(fd)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)


def _exec_program(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(127)


def _run_worker(channel: int, path: list[str], function: str) -> NoReturn:
    os.set_inheritable(channel, False)  # processes started by the worker must not inherit it
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    sys.path[:] = path
    sys.argv[:] = [""]
    code = 1
    try:
        module, name = function.split(":")
        getattr(importlib.import_module(module), name)(channel)
        code = 0
    except BaseException:  # boundary: the parent's code must not run a second time
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the worker may have closed it
                stream.flush()
        os._exit(code)


def _forward_output(parent: int, worker: int, wakeup_fd: int, output_fd: int) -> int:
    """Forward the worker's output until the worker or the trainer ends, then kill all remaining
    processes.

    Returns the worker's exit code, -N if signal N killed it.
    """
    output = _OutputForwarder(output_fd)
    os.set_blocking(_OUTPUT_SOCKET, False)
    poller = select.poll()
    for fd in (_OUTPUT_SOCKET, wakeup_fd, output_fd):
        poller.register(fd, select.POLLIN)
    code: int | None = None
    trainer_ended = False
    while code is None and not trainer_ended:
        for fd, _ in poller.poll():
            if fd == output_fd and not output.forward():
                poller.unregister(output_fd)
            elif (
                fd == _OUTPUT_SOCKET
            ):  # the trainer sends nothing: the event means that it closed its end
                trainer_ended = True
            elif fd == wakeup_fd:
                os.read(wakeup_fd, 4096)
                # The end of a thread of the trainer sends the signal too, but keeps the parent.
                trainer_ended = trainer_ended or os.getppid() != parent
        code, _ = _reap_children(worker)
    code = kill_all(worker, code)
    output.finish()
    return code


class _OutputForwarder:
    """Forward the first part of a worker's output; drop the rest except for its end."""

    def __init__(self, pipe: int):
        self._pipe, self._budget, self._tail, self._dropped = pipe, OUTPUT_BYTES, b"", 0
        os.set_blocking(pipe, False)

    def forward(self) -> bool:
        """Read once. Return False if no more output can arrive."""
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return True
        passed, excess = data[: self._budget], data[self._budget :]
        if passed:
            self._budget -= len(passed)
            _send_output(passed)
        if excess:
            self._dropped += len(excess)
            self._tail = (self._tail + excess)[-OUTPUT_TAIL_BYTES:]
        return bool(data)

    def finish(self) -> None:
        """Forward the remaining output that fits, and its end, once all writers are dead."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            before = self._budget, self._dropped
            if not self.forward() or before == (self._budget, self._dropped):
                break
        if self._dropped > len(self._tail):
            _send_output(f"\n[{self._dropped - len(self._tail)} bytes omitted]\n".encode())
        _send_output(self._tail)


def _send_output(data: bytes) -> None:
    """Send data to the trainer if it still reads and its buffer has room.

    Never block: a worker must not wait for a reader of its output.
    """
    try:
        os.write(_OUTPUT_SOCKET, data)
    except OSError:
        pass


# ----------------------------------------------------------------------- ending all descendants


def _reap_children(worker: int, code: int | None = None) -> tuple[int | None, bool]:
    """Reap all children that ended. Return the worker's exit code (`code`, unless the worker is
    among them), and whether children remain.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, False
        if pid == 0:
            return code, True
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)


def kill_all(worker: int, code: int | None) -> int:
    """Kill the worker, its process group, and all descendants, including adopted ones.

    Returns the worker's exit code.
    """
    deadline = time.monotonic() + KILL_SECONDS
    kill_process(worker, group=True)
    while time.monotonic() < deadline:
        code, remain = _reap_children(worker, code)
        if not remain:  # orphans would have been adopted
            break
        for pid in find_descendants(os.getpid()):
            kill_process(pid)
        time.sleep(0.001)
    return code if code is not None else -int(signal.SIGKILL)


def kill_process(pid: int, *, group: bool = False) -> None:
    for end in (os.killpg, os.kill) if group else (os.kill,):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended, or runs as another user


def kill_tree(pid: int) -> None:
    """Kill the process group that `pid` leads, and all its descendants with their groups.

    Reads only the processes of the tree: a machine may run thousands. Misses orphans, which the
    reaper has adopted, and without /proc/PID/task/TID/children all but the group.
    """
    tree = [pid]
    for member in tree:  # grows in the loop
        for path in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it ended in the meantime
                tree += map(int, path.read_text().split())
    # The group alone: if the process has been reaped, its number may be that of another process.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for member in tree[1:]:
        kill_process(member, group=True)


def read_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, from the state on; [] if the process has
    ended, and without /proc.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def find_descendants(pid: int) -> list[int]:
    """Return the pids of the living descendants of a process from /proc; [] without /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if (fields := read_stat(folder.name)) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    tree = [pid]
    for member in tree:  # grows in the loop
        tree += children.pop(member, [])
    return tree[1:]


def find_marked_processes(mark: str, session: int) -> list[int]:
    """Return the pids of processes in a session or with MARK=mark in their environment; [] without
    /proc.

    A process that changes its title overwrites its environment in /proc.
    """
    pids = []
    entry = f"{MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        fields = read_stat(folder.name)
        in_session = bool(fields) and int(fields[3]) == session and fields[0] != "Z"
        with contextlib.suppress(OSError):  # it has ended, or runs as another user
            if in_session or entry in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
