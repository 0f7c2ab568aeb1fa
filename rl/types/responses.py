"""Define the responses of the clients. Names and fields follow Tinker's client; additions of this
project are marked "extension".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Literal

import numpy as np

from rl.types.expert_records import experts_as_text, experts_from_text
from rl.types.number_lists import ArrayLists, pack_numbers
from rl.types.training_data import TensorData

StopReason = Literal["stop", "length"]
CheckpointType = Literal["training", "sampler"]
_NUMBER_LISTS = ("tokens", "logprobs", "versions")  # fields of SampledSequence sent as arrays


@dataclass(slots=True)
class SampledSequence(ArrayLists):
    """Hold sampled tokens (a sampled stop token is the last) and the behavior logprob of each.

    Between processes they are sent as arrays, which become lists when they are first read.
    """

    tokens: list[int]
    logprobs: list[float] | None = None
    stop_reason: StopReason = "stop"
    version: int | None = None  # extension: the version of the weights that sampled it
    sequence_id: str = ""  # distinct for each sequence of a service
    # extension: the sampling temperature, which the logprobs are of (greedy, 0: logprobs at 1)
    temperature: float | None = None
    topk_logprobs: list[list[tuple[int, float]] | None] | None = None
    # extension: the experts of each token that was fed, int16 [tokens, layers with experts *
    # experts per token], if experts are recorded
    experts: np.ndarray | None = None
    # extension: the prompt exceeds the length at which rotary frequencies change (longrope)
    beyond: bool = False
    # extension: the version of each token, if weights changed while sampling; `version` is the
    # oldest
    versions: list[int] | None = None
    # extension: the rl.rewards.SampleScore of the rank that sampled it, if that rank scored it
    score: Any = field(default=None, repr=False, compare=False)

    def _find_array(self, name: str) -> np.ndarray | None:
        try:
            object.__getattribute__(self, name)
        except AttributeError:  # the slot is empty: the field was neither read nor assigned
            return ArrayLists._find_array(self, name)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        columns = {name: self.as_array(name) for name in _NUMBER_LISTS}
        arrays = {name: a for name, a in columns.items() if isinstance(a, np.ndarray)}
        others = [None if f.name in arrays else getattr(self, f.name) for f in fields(self)]
        packed = {name: (array.dtype.char, array.tobytes()) for name, array in arrays.items()}
        return _restore_sequence, (others, packed)

    def as_array(self, name: str) -> Any:
        """Return one of the fields that are lists of numbers as an array of the narrowest type that
        holds the same numbers; the field itself if it is no such list. An extension.
        """
        array = self._find_array(name)
        return pack_numbers(getattr(self, name)) if array is None else array

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens. An extension."""
        array = self._find_array("tokens")
        return len(self.tokens if array is None else array)

    @property
    def tokens_np(self) -> np.ndarray:
        array = self._find_array("tokens")
        return np.asarray(self.tokens if array is None else array, dtype=np.int32)

    @property
    def logprobs_np(self) -> np.ndarray | None:
        array = self._find_array("logprobs")
        values = self.logprobs if array is None else array
        return None if values is None else np.asarray(values, dtype=np.float32)

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the score as JSON, for a checkpoint. An extension."""
        saved = asdict(replace(self, experts=None, score=None))
        del saved["score"]
        experts = self.experts
        return {**saved, "experts": None if experts is None else experts_as_text(experts)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> SampledSequence:
        """Restore what `as_json` returned. An extension."""
        experts = saved.get("experts")
        return cls(**{**saved, "experts": None if experts is None else experts_from_text(experts)})


def _restore_sequence(
    values: Sequence[Any], packed: Mapping[str, tuple[str, bytes]]
) -> SampledSequence:
    """Return the sequence of `SampledSequence.__reduce__`. `values`: of all fields, in order.
    `packed`: by field, the dtype and the bytes of an array.
    """
    sequence = SampledSequence(*values)
    sequence._set_arrays({name: np.frombuffer(raw, char) for name, (char, raw) in packed.items()})
    return sequence


@dataclass(slots=True)
class SampleResponse:
    """Hold the samples of a prompt, and the logprobs of the prompt if requested."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    # prompt tokens whose keys and values were in the cache
    prompt_cache_hit_tokens: int = 0

    @property
    def prompt_logprobs_np(self) -> np.ndarray | None:
        """Return the prompt logprobs as float32; NaN for a missing logprob (the first token)."""
        if self.prompt_logprobs is None:
            return None
        return np.asarray(
            [np.nan if logp is None else logp for logp in self.prompt_logprobs], dtype=np.float32
        )


# ------------------------------------------------------------- responses of training and service


@dataclass(slots=True)
class ForwardBackwardOutput:
    """Hold the result of a forward or forward_backward call.

    `loss_fn_outputs[i]["logprobs"]`: the learner's logprob of each target of datum i. Metric keys
    end in their reduction. A client with a value head adds `["values"]`: the value at each
    position, computed from the input up to and including that position.
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
    """Describe a checkpoint folder. `tinker_path` is its path on this machine."""

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
    """Describe the training client that wrote a checkpoint folder."""

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


def merge_counters(tables: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Return the sum of each counter over the tables; of a counter named `peak_...` the maximum."""
    total: dict[str, float] = {}
    for table in tables:
        for name, count in table.items():
            before = total.get(name, 0)
            total[name] = max(before, count) if name.startswith("peak_") else before + count
    return total
