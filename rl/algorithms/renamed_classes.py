"""Name the present class in the error for a class that was renamed: files of users import it."""

from __future__ import annotations

from collections.abc import Callable
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


def make_getattr(module: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a module. It raises ImportError for a renamed class, since
    `from module import name` drops the message of an AttributeError.
    """

    def getattr_renamed(name: str) -> NoReturn:
        if name in RENAMED_CLASSES:
            raise ImportError(
                f"{module}.{name} was renamed to {RENAMED_CLASSES[name]}: import "
                f"rl.algorithms.{RENAMED_CLASSES[name]}"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_renamed
