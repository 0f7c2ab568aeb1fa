"""Lock the folder of a run or of a server for one process at a time, on a disk shared by many
machines (NFS). The lock ends with its owner.

`run.lock` is created atomically as a hard link to a file that is written before. A link is atomic
on NFS, where flock may not hold. The file names its owner: host, process id, start time. Its
modification time is the heartbeat. A process that meets an existing lock takes it over

    from an ended process on this host: at once
    from an earlier start of the same Slurm job: at once, Slurm restarts a job only after it ended
    from another host: when the last heartbeat is older than STALE seconds

and is refused otherwise. Ages are differences between two files of the same disk, so clock
differences between hosts do not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl.errors import RunFolderError
from rl.processes.reaper import read_stat

LOCK = "run.lock"
HEARTBEAT_SECONDS = 5.0
STALE = 60.0
_TAKEOVER = LOCK + ".taking"  # held while a dead owner's lock is replaced


def _boot_id() -> str:
    """Return the id of this machine's boot and that of the process-id namespace, as one text.

    A process id has no meaning in another boot or namespace. Return "" if either is unknown.
    """
    with contextlib.suppress(OSError):
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
    return ""


def _read_process(pid: int) -> tuple[str, str]:
    """Return state and start time (in kernel ticks) of process `pid`, or "" if they cannot be read.

    Process ids are reused, the pair (process id, start time) is not.
    """
    fields = read_stat(pid)
    return (fields[0], fields[19]) if fields else ("", "")


def _is_alive(pid: int, start_ticks: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    state, now = _read_process(pid)
    if start_ticks and now and start_ticks != now:
        return False
    # a zombie: the process has ended, but its parent has not collected its exit code yet
    return state not in ("Z", "X")


def _process_record() -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID")
    return {
        "host": socket.gethostname(),
        "boot": _boot_id(),
        "pid": os.getpid(),
        "began": _read_process(os.getpid())[1],
        "slurm": [job, int(os.environ.get("SLURM_RESTART_COUNT") or 0)] if job else None,
        "since": time.time(),
        "nonce": uuid.uuid4().hex,
    }


class RunLock:
    """Hold a folder's lock from `acquire` to `release` (or to the end of `with`).

    `check_held()` raises RunFolderError once another process has taken the lock over.

    `patient`: watch a lock of another host until its heartbeat continues (refused) or has been
    missing for STALE seconds (taken over). It serves a job that a scheduler restarted on another
    host, where no user can restart it again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        patient: bool = False,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        stale_seconds: float = STALE,
    ):
        self.folder, self.path = folder, folder / LOCK
        self._patient, self._heartbeat_seconds, self._stale = (
            patient,
            heartbeat_seconds,
            stale_seconds,
        )
        self._record = _process_record()
        self._acquired = False
        self._lost_to: Mapping[str, Any] | None = None
        self._ended = threading.Event()

    def acquire(self, warn: Callable[[str], None] = lambda text: None) -> None:
        """Acquire the lock. Call `warn` with the owner of a lock that is taken over.

        Acquiring a lock that is already held is a no-op. Raises RunFolderError, naming host,
        process and heartbeat age of the owner, if the folder is in use.
        """
        waited = False
        while not self._acquired:
            if self._create(self.path):
                break
            owner, heartbeat = self._read_owner(), self.heartbeat_time()
            if owner is None or heartbeat is None:
                continue  # the owner released it meanwhile
            age = max(0.0, self._disk_time() - heartbeat)
            reason = self._find_end_reason(owner, age)
            if reason is not None:
                if self._replace(owner):
                    # the user starts after a process that did not release the folder
                    warn(
                        f"{_describe_owner(owner)} had {self.folder} and did not release it; "
                        f"{reason}. Its lock is taken over; no action is needed"
                    )
                    break
                continue
            if not self._patient or self._is_local(owner):
                raise RunFolderError(self._refusal_message(owner, age))
            if not waited:
                waited = True
                warn(
                    f"{_describe_owner(owner)} has {self.folder}, its last heartbeat was "
                    f"{age:.0f} s ago: waiting up to {self._stale:g} s to see whether it is alive"
                )
            time.sleep(min(self._heartbeat_seconds, 1.0))
            if self.heartbeat_time() not in (heartbeat, None):
                raise RunFolderError(self._refusal_message(owner, 0.0))
        if not self._acquired:
            self._acquired, self._ended = True, threading.Event()
            last_beat = self.heartbeat_time() or self._disk_time()
            threading.Thread(
                target=self._run_heartbeat, args=(last_beat,), name="whetstone-lock", daemon=True
            ).start()

    def check_held(self) -> None:
        """Raise RunFolderError if another process has taken the folder over.

        This happens when this process was suspended (or lost its disk) for too long.
        """
        if self._lost_to is not None:
            raise RunFolderError(
                f"{self.folder} was taken over by {_describe_owner(self._lost_to)} while this "
                "process did not respond: this process stops writing to the folder"
            )

    def release(self) -> None:
        """Release the lock. Safe to call twice, from a signal handler, and without a lock."""
        if self._acquired and self._record["pid"] == os.getpid():  # not in a forked child
            self._acquired = False
            self._ended.set()
            owner = self._read_owner()
            if owner is not None and owner.get("nonce") == self._record["nonce"]:
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def heartbeat_time(self) -> float | None:
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime
        return None

    def has_local_owner_ended(self) -> bool:
        """Return whether the folder's lock names a process of this host that has ended."""
        owner = self._read_owner() or {}
        try:
            return self._is_local(owner) and not _is_alive(
                owner["pid"], str(owner.get("began") or "")
            )
        except OverflowError:  # no process id
            return False

    def _create(self, path: Path) -> bool:
        """Create `path` with this process's record atomically. Return False if `path` exists."""
        aside, record = path.with_name(f"{LOCK}.{self._record['nonce']}"), json.dumps(self._record)
        try:
            with aside.open("x") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(aside, path)
            except FileExistsError:
                # NFS may repeat a request whose reply was lost: the link is this process's own
                return aside.stat().st_nlink == 2
            # A file system without links: creating the name is atomic, its content follows a moment
            # later.
            except OSError:
                try:
                    with path.open("x") as file:
                        file.write(record)
                except FileExistsError:
                    return False
            return True
        except OSError as error:
            raise RunFolderError(
                f"cannot write to {self.folder} ({error}): give another --output-dir"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    def _read_owner(self) -> dict[str, Any] | None:
        """Return the owner's record: {} if it cannot be read, None if no lock exists."""
        try:
            owner = json.loads(self.path.read_bytes().decode("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _disk_time(self) -> float:
        """Return the current time by the clock of the disk's modification times."""
        probe = self.folder / f"{LOCK}.{self._record['nonce']}.now"
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _is_local(self, owner: Mapping[str, Any]) -> bool:
        return (
            owner.get("host") == self._record["host"]
            and owner.get("boot") == self._record["boot"]
            and isinstance(owner.get("pid"), int)
        )

    def _find_end_reason(self, owner: Mapping[str, Any], age: float) -> str | None:
        """Return the reason why the owner has ended, or None if it may be running."""
        if self._is_local(owner):
            if _is_alive(owner["pid"], str(owner.get("began") or "")):
                return None
            return "that process has ended (perhaps it was killed)"
        mine, theirs = self._record["slurm"], owner.get("slurm")
        if mine and isinstance(theirs, list) and len(theirs) == 2:
            if theirs[0] == mine[0] and theirs[1] != mine[1]:
                return f"it was an earlier start of this Slurm job {mine[0]}"
        return f"its last heartbeat was {age:.0f} s ago" if age > self._stale else None

    def _replace(self, owner: Mapping[str, Any]) -> bool:
        """Replace a dead owner's lock by this process's lock. Return whether it succeeded.

        One process at a time may try. It reads the lock again before replacing it.
        """
        taking = self.folder / _TAKEOVER
        if not self._create(taking):
            with contextlib.suppress(OSError):
                # the process holding it was killed in that moment
                if self._disk_time() - taking.stat().st_mtime > self._stale:
                    taking.unlink()
            time.sleep(0.05)
            return False
        try:
            current = self._read_owner()
            if current is None or current.get("nonce") != owner.get("nonce"):
                return False
            # This process was suspended so long that another process removed its temporary lock, or
            # even moved it into place.
            with contextlib.suppress(FileNotFoundError):
                os.replace(taking, self.path)
            now = self._read_owner()
            return now is not None and now.get("nonce") == self._record["nonce"]
        finally:
            # remove the temporary lock of the replacement if it belongs to this process
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if json.loads(taking.read_bytes()).get("nonce") == self._record["nonce"]:
                    taking.unlink()

    def _refusal_message(self, owner: Mapping[str, Any], age: float) -> str:
        since = owner.get("since")
        running = (
            f", started {_format_duration(time.time() - since)} ago"
            if isinstance(since, (int, float))
            else ""
        )
        return (
            f"{self.folder} is in use by {_describe_owner(owner)}{running}, last heartbeat "
            f"{age:.0f} s ago: wait for it or end it, or give another --output-dir. (A process "
            f"that was killed on another machine counts as ended {self._stale:g} s after its last "
            f"heartbeat; if nothing runs on that machine, remove {self.path})"
        )

    def _run_heartbeat(self, last_beat: float) -> None:
        while not self._ended.wait(self._heartbeat_seconds):
            owner = self._read_owner()
            if self._ended.is_set():
                return
            if owner is None and self._disk_time() - last_beat > self._stale:
                self._lost_to = {}  # another process could take the lock over and release it
                return
            if owner is not None and owner.get("nonce") not in (None, self._record["nonce"]):
                self._lost_to = owner
                return
            # While the disk is unreachable, no other process sees the lock either.
            with contextlib.suppress(OSError, RunFolderError):
                os.utime(self.path) if owner is not None else self._create(self.path)
                last_beat = self.heartbeat_time() or last_beat


def _describe_owner(owner: Mapping[str, Any]) -> str:
    if not isinstance(owner.get("pid"), int):
        return "an unknown process (its lock names none)"
    return f"process {owner['pid']} on {owner.get('host')}"


def _format_duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
