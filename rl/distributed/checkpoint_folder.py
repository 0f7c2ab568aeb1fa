"""Write checkpoints atomically: a folder is complete or absent.

A checkpoint is written to `<name>.partial-<pid>`; every file is fsynced; the manifest with sizes
and SHA-256 comes last, then a single rename. A folder without a valid manifest is not a checkpoint.
Saving under an existing name is an error.

    model/                  a plain Hugging Face folder: config.json, model.safetensors or a PEFT
                            adapter, tokenizer
    optimizer.safetensors   AdamW's moments by parameter name (absent from sampler-only weights)
    state.json              model spec, versions, the training loop's state: readable
    value_head.safetensors  of a policy or critic with a value head
    rng.safetensors         torch's generator state of each rank
    manifest.json           size and checksum of each file, expiry time, and a checksum of these

The umask decides the readers of every file. Only files written by this module are removed: links
are never followed or removed, and a name always refers to a direct subfolder of the parent.
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

from rl.errors import UserError, suggest_path
from rl.jsonl import flush_to_disk, write_atomically

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PARTIAL = re.compile(r"(.+)\.partial-(\d+)")
_REPLACED = re.compile(r"(.+)\.replaced-(\d+)")
# Longest name: file systems take 255 bytes, and the step and ".partial-<pid>" are appended.
_MAX_NAME_LENGTH = 200


class DamagedCheckpoint(UserError):
    """Report a folder that is not a complete checkpoint; the message names the file and the
    fault.
    """


class DiskFull(UserError):
    """Report that the disk has too little space for a checkpoint.

    Its partial files are removed, and earlier checkpoints are unchanged.
    """


def is_checkpoint_name(name: Any) -> bool:
    """Return whether `name` is a valid checkpoint name.

    It has letters, digits, '.', '_' and '-', is not a path, and does not look like a partial write.
    """
    return (
        isinstance(name, str)
        and len(name) <= _MAX_NAME_LENGTH
        and bool(_NAME.fullmatch(name))
        and not any(mark in name for mark in (".partial-", ".replaced-"))
    )


def checkpoint_path(parent: Path, name: Any) -> Path:
    """Return the folder of a checkpoint by its name.

    Raises DamagedCheckpoint for an invalid name (of a list that was modified).
    """
    if not is_checkpoint_name(name):
        raise DamagedCheckpoint(
            f"{name!r} is not a valid name of a checkpoint in {parent}: expected letters, digits, "
            f"'.', '_' and '-', at most {_MAX_NAME_LENGTH}"
        )
    return parent / name


@contextlib.contextmanager
def write_checkpoint(
    folder: Path,
    *,
    expected_bytes: int = 0,
    ttl_seconds: float | None = None,
    replace: bool = False,
) -> Iterator[Path]:
    """Yield a folder to write into; it becomes `folder` if the block succeeds, otherwise it is
    removed.

    `replace`: an existing `folder` is removed once the new folder is complete. Its name refers to
    the old or the new folder at any time. If the system cannot exchange two folders, the old folder
    is restored on the next access after a crash. Raises UserError before anything is written if
    `folder` exists without `replace` (or is not a checkpoint), and DiskFull if the disk has too
    little space or fills up.
    """
    folder = Path(folder)
    restore_replaced(folder)
    if folder.exists() and not (replace and (folder / MANIFEST).is_file()):
        raise UserError(
            f"{folder} exists already, and a save never overwrites it. Choose another name or "
            "remove it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_interrupted(folder)
    remove_expired(folder.parent)
    free = shutil.disk_usage(folder.parent).free
    if expected_bytes * 1.05 + 2**20 > free:
        needed = f"{expected_bytes / 2**20:.0f} MiB"
        raise DiskFull(
            f"saving {folder} needs about {needed}, the disk has {free / 2**20:.0f} MiB "
            f"free{_FREE_SPACE_HINT}"
        )
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    aside.mkdir()
    try:
        yield aside
        _write_manifest(aside, ttl_seconds)
        # A complete checkpoint, restored if the process ends between the two renames.
        before = folder.with_name(f"{folder.name}.replaced-{os.getpid()}")
        if not folder.exists():
            os.rename(aside, folder)
        elif not _swap_folders(aside, folder):
            os.rename(folder, before)
            os.rename(aside, folder)
        flush_to_disk(folder.parent)
        for old in (aside, before):
            shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        restore_replaced(folder)
        if is_disk_full(error):
            raise DiskFull(
                f"the disk filled up while {folder} was written: {error}{_FREE_SPACE_HINT}"
            ) from error
        raise


def _swap_folders(first: Path, second: Path) -> bool:
    """Swap two folders atomically (Linux's renameat2).

    Return False if the system or the file system does not support it.
    """
    rename = (
        getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if sys.platform == "linux"
        else None
    )
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return (
        rename is not None
        and rename(cwd, os.fsencode(first), cwd, os.fsencode(second), exchange) == 0
    )


def restore_replaced(folder: Path) -> None:
    """Restore the old `folder` if a process ended while it was replacing it.

    The process ended between moving the old folder away and renaming the new folder.
    """
    if folder.exists() or not folder.parent.is_dir():
        return
    for path in folder.parent.iterdir():
        match = _REPLACED.fullmatch(path.name)
        if (
            match
            and match[1] == folder.name
            and not path.is_symlink()
            and (path / MANIFEST).is_file()
            and not _is_running(int(match[2]))
        ):
            os.rename(path, folder)
            return


def _remove_interrupted(folder: Path) -> None:
    """Remove what processes that have ended wrote of `folder`."""
    for path in list(folder.parent.iterdir()):
        match = _PARTIAL.fullmatch(path.name)
        if match and match[1] == folder.name and not _is_running(int(match[2])):
            shutil.rmtree(path, ignore_errors=True)  # never a link


def _is_running(pid: int) -> bool:
    """Return whether another process with this id runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return pid != os.getpid()  # an earlier process with this process's id has ended


_FREE_SPACE_HINT = (
    ". Earlier checkpoints are complete: free disk space, and --resume continues from the newest"
)


def is_disk_full(error: BaseException) -> bool:
    """Return whether a write failed because of missing disk space or quota.

    safetensors reports it only in the message.
    """
    codes = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in codes) or any(
        f"(os error {code})" in str(error) for code in codes
    )


