"""Test that /openapi.json describes the routes and the bodies that they refuse."""

import json
import re

import pytest
from serving import Wire, server
from test_serve import KEYS

from rl.serve.openai_schemas import SamplingBody
from rl.types import PARAMETER_BOUNDS

PREFIX = "#/components/schemas/"
# pydantic type name -> (a value of another type, the type name in the error)
OTHERS = {"string": (7, "str"), "integer": ("x", "int"), "boolean": ("x", "bool"),
          "object": ([1], "dict"), "number": ("x", "float"), "array": (7, "list")}  # fmt: skip
# the fields that OpenAI-style routes require, and the companions that some fields require
GOOD = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "token_ids": [5],
        "reward": 1.0}  # fmt: skip
BESIDE = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    with server(tmp_path_factory.mktemp("served"), keys=KEYS) as first:
        made = Wire(first, KEYS[0])
        made.open()
        made.served = first
        chat = {"messages": GOOD["messages"], "max_tokens": 1}
        assert made.http.post("/session/mine/v1/chat/completions", json=chat).status_code == 200
        yield made


def list_variants(schema):
    """Return the alternatives of a field's schema, without null."""
    return [item for item in schema.get("anyOf", [schema]) if item.get("type") != "null"]


def test_every_route_is_described_and_every_reference_leads_somewhere(wire):
    answer = wire.http.get("/openapi.json")
    document = answer.json()
    paths = document["paths"]
    described = {(method.upper(), path) for path, item in paths.items() for method in item}
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in wire.served.app.app.routes
        if route.path.startswith(("/api/v1/", "/v1/", "/session", "/inference/"))
        and route.path != "/api/v1/healthz"
        for method in route.methods - {"HEAD"}
    }
    assert len(routes) > 50 and routes == described
    for path, item in paths.items():
        for operation in item.values():
            names = {parameter["name"] for parameter in operation.get("parameters", [])}
            assert names == set(re.findall(r"{(\w+)}", path)), path
    references = set(re.findall(r'"\$ref": ?"([^"]*)"', answer.text))
    assert references == {PREFIX + name for name in document["components"]["schemas"]}
    assert len(references) > 20
    training = paths["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert list(training) == ["application/x-protobuf"]
    page = wire.http.get("/docs").text  # loads no resources, so it works without a network
    assert "openapi.json" in page and all(path in page for path in paths)
    assert not re.search("https?:|<script|<link|src=", page)
    for path in ("/openapi.json", "/docs"):
        assert wire.http.get(path, headers={"x-api-key": "x"}).status_code == 401


def test_a_body_that_is_not_as_described_is_refused_by_the_field(wire):
    """Send each body without each required field, and with fields of other types."""
    document = wire.http.get("/openapi.json").json()
    schemas, sent = document["components"]["schemas"], 0
    runs_later = {"path", "ttl_seconds", "overwrite", "user_metadata", "sampling_session_seq_id"}
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        reference = content.get("application/json", {}).get("schema", {}).get("$ref")
        if reference is None:
            continue
        schema = schemas[reference.removeprefix(PREFIX)]
        is_openai = not path.startswith("/api/")
        good = {"lora_config": {"rank": 4}}
        if is_openai:
            good = {name: GOOD[name] for name in schema["required"]}
        for name, field in schema["properties"].items():
            kind = None if is_openai else list_variants(field)[0].get("type")
            good.setdefault(name, {"string": "x", "integer": 1, "object": {}}.get(kind))
        url = path.replace("{session_id}", "x").replace("{session}", "mine")

        def refused(body, url=url, is_openai=is_openai):
            answer = wire.http.post(url, json={k: v for k, v in body.items() if v is not None})
            assert answer.status_code == 400, (url, body, answer.text)
            error = answer.json()["error"]
            assert is_openai or answer.json()["detail"] == error["message"]
            assert not is_openai or error["param"] and "code" in error
            return error["message"]

        for name in set(schema.get("required", [])) - ({"prompt"} if "asample" in path else set()):
            text = refused({**good, name: None})
            assert text.startswith("the body lacks") and name in text, (path, text)
            sent += 1
        for name, field in schema["properties"].items():
            (first, *_) = list_variants(field)
            is_late = "save_weights" in path and name in runs_later
            if first.get("type") not in OTHERS or is_late:
                continue
            value, expected = OTHERS[first["type"]]
            neighbor = {**good, **BESIDE.get(name, {})}
            text = refused({**neighbor, name: value})
            got = type(value).__name__
            if is_openai:
                expected = field["description"].partition(";")[0] if "description" in field else ""
                assert text == f"{name} must be {expected}, got {value!r}", (path, text)
            else:
                assert text == f"{name} must be of type {expected}, got {got}", (path, text)
            sent += 1
            for bound, change in (("minimum", -1), ("maximum", 1)):
                if bound in first:
                    text = refused({**neighbor, name: first[bound] + change})
                    assert text.startswith(name) and text.endswith(str(first[bound] + change))
                    assert is_openai or str(first[bound]) in text
                    sent += 1
    assert sent > 200
    text = wire.http.post(
        "/api/v1/create_model",
        json={"session_id": wire.session, "base_model": "x", "model_seq_id": 0,
              "lora_config": {"rank": True}},
    ).json()["detail"]  # fmt: skip
    assert text == "lora_config.rank must be of type int, got bool"


RESPONSES = [
    ("/v1/chat/completions", {"messages": GOOD["messages"], "max_tokens": 3, "n": 2}),
    ("/v1/chat/completions", {"messages": GOOD["messages"], "max_tokens": 3, "logprobs": True,
                              "top_logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", [5, 6]], "max_tokens": 3, "echo": True, "logprobs": 2,
                         "return_token_ids": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2,
                                                                      "logprobs": 1}}),
]  # fmt: skip


@pytest.mark.parametrize("path, body", RESPONSES)
def test_responses_and_events_are_as_described(wire, path, body):
    """Validate with a JSON schema validator, which is independent of the server's types."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs the package jsonschema")
    document = wire.http.get("/openapi.json").json()
    described = document["paths"][path]["post"]["responses"]["200"]["content"]

    def check(value, media_type):
        reference = described[media_type]["schema"]["$ref"]
        schema = {"$ref": reference, "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)
        known = document["components"]["schemas"][reference.removeprefix(PREFIX)]["properties"]
        assert set(value) <= set(known), reference

    answer = wire.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    check(answer.json(), "application/json")
    if "text/event-stream" in described:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        lines = wire.http.post(path, json={**body, **options}).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert len(events) > 2 and lines[-2:] == ["data: [DONE]", ""] and "usage" in events[-1]
        for event in events:
            check(event, "text/event-stream")


def test_every_number_of_the_sampler_has_a_name_for_http():
    numbers = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2}
    numbers |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 2.0}
    assert {*numbers, "max_tokens", "seed"} == set(PARAMETER_BOUNDS), "add the new number here"
    params = SamplingBody(**numbers, ignore_eos=True).make_params(6)
    assert {name: getattr(params, name) for name in numbers} == numbers and params.ignore_eos
