"""Register the built-in methods, and load those of users: `train.py mine.py:Method` names a class
in a file.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

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
from rl.errors import describe_import_error

# What a class had to declare before `required_models` was a method of it.
_FORMER_DECLARATIONS = ("clients", "weights", "critic", "needs_initial_policy")
_RENAMED_HOOKS = {
    "datums": "build_datums", "begin": "prepare_rows", "remark": "describe_data",
    "remark_on_data": "describe_data",
}  # fmt: skip


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

    Raises SettingsError if the class does not exist or is no method.
    """
    place, _, attribute = address.rpartition(":")
    module = _import_file(place) if place.endswith(".py") else _import_module(place, address)
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
    if former := [name for name in _RENAMED_HOOKS if hasattr(target, name)]:
        renamed = ", ".join(f"{name} is {_RENAMED_HOOKS[name]} now" for name in former)
        raise SettingsError([f"method {address} declares former hooks: {renamed}"])
    required = "compute_advantages" if method.online else "build_datums"
    if missing := [
        name for name in ("update", required) if getattr(method, name) is getattr(Method, name)
    ]:
        raise SettingsError(
            [
                f"method {address} has no {' and no '.join(missing)}: see "
                "rl/algorithms/method_interface.py for the hooks of a method"
            ]
        )
    if former := [name for name in _FORMER_DECLARATIONS if hasattr(target, name)]:
        raise SettingsError(
            [
                f"method {address} declares {', '.join(former)}, which nothing reads any more: "
                "request its models in a method required_models(self, factory), such as "
                'return {"reference": factory.reference()} (see rl/algorithms/grpo.py)'
            ]
        )
    if former := [n for n in ("reads", "value_head") if callable(getattr(target, n, None))]:
        raise SettingsError(
            [
                f"method {address} declares {', '.join(former)} as a function; it is a value or a "
                "property now (see rl/algorithms/method_interface.py)"
            ]
        )
    if not dataclasses.is_dataclass(getattr(target, "Settings", None)):
        raise SettingsError(
            [
                f"method {address} has no Settings, a dataclass of sections such as "
                "rl.algorithms.GrpoSettings (use that class or inherit from it)"
            ]
        )
    if "summary" not in vars(method):
        method.summary = (target.__doc__ or address).strip().splitlines()[0]
    return method


def _import_file(place: str) -> ModuleType:
    """Import the Python file `place`.

    Raises SettingsError if it does not exist or fails to load.
    """
    path = Path(place).expanduser().resolve()
    name = f"whetstone_method_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise SettingsError([f"method {place}: no such file (relative to {Path.cwd()})"])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # holds for every .py path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: its dataclasses look up the module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # boundary: the user's module
        del sys.modules[name]
        raise SettingsError(
            [f"method file {place} failed to load: {describe_import_error(error, place)}"]
        ) from error
    return module


def _import_module(module_name: str, address: str) -> ModuleType:
    """Import the module `module_name`. Raises SettingsError if the import fails."""
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # boundary: the user's module
        reason = describe_import_error(error, module_name)
        raise SettingsError(
            [
                f"method {address}: importing {module_name} failed ({reason}); name a file as "
                "file.py:Class"
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
