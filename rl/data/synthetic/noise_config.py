"""Parse the options `noise` and `from` of generated data sets: wrong responses, for SFT of a model
that knows a task but answers badly.
"""

from __future__ import annotations

from collections.abc import Mapping


def parse_noise(options: Mapping[str, str]) -> tuple[float, int] | None:
    """Return (share of noisy responses, first epoch that has them), by default (0, 0).

    Returns None if a value is invalid.
    """
    try:
        noise, first = float(options.get("noise", "0")), int(options.get("from", "0"))
    except ValueError:
        return None
    return (noise, first) if 0 <= noise <= 1 and first >= 0 else None
