"""Define training data: arrays, training sequences and the provenance of their tokens. Names and
fields follow Tinker's client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.types.number_checks import shorten
from rl.types.number_lists import pack_column, unpack_column

if TYPE_CHECKING:
    import torch

    from rl.types.inputs import ModelInput

_DTYPES = {"int64": np.int64, "float32": np.float32}
_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}  # str(dtype) takes 6 us


class TensorData:
    """Hold an array that is sent between driver and workers: `data` (flat), `dtype` ("int64" |
    "float32"), `shape`.

    The data is a single numpy array (`array`), so that sending needs no copy. It is a copy: a verb
    may read it after its caller has reused the buffer. Compressed sparse
    rows (`sparse_crow_indices`, `sparse_col_indices`, with `shape`) are expanded with zeros. Raises
    ValueError for ragged or non-numeric data, and for ids that are not whole numbers.
    """

    __slots__ = ("array",)

    def __init__(
        self,
        data: Any,
        dtype: str | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ):
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"TensorData dtype must be 'int64' or 'float32', got {dtype!r}")
        array = np.asarray(data)
        if array.size == 0 and array.dtype == object:
            array = array.astype(np.float32)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"TensorData holds a rectangle of numbers, got {shorten(data, 80)}")
        if dtype is None:
            dtype = "int64" if array.dtype.kind in "iub" else "float32"
        if dtype == "int64":
            _check_whole(array)
        # A number beyond float32 becomes infinite; the losses check for that.
        with np.errstate(over="ignore"):
            array = np.array(array, dtype=_DTYPES[dtype], order="C", ndmin=1)
        if sparse_crow_indices is not None or sparse_col_indices is not None:
            array = _expand_sparse(array, shape, sparse_crow_indices, sparse_col_indices)
        if shape is not None:
            try:
                array = array.reshape(tuple(shape))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{array.size} numbers do not have the shape {shape!r}") from error
        self.array: np.ndarray = array

    @classmethod
    def _of(cls, array: np.ndarray) -> TensorData:
        """Hold an int64 or float32 array itself, without a copy."""
        data = cls.__new__(cls)
        data.array = array
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_tensor_data, pack_column(self.array)

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        tensor = tensor.detach().cpu()
        return cls((tensor.float() if tensor.is_floating_point() else tensor).numpy())

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> TensorData:
        """Convert a sparse tensor to a dense one, as `from_torch`; no compression is needed
        locally.
        """
        return cls.from_torch(tensor.to_dense())

    def to_numpy(self, pad_value: int = 0) -> np.ndarray:
        return self.array

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.array.copy() if not self.array.flags.writeable else self.array)

    def tolist(self, pad_value: int = 0) -> list:
        return self.array.tolist()

    @property
    def data(self) -> list:
        return self.array.reshape(-1).tolist()

    @property
    def dtype(self) -> str:
        return _DTYPE_NAMES[self.array.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"TensorData(shape={self.shape}, dtype={self.dtype!r})"


def _restore_tensor_data(*packed: Any) -> TensorData:
    return TensorData._of(unpack_column(*packed))


def _check_whole(array: np.ndarray) -> None:
    """Raise ValueError unless all numbers are whole and fit int64."""
    if array.dtype.kind == "f" and not (
        np.isfinite(array).all()
        and (array == np.trunc(array)).all()
        and (np.abs(array) < 2**63).all()
    ):
        raise ValueError(
            f"int64 data holds whole numbers, got {shorten(array.reshape(-1)[:6].tolist(), 80)}"
        )
    if array.dtype == np.uint64 and (array >= 2**63).any():
        raise ValueError(f"int64 data lies below 2**63, got {int(array.max())}")


def _expand_sparse(values: np.ndarray, shape: Any, rows: Any, columns: Any) -> np.ndarray:
    """Expand compressed sparse rows to a dense array.

    Row i has values[rows[i]:rows[i + 1]] at columns[rows[i]:rows[i + 1]], and zeros elsewhere.
    Raises ValueError if the indices do not fit the shape.
    """
    if (
        shape is None
        or len(shape) != 2
        or rows is None
        or columns is None
        or len(rows) != shape[0] + 1
        or len(columns) != len(values)
    ):
        raise ValueError(
            "compressed rows need a shape of two numbers, sparse_crow_indices (a number more than "
            "rows) and a column index per value"
        )
    counts, array = np.diff(np.asarray(rows)), np.zeros(tuple(shape), dtype=values.dtype)
    if (
        (counts < 0).any()
        or counts.sum() != len(values)
        or (np.asarray(columns) >= shape[1]).any()
        or (np.asarray(columns) < 0).any()
    ):
        raise ValueError(
            f"sparse_crow_indices or sparse_col_indices do not fit the shape {list(shape)} and "
            f"{len(values)} values"
        )
    array[np.repeat(np.arange(shape[0]), counts), np.asarray(columns, dtype=np.int64)] = values
    return array


# The dtypes of the built-in loss inputs. Other inputs (fields of a custom loss) are float32 unless
# integers.
LOSS_INPUT_DTYPES: Mapping[str, str] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "mask": "float32",
    "ref_logprobs": "float32",
    "behavior_logprobs": "float32",
    "proximal_share": "float32",
    "returns": "float32",
    "values_old": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}


def _tensor_data(name: str, value: Any) -> TensorData:
    """Convert a loss input to TensorData of its dtype. Raises ValueError for unusable values."""
    if isinstance(value, TensorData):
        data = value
    elif isinstance(value, (int, float)):
        raise ValueError(
            f"loss_fn_inputs[{name!r}] is a single number ({value!r}); it needs one value a token, "
            f"e.g. [{value!r}] * n"
        )
    elif value is None:
        raise ValueError(
            f"loss_fn_inputs[{name!r}] is None: omit the field, or pass one value a token"
        )
    else:
        try:
            data = (
                TensorData.from_torch(value)
                if type(value).__module__.startswith("torch")
                else TensorData(value)
            )
        except ValueError as error:
            raise ValueError(f"loss_fn_inputs[{name!r}]: {error}") from error
    dtype = LOSS_INPUT_DTYPES.get(name, data.dtype)
    return data if data.dtype == dtype else TensorData(data.array, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Refer to a part of a sequence. Raises ValueError unless it has an id and its offset and
    length are at least 0.
    """

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        if self.length < 0 or self.offset < 0 or not self.sequence_id:
            raise ValueError(
                f"a span needs a sequence_id, an offset and a length of at least 0; got {self!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptProvenanceSpan(_Span):
    """Refer to tokens of a sampled sequence's prompt: positions `offset` to `offset + length`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledProvenanceSpan(_Span):
    """Refer to sampled tokens: tokens `offset` to `offset + length` of a sequence."""


ProvenanceSpans = Sequence[PromptProvenanceSpan | SampledProvenanceSpan]


@dataclass(slots=True)
class Datum:
    """Hold a training sequence: the input tokens and the loss inputs of each position.

    loss_fn_inputs: lists, numpy arrays, torch tensors or TensorData, each of the length N of
        `model_input` (`target_tokens` and `weights` may be (N, K) for soft targets). Lengths are
        checked later, by the loss.
    model_input_spans, loss_fn_input_spans: see `with_provenance`.
    episode_share (extension): the datum's share of the action tokens of its episode; 1 unless the
        episode has several datums.
    temperature (extension): the sampling temperature of the actions, at which the learner computes
        their logprobs. None: taken from the spans, or looked up by tokens and logprobs if this
        process sampled them.
    experts (extension): the experts of each token at sampling, int16 [N, layers with experts *
        experts per token], -1 if unknown. A learner with router replay uses the same experts.
    version (extension): the version of the learner's weights that sampled the actions, if it is
        the same for all; otherwise `loss_fn_inputs["versions"]` holds it.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]
    model_input_spans: ProvenanceSpans | None
    loss_fn_input_spans: ProvenanceSpans | None
    episode_share: float
    temperature: float | None
    experts: np.ndarray | None
    version: int | None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
        *,
        episode_share: float = 1.0,
        temperature: float | None = None,
        experts: np.ndarray | None = None,
        version: int | None = None,
    ):
        if experts is not None and (experts.ndim != 2 or len(experts) != model_input.length):
            raise ValueError(
                f"experts of shape {experts.shape} for an input of {model_input.length} tokens: "
                f"one row a token is expected"
            )
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise ValueError(
                "provenance needs the spans of the model input and of the loss inputs: pass "
                "both lists of spans or neither"
            )
        self.model_input = model_input
        self.model_input_spans = model_input_spans
        self.loss_fn_input_spans = loss_fn_input_spans
        self.episode_share = episode_share
        self.temperature = temperature
        self.experts = experts
        self.version = version
        self.loss_fn_inputs = {
            name: _tensor_data(name, value) for name, value in (loss_fn_inputs or {}).items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the datum's parts, without targets that are the next input token."""
        inputs: dict[str, Any] = dict(self.loss_fn_inputs)
        targets = inputs["target_tokens"].array if "target_tokens" in inputs else None
        if targets is not None and targets.ndim == 1 and len(targets):
            # an image that no model has read has no tokens; other tokens may be no ids
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                if np.array_equal(targets[:-1], self.model_input.token_array()[1:]):
                    inputs["target_tokens"] = int(targets[-1])
        others = [getattr(self, name) for name in _OTHER_FIELDS]
        return _restore_datum, (inputs, others)

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Datum:
        """Return the same datum with the sampled sequences that its positions come from.

        model_input: the spans of the input, in order. loss_fn_inputs: the spans of the targets, in
        order. The learner reads the temperature of the samples from the spans. Raises ValueError
        if the spans do not cover exactly the input or the targets.
        """
        targets = self.loss_fn_inputs.get("target_tokens")
        lengths = {
            "model_input": self.model_input.length,
            "loss_fn_inputs": len(targets) if targets is not None else None,
        }
        for name, spans in (("model_input", model_input), ("loss_fn_inputs", loss_fn_inputs)):
            wrong = [
                span
                for span in spans
                if not isinstance(span, (PromptProvenanceSpan, SampledProvenanceSpan))
            ]
            if wrong:
                raise ValueError(
                    f"with_provenance takes PromptProvenanceSpan and SampledProvenanceSpan, got "
                    f"{shorten(wrong[0], 80)}"
                )
            covered = sum(span.length for span in spans)
            if lengths[name] is not None and covered != lengths[name]:
                raise ValueError(
                    f"with_provenance: the spans of {name} cover {covered} positions, it has "
                    f"{lengths[name]}"
                )
        return replace(
            self,
            model_input_spans=list(model_input),
            loss_fn_input_spans=list(loss_fn_inputs),
        )

    @property
    def action_mask(self) -> np.ndarray:
        """Return the sampled targets, bool [N], from the loss input `mask`. An extension."""
        return self.loss_fn_inputs["mask"].array != 0

    def with_inputs(self, loss_fn_inputs: Mapping[str, Any]) -> Datum:
        """Return the same datum, of the same sample, with other loss inputs. An extension."""
        return replace(self, loss_fn_inputs=loss_fn_inputs)  # type: ignore[arg-type]


_OTHER_FIELDS = tuple(f.name for f in fields(Datum) if f.name != "loss_fn_inputs")


def _restore_datum(inputs: dict[str, Any], others: Sequence[Any]) -> Datum:
    """Return the datum of `Datum.__reduce__`. `others`: its other fields, in order."""
    options = dict(zip(_OTHER_FIELDS, others, strict=True))
    last = inputs.get("target_tokens")
    if isinstance(last, int):
        targets = np.append(options["model_input"].token_array()[1:], last)
        inputs["target_tokens"] = TensorData._of(targets)
    return Datum(loss_fn_inputs=inputs, **options)
