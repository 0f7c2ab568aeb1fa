"""The nouns of the clients, importing nothing of ours.

Names and fields follow Tinker's client, so that a script written for it needs only its imports changed;
what is ours alone is marked "extension". Shape letters: P problems, G group, T tokens, K soft targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

StopReason = Literal["stop", "length"]

# ---------------------------------------------------------------------------------------------- what a model reads


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A run of token ids."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """An image as png or jpeg bytes. `length` is known only to a vision model's processor."""

    data: bytes
    format: Literal["png", "jpeg"]
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        raise ValueError(f"the length in tokens of an image ({self.format}, {len(self.data)} bytes) depends on the model")


Chunk = EncodedTextChunk | ImageChunk


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a model reads: chunks of text tokens (and images, for models that take them)."""

    chunks: Sequence[Chunk] = ()

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls((EncodedTextChunk(tokens if isinstance(tokens, list) else [int(t) for t in tokens]),))

    @classmethod
    def empty(cls) -> ModelInput:
        return cls(())

    def to_ints(self) -> list[int]:
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(f"to_ints() reads text chunks alone, this input holds an {chunk.type} chunk")
            tokens.extend(chunk.tokens)
        return tokens

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: Chunk) -> ModelInput:
        return ModelInput((*self.chunks, chunk))

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([int(token)]))


# ------------------------------------------------------------------------------------------------- what it learns on

_DTYPES = {"int64": np.int64, "float32": np.float32}


class TensorData:
    """An array that travels between driver and workers: `data` (flat), `dtype` ("int64" | "float32"), `shape`.

    Kept as one numpy array (`array`), so no copy is made on the way.
    """

    __slots__ = ("array",)

    def __init__(self, data: Any, dtype: str | None = None, shape: Sequence[int] | None = None):
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"TensorData dtype is 'int64' or 'float32', got {dtype!r}")
        array = np.asarray(data)
        if dtype is None:
            dtype = "int64" if array.dtype.kind in "iub" else "float32"
        array = np.ascontiguousarray(array, dtype=_DTYPES[dtype])
        self.array: np.ndarray = array.reshape(tuple(shape)) if shape is not None else array

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        tensor = tensor.detach().cpu()
        return cls((tensor.float() if tensor.is_floating_point() else tensor).numpy())

    def to_numpy(self) -> np.ndarray:
        return self.array

    def to_torch(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.array.copy() if not self.array.flags.writeable else self.array)

    def tolist(self) -> list:
        return self.array.tolist()

    @property
    def data(self) -> list:
        return self.array.reshape(-1).tolist()

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"TensorData(shape={self.shape}, dtype={self.dtype!r})"


# The loss inputs that are known, with their dtypes. Others (fields of a custom loss) are float32 unless integers.
LOSS_INPUT_DTYPES: Mapping[str, str] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "mask": "float32",
    "ref_logprobs": "float32",
    "drawn_logprobs": "float32",
    "returns": "float32",
    "values_old": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}


def _tensor_data(name: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        data = value
    elif isinstance(value, (int, float)):
        raise ValueError(f"loss_fn_inputs[{name!r}] is one number ({value!r}); it needs one value a token, e.g. [{value!r}] * n")
    else:
        data = TensorData.from_torch(value) if type(value).__module__.startswith("torch") else TensorData(value)
    dtype = LOSS_INPUT_DTYPES.get(name, data.dtype)
    return data if data.dtype == dtype else TensorData(data.array, dtype)


@dataclass(slots=True)
class Datum:
    """One training sequence: the input tokens and, for each position, what the loss needs there.

    `loss_fn_inputs` takes lists, numpy arrays, torch tensors or TensorData; each has the length of `model_input`
    (`target_tokens` and `weights` may be (N, K) for soft targets). Lengths are checked where the loss is known.
    `episode_share` (extension): the share of its episode's action tokens that it holds, 1 unless the episode makes several datums.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]
    episode_share: float

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any], episode_share: float = 1.0):
        self.model_input = model_input
        self.episode_share = episode_share
        self.loss_fn_inputs = {name: _tensor_data(name, value) for name, value in loss_fn_inputs.items()}


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW for one optimizer step. `grad_clip_norm` 0 means no clipping; the norm is reported either way."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class LoraConfig:
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    alpha: float | None = None  # extension: None means alpha = rank, so the adapter's scale is 1


# -------------------------------------------------------------------------------------------------- what it samples


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens.

    `stop`: strings, or token ids, or None. None keeps the model's EOS tokens; `[]` disables every stop; strings and ids
    stop in addition to EOS. `top_k` -1 and `top_p` 1 mean no truncation. `temperature` 0 is greedy.
    `seed`: with the same seed (and weights) the same samples; members of a group still differ from each other.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is at least 0 (0 is greedy), got {self.temperature}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is at least 1, or -1 for no truncation, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p lies in (0, 1], got {self.top_p}")


@dataclass(slots=True)
class SampledSequence:
    """Sampled tokens (the stop token, if one was drawn, is the last) and the logprob of each as it was drawn."""

    tokens: list[int]
    logprobs: list[float] | None = None
    stop_reason: StopReason = "stop"
    version: int | None = None  # extension: the version of the weights that drew it


@dataclass(slots=True)
class SampleResponse:
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


# --------------------------------------------------------------------------------------------------- what verbs return


@dataclass(slots=True)
class ForwardBackwardOutput:
    """`loss_fn_outputs[i]["logprobs"]`: the learner's logprob of each target of datum i. Metric keys end in their reduction.

    A client with a value head adds `["values"]`: the value at each position, having read the input up to and with it.
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


@dataclass(frozen=True, slots=True)
class SupportedModel:
    model_name: str


@dataclass(frozen=True, slots=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]


# ------------------------------------------------------------------------------------------------- problems, episodes

Message = dict[str, Any]  # {"role": "user" | "assistant" | "system" | "tool", "content": str, ...}


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer that was sampled and rewarded earlier. `place`: its file and line.

    `prompt_tokens`, `tokens`, `logprobs` (of `tokens`, at `temperature`): as it was drawn, where the file has them.
    """

    reward: float
    text: str = ""
    prompt_tokens: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    temperature: float | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a data set, ready to be asked.

    `messages` go through a renderer. `meta` reaches the reward (its "answer" is the expected answer by convention).
    `response`: a worked answer, where the data has one (supervised training). `tag` names the data set in metrics.
    `index`: the row's position in its data set, the problem's identity in random streams and rollouts.
    `rejected`: where the data has pairs, the answer that `response` was preferred to.
    `answers`: where the data is of stored rollouts, those to this problem.
    """

    messages: Sequence[Message]
    meta: Mapping[str, Any] = field(default_factory=dict)
    response: str | None = None
    tag: str = "problem"
    index: int = 0
    rejected: str | None = None
    answers: Sequence[StoredAnswer] = ()
