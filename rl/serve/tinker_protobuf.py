"""Define the protobuf messages of Tinker's protocol from a table.

https://protobuf.dev/programming-guides/encoding describes the encoding.

A line is a message: its name, then `field number type`. `*` before the type marks a list, `?` an
optional field with explicit presence, `{}` a map with string keys. `type|name` makes the field a
member of the oneof `name`. Names and numbers are from tinker 0.38 (tests/test_serve_sdk.py compares
this table with the package's descriptors).
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from rl.serve.http_errors import HttpError

PACKAGE = "tinker_public"
STOP, LENGTH = 0, 1
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4

_ENUMS = {
    "StopReason": {"STOP_REASON_STOP": STOP, "STOP_REASON_LENGTH": LENGTH},
    "DType": {
        "DTYPE_UNSPECIFIED": 0,
        "DTYPE_FLOAT32": FLOAT32,
        "DTYPE_INT64": INT64,
        "DTYPE_INT32": INT32,
        "DTYPE_BFLOAT16": BFLOAT16,
    },
}
_MESSAGES = """
SampleResponse: sequences 1 *SampledSequence, prompt_logprobs 2 ?bytes, topk_prompt_logprobs 3 ?TopkLogprobs, \
prompt_cache_hit_tokens 4 int32, target_prompt_logprobs 5 ?Tensor, prompt_alt_tokens 6 ?PromptAltTokens
PromptAltTokens: tokens 1 Tensor, logprobs 2 Tensor
SampledSequence: stop_reason 1 StopReason, tokens 2 bytes, logprobs 3 ?bytes, topk_sampled_logprobs 4 ?TopkLogprobs
TopkLogprobs: token_ids 1 bytes, logprobs 2 bytes, k 3 uint32, length 4 uint32
SparseCsr: values 1 bytes, crow_indices 2 bytes, col_indices 3 bytes
Tensor: dense 1 bytes|encoding, sparse_csr 2 SparseCsr|encoding, dtype 3 DType, shape 4 *int64
BatchedTensor: data 1 bytes, offsets 2 bytes, dtype 3 DType, trailing_shape 4 *int64
ArrayRecord: type_tag 1 string, fields 2 {}BatchedTensor, num_datums 3 int64
ForwardBackwardOutput: loss_fn_output_type 1 string, loss_fn_outputs 2 *ArrayRecord, metrics 3 {}double
ForwardBackwardRequest: model_id 1 string, seq_id 2 int32, data 3 *Datum, loss_fn 4 string, loss_fn_config 5 {}double, \
forward_only 6 bool, loss_fn_config_v2 7 {}LossConfigValue
LossConfigValue: number 1 double|value, text 2 string|value
Datum: model_input 1 *Chunk, loss_fn_inputs 2 {}Tensor, model_input_spans 3 *ProvenanceSpan, loss_fn_input_spans 4 *ProvenanceSpan
ProvenanceSpan: prompt_tokens 1 PromptProvenanceSpan|span, sampled_tokens 2 SampledProvenanceSpan|span
PromptProvenanceSpan: sequence_id 1 string, offset 2 int64, length 3 int64
SampledProvenanceSpan: sequence_id 1 string, offset 2 int64, length 3 int64
Chunk: encoded_text 1 EncodedTextChunk|chunk, image 2 ImageChunk|chunk, dmel 3 DmelChunk|chunk
EncodedTextChunk: tokens 1 bytes
ImageChunk: data 1 bytes, format 2 string, expected_tokens 3 ?int32, override_dimensions 4 ?ImageDimensions
ImageDimensions: width 1 uint32, height 2 uint32
DmelChunk: dmel 1 bytes
"""  # noqa: E501


def build_schema() -> descriptor_pb2.FileDescriptorProto:
    """Return the table as a protobuf file descriptor."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for value, code in values.items():
            enum.value.add(name=value, number=code)
    for line in _MESSAGES.strip().splitlines():
        name, _, fields = line.partition(":")
        message, optional = file.message_type.add(name=name), []
        for text in fields.split(","):
            field_name, number, kind = text.split()
            field = message.field.add(name=field_name, number=int(number))
            kind, _, oneof = kind.partition("|")
            field.label = field.LABEL_REPEATED if kind[0] in "*{" else field.LABEL_OPTIONAL
            if kind[0] == "{":
                kind = _add_map_entry(message, field_name, kind[2:])
            _set_type(field, kind.lstrip("*?"))
            if oneof:
                names = [declaration.name for declaration in message.oneof_decl]
                field.oneof_index = names.index(oneof) if oneof in names else len(names)
                if oneof not in names:
                    message.oneof_decl.add(name=oneof)
            elif kind[0] == "?":
                optional.append(field)
        for optional_field in optional:  # protobuf requires synthetic oneofs after the real ones
            optional_field.proto3_optional, optional_field.oneof_index = (
                True,
                len(message.oneof_decl),
            )
            message.oneof_decl.add(name=f"_{optional_field.name}")
    return file


def _add_map_entry(message: descriptor_pb2.DescriptorProto, field: str, kind: str) -> str:
    """Add the nested message of a map's entries, and return the type name for the map field."""
    entry = message.nested_type.add(
        name="".join(part.capitalize() for part in field.split("_")) + "Entry"
    )
    entry.options.map_entry = True
    for number, (name, type_name) in enumerate((("key", "string"), ("value", kind)), start=1):
        member = entry.field.add(
            name=name, number=number, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
        )
        _set_type(member, type_name)
    return f"{message.name}.{entry.name}"


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    """Set the type of a field. A lower-case `kind` is a scalar, otherwise a message or an enum."""
    if kind[0].islower():
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
        return
    field.type = field.TYPE_ENUM if kind in _ENUMS else field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


def _build_classes() -> dict[str, Any]:
    """Return the message classes by name."""
    # a separate pool, because tinker's file of the same name may be loaded in this process
    pool = descriptor_pool.DescriptorPool()
    file = pool.AddSerializedFile(build_schema().SerializeToString())
    names = list((file or pool.FindFileByName("tinker_public.proto")).message_types_by_name)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in names
    }


MESSAGES = _build_classes()


def parse_message(name: str, body: bytes) -> Any:
    """Parse `body` as the message `name`. Raises HttpError (400) if it cannot be parsed."""
    try:
        return MESSAGES[name].FromString(body)
    except (DecodeError, ValueError, RecursionError):
        raise HttpError(
            400, f"the body is not a protobuf {name}: it is truncated, or has another format"
        ) from None


def make_message(name: str) -> Message:
    """Return an empty message."""
    return MESSAGES[name]()
