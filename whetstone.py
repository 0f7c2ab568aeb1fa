"""Run the root scripts by name from any folder: the command `whetstone`, installed by `pip install
-e .`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent
SCRIPTS = ("train", "sample", "evaluate", "export", "serve", "plot")


def main() -> int:
    """Run a script: `whetstone train grpo --steps 10` is `python train.py grpo --steps 10`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in SCRIPTS:
        unknown = name not in ("", "-h", "--help")
        message = f"whetstone: unknown command {name!r}\n" if unknown else ""
        text = (
            f"{message}usage: whetstone {{{','.join(SCRIPTS)}}} ...\n  the scripts of {_CHECKOUT}, "
            "by name: whetstone train --help\n"
        )
        (sys.stderr if unknown else sys.stdout).write(text)
        return 2 if unknown else 0
    script = _CHECKOUT / f"{name}.py"
    if not script.is_file():
        sys.stderr.write(
            f"whetstone: {script} does not exist: install from a checkout, with pip install -e .\n"
        )
        return 2
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(_CHECKOUT))
    runpy.run_path(str(script), run_name="__main__")
    return 0
