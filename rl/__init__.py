"""Whetstone: reinforcement learning for language models on your own GPUs.

    from rl import ServiceClient, types, renderers

Everything is imported when it is first asked for, so that `import rl` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl import model_info, renderers, rewards, types
    from rl.errors import UserError
    from rl.models import load_tokenizer as get_tokenizer
    from rl.rewards import register_reward, resolve_reward
    from rl.service import ServiceClient
    from rl.training_config import LoRAConfig, TrainingConfig
    from rl.types import TensorData

# name -> (module, attribute; None for the module itself)
_FACE: dict[str, tuple[str, str | None]] = {
    "LoRAConfig": ("rl.training_config", "LoRAConfig"),
    "ServiceClient": ("rl.service", "ServiceClient"),
    "TensorData": ("rl.types", "TensorData"),
    "TrainingConfig": ("rl.training_config", "TrainingConfig"),
    "UserError": ("rl.errors", "UserError"),
    "get_tokenizer": ("rl.models", "load_tokenizer"),
    "model_info": ("rl.model_info", None),
    "register_reward": ("rl.rewards", "register_reward"),
    "renderers": ("rl.renderers", None),
    "resolve_reward": ("rl.rewards", "resolve_reward"),
    "rewards": ("rl.rewards", None),
    "types": ("rl.types", None),
}

__all__ = [
    "LoRAConfig",
    "ServiceClient",
    "TensorData",
    "TrainingConfig",
    "UserError",
    "get_tokenizer",
    "model_info",
    "register_reward",
    "renderers",
    "resolve_reward",
    "rewards",
    "types",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'rl' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    module, attribute = _FACE[name]
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return __all__
