"""Test that rl/serve/tinker_pb2.py matches rl/serve/tinker.proto."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")

from google.protobuf import descriptor_pb2  # noqa: E402

REPO = Path(__file__).resolve().parents[2]
PROTO = "rl/serve/tinker.proto"
SCALARS = {"double", "string", "bytes", "bool", "int32", "int64", "uint32"}


def read_proto(text):
    """Return {message: {field: (number, kind, type, oneof)}} and {enum: {value: number}}."""
    text = re.sub(r"//[^\n]*", "", text)
    messages, enums = {}, {}
    for kind, name, body in re.findall(r"^(message|enum) (\w+) \{\n(.*?)^\}", text, re.M | re.S):
        if kind == "enum":
            enums[name] = {v: int(n) for v, n in re.findall(r"(\w+) = (\d+);", body)}
            continue
        fields, oneof = {}, None
        for line in filter(None, map(str.strip, body.splitlines())):
            if line.startswith("oneof"):
                oneof = line.split()[1]
            elif line == "}":
                oneof = None
            else:
                match = re.fullmatch(r"(?:(optional|repeated) )?(map<.*>|\w+) (\w+) = (\d+);", line)
                assert match, line
                fields[match[3]] = (int(match[4]), match[1] or "", match[2], oneof)
        messages[name] = fields
    return messages, enums


def read_descriptor(file):
    """Return the same as `read_proto`, from a file descriptor."""

    def type_of(field):
        name = field.type_name.removeprefix(f".{file.package}.")
        return name or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)[5:].lower()

    messages = {}
    for message in file.message_type:
        entries = {f"{message.name}.{nested.name}": nested for nested in message.nested_type}
        assert all(nested.options.map_entry for nested in entries.values())
        fields = messages[message.name] = {}
        for field in message.field:
            kind, type_name, oneof = "", type_of(field), None
            if type_name in entries:
                key, value = map(type_of, entries[type_name].field)
                type_name = f"map<{key}, {value}>"
            elif field.proto3_optional:
                kind = "optional"
            elif field.label == field.LABEL_REPEATED:
                kind = "repeated"
            elif field.HasField("oneof_index"):
                oneof = message.oneof_decl[field.oneof_index].name
            fields[field.name] = (field.number, kind, type_name, oneof)
    enums = {enum.name: {v.name: v.number for v in enum.value} for enum in file.enum_type}
    return messages, enums


def test_the_generated_module_has_the_messages_of_the_proto_file():
    from rl.serve import tinker_pb2

    file = descriptor_pb2.FileDescriptorProto()
    tinker_pb2.DESCRIPTOR.CopyToProto(file)
    messages, enums = read_proto((REPO / PROTO).read_text())
    assert (messages, enums) == read_descriptor(file)
    types = {t for fields in messages.values() for _, _, t, _ in fields.values()}
    assert {t for t in types if "<" not in t} <= SCALARS | set(messages) | set(enums)
    assert len(messages) == 20 and len(enums) == 2 and file.name == PROTO


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
    from rl.errors import BadRequestError
    from rl.serve import conversion, tinker_pb2

    tensor = tinker_pb2.Datum().loss_fn_inputs["weights"]
    tensor.dtype = tinker_pb2.DTYPE_BFLOAT16
    with pytest.raises(BadRequestError, match=r"has dtype bfloat16, expected float32 or int64"):
        conversion.parse_tensor("weights", tensor)
    tensor.dtype = tinker_pb2.DTYPE_FLOAT32
    tensor.shape.extend([2, -1])
    with pytest.raises(
        BadRequestError, match=r"shape \[2, -1\], expected dimensions of at least 0"
    ):
        conversion.parse_tensor("weights", tensor)
    fields = {"data": [1], "shape": "x", "sparse_crow_indices": [0], "sparse_col_indices": [0]}
    with pytest.raises(BadRequestError, match="shape must be a list of integers .* got 'x'"):
        conversion.parse_targets(fields)