def _write_manifest(folder: Path, ttl_seconds: float | None) -> None:
    """Write the manifest of `folder` and fsync its files and folders."""
    files: dict[str, dict[str, int | str]] = {}
    readers = _new_file_mode(folder)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        os.chmod(path, readers)  # safetensors ignores the umask and writes for the owner only
        files[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": _file_checksum(path),
        }
        flush_to_disk(path)
    _save_manifest(folder / MANIFEST, files, ttl_seconds)
    for inner in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        flush_to_disk(inner)


def _save_manifest(
    path: Path, files: dict[str, dict[str, int | str]], ttl_seconds: float | None
) -> None:
    """Write a manifest with its checksum."""
    expires_at = time.time() + ttl_seconds if ttl_seconds is not None else None
    manifest = {"files": files, "expires_at": expires_at}
    checksum = _manifest_checksum(manifest)
    write_atomically(path, json.dumps({**manifest, "sha256": checksum}, indent=1))


def _new_file_mode(folder: Path) -> int:
    """Return the permission bits of a newly created file.

    The umask cannot be read without changing it, so a probe file is created.
    """
    probe = folder / MANIFEST
    probe.touch()
    return probe.stat().st_mode & 0o777


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's entries, without the checksum itself."""
    content = {"files": manifest["files"], "expires_at": manifest["expires_at"]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_checksum(path: Path) -> str:
    """Return a file's SHA-256.

    An unchanged file is read once per process, because opening a checkpoint checks it several
    times.
    """
    now = path.stat()
    if time.time() - max(now.st_mtime, now.st_ctime) < _SETTLED_SECONDS:
        return _read_checksum(path)
    return _cached_checksum(
        path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
    )


# A file changed more recently may change again within the same tick of its file system's clock.
_SETTLED_SECONDS = 10.0


@lru_cache(maxsize=4096)
def _cached_checksum(path: Path, *file_stats: int) -> str:
    """Return a cached checksum. `file_stats`: device, inode, size and times, which any write
    changes.
    """
    return _read_checksum(path)


def _read_checksum(path: Path) -> str:
    """Return a file's SHA-256, reading it."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _read_manifest(folder: Path) -> tuple[dict[str, dict[str, int | str]], float | None]:
    """Return ({file name: its "bytes" and "sha256"}, expiry time).

    Raises DamagedCheckpoint if the manifest is missing, damaged or modified.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedCheckpoint(
            f"{folder} has no {MANIFEST}: it is not a checkpoint, or its write was interrupted"
        )
    try:
        manifest = json.loads(path.read_bytes().decode("utf-8"))
        files: dict[str, dict[str, int | str]] = {
            name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in manifest["files"].items()
        }
        expires = None if manifest["expires_at"] is None else float(manifest["expires_at"])
        checksum = manifest.get("sha256", ...)  # old manifests have no checksum
        changed = checksum is not ... and checksum != _manifest_checksum(manifest)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedCheckpoint(
            f"{path} cannot be read, it was modified or damaged: {type(error).__name__} {error}"
        ) from error
    if changed:
        raise DamagedCheckpoint(f"{path} does not match its checksum: it was modified or damaged")
    for name in files:
        if name.startswith("/") or not name or {"", ".", ".."} & set(name.split("/")):
            raise DamagedCheckpoint(
                f"{path} names {name!r}, which is not a file of this folder: it was modified"
            )
    return files, expires


def verify_checkpoint(folder: Path) -> None:
    """Raise DamagedCheckpoint unless every file of the manifest exists with its size and checksum.

    A learner in a subfolder (`<checkpoint>/critic`) is complete if the checkpoint is.
    """
    folder = Path(folder)
    restore_replaced(folder)
    if not folder.is_dir():
        raise DamagedCheckpoint(
            f"no checkpoint at {folder}: the folder does not exist. Expected: the folder that "
            f"save_state(...).result().path names{suggest_path(folder)}"
        )
    if (
        (folder / "state.json").is_file()
        and not (folder / MANIFEST).is_file()
        and (folder.parent / MANIFEST).is_file()
    ):
        folder = folder.parent
    files, expires = _read_manifest(folder)
    if expires is not None and expires < time.time():
        raise DamagedCheckpoint(f"{folder} was saved with ttl_seconds and has expired")
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{folder} lacks {name}")
        if (size := file.stat().st_size) != entry["bytes"]:
            raise DamagedCheckpoint(f"{file} has {size} bytes, the manifest says {entry['bytes']}")
        if _file_checksum(file) != entry["sha256"]:
            raise DamagedCheckpoint(
                f"{file} does not match the checksum of the manifest: it was modified or damaged"
            )


def read_verified_state(folder: Path) -> dict[str, Any]:
    """Return state.json of a complete checkpoint. Raises DamagedCheckpoint."""
    verify_checkpoint(folder)
    return read_unverified_state(folder)


def read_unverified_state(folder: Path) -> dict[str, Any]:
    """Return state.json without verifying the other files.

    Raises DamagedCheckpoint if it cannot be read.
    """
    path = Path(folder) / "state.json"
    if not path.is_file():
        raise DamagedCheckpoint(f"{folder} has no state.json")
    try:
        state = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{path} is not JSON ({error}): it was modified or damaged"
        ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} is not a JSON object: it was modified or damaged")
    return state


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint atomically: a crash leaves no partial folder under its name.

    A link is not removed.
    """
    folder = Path(folder)
    if folder.is_symlink() or not folder.is_dir():
        return
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another thread removes it
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def set_expiry(folder: Path, ttl_seconds: float | None) -> None:
    """Let the checkpoint expire in `ttl_seconds` from now; None: never.

    Its manifest is replaced atomically.
    """
    files, _ = _read_manifest(folder)
    _save_manifest(folder / MANIFEST, files, ttl_seconds)


def remove_leftovers(parent: Path) -> None:
    """Remove interrupted writes (`<name>.partial-<pid>`), replaced checkpoints and expired
    checkpoints in `parent`.
    """
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        replaced = _REPLACED.fullmatch(path.name)
        is_leftover = (
            _PARTIAL.fullmatch(path.name) if replaced is None else (parent / replaced[1]).exists()
        )
        if is_leftover and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    remove_expired(parent)


def remove_expired(parent: Path) -> None:
    """Remove the checkpoints in `parent` that have outlived their ttl_seconds."""
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        remove_if_expired(path)


def remove_if_expired(folder: Path) -> None:
    """Remove a checkpoint if it has outlived its ttl_seconds. Keep damaged checkpoints."""
    if not folder.is_symlink() and (folder / MANIFEST).is_file():
        with contextlib.suppress(DamagedCheckpoint, FileNotFoundError):
            _, expires = _read_manifest(folder)
            if expires is not None and expires < time.time():
                remove_checkpoint(folder)
