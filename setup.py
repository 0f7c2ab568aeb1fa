"""Add the root scripts and the recipes to a wheel, as the folder whetstone_scripts.

Everything else about the package is in pyproject.toml.
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # which an isolated build leaves out

from whetstone import SCRIPTS  # noqa: E402


class BuildWithScripts(build_py):
    def run(self) -> None:
        """Build the packages, and copy scripts, recipes and launch configurations."""
        super().run()
        if self.editable_mode:  # the command finds the scripts in the checkout
            return
        target = Path(self.build_lib) / "whetstone_scripts"
        target.mkdir(parents=True, exist_ok=True)
        for name in (*SCRIPTS, "minimal_loop"):
            shutil.copy2(ROOT / f"{name.replace('-', '_')}.py", target)
        for folder in ("recipes", "accelerate_configs", "ds_configs"):
            shutil.copytree(ROOT / folder, target / folder, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithScripts})
