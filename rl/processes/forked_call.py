"""Call a function in a fork of this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from rl.processes.message_frames import InvalidReply, encode_frame, read_message
from rl.processes.reaper import detach_from, kill_process, kill_tree


class ForkedCall:
    """Call a function in a forked process, which ends with the thread that started it.

    `function`: returns the result in bytes. `limit`: maximum length of the result.
    """

    # A fork of another thread would keep this call's end of the socket open, so that a crash
    # would not be noticed.
    _fork_lock = threading.Lock()

    def __init__(self, function: Callable[[], bytes], limit: int):
        self._limit, self._pid_lock, parent = limit, threading.Lock(), os.getpid()
        self._pid: int | None = None  # None after the process was reaped
        with self._fork_lock:  # a forked child releases its copy
            self._channel, child_end = socket.socketpair()
            try:
                pid = os.fork()
            except BaseException:
                self._channel.close()
                child_end.close()
                raise
            (child_end if pid else self._channel).close()
        if pid == 0:
            try:
                detach_from(parent)
                child_end.sendall(encode_frame(function()))
            finally:
                os._exit(0)
        self._pid = pid

    def wait(self) -> bytes:
        """Return the result; b"" if the process ended without a valid result. End the processes of
        its process group.
        """
        try:
            return read_message(self._channel, self._limit)
        except (OSError, InvalidReply):
            return b""
        finally:
            self._channel.close()
            with self._pid_lock:
                if self._pid is not None:
                    kill_tree(self._pid)
                    os.waitpid(self._pid, 0)
                    self._pid = None

    def kill(self) -> None:
        """Kill the process and its descendants, unless `wait` has returned."""
        with self._pid_lock:
            if self._pid is not None:
                kill_tree(self._pid)
                kill_process(self._pid)  # it may not lead its process group yet
