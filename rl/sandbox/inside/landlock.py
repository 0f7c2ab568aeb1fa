"""Restrict the file system, sockets and signals of a program by Landlock.

Uses the package sandlock, on hosts that refuse namespaces.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/dev/null", "/dev/zero",
             "/dev/urandom")  # fmt: skip


def load(folder: str) -> None:
    """Import sandlock from its installation folder, before the first fork. Raises ImportError."""
    sys.path.append(folder)
    try:
        import sandlock  # noqa: F401
    finally:
        sys.path.remove(folder)


def confine(folder: str) -> None:
    """Confine this process and its children irrevocably: read access to the system and the
    interpreter, write access to `folder`.
    """
    sandlock: Any = sys.modules["sandlock"]
    packages = os.environ["PYTHONPATH"]
    importable = [packages, *(os.path.realpath(entry.path) for entry in os.scandir(packages))]
    readable = [
        place
        for place in (*_READABLE, *importable, os.path.realpath(sys.base_prefix))
        if os.path.exists(place)
    ]
    sandlock.confine(sandlock.Sandbox(fs_readable=readable, fs_writable=[folder]))
