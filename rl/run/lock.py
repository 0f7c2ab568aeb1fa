"""One process works in a run's folder at a time: a lock that holds on a disk of many machines
(NFS), and ends with its owner.

`run.lock` is made whole or not at all (a link to a file that is written before: atomic on NFS,
where flock may not hold) and says who has it: host, process, when it began. Its time of change is a
heartbeat. Whoever finds a lock takes it over

    of a process on this host that has ended: at once
    of an earlier start of the same Slurm job: at once, Slurm starts a job again only when it has ended
    of another host: when the heart has not beaten for STALE seconds

and else is refused. Ages are taken between two files of the same disk, so clocks that differ do not
matter.
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
from types import TracebackType
from typing import Any

from rl.errors import RunFolderError
from rl.report import LOCK

BEAT = 5.0
STALE = 60.0
_TAKING = LOCK + ".taking"  # held for the moment in which a dead owner's lock is replaced


def _boot() -> str:
    """Which start of which machine, and which of its containers' tables of processes: a process id
    means nothing in another.
    """
    with contextlib.suppress(OSError):
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
    return ""


def _began(pid: int) -> str:
    """When a process began, in the kernel's own ticks: a process id is given again, this is not. ""
    where it cannot be told.
    """
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _is_alive(pid: int, began: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    now = _began(pid)
    if began and now and began != now:
        return False
    # ended, and nobody has asked for its exit code yet
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return True


def _who() -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID")
    slurm = [job, int(os.environ.get("SLURM_RESTART_COUNT") or 0)] if job else None
    here = {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
        "slurm": slurm,
    }
    return {**here, "since": time.time(), "nonce": uuid.uuid4().hex}


class RunLock:
    """Holds a folder's lock from `acquire` to `release` (or the end of `with`). `held()` raises
    once another has taken it over.

    `patient`: a lock of another host is watched until its heart beats again (refused) or has
    stopped for STALE seconds (taken): for a job that a scheduler started again elsewhere, which
    nobody is there to start a third time.
    """

    def __init__(
        self, folder: Path, *, patient: bool = False, beat: float = BEAT, stale: float = STALE
    ):
        self.folder, self.path = folder, folder / LOCK
        self._patient, self._beat_seconds, self._stale = patient, beat, stale
        self._me = _who()
        self._mine = False
        self._lost_to: Mapping[str, Any] | None = None
        self._ended = threading.Event()

    def acquire(self, say: Callable[[str], None] = lambda text: None) -> None:
        """RunFolderError, naming host, process and age of who has the folder. `say` hears whose
        lock was taken over. Twice is once.
        """
        waited = False
        while not self._mine:
            if self._put(self.path):
                break
            there = self._read()
            if there is None:
                continue  # it was released just now
            owner, age = there
            over = self._is_over(owner, age)
            if over is None:
                if not self._patient or self._is_here(owner):
                    raise RunFolderError(self._refusal(owner, age))
                before, waited = self.path_time(), self._say_once(waited, owner, age, say)
                time.sleep(min(self._beat_seconds, 1.0))
                if self.path_time() not in (before, None):
                    raise RunFolderError(self._refusal(owner, 0.0))
                continue
            if self._replace(owner):
                say(_takes_over(self.folder, owner, over))
                break
        if not self._mine:
            self._mine = True
            threading.Thread(target=self._beats, name="whetstone-lock", daemon=True).start()

    def held(self) -> None:
        """RunFolderError where the folder is another's by now: this process slept (or lost its
        disk) for too long.
        """
        if self._lost_to is not None:
            raise RunFolderError(
                f"{self.folder} was taken over by {_named(self._lost_to)} while this process did not answer: it writes nothing more there"
            )

    def release(self) -> None:
        """Gives the folder back. Safe to call twice, from a signal handler, and when it was never
        had.
        """
        if self._mine and self._me["pid"] == os.getpid():  # not a child that was forked
            self._mine = False
            self._ended.set()
            owner = self._owner()
            if owner is not None and owner.get("nonce") == self._me["nonce"]:
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    # ------------------------------------------------------------------------------------------ how

    def path_time(self) -> float | None:
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime
        return None

    def _say_once(
        self, said: bool, owner: Mapping[str, Any], age: float, say: Callable[[str], None]
    ) -> bool:
        if not said:
            heard = f"{_named(owner)} has {self.folder} and was last heard of {age:.0f} s ago"
            say(f"{heard}: waiting up to {self._stale:g} s to know whether it lives")
        return True

    def _put(self, path: Path) -> bool:
        """Makes `path` with our name in it, whole at once; False where there is one already."""
        aside = path.with_name(f"{LOCK}.{self._me['nonce']}")
        try:
            with aside.open("x") as file:
                file.write(json.dumps(self._me))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(aside, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without links: the name alone is made at once, its text a moment later
                return self._put_without_links(path)
            return True
        except OSError as error:
            raise RunFolderError(
                f"{self.folder} cannot be written to ({error}): give another --output-dir"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    def _put_without_links(self, path: Path) -> bool:
        try:
            with path.open("x") as file:
                file.write(json.dumps(self._me))
            return True
        except FileExistsError:
            return False

    def _owner(self) -> dict[str, Any] | None:
        """Who has the lock; nobody's name where it cannot be read, None where there is none."""
        try:
            owner = json.loads(self.path.read_bytes().decode("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _read(self) -> tuple[dict[str, Any], float] | None:
        """(owner, seconds since the last beat); None where there is no lock."""
        owner, beaten = self._owner(), self.path_time()
        return (
            None
            if owner is None or beaten is None
            else (owner, max(0.0, self._disk_time() - beaten))
        )

    def _disk_time(self) -> float:
        """Now, by the clock that the disk's times are taken from."""
        probe = self.folder / f"{LOCK}.{self._me['nonce']}.now"
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _is_here(self, owner: Mapping[str, Any]) -> bool:
        return (
            owner.get("host") == self._me["host"]
            and owner.get("boot") == self._me["boot"]
            and isinstance(owner.get("pid"), int)
        )

    def _is_over(self, owner: Mapping[str, Any], age: float) -> str | None:
        """Why the owner cannot be at work any more; None where it may be."""
        if self._is_here(owner):
            return (
                None
                if _is_alive(owner["pid"], str(owner.get("began") or ""))
                else "that process has ended (killed, perhaps)"
            )
        mine, theirs = self._me["slurm"], owner.get("slurm")
        if (
            mine
            and isinstance(theirs, list)
            and len(theirs) == 2
            and theirs[0] == mine[0]
            and theirs[1] != mine[1]
        ):
            return f"it was an earlier start of this Slurm job {mine[0]}"
        return f"it was last heard of {age:.0f} s ago" if age > self._stale else None

    def _replace(self, owner: Mapping[str, Any]) -> bool:
        """Puts our lock in the place of a dead owner's. One process at a time may try, and looks
        again before it does.
        """
        taking = self.folder / _TAKING
        if not self._put(taking):
            with contextlib.suppress(OSError):
                # whoever held it was killed in that moment
                if self._disk_time() - taking.stat().st_mtime > self._stale:
                    taking.unlink()
            time.sleep(0.05)
            return False
        try:
            there = self._owner()
            if there is None or there.get("nonce") != owner.get("nonce"):
                return False
            # we slept for so long that another took our turn, or even put our place in
            with contextlib.suppress(FileNotFoundError):
                os.replace(taking, self.path)
            now = self._owner()
            return now is not None and now.get("nonce") == self._me["nonce"]
        finally:
            self._take_back(taking)

    def _take_back(self, taking: Path) -> None:
        """Ends our turn to replace a lock, and nobody else's."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json.loads(taking.read_bytes()).get("nonce") == self._me["nonce"]:
                taking.unlink()

    def _refusal(self, owner: Mapping[str, Any], age: float) -> str:
        since = owner.get("since")
        running = (
            f", begun {_duration(time.time() - since)} ago"
            if isinstance(since, (int, float))
            else ""
        )
        return (
            f"{self.folder} is in use by {_named(owner)}{running}, last heard of {age:.0f} s ago: wait for it or end it, or give another "
            f"--output-dir. (A process that was killed on another machine counts as ended {self._stale:g} s after it was last heard of; if "
            f"nothing runs there, remove {self.path})"
        )

    def _beats(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            owner = self._owner()
            if self._ended.is_set():
                return
            if owner is not None and owner.get("nonce") not in (None, self._me["nonce"]):
                self._lost_to = owner
                return
            # a disk that is away for a while: nobody else sees the lock then, either
            with contextlib.suppress(OSError, RunFolderError):
                os.utime(self.path) if owner is not None else self._put(self.path)


def _named(owner: Mapping[str, Any]) -> str:
    if not isinstance(owner.get("pid"), int):
        return "a process that its lock does not name"
    return f"process {owner['pid']} on {owner.get('host')}"


def _takes_over(folder: Path, owner: Mapping[str, Any], over: str) -> str:
    """What a person is told who starts after a process that did not give the folder back: that this
    is well.
    """
    return f"{_named(owner)} had {folder} and did not give it back; {over}. Its lock is taken over, nothing is to be done about it"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
