"""Checkpoints: folders that are whole or absent.

Written aside (`<name>.partial-<pid>`), every file fsynced, a manifest with sizes and SHA-256 last,
then one rename. A folder without a valid manifest is not a checkpoint. A name, once written, stays:
saving under it again is an error.

    model/                  a plain Hugging Face folder: config.json, model.safetensors or a PEFT adapter, tokenizer
    optimizer.safetensors   AdamW's moments by parameter name (absent from sampler-only weights)
    state.json              what made the model, versions, the loop's state: readable
    value_head.safetensors  of a policy or critic that has one
    rng.safetensors         torch's generator state of each rank
    manifest.json           size and checksum of each file, time of expiry, and a checksum of those

Every file may be read by whom the umask lets. Nothing is removed but what was written here: a link
is left alone, and a name leads to a folder right below the one that it was looked for in, or
nowhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl.errors import UserError

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PARTIAL = re.compile(r".+\.partial-\d+")
_REPLACED = re.compile(r"(.+)\.replaced-(\d+)")
# of a name: file systems take 255 bytes, and the step and ".partial-<pid>" come behind it
_LONGEST = 200


class DamagedCheckpoint(UserError):
    """A folder that is no whole checkpoint: the message names the file and what is wrong with it."""


class DiskFull(UserError):
    """There is no room for a checkpoint: nothing of it is left behind, and those before it are as
    they were.
    """


def is_name(name: Any) -> bool:
    """Whether a checkpoint may be called so: letters, digits, '.', '_' and '-', no path, nothing
    that looks like a cut-off write.
    """
    return (
        isinstance(name, str)
        and len(name) <= _LONGEST
        and bool(_NAME.fullmatch(name))
        and ".partial-" not in name
    )


def below(parent: Path, name: Any) -> Path:
    """The folder of a checkpoint by its name. DamagedCheckpoint for a name that leads elsewhere (of
    a list that was changed).
    """
    if not is_name(name):
        raise DamagedCheckpoint(
            f"{name!r} is no name of a checkpoint in {parent}: letters, digits, '.', '_' and '-', at most {_LONGEST}"
        )
    return parent / name


@contextlib.contextmanager
def writing(
    folder: Path,
    *,
    expected_bytes: int = 0,
    ttl_seconds: float | None = None,
    replace: bool = False,
) -> Iterator[Path]:
    """Yields a folder to write into; when the block ends well it becomes `folder`, otherwise
    nothing is left behind.

    `replace`: a `folder` that exists is removed once the new one is whole. Under its name there is
    one or the other at any time, or (where the system cannot exchange two folders) the old one
    comes back when it is looked for. Raises UserError before anything is written if it exists
    otherwise (or is no checkpoint), DiskFull if the disk has too little room or fills up.
    """
    folder = Path(folder)
    bring_back(folder)
    if folder.exists() and not (replace and (folder / MANIFEST).is_file()):
        raise UserError(
            f"{folder} exists already; what is saved under a name stays. Choose another name or remove it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_expired(folder.parent)
    free = shutil.disk_usage(folder.parent).free
    if expected_bytes * 1.05 + 2**20 > free:
        needed = f"{expected_bytes / 2**20:.0f} MiB"
        raise DiskFull(
            f"saving {folder} needs about {needed}, the disk has {free / 2**20:.0f} MiB free{_MAKE_ROOM}"
        )
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        _write_manifest(aside, ttl_seconds)
        # whole, and brought back if it ends between the two renames
        before = folder.with_name(f"{folder.name}.replaced-{os.getpid()}")
        if not folder.exists():
            os.rename(aside, folder)
        elif not _exchanged(aside, folder):
            os.rename(folder, before)
            os.rename(aside, folder)
        _fsync(folder.parent)
        for old in (aside, before):
            shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        bring_back(folder)
        if is_disk_full(error):
            raise DiskFull(
                f"the disk filled up while {folder} was written: {error}{_MAKE_ROOM}"
            ) from error
        raise


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step (Linux's renameat2). False where the system or the file
    system cannot.
    """
    rename = (
        getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if sys.platform == "linux"
        else None
    )
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return (
        rename is not None
        and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
    )


def bring_back(folder: Path) -> None:
    """Where a process ended while it replaced `folder`, between taking the old one away and putting
    the new one there: the old one.
    """
    if folder.exists() or not folder.parent.is_dir():
        return
    for path in folder.parent.iterdir():
        found = _REPLACED.fullmatch(path.name)
        if (
            found
            and found[1] == folder.name
            and not path.is_symlink()
            and (path / MANIFEST).is_file()
            and not _runs(int(found[2]))
        ):
            os.rename(path, folder)
            return


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return pid != os.getpid()  # we do not: whoever had this number before us ended


_MAKE_ROOM = (
    ". The checkpoints before it are whole: make room, and --resume goes on from the newest"
)


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of room or of quota. safetensors says so in words alone."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in codes) or any(
        f"(os error {code})" in str(error) for code in codes
    )


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def _write_manifest(folder: Path, ttl_seconds: float | None) -> None:
    files = {}
    readers = _readers(folder)
    for path in _files(folder):
        os.chmod(path, readers)  # safetensors writes for the owner alone, whatever the umask says
        files[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": _checksum(path),
        }
        _fsync(path)
    manifest = {
        "files": files,
        "expires_at": time.time() + ttl_seconds if ttl_seconds is not None else None,
    }
    path = folder / MANIFEST
    path.write_text(json.dumps({**manifest, "sha256": _own_checksum(manifest)}, indent=1))
    _fsync(path)
    for inner in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        _fsync(inner)


