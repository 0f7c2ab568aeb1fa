"""Check at start that settings, library versions and this project's code agree on all ranks."""

from __future__ import annotations

import dataclasses
import platform
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rl.distributed.collectives import ObjectGroup
from rl.errors import RankLost, UserError
from rl.sanitize import list_some

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
_MAX_LISTED = 8  # an error lists at most this many differences


def check_same_launch(objects: ObjectGroup, settings: Any) -> None:
    """Check that all ranks have the same settings (a dataclass), libraries and code.

    Raises UserError on rank 0, which names each difference and its rank, and RankLost on other
    ranks.
    """
    if objects.world == 1:
        return
    differ = None
    if (launch_infos := objects.gather(collect_launch_info(settings))) is not None:
        names = [objects.rank_name(r) for r in range(objects.world)]
        differ = find_differences(launch_infos, names)
    differ = objects.broadcast_verb(differ)
    if not differ:
        return
    if objects.rank > 0:
        raise RankLost(
            "the ranks were not started alike; the error of rank 0 lists the differences"
        )
    raise UserError(
        f"the ranks do not agree: {list_some(differ, _MAX_LISTED, '; ')}. Start all ranks with the "
        "same command, from the same installation"
    )


def collect_launch_info(settings: Any) -> dict[str, str]:
    """Return name to value, as text, of everything that is compared."""
    values = {
        f"the setting {name}": value for name, value in _flatten(dataclasses.asdict(settings))
    }
    values["the version of python"] = platform.python_version()
    for library in _LIBRARIES:
        try:
            values[f"the version of {library}"] = metadata.version(library)
        except metadata.PackageNotFoundError:
            values[f"the version of {library}"] = "none"
    return {**values, "the code of this project (checksum)": f"{_source_checksum():08x}"}


def find_differences(launch_infos: list[Mapping[str, str]], rank_names: list[str]) -> list[str]:
    """Return a message for each name and rank with a value other than rank 0's."""
    first = launch_infos[0]
    messages = []
    for other, name in zip(launch_infos[1:], rank_names[1:], strict=True):
        for key in {**first, **other}:
            expected, actual = first.get(key, "none"), other.get(key, "none")
            if expected != actual:
                messages.append(f"{key} is {actual} on {name} and {expected} on {rank_names[0]}")
    return messages


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested dicts as (dotted name, repr of the value)."""
    pairs = []
    for name, value in tree.items():
        if isinstance(value, dict):
            pairs += _flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, repr(value)))
    return pairs


def _source_checksum() -> int:
    """Return the CRC-32 of the sources that every rank runs (the script runs only on rank 0)."""
    total = 0
    for path in sorted(p for package in ("rl", "kernels") for p in (_ROOT / package).rglob("*.py")):
        total = zlib.crc32(
            path.read_bytes(), zlib.crc32(str(path.relative_to(_ROOT)).encode(), total)
        )
    return total
