"""Record each launch of a run: versions, devices, and the memory that was planned and used."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rl.jsonl import format_json_line, write_atomically
from rl.reporting import LAUNCHES, read_rollouts
from rl.trainer.memory_table import StageNeeds

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "triton", "numpy")
_MAX_LAUNCHES = 200  # rows that are kept of a run that is resumed again and again


def list_versions() -> dict[str, str]:
    """Return the versions of Python, of the main packages and of CUDA in this process."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**versions, **({"cuda": torch.version.cuda} if torch.version.cuda else {})}


def list_devices() -> list[dict[str, Any]]:
    """Return name and bytes of memory of each GPU of this machine; without one, its processor."""
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [{"name": device.name, "memory": device.total_memory} for device in devices]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [{"name": f"{os.cpu_count()} CPU cores, {platform.machine()}", "memory": memory}]


def measure_peak_memory() -> dict[str, Any]:
    """Return the most bytes that rank 0 has used so far: of GPU memory, otherwise of its process.
    The allocator's reserve counts as GPU memory.
    """
    if torch.cuda.is_initialized():
        return {"peak_memory": torch.cuda.max_memory_reserved(), "peak_memory_of": "GPU of rank 0"}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory": peak, "peak_memory_of": "process of rank 0"}


def describe_launch(
    step: int, info: Mapping[str, Any], plans: Sequence[StageNeeds]
) -> dict[str, Any]:
    """Return the record of a launch that starts at `step`. `info`: that of the policy's client.
    `plans`: the memory plan of each stage, if it was computed.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "step": step,
        "processes": info.get("world"),
        "device": str(info.get("device")),
        "dtype": str(info.get("dtype")),
        "parameters": info.get("parameters"),
        "trainable_parameters": info.get("trainable_parameters"),
        "versions": list_versions(),
        "devices": list_devices(),
        "planned_memory": {needs.stage: round(needs.plan.peak) for needs in plans},
    }


class LaunchLog:
    """Keep launches.jsonl of a run's folder: a row for each launch, the current one last. Drop
    lines that are no JSON objects.
    """

    def __init__(self, folder: Path, launch: Mapping[str, Any]):
        self._path = folder / LAUNCHES
        self._earlier: list[dict[str, Any]] | None = None
        self._launch = dict(launch)

    def write(self) -> None:
        """Write the file, with the memory that this launch has used so far."""
        if self._earlier is None:
            rows = read_rollouts(self._path) if self._path.exists() else []
            self._earlier = rows[1 - _MAX_LAUNCHES :]
        rows = [*self._earlier, {**self._launch, **measure_peak_memory()}]
        write_atomically(self._path, "".join(map(format_json_line, rows)))
