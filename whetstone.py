"""Run the root scripts by name from any folder: the command `whetstone`.

A wheel installs the scripts and the recipes in the folder whetstone_scripts (setup.py).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_SCRIPTS_FOLDER = _HERE if (_HERE / "train.py").is_file() else _HERE / "whetstone_scripts"
running_script: str | None = None  # the script that `main` runs in this process
SCRIPTS = (
    "train", "sample", "evaluate", "export", "serve", "plot", "report", "watch", "check-reward",
    "why",
)  # fmt: skip


def main() -> int:
    """Run a script: `whetstone train grpo --steps 10` is `python train.py grpo --steps 10`."""
    global running_script
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "--version":
        from rl import __version__

        sys.stdout.write(f"whetstone {__version__}\n")
        return 0
    if name not in SCRIPTS:
        unknown = name not in ("", "-h", "--help")
        message = f"whetstone: unknown command {name!r}\n" if unknown else ""
        text = (
            f"{message}usage: whetstone {{{','.join(SCRIPTS)}}} ...\n"
            f"  the scripts of {_SCRIPTS_FOLDER}, by name: whetstone train --help\n"
        )
        (sys.stderr if unknown else sys.stdout).write(text)
        return 2 if unknown else 0
    script = _SCRIPTS_FOLDER / f"{name.replace('-', '_')}.py"
    if not script.is_file():
        sys.stderr.write(
            f"whetstone: {script} does not exist: the installation is damaged, install it again\n"
        )
        return 2
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(_SCRIPTS_FOLDER))
    running_script = name
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        running_script = None
    return 0
