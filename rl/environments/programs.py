"""The sandbox that environments of this process run programs in."""

from __future__ import annotations

import atexit
from functools import cache

from rl.sandbox import Sandbox


@cache
def sandbox(mode: str) -> Sandbox:
    """One of each mode for all episodes, made when the first of them needs it. Raises UserError
    where this host has none.
    """
    made = Sandbox(mode)
    atexit.register(made.close)
    return made
