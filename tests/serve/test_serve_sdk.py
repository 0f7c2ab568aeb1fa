"""Test that the real SDK with a real server on loopback matches the clients in this process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_serve_docs import MODEL_NAME, find_block

from rl.client import ServiceClient
from rl.types import AdamParams, Datum, ModelInput, SamplingParams

REPO = Path(__file__).resolve().parents[2]
BASE = "tiny:ascii-small"
pytestmark = [pytest.mark.sdk, pytest.mark.slow]


@pytest.fixture(scope="module")
def sdk_python() -> str:
    python = os.environ.get("WHETSTONE_TEST_SDK")
    if not python:
        pytest.skip("WHETSTONE_TEST_SDK names no Python with the tinker SDK (the extra sdk)")
    return python


def run_against_server(folder: Path, base: str, *runs: Callable[[str], dict]) -> list[str]:
    """Return what subprocesses print that use a server. `runs`: the server's address to the
    arguments of `subprocess.run`.
    """
    command = [
        sys.executable, "serve.py", "--base-model", base, "--port", "0", "--output-dir",
        str(folder / "out"),
    ]  # fmt: skip
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=log, text=True)
    outputs = []
    try:
        line = process.stdout.readline()
        url = line.split(" at ")[1].strip()
        for run in runs:
            done = subprocess.run(
                **run(url), cwd=folder, capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 0, done.stderr[-3000:] + (folder / "log").read_text()[-3000:]
            outputs.append(done.stdout)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
    log = (folder / "log").read_text()
    assert "tml-a-key" not in log and "Traceback" not in log
    return outputs


@pytest.fixture(scope="module")
def sdk_results(sdk_python, tmp_path_factory) -> dict:
    """Return the results of tests/serve/sdk_client.py."""
    script = str(REPO / "tests" / "serve" / "sdk_client.py")
    folder = tmp_path_factory.mktemp("served")
    (output,) = run_against_server(folder, BASE, lambda url: {"args": [sdk_python, script, url]})
    return json.loads(output.splitlines()[-1])


def test_the_examples_of_the_page_run_as_they_stand(sdk_python, tmp_path):
    """Only the address is another, and the model that the server has under the page's name."""

    def run_sdk(url):
        env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-a-key"}
        return {"args": [sdk_python, "-c", find_block("import tinker\n")], "env": env}

    def run_curl(url):
        return {"args": ["bash", "-c", find_block("curl ").replace("http://127.0.0.1:8000", url)]}

    base = f"{MODEL_NAME}={BASE}"
    printed, reply = run_against_server(tmp_path, base, run_sdk, run_curl)
    metrics, path = printed.strip().splitlines()[-2:]
    assert "loss:sum" in metrics and path.split()[0].startswith("tinker://")
    assert json.loads(reply)["choices"][0]["message"]["role"] == "assistant"


