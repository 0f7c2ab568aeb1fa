"""Test serve.py where its optional packages are not installed."""

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_a_missing_package_is_named_with_its_remedy():
    hides = (
        "import importlib.util as u, runpy, sys; f = u.find_spec; u.find_spec = lambda n, *p: "
        "None if n == 'starlette' else f(n, *p); "
    )
    runs = (
        f"sys.argv = ['serve.py', '--base-model', 'tiny:ascii']; "
        f"runpy.run_path({str(REPO / 'serve.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", hides + runs], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    output = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and "Traceback" not in output
    assert re.search(r"not installed \((\w+, )*starlette\b", output)
    assert 'pip install -e ".[serve]"' in output
