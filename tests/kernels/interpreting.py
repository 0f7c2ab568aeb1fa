"""Run tests with Triton's interpreter. It must be selected before Triton is imported, so these
tests run in a separate process.
"""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    # The kernel launchers multiply views of padded buffers. oneDNN's bf16 product with AMX
    # multiplies the column after an odd number of columns by 0, which gives NaN if that column
    # holds NaN.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}


def mark_interpreted(test):
    """Mark a test for the process that `run_interpreted` starts; it is not collected elsewhere."""
    test.__test__ = INTERPRETED
    return test


def run_interpreted(file: str, marked: str) -> None:
    """Run the tests of a file that `marked` selects, in a process with the interpreter."""
    if _minor("triton") < (3, 7) and _minor("numpy") >= (2, 4):
        pytest.skip(
            f"triton {version('triton')}'s interpreter takes no one-element arrays of numpy "
            f"{version('numpy')} for numbers"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, file]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def _minor(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def patch_once() -> None:
    """Patch Triton's language once for its library, and once per launch.

    The interpreter replaces the functions of the language at every function call within a kernel,
    which takes two fifths of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(tl.standard.cdiv.fn)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
        *args, **kwargs
    )  # type: ignore[method-assign]
