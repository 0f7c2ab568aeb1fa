"""What a person should know, and nothing ends for: said once, by the process that drives."""

from __future__ import annotations

import os
import warnings


def remark(text: str, stacklevel: int = 3) -> None:
    """A warning on rank 0 alone: every rank finds the same. `stacklevel` as in `warnings.warn`; 3 names the caller's caller."""
    if int(os.environ.get("RANK", "0")) == 0:
        warnings.warn(text, stacklevel=stacklevel)
