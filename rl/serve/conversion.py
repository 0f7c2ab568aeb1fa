"""Convert datums, samples and outputs between Tinker's messages (protobuf, JSON) and `rl.types`.

A message that cannot be read raises BadRequestError or another ValueError, which names the field.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rl.errors import BadRequestError
from rl.serve import tinker_pb2
from rl.serve.http_errors import HttpError
from rl.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampleResponse,
    TensorData,
)

_NUMPY: dict[int, np.dtype[Any]] = {
    tinker_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tinker_pb2.DTYPE_INT64: np.dtype("<i8"),
    tinker_pb2.DTYPE_INT32: np.dtype("<i4"),
}
_PROTO_DTYPES = {"float32": tinker_pb2.DTYPE_FLOAT32, "int64": tinker_pb2.DTYPE_INT64}
_STOP_REASONS = {tinker_pb2.STOP_REASON_LENGTH: "length", tinker_pb2.STOP_REASON_STOP: "stop"}
# limit of cells of all sparse tensors in a request, which are made dense: a constant, and a number
# of cells for each value sent
_MAX_CELLS, _CELLS_PER_VALUE = 2**22, 256
_NO_LOGPROB = -99999.0  # marks an empty cell of the top-k logprobs


def parse_message(message_type: Any, body: bytes) -> Any:
    """Parse `body` as a protobuf message. Raises HttpError (400) if it cannot be parsed."""
    try:
        return message_type.FromString(body)
    except (DecodeError, ValueError, RecursionError):
        name = message_type.DESCRIPTOR.name
        raise HttpError(
            400, f"the body is not a protobuf {name}: it is truncated, or has another format"
        ) from None


def parse_datum(message: Any) -> Datum:
    """Return the Datum of a protobuf message. Raises ValueError for an invalid message."""
    inputs = {name: parse_tensor(name, item) for name, item in message.loss_fn_inputs.items()}
    raw_spans = message.model_input_spans, message.loss_fn_input_spans
    spans = [list(map(_parse_span, raw)) for raw in raw_spans] if any(raw_spans) else ()
    return Datum(ModelInput(list(map(_parse_chunk, message.model_input))), inputs, *spans)


def _parse_chunk(chunk: Any) -> EncodedTextChunk | ImageChunk:
    """Return a chunk of the model input of a protobuf Datum."""
    kind = chunk.WhichOneof("chunk")
    if kind == "image":
        image = chunk.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        return make_image(image.data, image.format, expected, image.HasField("override_dimensions"))
    if kind != "encoded_text":
        raise BadRequestError(
            f"a chunk of the model input is {_UNSUPPORTED_CHUNKS.get(kind, kind or 'empty')}: this "
            "server accepts text and images"
        )
    return EncodedTextChunk(
        _parse_array(chunk.encoded_text.tokens, np.dtype("<i4"), "tokens").tolist()
    )


_UNSUPPORTED_CHUNKS = {
    "image_asset_pointer": "a pointer to an image (send its bytes: types.ImageChunk)",
    "dmel": "audio",
}


def make_image(data: bytes, form: Any, expected_tokens: Any, overrides_size: bool) -> ImageChunk:
    """Return an image chunk. Raises BadRequestError for an invalid field.

    `overrides_size`: whether the request overrides the image's dimensions, which is not supported.
    """
    if form not in ("png", "jpeg"):
        raise BadRequestError(f"an image's format must be 'png' or 'jpeg', got {form!r:.40}")
    if expected_tokens is not None and (type(expected_tokens) is not int or expected_tokens < 1):
        raise BadRequestError(
            "an image's expected_tokens must be an integer of at least 1, or omitted; got "
            f"{expected_tokens!r:.40}"
        )
    if overrides_size:
        raise BadRequestError(
            "override_dimensions is not supported: the model's image processor resizes an image; "
            "send the image in the size you want"
        )
    return ImageChunk(data, form, expected_tokens)


def _parse_span(span: Any) -> PromptProvenanceSpan | SampledProvenanceSpan:
    """Return a provenance span of a protobuf Datum."""
    kind = span.WhichOneof("span")
    if kind is None:
        raise BadRequestError("a span of provenance is empty")
    fields = getattr(span, kind)
    span_class = PromptProvenanceSpan if kind == "prompt_tokens" else SampledProvenanceSpan
    return span_class(sequence_id=fields.sequence_id, offset=fields.offset, length=fields.length)


def _parse_array(raw: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    """Return the values in `raw`, 1-D. `name`: the name of the field in errors."""
    if len(raw) % dtype.itemsize:
        raise BadRequestError(
            f"{name} has {len(raw)} bytes, which is not a multiple of the size of {dtype.name}"
        )
    return np.frombuffer(raw, dtype)


def check_cells(data: Sequence[Any]) -> None:
    """Raise BadRequestError for sparse tensors with many more cells than values.

    Without this limit a few bytes could allocate any amount of memory.
    """
    tensors = [
        tensor
        for message in data
        for tensor in message.loss_fn_inputs.values()
        if tensor.WhichOneof("encoding") == "sparse_csr"
    ]
    cells = sum(_count_cells([max(n, 0) for n in tensor.shape]) for tensor in tensors)
    _check_cells(cells, sum(len(tensor.sparse_csr.col_indices) // 8 for tensor in tensors))


def _count_cells(shape: Sequence[int]) -> float:
    """Return the number of cells of a tensor, infinity above 1e308.

    The exact product of a shape of a few megabytes would stop the server for a minute and longer.
    """
    return math.prod(map(float, shape)) if all(shape) else 0.0


def _check_cells(cells: float, values: int) -> None:
    """Raise BadRequestError if sparse tensors with `values` values have too many cells."""
    limit = _MAX_CELLS + _CELLS_PER_VALUE * values
    if cells > limit:
        message = (
            f"sparse tensors with {values} values have {cells:.0f} cells, the limit is {limit}"
        )
        raise BadRequestError(f"{message}: send less at once, or send them dense")


def parse_tensor(name: str, message: Any) -> TensorData:
    """Return the tensor of a protobuf message. Raises BadRequestError, which names `name`."""
    if message.dtype not in _NUMPY:
        names = {number: text[6:].lower() for text, number in tinker_pb2.DType.items()}  # no DTYPE_
        got = names.get(message.dtype, message.dtype)
        raise BadRequestError(
            f"loss_fn_inputs[{name!r}] has dtype {got}, expected float32 or int64"
        )
    dtype, shape = _NUMPY[message.dtype], list(message.shape)
    kind = "float32" if dtype.kind == "f" else "int64"
    if any(n < 0 for n in shape) or _count_cells(shape) > 2**31:
        raise BadRequestError(
            f"loss_fn_inputs[{name!r}] has the shape {shape[:8]}, expected dimensions of at least "
            "0 and at most 2^31 cells"
        )
    try:
        if message.WhichOneof("encoding") != "sparse_csr":
            return TensorData(_parse_array(message.dense, dtype, name), kind, shape or None)
        rows, columns = (
            _parse_array(raw, np.dtype("<i8"), name)
            for raw in (message.sparse_csr.crow_indices, message.sparse_csr.col_indices)
        )
        values = _parse_array(message.sparse_csr.values, dtype, name)
        return TensorData(values, kind, shape, rows, columns)  # type: ignore[arg-type]
    except BadRequestError:
        raise
    except (ValueError, IndexError, MemoryError) as error:
        raise BadRequestError(f"loss_fn_inputs[{name!r}]: {error}") from error


def parse_loss_config(message: Any) -> dict[str, Any]:
    """Return the settings of the loss: those of the newer map, if it has any, else the older."""
    newer = {
        key: getattr(value, value.WhichOneof("value") or "number")
        for key, value in message.loss_fn_config_v2.items()
    }
    return newer or dict(message.loss_fn_config)


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """Return the protobuf bytes of an output.

    Consecutive datums with the same fields share a record.
    """
    message = tinker_pb2.ForwardBackwardOutput()
    message.loss_fn_output_type = "ArrayRecord"
    for layout, group in itertools.groupby(
        output.loss_fn_outputs,
        lambda row: {name: (data.dtype, data.array.shape[1:]) for name, data in row.items()},
    ):
        rows = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(rows))
        for name, (dtype, trailing_shape) in layout.items():
            field, parts = record.fields[name], [row[name].array.tobytes() for row in rows]
            field.dtype, field.data = _PROTO_DTYPES[dtype], b"".join(parts)
            field.offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
            field.trailing_shape.extend(trailing_shape)
    for key, value in output.metrics.items():
        message.metrics[key if ":" in key else f"{key}:mean"] = float(value)
    return message.SerializeToString()


def encode_samples(response: SampleResponse) -> bytes:
    """Return the protobuf bytes of a sample response."""
    message = tinker_pb2.SampleResponse()
    for sequence in response.sequences:
        item = message.sequences.add(tokens=sequence.tokens_np.astype("<i4").tobytes())
        item.stop_reason = f"STOP_REASON_{sequence.stop_reason.upper()}"
        if sequence.logprobs_np is not None:
            item.logprobs = sequence.logprobs_np.astype("<f4").tobytes()
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.astype("<f4").tobytes()
    if (rows := response.topk_prompt_logprobs) is not None:
        # arrays [positions, k], padded with `_NO_LOGPROB`
        width = max((len(row) for row in rows if row), default=0)
        padded = [[*(row or ()), *[(0, _NO_LOGPROB)] * width][:width] for row in rows]
        cells = np.array(padded, [("ids", "<i4"), ("logprobs", "<f4")])
        topk = message.topk_prompt_logprobs
        topk.k, topk.length = width, len(rows)
        topk.token_ids, topk.logprobs = cells["ids"].tobytes(), cells["logprobs"].tobytes()
    if response.target_prompt_logprobs is not None:
        targets, tensor = response.target_prompt_logprobs.array, message.target_prompt_logprobs
        tensor.dense, tensor.dtype = targets.astype("<f4").tobytes(), tinker_pb2.DTYPE_FLOAT32
        tensor.shape.extend(targets.shape)
    message.prompt_cache_hit_tokens = response.prompt_cache_hit_tokens
    return message.SerializeToString()


def samples_to_json(body: bytes) -> dict[str, Any]:
    """Return `encode_samples(...)` as JSON, for a client that does not accept protobuf."""
    message = parse_message(tinker_pb2.SampleResponse, body)
    sequences = [
        {
            "tokens": _read(item.tokens, "<i4"),
            "logprobs": _read(item.logprobs) if item.HasField("logprobs") else None,
            "stop_reason": _STOP_REASONS[item.stop_reason],
        }
        for item in message.sequences
    ]
    logprobs = [None if math.isnan(value) else value for value in _read(message.prompt_logprobs)]
    topk = message.topk_prompt_logprobs
    pairs = zip(_read(topk.token_ids, "<i4"), _read(topk.logprobs), strict=True)
    rows = [list(itertools.islice(pairs, topk.k)) for _ in range(topk.length)]
    top = [[pair for pair in row if pair[1] != _NO_LOGPROB] or None for row in rows]
    result = {
        "type": "sample",
        "sequences": sequences,
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
        "prompt_logprobs": logprobs if message.HasField("prompt_logprobs") else None,
        "topk_prompt_logprobs": top if message.HasField("topk_prompt_logprobs") else None,
    }
    if message.HasField("target_prompt_logprobs"):
        tensor = message.target_prompt_logprobs
        array = np.frombuffer(tensor.dense, "<f4").reshape(tuple(tensor.shape))
        result["target_prompt_logprobs"] = _tensor_to_json(array)
    return result


def output_to_json(body: bytes) -> dict[str, Any]:
    """Return `encode_output(...)` as JSON, for a client that does not accept protobuf."""
    message = parse_message(tinker_pb2.ForwardBackwardOutput, body)
    rows: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        first = len(rows)
        rows += [{} for _ in range(record.num_datums)]
        for name, tensors in record.fields.items():
            bounds = itertools.pairwise(_read(tensors.offsets, "<i8"))
            for row, (begin, end) in zip(rows[first:], bounds, strict=True):
                array = np.frombuffer(tensors.data[begin:end], _NUMPY[tensors.dtype])
                row[name] = _tensor_to_json(array.reshape(-1, *tensors.trailing_shape))
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": rows,
        "metrics": dict(message.metrics),
    }


def _read(raw: bytes, dtype: str = "<f4") -> list[Any]:
    return list(np.frombuffer(raw, dtype).tolist())


def _tensor_to_json(array: np.ndarray) -> dict[str, Any]:
    """Return a tensor as JSON."""
    data = TensorData.from_numpy(array)
    return {"data": data.data, "dtype": data.dtype, "shape": data.shape}


def parse_targets(fields: Mapping[str, Any] | None) -> TensorData | None:
    """Return the token ids to score, [prompt tokens - 1, K], of a JSON TensorData.

    Sparse rows are padded with -1, which requests no logprob.
    """
    if fields is None:
        return None
    shape, crow, columns = (
        fields.get(name) for name in ("shape", "sparse_crow_indices", "sparse_col_indices")
    )
    try:
        if crow is None and columns is None:
            return TensorData(fields.get("data"), "int64", shape)
        values = np.asarray(fields.get("data"), np.int64)
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape must be a list of integers of at least 0, got {shape!r:.80}")
        _check_cells(_count_cells(shape), values.size)
        # a cell without a value becomes 0 in the dense array: shift the values up by 1 before, and
        # down by 1 after
        return TensorData(TensorData(values + 1, "int64", shape, crow, columns).array - 1)
    except (ValueError, TypeError, OverflowError, IndexError) as error:
        raise BadRequestError(
            "target_prompt_logprobs must be a TensorData of token ids, [prompt tokens - 1, K]: "
            f"{error}"
        ) from error
