"""Run the zygote, the first program in the outer isolation: an interpreter that starts once and
forks for each job within milliseconds.

The zygote reads no content of a job: each job arrives as a socket, which is passed to a monitor
unread.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys

from rl.sandbox.inside import isolation, message_framing, monitor

# The modules that programs import most are preloaded; no code of a program runs here.
_MODULES = (
    "abc array ast bisect collections copy dataclasses datetime decimal enum fractions functools hashlib heapq inspect io itertools json "
    "math operator random re statistics string struct threading time traceback types typing"
)


def main(control_fd: int, names: str, user: int, importable: str, sandlock: str = "") -> None:
    """Serve jobs until the caller closes the control socket.

    `names`: the isolation layers, separated by commas. `user`: the user that root switches to.
    `importable`: the folder of packages that programs may import. `sandlock`: the folder of the
    package sandlock.
    """
    control = socket.socket(fileno=control_fd)
    layers = set(names.split(","))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    sys.setrecursionlimit(1000)
    if "landlock" in layers:
        isolation.load_landlock(sandlock)
    for name in _MODULES.split():
        importlib.import_module(name)
    sys.path.append(importable)
    os.environ["PYTHONPATH"] = importable  # for an interpreter that a program starts
    if os.getuid() == 0 and user:
        if "proc" in layers:
            isolation.unmount_proc_covers()
        isolation.switch_user(user)
    gc.collect()
    gc.freeze()  # forks then share these pages
    message_framing.send(control, {"ready": os.getpid()})
    while True:
        try:
            _, fds = message_framing.receive_with_fds(control)
        except message_framing.ConnectionClosedError:
            os._exit(0)
        _job(control, fds[0], layers)


def _job(control: socket.socket, descriptor: int, layers: set[str]) -> None:
    pid = os.fork()
    if pid == 0:
        control.close()
        monitor.serve(socket.socket(fileno=descriptor), layers, os.getuid(), os.getgid())
    os.close(descriptor)
    process = os.pidfd_open(pid)
    waiting = select.poll()  # select takes no descriptors above 1023
    waiting.register(process, select.POLLIN)
    waiting.register(control, select.POLLHUP | select.POLLRDHUP)
    if any(descriptor != process for descriptor, _ in waiting.poll()):  # the caller has ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os._exit(0)
    os.close(process)
    os.waitpid(pid, 0)
    # reap the init of a killed monitor, which dies with it
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    message_framing.send(control, {"free": True})
