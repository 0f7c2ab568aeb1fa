"""Shorten the start and the exit of commands that import torch and transformers."""

from __future__ import annotations

import atexit
import gc


def reduce_gc() -> None:
    """Reduce garbage collection. Call it before any large import.

    The imports create a million permanent objects. Python's collector traverses them repeatedly
    during the imports, and again at exit: about two of the six seconds of a short command. This
    makes the collector run less often, and not at exit.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # registered first, so called last
