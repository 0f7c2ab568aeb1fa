"""Checkpoints: folders that are whole or absent.

Written aside (`<name>.partial-<pid>`), every file fsynced, a manifest with sizes and SHA-256 last, then one rename.
A folder without a valid manifest is not a checkpoint. A name, once written, stays: saving under it again is an error.

    model/                  a plain Hugging Face folder: config.json, model.safetensors or a PEFT adapter, tokenizer
    optimizer.safetensors   AdamW's moments by parameter name (absent from sampler-only weights)
    state.json              what made the model, versions, the loop's state: readable
    value_head.safetensors  of a policy or critic that has one
    rng.safetensors         torch's generator state of each rank
    manifest.json           size and checksum of each file, time of expiry
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.errors import UserError

MANIFEST = "manifest.json"


class DamagedCheckpoint(UserError):
    """A folder that is no whole checkpoint: the message names the file and what is wrong with it."""


class DiskFull(UserError):
    """There is no room for a checkpoint: nothing of it is left behind, and those before it are as they were."""


@contextlib.contextmanager
def writing(folder: Path, *, expected_bytes: int = 0, ttl_seconds: float | None = None) -> Iterator[Path]:
    """Yields a folder to write into; when the block ends well it becomes `folder`, otherwise nothing is left behind.

    Raises UserError before anything is written if `folder` exists, DiskFull if the disk has too little room or fills up.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} exists already; what is saved under a name stays. Choose another name or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_expired(folder.parent)
    free = shutil.disk_usage(folder.parent).free
    if expected_bytes * 1.05 + 2**20 > free:
        needed = f"{expected_bytes / 2**20:.0f} MiB"
        raise DiskFull(f"saving {folder} needs about {needed}, the disk has {free / 2**20:.0f} MiB free{_MAKE_ROOM}")
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        _write_manifest(aside, ttl_seconds)
        os.rename(aside, folder)
        _fsync(folder.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if is_disk_full(error):
            raise DiskFull(f"the disk filled up while {folder} was written: {error}{_MAKE_ROOM}") from error
        raise


_MAKE_ROOM = ". The checkpoints before it are whole: make room, and --resume goes on from the newest"


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of room or of quota. safetensors says so in words alone."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in codes) or any(f"(os error {code})" in str(error) for code in codes)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def _write_manifest(folder: Path, ttl_seconds: float | None) -> None:
    files = {}
    for path in _files(folder):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _checksum(path)}
        _fsync(path)
    manifest = {"files": files, "expires_at": time.time() + ttl_seconds if ttl_seconds is not None else None}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _fsync(path)
    for inner in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        _fsync(inner)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _read_manifest(folder: Path) -> tuple[dict[str, tuple[int, str]], float | None]:
    """(size and checksum by file name, time of expiry). ValueError, KeyError, TypeError or AttributeError where it is damaged."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    expires = manifest["expires_at"]
    return files, None if expires is None else float(expires)


def verify(folder: Path) -> None:
    """Raises DamagedCheckpoint unless every file of the manifest is there with its size and checksum.

    A learner saved beside another (`<checkpoint>/critic`) is whole if the checkpoint is.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DamagedCheckpoint(f"no checkpoint at {folder}: the folder does not exist")
    if (folder / "state.json").is_file() and not (folder / MANIFEST).is_file() and (folder.parent / MANIFEST).is_file():
        folder = folder.parent
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedCheckpoint(f"{folder} has no {MANIFEST}: it is no checkpoint, or its writing was cut off")
    try:
        manifest = _read_manifest(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read, it was changed or damaged: {type(error).__name__} {error}") from error
    files, expires = manifest
    if expires is not None and expires < time.time():
        raise DamagedCheckpoint(f"{folder} was saved with ttl_seconds and has expired")
    for name, (size, checksum) in files.items():
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{folder} lacks {name}")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(f"{file} has {file.stat().st_size} bytes, the manifest says {size}")
        if _checksum(file) != checksum:
            raise DamagedCheckpoint(f"{file} does not have the checksum of the manifest: it was changed or damaged")


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a whole checkpoint. Raises DamagedCheckpoint."""
    verify(folder)
    path = Path(folder) / "state.json"
    if not path.is_file():
        raise DamagedCheckpoint(f"{folder} has no state.json")
    return json.loads(path.read_text())


def remove(folder: Path) -> None:
    """Removes a checkpoint so that a crash in between leaves no half of it under its name."""
    folder = Path(folder)
    if not folder.is_dir():
        return
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Removes what interrupted writes left (`*.partial-*`) and what has outlived its ttl_seconds."""
    for path in parent.glob("*.partial-*") if parent.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)
    remove_expired(parent)


def remove_expired(parent: Path) -> None:
    """Removes the checkpoints in `parent` that have outlived their ttl_seconds."""
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        if (path / MANIFEST).is_file():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # a damaged one is not ours to remove
                _, expires = _read_manifest(path)
                if expires is not None and expires < time.time():
                    remove(path)