def make_text_datums(count, seed):
    generator, data = torch.Generator().manual_seed(seed), []
    for i in range(count):
        row = torch.randint(2, 90, (5 + i,), generator=generator).tolist()
        data.append(
            Datum(
                ModelInput.from_ints(row[:-1]),
                {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
            )
        )
    return data


def outputs(result):
    return {
        "metrics": result.metrics,
        "logprobs": [item["logprobs"].tolist() for item in result.loss_fn_outputs],
    }


def sampled(client, prompt, count, seed):
    actual = client.sample(ModelInput.from_ints(prompt), count, SamplingParams(6, seed)).result()
    return [
        [item.tokens, [float(value) for value in item.logprobs_np]] for item in actual.sequences
    ]


def custom(client, data):
    """Run the requests that the SDK sends for a custom loss, the sum of the squared logprobs."""
    actual = client.forward(data, "cross_entropy").result().loss_fn_outputs
    leaves = [output["logprobs"].to_torch().clone().requires_grad_(True) for output in actual]
    loss = sum((leaf**2).sum() for leaf in leaves)
    loss.backward()
    pairs = zip(data, leaves, strict=True)
    weighed = [
        first.with_inputs({**first.loss_fn_inputs, "weights": -leaf.grad}) for first, leaf in pairs
    ]
    client.forward_backward(weighed, "cross_entropy").result()
    return float(loss)


def test_the_sdk_sees_what_the_clients_in_this_process_see_to_the_bit(sdk_results, tmp_path):
    with ServiceClient(output_dir=tmp_path) as service:
        clients = [service.create_lora_training_client(BASE, rank, 7) for rank in (4, 6)]
        assert sdk_results["info"] == [4, 6]
        for step in range(2):
            for i, client in enumerate(clients):
                assert (
                    outputs(
                        client.forward_backward(make_text_datums(5, step), "cross_entropy").result()
                    )
                    == sdk_results[f"learnt {step} {i}"]
                )
                assert (
                    client.optim_step(AdamParams(1e-2)).result().metrics
                    == sdk_results[f"stepped {step} {i}"]
                )
        client = clients[0]
        loss = custom(client, make_text_datums(3, 9))
        assert sdk_results["custom"]["loss:sum"] == sdk_results["custom"]["squares"] == loss
        assert client.optim_step(AdamParams(1e-2)).result().metrics == sdk_results["custom stepped"]
        sampler = client.save_weights_and_get_sampling_client()
        assert (
            sampled(sampler, [5, 9, 30], 3, 11)
            == sdk_results["sampled"]
            == sdk_results["sampled from a path"]
        )
        reference = [
            sampler.sample(ModelInput.from_ints([4, 5 + i]), 1, SamplingParams(4, 5))
            .result()
            .sequences[0]
            .tokens
            for i in range(8)
        ]
        assert reference == sdk_results["wave"]
        scored = sampler.compute_logprobs(ModelInput.from_ints([5, 9, 30, 31])).result()
        assert scored[0] is sdk_results["scored"][0] is None and sdk_results["scored"][
            1:
        ] == pytest.approx(scored[1:], abs=1e-5)
        went_on = [
            outputs(client.forward_backward(make_text_datums(4, 3), "cross_entropy").result())
        ]
        went_on.append(client.optim_step(AdamParams(1e-2)).result().metrics)
        assert sdk_results["went on"] == sdk_results["resumed"] == went_on
        assert sdk_results["tokens"] == client.get_tokenizer().encode("hello")


def test_what_is_refused_raises_at_once_in_the_sdk_and_says_why(sdk_results):
    output = {
        "datum": "500", "after it": "not run", "loss": "stable_reinforce", "base": "no/such-model",
        "path": "tinker://", "image": "an image", "draws": "prompt_alt_tokens_k", "prompt": "999",
    }  # fmt: skip
    for name, text in output.items():
        kind, message, *rest = sdk_results["refused"][name]
        assert text in message and "Traceback" not in message, (name, sdk_results["refused"][name])
        assert kind in ("RequestFailedError", "BadRequestError", "NotFoundError"), (name, kind)
        assert kind != "RequestFailedError" or rest[0].lower().endswith("user"), (name, rest)
        assert rest[1] < 30
    assert sdk_results["refused"]["goes on"]["loss:sum"] > 0


def test_what_was_saved_is_listed_given_a_time_to_live_and_removed(sdk_results):
    assert sdk_results["models"] == [BASE] and sdk_results["run"] == BASE and sdk_results["expires"]
    assert [path.split("/", 3)[3] for path in sdk_results["checkpoints"]] == [
        "weights/state",
        "sampler_weights/weights",
    ]
    assert [path.split("/", 3)[3] for path in sdk_results["left"]] == ["sampler_weights/weights"]


def test_our_messages_are_the_sdks_on_the_wire(sdk_results):
    from google.protobuf import descriptor_pb2

    from rl.serve import tinker_pb2

    def fields(file):
        results = {}

        def walk(before, messages):
            for message in messages:
                rows = {}
                for item in message.field:
                    oneof = (
                        message.oneof_decl[item.oneof_index].name
                        if item.HasField("oneof_index")
                        else None
                    )
                    rows[item.number] = (
                        item.name,
                        item.type,
                        item.label,
                        item.type_name.removeprefix(f".{file.package}."),
                        item.proto3_optional,
                        oneof,
                    )
                results[before + message.name] = rows
                walk(f"{before}{message.name}.", message.nested_type)

        walk("", file.message_type)
        return results, {
            enum.name: [(value.name, value.number) for value in enum.value]
            for enum in file.enum_type
        }

    theirs, their_enums = fields(
        descriptor_pb2.FileDescriptorProto.FromString(bytes.fromhex(sdk_results["schema"]))
    )
    schema = descriptor_pb2.FileDescriptorProto()
    tinker_pb2.DESCRIPTOR.CopyToProto(schema)
    ours, enums = fields(schema)
    assert enums == their_enums and len(ours) > 20
    assert {name: theirs[name] for name in ours} == ours
