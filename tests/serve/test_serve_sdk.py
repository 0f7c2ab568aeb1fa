"""Test that the real SDK with a server matches the clients in this process to the bit, though the
server fails now and then.
"""

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from serving import BASE, get_metric, server
from test_serve_docs import MODEL_NAME, find_block
from test_serve_process import start_server, stop

from rl.client import ServiceClient
from rl.learner import LearnerSettings
from rl.programs.program_rollout import LoopServer
from rl.runtime import WorkerSettings
from rl.serve import HttpError, tinker_pb2
from rl.serve.http_errors import make_error_response
from rl.types import AdamParams, Datum, ModelInput, SamplingParams

pytestmark = [pytest.mark.sdk, pytest.mark.slow]
KEYS = ("tml-the-one-that-trains", "tml-the-one-that-samples")
BUDGET = 32  # tokens of a micro-batch: each call has several
SHUT, FULL, BROKEN, CUT = 503, 429, 500, 0  # CUT: the connection ends within the response
# Faults of a route's first requests: a status instead of the response. "taken": after the server
# has run the request.
FAULTS = {
    "create_session": [(SHUT, "refused")],
    "create_model": [(SHUT, "taken")],
    "forward_backward": [(SHUT, "refused"), (FULL, "refused"), (CUT, "taken"), (BROKEN, "taken")],
    "optim_step": [(SHUT, "taken"), (CUT, "taken")],
    "save_weights_for_sampler": [(CUT, "taken")],
    "asample": [(FULL, "refused"), (SHUT, "taken"), (CUT, "taken")],
    "retrieve_future": [(SHUT, "refused"), (FULL, "refused"), (CUT, "taken"), (SHUT, "taken")],
}


class FaultyApp:
    """An application whose first responses fail. `seen` counts the requests by route."""

    def __init__(self, app):
        self.app, self.seen = app, Counter()
        self.remaining = {name: list(faults) for name, faults in FAULTS.items()}

    async def __call__(self, scope, receive, send):
        name = scope["path"].removeprefix("/api/v1/") if scope["type"] == "http" else ""
        self.seen[name] += 1
        status, when = self.remaining[name].pop(0) if self.remaining.get(name) else (None, "")
        if when == "taken":
            await self.app(scope, receive, _nowhere)
        if status is None:
            await self.app(scope, receive, send)
        elif status == CUT:  # fewer bytes are sent than promised
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": [(b"content-length", b"1000")]})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
        else:
            await make_error_response(HttpError(status, "not now: try again"))(scope, receive, send)


async def _nowhere(message):
    pass


def _breaks_once(tenants):
    """Make the first `forward` fail in the server, through no fault of the caller."""
    plain, broken = tenants.forward_backward, []

    def sometimes(model, read, backward):
        if not backward and not broken:
            broken.append(model.model_id)
            raise RuntimeError("the words of a fault that nobody is to see")
        return plain(model, read, backward)

    tenants.forward_backward = sometimes


@pytest.fixture(scope="module")
def sdk_python() -> str:
    python = os.environ.get("WHETSTONE_TEST_SDK")
    if not python:
        pytest.skip("WHETSTONE_TEST_SDK names no Python with the tinker SDK (the extra sdk)")
    return python


@pytest.fixture(scope="module")
def served_sdk(sdk_python, tmp_path_factory):
    """Return the results of tests/serve/sdk_client.py, and its server."""
    with server(tmp_path_factory.mktemp("served"), keys=KEYS, token_budget=BUDGET) as first:
        _breaks_once(first.model_manager)
        faulty = FaultyApp(first.app)
        listening = LoopServer(lambda: faulty, "the test's server")
        try:
            script = str(Path(__file__).with_name("sdk_client.py"))
            command = [sdk_python, script, listening.url, *KEYS]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr[-3000:]
            yield json.loads(done.stdout.splitlines()[-1]), first, faulty
        finally:
            listening.close()


@pytest.fixture(scope="module")
def sdk_results(served_sdk) -> dict:
    return served_sdk[0]


@pytest.fixture
def local_service(tmp_path):
    settings = WorkerSettings(learner=LearnerSettings(token_budget=BUDGET))
    with ServiceClient(output_dir=tmp_path, settings=settings) as service:
        yield service


