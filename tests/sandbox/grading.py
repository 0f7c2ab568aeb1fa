"""Grade many programs on all workers of a sandbox."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.sandbox import Grade, Sandbox


def grade_many(sandbox: Sandbox, pairs: list[tuple[str, Any]], **options: Any) -> list[Grade]:
    """Return the grades of (program, tests), in order."""
    with ThreadPoolExecutor(sandbox.workers) as pool:
        return list(pool.map(lambda pair: sandbox.grade(*pair, **options), pairs))
