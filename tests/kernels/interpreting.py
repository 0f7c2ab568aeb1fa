"""Run tests with Triton's interpreter. It must be selected before Triton is imported, so
test_kernel_interpreter.py runs these tests in a separate process.
"""

import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

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
# For the tests of a file that are quick without the interpreter.
SLOW_INTERPRETED = [pytest.mark.slow] if INTERPRETED else []


def mark_interpreted(test):
    """Mark a test for the process that `run_interpreted` starts; it is not collected elsewhere."""
    test.__test__ = INTERPRETED
    return test


@cache
def run_interpreted(marked: str, *stems: str) -> dict[str, dict[str, str]]:
    """Run the tests of some files that `marked` selects, in a process with the interpreter. Return
    the failure of each test, empty if it passed, by file; skipped tests are left out.
    """
    if _minor("triton") < (3, 7) and _minor("numpy") >= (2, 4):
        pytest.skip(
            f"triton {version('triton')}'s interpreter takes no one-element arrays of numpy "
            f"{version('numpy')} for numbers"
        )
    files = [str(Path(__file__).with_name(f"{stem}.py")) for stem in stems]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *files],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
        results: dict[str, dict[str, str]] = defaultdict(dict)
        for case in ElementTree.parse(report).iter("testcase"):
            problems = [item for item in case if item.tag in ("failure", "error")]
            stem = case.get("classname", "").rsplit(".", 1)[-1]
            if case.find("skipped") is None:
                text = "\n".join(item.text or "" for item in problems)
                results[stem][case.get("name", "")] = text
    assert done.returncode == 0 or any(any(tests.values()) for tests in results.values()), (
        done.stdout[-4000:]
    )
    return results


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
