"""Register the built-in methods, and load those of users: `train.py mine.py:Method` names a class
in a file. Name the present class in the error for a class that was renamed: files of users import
it.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from rl.algorithms.best_of_n import BestOfN
from rl.algorithms.distillation import Distillation
from rl.algorithms.dpo import DPO
from rl.algorithms.grpo import GRPO, REINFORCE
from rl.algorithms.kto import KTO
from rl.algorithms.method_interface import Method
from rl.algorithms.offline import Offline
from rl.algorithms.online_dpo import OnlineDPO
from rl.algorithms.orpo_simpo import ORPO, SIMPO
from rl.algorithms.ppo import PPO, RLHF
from rl.algorithms.reward_model import RewardModelTraining
from rl.algorithms.sft import SFT
from rl.config import SettingsError, StageConfig, is_method_address
from rl.errors import UserError, describe_import_error
from rl.rewards import load_file

# What a class had to declare before `required_models` was a method of it.
_FORMER_DECLARATIONS = ("clients", "weights", "critic", "needs_initial_policy")
_RENAMED_HOOKS = {
    "datums": "build_datums", "begin": "prepare_rows", "remark": "describe_data",
    "remark_on_data": "describe_data",
}  # fmt: skip

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


class MethodRegistry(dict[str, type[Method]]):
    """Map names to methods. `file.py:Class` and `module:Class` are also names; they are imported at
    their first use.
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            is_method_address(name) and self[str(name)] is not None
        )

    def __missing__(self, name: str) -> type[Method]:
        """Import the method at the address `name`. Raises KeyError if `name` is no address."""
        if not is_method_address(name):
            raise KeyError(name)
        return _load_method(name)

    def create(self, stage: StageConfig) -> Method:
        """Return the method of a stage, with the stage's settings."""
        return self[stage.method](stage.settings)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        return self[name] if name in self else default


def _load_method(address: str) -> type[Method]:
    """Return the method at `address`.

    Raises SettingsError if the file or module cannot be imported, if the class does not exist or is
    no method.
    """
    place, _, attribute = address.rpartition(":")
    module = _import_module(place, address)
    target = getattr(module, attribute, None)
    if not isinstance(target, type):
        available = ", ".join(
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        )
        raise SettingsError(
            [
                f"method {address}: {place} has no class {attribute}; its classes: "
                f"{available or 'none'}"
            ]
        )
    method: type[Method] = (
        target
        if issubclass(target, Method)
        else type(target.__name__, (target, Method), {"__doc__": target.__doc__})
    )  # a class derived from nothing gets the defaults
    if fault := _find_fault(method):
        raise SettingsError([f"method {address} {fault}"])
    if "summary" not in vars(method):
        method.summary = ((target.__doc__ or "").strip() or address).splitlines()[0]
    return method


def _find_fault(method: type[Method]) -> str | None:
    """Return what is wrong with a method's class, as a predicate such as "has no update"; None if
    nothing is.
    """
    if renamed := [
        f"{old} is {new} now" for old, new in _RENAMED_HOOKS.items() if hasattr(method, old)
    ]:
        return f"declares former hooks: {', '.join(renamed)}"
    required = ("update", "compute_advantages" if method.online else "build_datums")
    if missing := [name for name in required if getattr(method, name) is getattr(Method, name)]:
        return (
            f"has no {' and no '.join(missing)}: see rl/algorithms/method_interface.py for the "
            "hooks of a method"
        )
    if former := [name for name in _FORMER_DECLARATIONS if hasattr(method, name)]:
        return (
            f"declares {', '.join(former)}, which nothing reads any more: request its models in a "
            "method required_models(self, factory), such as "
            'return {"reference": factory.reference()} (see rl/algorithms/grpo.py)'
        )
    if former := [name for name in ("reads", "value_head") if callable(getattr(method, name))]:
        return (
            f"declares {', '.join(former)} as a function; it is a value or a property now (see "
            "rl/algorithms/method_interface.py)"
        )
    if not dataclasses.is_dataclass(getattr(method, "Settings", None)):
        return (
            "has no Settings, a dataclass of sections such as rl.algorithms.GrpoSettings (use that "
            "class or inherit from it)"
        )
    return None


def _import_module(place: str, address: str) -> ModuleType:
    """Import a file or module. Raises SettingsError if that fails."""
    if place.endswith(".py"):
        try:
            return load_file(str(Path(place).expanduser().resolve()), "method")
        except UserError as error:
            raise SettingsError([str(error)]) from error
    try:
        return importlib.import_module(place)
    except Exception as error:  # boundary: the user's module
        raise SettingsError(
            [
                f"method {address}: importing {place} failed "
                f"({describe_import_error(error, place)}); name a file as file.py:Class"
            ]
        ) from error


METHODS = MethodRegistry(
    {
        "grpo": GRPO,
        "reinforce": REINFORCE,
        "ppo": PPO,
        "online_dpo": OnlineDPO,
        "best_of_n": BestOfN,
        "sft": SFT,
        "dpo": DPO,
        "orpo": ORPO,
        "simpo": SIMPO,
        "kto": KTO,
        "reward_model": RewardModelTraining,
        "rlhf": RLHF,
        "offline": Offline,
        "distill": Distillation,
    }
)


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