def _readers(folder: Path) -> int:
    """The permissions of a file that is made here as any program makes one: the umask cannot be
    asked without changing it.
    """
    probe = folder / MANIFEST
    probe.touch()
    return probe.stat().st_mode & 0o777


def _own_checksum(manifest: dict[str, Any]) -> str:
    said = {"files": manifest["files"], "expires_at": manifest["expires_at"]}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> str:
    """Of a file's bytes. A file that lies there unchanged is read once a process: opening a
    checkpoint looks at it several times.
    """
    now = path.stat()
    if time.time() - max(now.st_mtime, now.st_ctime) < _SETTLED_SECONDS:
        return _read_checksum(path)
    return _known_checksum(
        path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
    )


# a file changed later than that may change once more within the same tick of its file system's
# clock
_SETTLED_SECONDS = 10.0


@lru_cache(maxsize=4096)
def _known_checksum(path: Path, *as_it_is: int) -> str:
    """`as_it_is`: device, inode, size and times, which change with any write."""
    return _read_checksum(path)


def _read_checksum(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _read_manifest(folder: Path) -> tuple[dict[str, tuple[int, str]], float | None]:
    """(size and checksum by file name, time of expiry). DamagedCheckpoint where it cannot be
    believed.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedCheckpoint(
            f"{folder} has no {MANIFEST}: it is no checkpoint, or its writing was cut off"
        )
    try:
        manifest = json.loads(path.read_bytes().decode("utf-8"))
        files = {
            name: (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
        expires = None if manifest["expires_at"] is None else float(manifest["expires_at"])
        own = manifest.get("sha256", ...)  # manifests did not always have one
        changed = own is not ... and own != _own_checksum(manifest)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedCheckpoint(
            f"{path} cannot be read, it was changed or damaged: {type(error).__name__} {error}"
        ) from error
    if changed:
        raise DamagedCheckpoint(f"{path} does not have its own checksum: it was changed or damaged")
    for name in files:
        if name.startswith("/") or not name or {"", ".", ".."} & set(name.split("/")):
            raise DamagedCheckpoint(
                f"{path} names {name!r}, which is no file of this folder: it was changed"
            )
    return files, expires


def verify(folder: Path) -> None:
    """Raises DamagedCheckpoint unless every file of the manifest is there with its size and
    checksum.

    A learner saved beside another (`<checkpoint>/critic`) is whole if the checkpoint is.
    """
    folder = Path(folder)
    bring_back(folder)
    if not folder.is_dir():
        raise DamagedCheckpoint(f"no checkpoint at {folder}: the folder does not exist")
    if (
        (folder / "state.json").is_file()
        and not (folder / MANIFEST).is_file()
        and (folder.parent / MANIFEST).is_file()
    ):
        folder = folder.parent
    files, expires = _read_manifest(folder)
    if expires is not None and expires < time.time():
        raise DamagedCheckpoint(f"{folder} was saved with ttl_seconds and has expired")
    for name, (size, checksum) in files.items():
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{folder} lacks {name}")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(
                f"{file} has {file.stat().st_size} bytes, the manifest says {size}"
            )
        if _checksum(file) != checksum:
            raise DamagedCheckpoint(
                f"{file} does not have the checksum of the manifest: it was changed or damaged"
            )


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a whole checkpoint. Raises DamagedCheckpoint."""
    verify(folder)
    return glance(folder)


def glance(folder: Path) -> dict[str, Any]:
    """state.json as it lies there, without a look at the other files: DamagedCheckpoint where it
    cannot be read.
    """
    path = Path(folder) / "state.json"
    if not path.is_file():
        raise DamagedCheckpoint(f"{folder} has no state.json")
    try:
        state = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{path} is not JSON ({error}): it was changed or damaged"
        ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} holds no JSON object: it was changed or damaged")
    return state


def remove(folder: Path) -> None:
    """Removes a checkpoint so that a crash in between leaves no half of it under its name. A link
    is left alone.
    """
    folder = Path(folder)
    if folder.is_symlink() or not folder.is_dir():
        return
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def expire(folder: Path, ttl_seconds: float | None) -> None:
    """From now on it has so many seconds to live; None: for good. Its manifest is replaced whole."""
    files, _ = _read_manifest(folder)
    said = {name: {"bytes": size, "sha256": checksum} for name, (size, checksum) in files.items()}
    manifest = {
        "files": said,
        "expires_at": time.time() + ttl_seconds if ttl_seconds is not None else None,
    }
    aside = folder / f"{MANIFEST}.partial"
    aside.write_text(json.dumps({**manifest, "sha256": _own_checksum(manifest)}, indent=1))
    _fsync(aside)
    os.replace(aside, folder / MANIFEST)


def remove_leftovers(parent: Path) -> None:
    """Removes what interrupted writes left (`<name>.partial-<pid>`) and what has outlived its
    ttl_seconds.
    """
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        if _PARTIAL.fullmatch(path.name) and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    remove_expired(parent)


def remove_expired(parent: Path) -> None:
    """Removes the checkpoints in `parent` that have outlived their ttl_seconds."""
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        if not path.is_symlink() and (path / MANIFEST).is_file():
            with contextlib.suppress(DamagedCheckpoint):  # a damaged one is not ours to remove
                _, expires = _read_manifest(path)
                if expires is not None and expires < time.time():
                    remove(path)
