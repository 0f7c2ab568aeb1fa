"""Between what travels and what rooms below speak of: datums, samples, outputs. Refused or
ValueError names what cannot be read.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.errors import BadRequestError
from rl.serve import wire
from rl.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)

_NUMPY: dict[int, np.dtype[Any]] = {
    wire.FLOAT32: np.dtype("<f4"),
    wire.INT64: np.dtype("<i8"),
    wire.INT32: np.dtype("<i4"),
}
# of all tensors in compressed form of one request, which are filled up; more for each value sent
_CELLS, _CELLS_EACH = 2**22, 256
_NO_LOGPROB = -99999.0  # in a cell of top-k that holds nothing


def datum(message: Any) -> Datum:
    """Of a protobuf Datum. ValueError for what no datum is."""
    inputs = {name: tensor(name, one) for name, one in message.loss_fn_inputs.items()}
    spans = [
        [_span(one) for one in found] or None
        for found in (message.model_input_spans, message.loss_fn_input_spans)
    ]
    if (spans[0] is None) != (spans[1] is None):
        spans = [one or [] for one in spans]
    return Datum(ModelInput([_chunk(chunk) for chunk in message.model_input]), inputs, *spans)


def _chunk(chunk: Any) -> EncodedTextChunk | ImageChunk:
    kind = chunk.WhichOneof("chunk")
    if kind == "image":
        image = chunk.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        return _image(image.data, image.format, expected, image.HasField("override_dimensions"))
    if kind != "encoded_text":
        raise BadRequestError(
            f"a chunk of the model input is {_UNREAD.get(kind, kind or 'empty')}: models here read text and images"
        )
    return EncodedTextChunk(_array(chunk.encoded_text.tokens, np.dtype("<i4"), "tokens").tolist())


_UNREAD = {
    "image_asset_pointer": "an image that lies elsewhere (send its bytes: types.ImageChunk)",
    "dmel": "audio",
}


def _image(data: bytes, form: Any, expected_tokens: Any, other_size: bool) -> ImageChunk:
    if form not in ("png", "jpeg"):
        raise BadRequestError(f"an image's format is 'png' or 'jpeg', got {form!r:.40}")
    if expected_tokens is not None and (type(expected_tokens) is not int or expected_tokens < 1):
        raise BadRequestError(
            f"an image's expected_tokens is a whole number of at least 1, or left out; got {expected_tokens!r:.40}"
        )
    if other_size:
        raise BadRequestError(
            "override_dimensions is not done here: the model's own reader sizes an image; send it in the size you want"
        )
    return ImageChunk(data, form, expected_tokens)


def _span(span: Any) -> PromptProvenanceSpan | SampledProvenanceSpan:
    kind = span.WhichOneof("span")
    if kind is None:
        raise BadRequestError("a span of provenance is empty")
    one = getattr(span, kind)
    made = PromptProvenanceSpan if kind == "prompt_tokens" else SampledProvenanceSpan
    return made(sequence_id=one.sequence_id, offset=one.offset, length=one.length)


def _array(raw: bytes, dtype: np.dtype, what: str) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise BadRequestError(
            f"{what} has {len(raw)} bytes, which is no whole number of {dtype.name}"
        )
    return np.frombuffer(raw, dtype)


def check_cells(data: Sequence[Any]) -> None:
    """Raise BadRequestError for tensors in compressed form with many more cells than values: a few
    bytes could ask for any memory.
    """
    tensors = [
        one
        for message in data
        for one in message.loss_fn_inputs.values()
        if one.WhichOneof("encoding") == "sparse_csr"
    ]
    cells = sum(math.prod(max(n, 0) for n in one.shape) for one in tensors)
    _check_cells(cells, sum(len(one.sparse_csr.col_indices) // 8 for one in tensors))


def _check_cells(cells: int, values: int) -> None:
    most = _CELLS + _CELLS_EACH * values
    if cells > most:
        text = f"tensors in compressed form come to {cells} cells with {values} values, and {most} are the most for these"
        raise BadRequestError(f"{text}: send less at once, or send them dense")


def tensor(name: str, message: Any) -> TensorData:
    if message.dtype not in _NUMPY:
        raise BadRequestError(
            f"loss_fn_inputs[{name!r}] has the dtype {message.dtype}: float32 or int64"
        )
    dtype, shape = _NUMPY[message.dtype], list(message.shape)
    kind = "float32" if dtype.kind == "f" else "int64"
    if any(n < 0 for n in shape) or math.prod(shape) > 2**31:
        raise BadRequestError(f"loss_fn_inputs[{name!r}] has the shape {shape[:8]}")
    try:
        if message.WhichOneof("encoding") != "sparse_csr":
            return TensorData(_array(message.dense, dtype, name), kind, shape or None)
        rows, columns = (
            _array(raw, np.dtype("<i8"), name)
            for raw in (message.sparse_csr.crow_indices, message.sparse_csr.col_indices)
        )
        return TensorData(
            _array(message.sparse_csr.values, dtype, name), kind, shape, rows, columns
        )  # type: ignore[arg-type]
    except BadRequestError:
        raise
    except (ValueError, IndexError, MemoryError) as error:
        raise BadRequestError(f"loss_fn_inputs[{name!r}]: {error}") from error


def loss_config(message: Any) -> dict[str, Any]:
    """The loss's settings: of the newer map where it has any."""
    newer = {
        key: getattr(value, value.WhichOneof("value") or "number")
        for key, value in message.loss_fn_config_v2.items()
    }
    return newer or dict(message.loss_fn_config)


def forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """One record of all datums; fields that some lack get a record for each run of datums with the
    same ones.
    """
    message = wire.make("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    for run in _runs(output.loss_fn_outputs):
        record = message.loss_fn_outputs.add(num_datums=len(run))
        for name, first in run[0].items():
            field, arrays = (
                record.fields[name],
                [np.ascontiguousarray(one[name].array) for one in run],
            )
            field.dtype = wire.FLOAT32 if first.dtype == "float32" else wire.INT64
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum(
                [0, *(array.nbytes for array in arrays)], dtype="<i8"
            ).tobytes()
            field.trailing_shape.extend(first.array.shape[1:])
    for key, value in output.metrics.items():
        message.metrics[key if ":" in key else f"{key}:mean"] = float(value)
    return message.SerializeToString()


def _runs(outputs: Sequence[Mapping[str, TensorData]]) -> list[list[Mapping[str, TensorData]]]:
    """Neighbours with the same fields, of the same type and trailing shape, together."""
    runs: list[list[Mapping[str, TensorData]]] = []
    last = None
    for output in outputs:
        kind = {name: (data.dtype, data.array.shape[1:]) for name, data in output.items()}
        if kind != last:
            runs.append([])
        runs[-1].append(output)
        last = kind
    return runs


def sample_response(response: SampleResponse) -> bytes:
    message = wire.make("SampleResponse")
    for sequence in response.sequences:
        one = message.sequences.add(
            stop_reason=wire.LENGTH if sequence.stop_reason == "length" else wire.STOP
        )
        one.tokens = sequence.tokens_np.astype("<i4").tobytes()
        if sequence.logprobs_np is not None:
            one.logprobs = sequence.logprobs_np.astype("<f4").tobytes()
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.astype("<f4").tobytes()
    if response.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        found, tensor = response.target_prompt_logprobs.array, message.target_prompt_logprobs
        tensor.dense, tensor.dtype = found.astype("<f4").tobytes(), wire.FLOAT32
        tensor.shape.extend(found.shape)
    message.prompt_cache_hit_tokens = response.prompt_cache_hit_tokens
    return message.SerializeToString()


def _write_topk(message: Any, rows: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    width = max((len(row) for row in rows if row), default=0)
    ids, logprobs = (
        np.zeros((len(rows), width), "<i4"),
        np.full((len(rows), width), _NO_LOGPROB, "<f4"),
    )
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row or ()):
            ids[i, j], logprobs[i, j] = token, logprob
    message.k, message.length, message.token_ids, message.logprobs = (
        width,
        len(rows),
        ids.tobytes(),
        logprobs.tobytes(),
    )


def sample_json(response: SampleResponse) -> dict[str, Any]:
    """The same for a client that takes no protobuf."""
    sequences = [
        {"tokens": s.tokens, "logprobs": s.logprobs, "stop_reason": s.stop_reason}
        for s in response.sequences
    ]
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
    }
    found |= {
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
    }
    targets = response.target_prompt_logprobs
    return found | ({} if targets is None else {"target_prompt_logprobs": _tensor_json(targets)})


def output_json(output: ForwardBackwardOutput) -> dict[str, Any]:
    rows = [
        {name: _tensor_json(data) for name, data in one.items()} for one in output.loss_fn_outputs
    ]
    metrics = {key if ":" in key else f"{key}:mean": value for key, value in output.metrics.items()}
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": rows, "metrics": metrics}


def read_outputs(body: bytes) -> ForwardBackwardOutput:
    """Read what `forward_backward_output` wrote."""
    message = wire.parse("ForwardBackwardOutput", body)
    rows: list[dict[str, TensorData]] = []
    for record in message.loss_fn_outputs:
        run: list[dict[str, TensorData]] = [{} for _ in range(record.num_datums)]
        for name, tensors in record.fields.items():
            offsets = np.frombuffer(tensors.offsets, "<i8").tolist()
            for row, begin, end in zip(run, offsets[:-1], offsets[1:], strict=True):
                array = np.frombuffer(tensors.data[begin:end], _NUMPY[tensors.dtype])
                row[name] = TensorData.from_numpy(array.reshape(-1, *tensors.trailing_shape))
        rows += run
    return ForwardBackwardOutput(rows, dict(message.metrics))


