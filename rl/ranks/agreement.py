"""What must be the same on every rank is compared when they start: settings, versions of libraries,
this project's own code.
"""

from __future__ import annotations

import dataclasses
import platform
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rl.errors import RankLost, UserError
from rl.ranks.distributed import ObjectGroup

_LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "safetensors",
    "tokenizers",
    "numpy",
    "triton",
)
_ROOT = Path(__file__).resolve().parents[2]
_MOST = 8  # differences that an error lists


def require_same(objects: ObjectGroup, settings: Any) -> None:
    """Raises UserError on rank 0, which names what differs on which rank, and RankLost elsewhere.
    `settings`: a dataclass.
    """
    if objects.world == 1:
        return
    everybody = objects.gather(described(settings))
    differ = (
        None
        if everybody is None
        else differences(everybody, [objects.name(r) for r in range(objects.world)])
    )
    differ = objects.broadcast_verb(differ)
    if not differ:
        return
    if objects.rank > 0:
        raise RankLost("the ranks were not started alike, rank 0 says how")
    more = f" and {len(differ) - _MOST} more" if len(differ) > _MOST else ""
    raise UserError(
        f"the ranks do not agree: {'; '.join(differ[:_MOST])}{more}. Start all of them alike, from the same installation"
    )


def described(settings: Any) -> dict[str, str]:
    """Name to value of all that is compared, as text."""
    found = {f"the setting {name}": value for name, value in _flat(dataclasses.asdict(settings))}
    found["the version of python"] = platform.python_version()
    for library in _LIBRARIES:
        try:
            found[f"the version of {library}"] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[f"the version of {library}"] = "none"
    return {**found, "the code of this project (checksum)": f"{_checksum():08x}"}


def differences(everybody: list[Mapping[str, str]], names: list[str]) -> list[str]:
    """One text for each thing and rank that differs from rank 0's."""
    first = everybody[0]
    found = []
    for other, name in zip(everybody[1:], names[1:], strict=True):
        for what in {**first, **other}:
            here, there = first.get(what, "none"), other.get(what, "none")
            if here != there:
                found.append(f"{what} is {there} on {name} and {here} on {names[0]}")
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for name, value in tree.items():
        found += (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else [(prefix + name, repr(value))]
        )
    return found


def _checksum() -> int:
    """Of the sources that every rank runs (the script is rank 0's own affair)."""
    total = 0
    for path in sorted(p for package in ("rl", "kernels") for p in (_ROOT / package).rglob("*.py")):
        total = zlib.crc32(
            path.read_bytes(), zlib.crc32(str(path.relative_to(_ROOT)).encode(), total)
        )
    return total
