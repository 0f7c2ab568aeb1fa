"""Call a function in a fork of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from rl.processes.message_frames import InvalidReply, encode_frame, read_message
from rl.processes.reaper import detach_from, kill_tree


class ForkedCall:
    """Call a function in a forked process, which ends with the thread that started it.

    `function`: returns the result in bytes. `limit`: maximum length of the result.
    """

    def __init__(self, function: Callable[[], bytes], limit: int):
        self._limit, parent = limit, os.getpid()
        self._channel, child_end = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                detach_from(parent)
                child_end.sendall(encode_frame(function()))
            finally:
                os._exit(0)
        child_end.close()

    def wait(self) -> bytes:
        """Return the result; b"" if the process ended without a valid result."""
        try:
            return read_message(self._channel, self._limit)
        except (OSError, InvalidReply):
            return b""
        finally:
            self._channel.close()
            os.waitpid(self._pid, 0)

    def kill(self) -> None:
        """Kill the process and its descendants."""
        kill_tree(self._pid)