def read_samples(body: bytes) -> SampleResponse:
    """Read what `sample_response` wrote."""
    message, sequences = wire.parse("SampleResponse", body), []
    for sequence in message.sequences:
        tokens = np.frombuffer(sequence.tokens, "<i4").tolist()
        logprobs = (
            np.frombuffer(sequence.logprobs, "<f4").tolist()
            if sequence.HasField("logprobs")
            else None
        )
        sequences.append(
            SampledSequence(
                tokens, logprobs, "length" if sequence.stop_reason == wire.LENGTH else "stop"
            )
        )
    response = SampleResponse(sequences, prompt_cache_hit_tokens=message.prompt_cache_hit_tokens)
    if message.HasField("prompt_logprobs"):
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4").tolist()
        response.prompt_logprobs = [
            None if math.isnan(logprob) else logprob for logprob in logprobs
        ]
    if message.HasField("topk_prompt_logprobs"):
        response.topk_prompt_logprobs = _read_topk(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        tensor = message.target_prompt_logprobs
        response.target_prompt_logprobs = TensorData.from_numpy(
            np.frombuffer(tensor.dense, "<f4").reshape(tuple(tensor.shape))
        )
    return response


def _read_topk(message: Any) -> list[list[tuple[int, float]] | None]:
    ids = np.frombuffer(message.token_ids, "<i4").reshape(message.length, message.k).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(message.length, message.k).tolist()
    rows: list[list[tuple[int, float]] | None] = []
    for tokens, values in zip(ids, logprobs, strict=True):
        rows.append(
            [
                (token, value)
                for token, value in zip(tokens, values, strict=True)
                if value != _NO_LOGPROB
            ]
            or None
        )
    return rows


def _tensor_json(data: TensorData) -> dict[str, Any]:
    return {"data": data.data, "dtype": data.dtype, "shape": data.shape}


def prompt(prompt: Any) -> ModelInput:
    """Of a JSON ModelInput. ValueError for what none is."""
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list):
        raise BadRequestError("prompt is {chunks: [...]}, as types.ModelInput makes it")
    found: list[EncodedTextChunk | ImageChunk] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, Mapping) else None
        if kind == "image":
            found.append(_image_of_json(chunk))
            continue
        if kind != "encoded_text":
            raise BadRequestError(
                f"a chunk of the prompt is {_UNREAD.get(str(kind), repr(kind)[:40])}: models here read text and images"
            )
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
            raise BadRequestError("a chunk's tokens are a list of token ids")
        found.append(EncodedTextChunk(tokens))
    return ModelInput(found)


def _image_of_json(chunk: Mapping[str, Any]) -> ImageChunk:
    try:
        data = base64.b64decode(chunk.get("data") or "", validate=True)
    except (ValueError, TypeError):
        raise BadRequestError("an image's data is its bytes as base64") from None
    return _image(
        data,
        chunk.get("format"),
        chunk.get("expected_tokens"),
        chunk.get("override_dimensions") is not None,
    )


def targets(given: Mapping[str, Any] | None) -> TensorData | None:
    """Ids that are to be scored, of a JSON TensorData: rows in compressed form are filled up with
    -1, which asks for nothing.
    """
    if given is None:
        return None
    shape, crow, columns = (
        given.get(name) for name in ("shape", "sparse_crow_indices", "sparse_col_indices")
    )
    try:
        if crow is None and columns is None:
            return TensorData(given.get("data"), "int64", shape)
        values = np.asarray(given.get("data"), np.int64)
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"the shape {shape!r:.80}")
        _check_cells(math.prod(shape), values.size)
        # what is not listed is 0 once it is filled up: so values are moved up by one, and down
        # again
        return TensorData(TensorData(values + 1, "int64", shape, crow, columns).array - 1)
    except (ValueError, TypeError, OverflowError, IndexError) as error:
        raise BadRequestError(
            f"target_prompt_logprobs is a TensorData of token ids, [prompt tokens - 1, K]: {error}"
        ) from error


def tokens_of(given: ModelInput) -> int:
    """How many tokens an input has, as far as it says: an image whose tokens are the model's to
    tell counts as none.
    """
    return sum(
        chunk.length if isinstance(chunk, EncodedTextChunk) else chunk.expected_tokens or 0
        for chunk in given.chunks
    )


def _settings_of(made: Any, name: str, fields: Any, known: Sequence[str]) -> Any:
    if not isinstance(fields, Mapping):
        raise BadRequestError(f"{name} is an object, got {type(fields).__name__}")
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise BadRequestError(
            f"{name} has {unknown[0]!r}, which is not done here: it takes {', '.join(known)}"
        )
    return made(**{key: value for key, value in fields.items()})


def sampling_params(fields: Any) -> SamplingParams:
    return _settings_of(
        SamplingParams,
        "sampling_params",
        fields,
        ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p"),
    )


def adam_params(fields: Any) -> AdamParams:
    known = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    return _settings_of(AdamParams, "adam_params", fields, known)
