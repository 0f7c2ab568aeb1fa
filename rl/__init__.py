"""Expose the public API of Whetstone: reinforcement learning for language models on your GPUs.

    from rl import ServiceClient, types, renderers

Names are imported on first access, so `import rl` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from rl import renderers, rewards, types
    from rl.client import (
        APIFuture,
        LoRAConfig,
        LossHandle,
        PerDatumLossFn,
        RestClient,
        SamplingClient,
        ServiceClient,
        TrainingClient,
        TrainingConfig,
    )
    from rl.client import SamplingClient as BackcompatSamplingClientFuture
    from rl.client import TrainingClient as BackcompatTrainingClientFuture
    from rl.errors import (
        APIConnectionError,
        APIError,
        APIResponseValidationError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BillingError,
        ConflictError,
        InternalServerError,
        NotFoundError,
        PermissionDeniedError,
        RateLimitError,
        RequestFailedError,
        TinkerError,
        UnprocessableEntityError,
        UserError,
    )  # fmt: skip
    from rl.models import info as model_info
    from rl.models import load_tokenizer as get_tokenizer
    from rl.rewards import register_reward, resolve_reward
    from rl.trainer import open_run, sample, train
    from rl.types import (  # fmt: skip
        AdamOptimizerConfig,
        AdamParams,
        Checkpoint,
        CheckpointType,
        Datum,
        EncodedTextChunk,
        ForwardBackwardOutput,
        GetInfoResponse,
        ImageChunk,
        LoraConfig,
        LossFnType,
        ModelID,
        ModelInput,
        ModelInputChunk,
        OptimParams,
        OptimStepResponse,
        PromptProvenanceSpan,
        SampledProvenanceSpan,
        SampledSequence,
        SampleResponse,
        SamplingParams,
        StopReason,
        TensorData,
        TensorDtype,
        TrainingRun,
    )

# name -> (module, attribute; None for the module itself); all other names of `__all__` are those of
# rl.errors, which end in Error, and of rl.types
_PUBLIC_NAMES: dict[str, tuple[str, str | None]] = {
    "APIFuture": ("rl.client.api_future", "APIFuture"),
    "BackcompatSamplingClientFuture": ("rl.client.sampling_client", "SamplingClient"),
    "BackcompatTrainingClientFuture": ("rl.client.training_client", "TrainingClient"),
    "LoRAConfig": ("rl.client.training_config", "LoRAConfig"),
    "LossHandle": ("rl.client.custom_loss", "LossHandle"),
    "PerDatumLossFn": ("rl.client.custom_loss", "PerDatumLossFn"),
    "RestClient": ("rl.client.rest_client", "RestClient"),
    "SamplingClient": ("rl.client.sampling_client", "SamplingClient"),
    "ServiceClient": ("rl.client.service_client", "ServiceClient"),
    "TrainingClient": ("rl.client.training_client", "TrainingClient"),
    "TrainingConfig": ("rl.client.training_config", "TrainingConfig"),
    "get_tokenizer": ("rl.models", "load_tokenizer"),
    "model_info": ("rl.models.info", None),
    "open_run": ("rl.trainer", "open_run"),
    "register_reward": ("rl.rewards", "register_reward"),
    "renderers": ("rl.renderers", None),
    "resolve_reward": ("rl.rewards", "resolve_reward"),
    "rewards": ("rl.rewards", None),
    "sample": ("rl.trainer", "sample"),
    "train": ("rl.trainer", "train"),
    "types": ("rl.types", None),
}
# Names of Tinker's client that have no meaning without its service.
_UNSUPPORTED = {
    "AdminClient": "organisations do not exist here",
    "auth": "accounts and keys do not exist here",
    "DimuonOptimizerConfig": "the optimizer is AdamW: types.AdamOptimizerConfig",
    "DimuonParams": "the optimizer is AdamW: types.AdamParams",
    "DmelChunk": "models here read text",
    "OptimStepRequest": "the API is method calls, not request objects",
    "ParsedCheckpointTinkerPath": "a checkpoint's path is its folder: use pathlib",
    "RequestOptions": "no network is involved",
    "SampleRequest": "the API is method calls, not request objects",
    "Timeout": "no network is involved; a future's result() takes a timeout",
}

__all__ = [
    "APIConnectionError", "APIError", "APIFuture", "APIResponseValidationError", "APIStatusError",
    "APITimeoutError", "AdamOptimizerConfig", "AdamParams", "AuthenticationError",
    "BackcompatSamplingClientFuture", "BackcompatTrainingClientFuture", "BadRequestError",
    "BillingError", "Checkpoint", "CheckpointType", "ConflictError", "Datum", "EncodedTextChunk",
    "ForwardBackwardOutput", "GetInfoResponse", "ImageChunk", "InternalServerError", "LoRAConfig",
    "LoraConfig", "LossFnType", "LossHandle", "ModelID", "ModelInput", "ModelInputChunk",
    "NotFoundError", "OptimParams", "OptimStepResponse", "PerDatumLossFn", "PermissionDeniedError",
    "PromptProvenanceSpan", "RateLimitError", "RequestFailedError", "RestClient", "SampleResponse",
    "SampledProvenanceSpan", "SampledSequence", "SamplingClient", "SamplingParams", "ServiceClient",
    "StopReason", "TensorData", "TensorDtype", "TinkerError", "TrainingClient", "TrainingConfig",
    "TrainingRun", "UnprocessableEntityError", "UserError", "get_tokenizer", "model_info",
    "open_run", "register_reward", "renderers", "resolve_reward", "rewards", "sample", "train",
    "types",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _UNSUPPORTED:
        raise AttributeError(
            f"rl has no {name}: {_UNSUPPORTED[name]} (docs/tinker.md lists all differences "
            "from Tinker's client)"
        )
    if name not in __all__:
        raise AttributeError(
            f"module 'rl' has no attribute {name!r}; its public names are {', '.join(__all__)}"
        )
    default = ("rl.errors" if name.endswith("Error") else "rl.types", name)
    module, attribute = _PUBLIC_NAMES.get(name, default)
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return __all__


class _LazyModule(ModuleType):
    """Stand in for a module at the address that scripts import; load its attributes on access."""

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":  # torch looks at that of every module while it is imported
            raise AttributeError(name)
        return getattr(sys.modules[__name__].__getattr__(self.__name__.rpartition(".")[2]), name)


sys.modules[f"{__name__}.model_info"] = _LazyModule(f"{__name__}.model_info")
