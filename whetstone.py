"""The command `whetstone`: the flat scripts by name, wherever one stands. Installed by `pip install
-e .`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_HOUSE = Path(__file__).resolve().parent
SCRIPTS = ("train", "sample", "evaluate", "export", "serve", "plot")


def main() -> int:
    """`whetstone train grpo --steps 10` is `python train.py grpo --steps 10`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in SCRIPTS:
        wrong = name not in ("", "-h", "--help")
        shown = f"whetstone: there is no command {name!r}\n" if wrong else ""
        text = f"{shown}usage: whetstone {{{','.join(SCRIPTS)}}} ...\n  the scripts of {_HOUSE}, by name: whetstone train --help\n"
        (sys.stderr if wrong else sys.stdout).write(text)
        return 2 if wrong else 0
    script = _HOUSE / f"{name}.py"
    if not script.is_file():
        sys.stderr.write(
            f"whetstone: {script} is not there: install from a checkout, with pip install -e .\n"
        )
        return 2
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(_HOUSE))
    runpy.run_path(str(script), run_name="__main__")
    return 0
