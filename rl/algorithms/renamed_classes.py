"""Name the present class in the error for a class that was renamed: files of users import it."""

from __future__ import annotations

import sys
from functools import partial
from typing import NoReturn

RENAMED_CLASSES = {
    "PolicyGradient": "GRPO",
    "Ppo": "PPO",
    "Sft": "SFT",
    "Dpo": "DPO",
    "Kto": "KTO",
    "OnlineDpo": "OnlineDPO",
    "WithoutReference": "ReferenceFreeDPO",
    "BradleyTerry": "RewardModelTraining",
}


def report_renamed_classes(package: str) -> None:
    """Set the `__getattr__` of a package and of its imported modules to `_raise_renamed`."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            vars(module)["__getattr__"] = partial(_raise_renamed, name)


def _raise_renamed(module: str, name: str) -> NoReturn:
    """Raise ImportError for a renamed class, since `from module import name` drops the message of
    an AttributeError.
    """
    if name in RENAMED_CLASSES:
        raise ImportError(
            f"{module}.{name} was renamed to {RENAMED_CLASSES[name]}: import "
            f"rl.algorithms.{RENAMED_CLASSES[name]}"
        )
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
