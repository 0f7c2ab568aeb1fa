"""Test that rl/serve/tinker_pb2.py matches rl/serve/tinker.proto."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")

from google.protobuf import descriptor_pb2  # noqa: E402

from rl.errors import BadRequestError  # noqa: E402
from rl.serve import conversion, tinker_pb2  # noqa: E402

REPO = Path(__file__).resolve().parents[2]
PROTO = "rl/serve/tinker.proto"


def write_fields(file, message):
    """Return the lines of a message's fields as a .proto file has them."""
    entries = {f"{message.name}.{nested.name}": nested for nested in message.nested_type}
    assert all(nested.options.map_entry for nested in entries.values())

    def type_of(field):
        name = field.type_name.removeprefix(f".{file.package}.")
        return name or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)[5:].lower()

    lines, open_oneof = [], None
    for field in message.field:
        kind, oneof = type_of(field), None
        if kind in entries:
            kind = f"map<{', '.join(map(type_of, entries[kind].field))}>"
        elif field.proto3_optional:
            kind = f"optional {kind}"
        elif field.label == field.LABEL_REPEATED:
            kind = f"repeated {kind}"
        elif field.HasField("oneof_index"):
            oneof = message.oneof_decl[field.oneof_index].name
        if oneof != open_oneof:
            lines += ["}"] * (open_oneof is not None) + [f"oneof {oneof} {{"] * (oneof is not None)
            open_oneof = oneof
        lines.append(f"{kind} {field.name} = {field.number};")
    return lines + ["}"] * (open_oneof is not None)


def test_the_generated_module_has_the_messages_of_the_proto_file():
    file = descriptor_pb2.FileDescriptorProto()
    tinker_pb2.DESCRIPTOR.CopyToProto(file)
    written = {f"message {item.name}": write_fields(file, item) for item in file.message_type}
    for enum in file.enum_type:
        lines = [f"{value.name} = {value.number};" for value in enum.value]
        written[f"enum {enum.name}"] = lines
    text = re.sub(r"//[^\n]*", "", (REPO / PROTO).read_text())
    blocks = re.findall(r"^((?:message|enum) \w+) \{\n(.*?)^\}", text, re.M | re.S)
    read = {head: [*filter(None, map(str.strip, body.splitlines()))] for head, body in blocks}
    assert read == written
    assert len(file.message_type) == 20 and len(file.enum_type) == 2 and file.name == PROTO


def test_the_generated_module_is_what_the_compiler_writes(tmp_path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("needs grpcio-tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", PROTO]
    subprocess.run(command, cwd=REPO, check=True, timeout=120)

    def without_version(path):  # of the compiler, which protobuf compares with its version
        text = (path / "rl/serve/tinker_pb2.py").read_text()
        text = re.sub(r"# Protobuf Python Version: .*\n", "", text)
        return re.sub(r"Domain\.PUBLIC,\n.*?'rl/serve", "'rl/serve", text, flags=re.S)

    assert without_version(tmp_path) == without_version(REPO)


def test_a_tensor_that_cannot_be_read_is_described():
    tensor = tinker_pb2.Datum().loss_fn_inputs["weights"]
    tensor.dtype = tinker_pb2.DTYPE_BFLOAT16
    with pytest.raises(BadRequestError, match=r"has dtype bfloat16, expected float32 or int64"):
        conversion.parse_tensor("weights", tensor)
    tensor.dtype = tinker_pb2.DTYPE_FLOAT32
    tensor.shape.extend([2, -1])
    message = r"shape \[2, -1\], expected dimensions of at least 0"
    with pytest.raises(BadRequestError, match=message):
        conversion.parse_tensor("weights", tensor)
    fields = {"data": [1], "shape": "x", "sparse_crow_indices": [0], "sparse_col_indices": [0]}
    with pytest.raises(BadRequestError, match="shape must be a list of integers .* got 'x'"):
        conversion.parse_targets(fields)
