"""Commands that start and end quickly, though they import torch and transformers."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

_WAYS = 2  # processes that are asked side by side


def quick() -> None:
    """Called by a script before it imports anything large.

    A million objects that stay come with the imports: Python's collector looks at them again and
    again while they come, and once more when the process ends, some two of the six seconds of a
    short command. Here it looks less often, and not at the end.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # registered first, so called last


def beside(work: Callable[..., None]) -> Sequence[Any]:
    """Starts a process that does `work`, called with its ends of some connections
    (multiprocessing's); returns the other ends.

    For a script's very beginning: what that process imports it imports while this one goes on. None
    are returned where that would gain nothing (a single core), where another rank does the work, or
    where processes cannot be forked. It ends with this one, and says nothing.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if cores < 2 or os.environ.get("RANK", "0") != "0":
        return ()
    from multiprocessing.connection import Pipe

    ours, theirs = zip(*(Pipe() for _ in range(_WAYS)), strict=True)
    try:
        child = os.fork()
    except OSError:
        return ()
    if child == 0:
        _work_alone(work, ours, theirs)
    for end in theirs:
        end.close()
    atexit.register(_end, child)
    return ours


def _work_alone(work: Callable[..., None], ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """All that the process does. Processes that it forks end with it, too."""
    with contextlib.suppress(BaseException):
        _end_with_the_parent()
        os.register_at_fork(after_in_child=_end_with_the_parent)
        for end in ours:
            end.close()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        quick()
        work(*theirs)
    os._exit(0)


def _end_with_the_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _end(child: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
