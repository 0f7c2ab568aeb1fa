"""Triton's interpreter: it is chosen before Triton is imported, so its tests run in a process of
their own.
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
    # The kernels' launchers multiply views of padded buffers. oneDNN's bf16 product with AMX
    # multiplies the column behind an odd number of columns by 0, which is NaN if it holds NaN.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}


def inside(test):
    """For the process that `run_interpreted` starts; not collected elsewhere."""
    test.__test__ = INTERPRETED
    return test


def run_interpreted(file: str, marked: str) -> None:
    """The tests of a file in a process with the interpreter; those that `marked` picks."""
    if _minor("triton") < (3, 7) and _minor("numpy") >= (2, 4):
        pytest.skip(
            f"triton {version('triton')}'s interpreter takes no one-element arrays of numpy "
            f"{version('numpy')} for numbers"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, file]
    done = subprocess.run(
        command,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def _minor(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def patch_once() -> None:
    """The interpreter puts its functions in place of the language's at every call of a function
    within a kernel: two fifths of its time. Here once for the language's own library, and at each
    launch.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(tl.standard.cdiv.fn)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
        *args, **kwargs
    )  # type: ignore[method-assign]
