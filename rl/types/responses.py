"""What the clients' verbs return. Names and fields follow Tinker's client; what is ours alone is
marked "extension".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np

from rl.types.noted import experts_as_text, experts_from_text
from rl.types.training_data import TensorData

StopReason = Literal["stop", "length"]
CheckpointType = Literal["training", "sampler"]


@dataclass(slots=True)
class SampledSequence:
    """Sampled tokens (the stop token, if one was drawn, is the last) and the logprob of each as it
    was drawn.
    """

    tokens: list[int]
    logprobs: list[float] | None = None
    stop_reason: StopReason = "stop"
    version: int | None = None  # extension: the version of the weights that drew it
    sequence_id: str = ""  # distinct for each sequence of a service
    # extension: what it was drawn at; the logprobs are of the distribution at it (greedy, 0: at 1)
    temperature: float | None = None
    topk_logprobs: list[list[tuple[int, float]] | None] | None = None
    # extension, where experts are noted: those of each token that was fed, int16 [tokens, layers
    # with experts * experts a token]
    experts: np.ndarray | None = None
    # extension: its prompt is longer than where the model's rotary frequencies change (longrope)
    beyond: bool = False
    # extension: each token's, where new weights came while it was drawn; `version` is the oldest
    versions: list[int] | None = None

    @property
    def tokens_np(self) -> np.ndarray:
        return np.asarray(self.tokens, dtype=np.int32)

    @property
    def logprobs_np(self) -> np.ndarray | None:
        return None if self.logprobs is None else np.asarray(self.logprobs, dtype=np.float32)

    def as_json(self) -> dict[str, Any]:
        """An extension: all of it, for a checkpoint."""
        return {
            **asdict(self),
            "experts": None if self.experts is None else experts_as_text(self.experts),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> SampledSequence:
        """An extension: what `as_json` gave."""
        experts = saved.get("experts")
        return cls(**{**saved, "experts": None if experts is None else experts_from_text(experts)})


@dataclass(slots=True)
class SampleResponse:
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    # of the prompt, that another request of the same batch had read already
    prompt_cache_hit_tokens: int = 0

    @property
    def prompt_logprobs_np(self) -> np.ndarray | None:
        """Not a number where there is none (the first token)."""
        if self.prompt_logprobs is None:
            return None
        return np.asarray(
            [np.nan if logp is None else logp for logp in self.prompt_logprobs], dtype=np.float32
        )


# -------------------------------------------------------------------------------- what verbs return


@dataclass(slots=True)
class ForwardBackwardOutput:
    """`loss_fn_outputs[i]["logprobs"]`: the learner's logprob of each target of datum i. Metric
    keys end in their reduction.

    A client with a value head adds `["values"]`: the value at each position, having read the input
    up to and with it.
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]
    loss_fn_output_type: str = "TensorData"


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    metrics: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    path: str
    type: Literal["save_weights"] = "save_weights"


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse:
    path: str


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    path: str


@dataclass(frozen=True, slots=True)
class ModelData:
    arch: str
    model_name: str
    tokenizer_id: str | None


@dataclass(frozen=True, slots=True)
class GetInfoResponse:
    model_data: ModelData
    model_id: str
    is_lora: bool
    lora_rank: int | None
    model_name: str
    type: Literal["get_info"] = "get_info"


@dataclass(frozen=True, slots=True)
class SupportedModel:
    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True, slots=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved folder. `tinker_path` is where it lies on this machine."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What a saved folder tells of the training client that wrote it."""

    training_run_id: str
    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    model_owner: str = "local"
    corrupted: bool = False


@dataclass(frozen=True, slots=True)
class WeightsInfoResponse:
    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
