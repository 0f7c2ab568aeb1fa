"""Cache what the concurrent episodes of a process share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def cache_once(function: Callable[..., T]) -> Callable[..., T]:
    """Cache a function as `functools.cache` does, and compute a value in one thread only."""
    cached, lock = functools.cache(function), threading.Lock()

    @functools.wraps(function)
    def call(*arguments: Any) -> T:
        with lock:
            return cached(*arguments)

    return call