def test_the_examples_of_the_page_run_as_they_stand(sdk_python, tmp_path):
    """Only the address is another, and the model that the server has under the page's name."""
    process, url = start_server(tmp_path, base=f"{MODEL_NAME}={BASE}")
    env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-a-key"}
    curl = find_block("curl ").replace("http://127.0.0.1:8000", url)
    # The SDK's event loop is a daemon thread. Such a thread can abort a process that finalizes.
    python = find_block("import tinker\n") + "import os, sys\nsys.stdout.flush(), os._exit(0)\n"
    outputs = []
    try:
        for words in ([sdk_python, "-c", python], ["bash", "-c", curl]):
            options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
            done = subprocess.run(words, **options, timeout=240)
            log = (tmp_path / "log").read_text()
            assert done.returncode == 0, done.stdout + done.stderr[-3000:] + log[-3000:]
            outputs.append(done.stdout)
        assert stop(process, signal.SIGTERM)[0] == 0
    finally:
        process.kill()
    metrics, path = outputs[0].strip().splitlines()[-2:]
    assert "loss:sum" in metrics and path.split()[0].startswith("tinker://")
    assert json.loads(outputs[1])["choices"][0]["message"]["role"] == "assistant"
    log = (tmp_path / "log").read_text()
    assert "tml-a-key" not in log and "Traceback" not in log


def make_text_datums(count, seed):
    generator, data = torch.Generator().manual_seed(seed), []
    for i in range(count):
        row = torch.randint(2, 90, (5 + i,), generator=generator).tolist()
        fields = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
        data.append(Datum(ModelInput.from_ints(row[:-1]), fields))
    return data


def outputs(result):
    logprobs = [item["logprobs"].tolist() for item in result.loss_fn_outputs]
    return {"metrics": result.metrics, "logprobs": logprobs}


def train(client, data):
    learnt = client.forward_backward(data, "cross_entropy").result()
    return [outputs(learnt), client.optim_step(AdamParams(1e-2)).result().metrics]


def sampled(client, prompt, count, seed, max_tokens=6):
    params = SamplingParams(max_tokens, seed)
    sequences = client.sample(ModelInput.from_ints(prompt), count, params).result().sequences
    return [[item.tokens, [float(value) for value in item.logprobs_np]] for item in sequences]


def custom(client, data):
    """Run the requests that the SDK sends for a custom loss, the sum of the squared logprobs."""
    actual = client.forward(data, "cross_entropy").result().loss_fn_outputs
    leaves = [output["logprobs"].to_torch().clone().requires_grad_(True) for output in actual]
    loss = sum((leaf**2).sum() for leaf in leaves)
    loss.backward()
    weighed = [
        datum.with_inputs({**datum.loss_fn_inputs, "weights": -leaf.grad})
        for datum, leaf in zip(data, leaves, strict=True)
    ]
    client.forward_backward(weighed, "cross_entropy").result()
    return float(loss)


def test_the_sdk_sees_what_the_clients_in_this_process_see_to_the_bit(sdk_results, local_service):
    clients = [local_service.create_lora_training_client(BASE, rank, 7) for rank in (4, 6)]
    assert sdk_results["info"] == [4, 6]
    for step in range(2):
        trained = [train(client, make_text_datums(5, step)) for client in clients]
        assert trained == sdk_results["trained"][step]
    client = clients[0]
    goes_on = client.forward(make_text_datums(2, 0), "cross_entropy").result()
    assert sdk_results["goes on"] == outputs(goes_on)
    loss = custom(client, make_text_datums(3, 9))
    assert sdk_results["custom"]["loss:sum"] == sdk_results["custom"]["squares"] == loss
    assert client.optim_step(AdamParams(1e-2)).result().metrics == sdk_results["custom stepped"]
    sampler = client.save_weights_and_get_sampling_client()
    drawn = sampled(sampler, [5, 9, 30], 3, 11)
    assert drawn == sdk_results["sampled"] == sdk_results["sampled from a path"]
    wave = [sampled(sampler, [4, 5 + i], 1, 5, max_tokens=4)[0][0] for i in range(8)]
    assert wave == sdk_results["wave"]
    scored = sampler.compute_logprobs(ModelInput.from_ints([5, 9, 30, 31])).result()
    assert scored[0] is sdk_results["scored"][0] is None
    assert sdk_results["scored"][1:] == pytest.approx(scored[1:], abs=1e-5)
    went_on = train(client, make_text_datums(4, 3))
    assert sdk_results["went on"] == sdk_results["resumed"] == went_on
    assert sdk_results["tokens"] == client.get_tokenizer().encode("hello")


def test_one_key_samples_while_another_trains_and_both_get_what_they_get_alone(
    sdk_results, local_service
):
    actual = sdk_results["beside"]
    client = local_service.create_lora_training_client(BASE, 6, 3)
    other = local_service.create_lora_training_client(BASE, 4, 9)
    train(other, make_text_datums(6, 5))
    sampler = other.save_weights_and_get_sampling_client()
    assert [sampled(sampler, [5, 9, 4 + i], 1, i) for i in range(6)] == actual["alone"]
    assert [sampled(sampler, [4, 5 + i], 1, 5)[0][0] for i in range(8)] == actual["wave"]
    assert actual["before"] == 7, "samples waited for the whole of another's call"
    data = [item for i in range(80) for item in make_text_datums(12, i)]
    assert train(client, data) == [actual["learnt"], actual["stepped"]]


