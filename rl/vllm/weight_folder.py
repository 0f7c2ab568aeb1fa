"""Choose and hold the folder in which the weights for vLLM servers are written."""

from __future__ import annotations

import fcntl
import math
import re
import shutil
import tempfile
import time
import uuid
import weakref
from pathlib import Path

from rl.errors import UserError

CGROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _LOCK = "whetstone-vllm-", "owner.lock"
_MAX_SHARE = 0.5  # of the available memory that weights in shared memory may take
_MIN_AGE = 60.0  # seconds, after which a folder without an owner is removed


class WeightFolder:
    """Hold a new folder, which is removed at the end. `path`: of the folder.

    `parent`: the folder around it. By default shared memory if it has room for `num_bytes`, else
    the temporary folder; there the folders of processes that were killed are removed.
    """

    def __init__(self, parent: Path | None, num_bytes: float):
        is_default, name = parent is None, f"{_PREFIX}{uuid.uuid4().hex}"
        if parent is None:
            parent = SHARED_MEMORY if _has_room(num_bytes) else Path(tempfile.gettempdir())
            _remove_abandoned(parent)
        self.path = parent.resolve() / name
        try:
            # a server of another user may read from a folder that the user named
            self.path.mkdir(0o700 if is_default else 0o777, parents=True)
        except OSError as error:
            raise UserError(
                f"the weights for vLLM servers cannot be written to {parent} ({error}): set "
                "sampler_folder to a folder in which this user may write"
            ) from error
        if is_default:  # the lock ends with the process
            self._lock = (self.path / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _has_room(num_bytes: float) -> bool:
    """Return whether shared memory has room for a number of bytes, which count as memory."""
    try:
        match = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        memory = int(match[1]) * 1024 if match else 0
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return False
    return num_bytes <= min(free, _MAX_SHARE * min(memory, _find_group_memory()))


def _find_group_memory() -> float:
    """Return the bytes that the control groups of this process (of a Slurm job, a container) leave
    free. Files in shared memory count as the group's.
    """
    remaining = math.inf
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        relative = next(line.split("::", 1)[1] for line in lines if line.startswith("0::"))
        group = CGROUPS / relative.strip("/")
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                used = int((folder / "memory.current").read_text())
                remaining = min(remaining, int(text) - used)
    except (OSError, StopIteration, ValueError):  # no cgroups of version 2
        pass
    return remaining


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that have ended without removing them."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - lock.stat().st_mtime > _MIN_AGE:
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # it has an owner, or belongs to another user
            continue
