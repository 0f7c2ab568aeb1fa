"""Shorten the start and the exit of commands that import torch and transformers."""

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

_CONNECTIONS = 2  # number of connections to the helper process


def reduce_gc() -> None:
    """Reduce garbage collection. Call it before any large import.

    The imports create a million permanent objects. Python's collector traverses them repeatedly
    during the imports, and again at exit: about two of the six seconds of a short command. This
    makes the collector run less often, and not at exit.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # registered first, so called last


def fork_helper(work: Callable[..., None]) -> Sequence[Any]:
    """Fork a process that calls `work` with its ends of some connections; return the other ends.

    The connections are multiprocessing's. Call it at the start of a script: the process imports its
    modules while the script continues. Returns no ends on a single core (no gain), on ranks other
    than 0, or if forking fails. The process ends with this process and prints nothing.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if cores < 2 or os.environ.get("RANK", "0") != "0":
        return ()
    from multiprocessing.connection import Pipe

    parent_ends, child_ends = zip(*(Pipe() for _ in range(_CONNECTIONS)), strict=True)
    try:
        child = os.fork()
    except OSError:
        return ()
    if child == 0:
        _run_helper(work, parent_ends, child_ends)
    for end in child_ends:
        end.close()
    atexit.register(_kill_helper, child)
    return parent_ends


def _run_helper(
    work: Callable[..., None], parent_ends: Sequence[Any], child_ends: Sequence[Any]
) -> None:
    """Run the helper process. Processes that it forks also end with it."""
    with contextlib.suppress(BaseException):
        _end_with_parent()
        os.register_at_fork(after_in_child=_end_with_parent)
        for end in parent_ends:
            end.close()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        reduce_gc()
        work(*child_ends)
    os._exit(0)


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _kill_helper(child: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