def test_what_the_sdk_does_again_after_a_fault_is_done_once(served_sdk):
    """A retried request runs once, if it was refused and if its response was lost."""
    actual, first, faulty = served_sdk
    assert not any(faulty.remaining.values()), f"faults that nobody met: {faulty.remaining}"
    models = [first.session_store.list_models(key[1]) for key in first.app._keys]
    # two of the steps, the resumed one, and the two that run side by side
    assert sum(map(len, models)) == 5, "a model that was asked for twice was made twice"
    # of the steps: two updates of two models, a custom loss, an update of two models
    verbs = {"forward_backward": 4 + 1 + 2 + 2, "optim_step": 4 + 1 + 2 + 2, "forward": 3}
    done = {verb: get_metric(first, "work_total", verb=verb, outcome="done") for verb in verbs}
    assert done == verbs, "something ran twice, or not at all"
    neighbor, scored = actual["beside"], 1
    rows = [*actual["sampled"], *actual["sampled from a path"], *sum(neighbor["alone"], [])]
    drawn = [tokens for tokens, _ in rows] + actual["wave"] + neighbor["wave"]
    sampled_tokens = sum(map(len, drawn)) + scored
    assert get_metric(first, "sampled_tokens_total") == sampled_tokens, "a sample was drawn twice"


def test_what_is_refused_raises_at_once_in_the_sdk_and_says_why(served_sdk):
    """Errors name the faulty side. SDK 0.38 raises a failed future at once for either side."""
    actual, _, faulty = served_sdk
    expected = {
        "datum": "500", "after it": "not run", "loss": "stable_reinforce", "base": "no/such-model",
        "path": "tinker://", "image": "an image", "draws": "prompt_alt_tokens_k", "prompt": "999",
    }  # fmt: skip
    for name, text in expected.items():
        kind, message, category, seconds = actual["refused"][name]
        assert text in message and "Traceback" not in message, (name, message)
        assert kind in ("RequestFailedError", "BadRequestError", "NotFoundError"), (name, kind)
        assert kind != "RequestFailedError" or category == "user", (name, category)
        assert seconds < 30, name
    assert actual["refused"]["goes on"]["loss:sum"] > 0
    kind, text, category = actual["server's"]
    assert (kind, category) == ("RequestFailedError", "server")
    assert "its log says why" in text and "nobody is to see" not in text
    calls = 4 + 2 + 2 + 2 + 3 + 2  # training, forwards, a custom loss, refusals, side by side
    sent = len(FAULTS["forward_backward"]) + calls
    assert faulty.seen["forward_backward"] == sent, "a refusal was sent again"


def test_what_was_saved_is_listed_given_a_time_to_live_and_removed(sdk_results):
    assert sdk_results["models"] == [BASE] and sdk_results["run"] == BASE and sdk_results["expires"]
    listed, left = (
        [path.split("/", 3)[3] for path in sdk_results[name]] for name in ("checkpoints", "left")
    )
    assert listed == ["weights/state", "sampler_weights/weights"]
    assert left == ["sampler_weights/weights"]


def test_our_messages_are_the_sdks_on_the_wire(sdk_results):
    from google.protobuf import descriptor_pb2

    def describe(file):
        """Return the fields of each message, and the values of each enum."""
        results = {}

        def walk(before, messages):
            for message in messages:
                rows = results[before + message.name] = {}
                for item in message.field:
                    has_oneof = item.HasField("oneof_index")
                    oneof = message.oneof_decl[item.oneof_index].name if has_oneof else None
                    kind = item.type_name.removeprefix(f".{file.package}.")
                    rows[item.number] = (
                        item.name, item.type, item.label, kind, item.proto3_optional, oneof,
                    )  # fmt: skip
                walk(f"{before}{message.name}.", message.nested_type)

        walk("", file.message_type)
        enums = {e.name: [(value.name, value.number) for value in e.value] for e in file.enum_type}
        return results, enums

    theirs, our_schema = (descriptor_pb2.FileDescriptorProto() for _ in range(2))
    theirs.ParseFromString(bytes.fromhex(sdk_results["schema"]))
    tinker_pb2.DESCRIPTOR.CopyToProto(our_schema)
    (theirs, their_enums), (ours, enums) = describe(theirs), describe(our_schema)
    assert enums == their_enums and len(ours) > 20
    assert {name: theirs[name] for name in ours} == ours
