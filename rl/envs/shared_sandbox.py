"""Provide the sandbox in which environments of this process run programs."""

from __future__ import annotations

import atexit
from functools import cache

from rl.sandbox import Sandbox


@cache
def get_sandbox(mode: str) -> Sandbox:
    """Return the sandbox of a mode, shared by all episodes and made on first use. Raises UserError
    if this host does not support the mode.
    """
    made = Sandbox(mode)
    atexit.register(made.close)
    return made
