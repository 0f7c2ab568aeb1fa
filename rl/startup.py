"""Prepare the start and the exit of commands that import torch and transformers."""

from __future__ import annotations

import atexit
import gc
import os


def reduce_gc() -> None:
    """Reduce garbage collection. Call it before any large import.

    The imports create a million permanent objects. Python's collector traverses them repeatedly
    during the imports, and again at exit: about two of the six seconds of a short command. This
    makes the collector run less often, and not at exit.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # registered first, so called last


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments, unless its environment variable is set.

    Batches of changing sizes otherwise leave memory that no other size can use. Call it before
    torch is imported.
    """
    names = [f"PYTORCH_{kind}ALLOC_CONF" for kind in ("", "CUDA_", "HIP_")]
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = "expandable_segments:True"
