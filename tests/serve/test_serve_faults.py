"""Test the real SDK against a server that fails now and then."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from serving import BASE, server
from test_serve_sdk import make_text_datums, outputs, sampled

from rl.client import ServiceClient
from rl.learner import LearnerSettings
from rl.programs.program_rollout import LoopServer
from rl.runtime import WorkerSettings
from rl.serve import HttpError
from rl.serve.http_errors import make_error_response
from rl.types import AdamParams, ModelInput, SamplingParams

pytestmark = [pytest.mark.sdk, pytest.mark.slow]
KEYS = ("tml-the-one-that-trains", "tml-the-one-that-samples")
BUDGET = 32  # tokens of a micro-batch: each call has several
ADAM = AdamParams(1e-2)
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
        self.app, self.remaining, self.seen = (
            app,
            {name: list(faults) for name, faults in FAULTS.items()},
            Counter(),
        )

    async def __call__(self, scope, receive, send):
        name = scope["path"].removeprefix("/api/v1/") if scope["type"] == "http" else ""
        self.seen[name] += 1
        status, when = self.remaining[name].pop(0) if self.remaining.get(name) else (None, "")
        if when == "taken":
            await self.app(scope, receive, _nowhere)
        if status is None:
            await self.app(scope, receive, send)
        elif status == CUT:  # fewer bytes are sent than promised
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-length", b"1000")],
                }
            )
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
def sdk_results(tmp_path_factory):
    """Return the results of tests/serve/sdk_faults.py, and its server."""
    python = os.environ.get("WHETSTONE_TEST_SDK")
    if not python:
        pytest.skip("WHETSTONE_TEST_SDK names no Python with the tinker SDK (the extra sdk)")
    with server(tmp_path_factory.mktemp("served"), keys=KEYS, token_budget=BUDGET) as first:
        _breaks_once(first.model_manager)
        faulty = FaultyApp(first.app)
        listening = LoopServer(lambda: faulty, "the test's server")
        try:
            command = [python, str(Path(__file__).with_name("sdk_faults.py")), listening.url, *KEYS]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr[-3000:]
            yield json.loads(done.stdout.splitlines()[-1]), first, faulty
        finally:
            listening.close()


@pytest.fixture
def local_service(tmp_path):
    with ServiceClient(
        output_dir=tmp_path, settings=WorkerSettings(learner=LearnerSettings(token_budget=BUDGET))
    ) as service:
        yield service


def test_what_the_sdk_does_again_after_a_fault_is_done_once(sdk_results, local_service):
    """A retried request runs once, if it was refused and if its response was lost."""
    actual, first, faulty = sdk_results[0]["faults"], *sdk_results[1:]
    assert not any(faulty.remaining.values()), f"faults that nobody met: {faulty.remaining}"
    client = local_service.create_lora_training_client(BASE, 4, 7)
    for step in range(2):
        assert (
            outputs(client.forward_backward(make_text_datums(5, step), "cross_entropy").result())
            == actual[f"learnt {step}"]
        )
        assert client.optim_step(ADAM).result().metrics == actual[f"stepped {step}"]
    sampler = client.save_weights_and_get_sampling_client()
    assert [sampled(sampler, [5, 9, 30 + i], 2, 11 + i) for i in range(2)] == actual["sampled"]
    owner, neighbor = first.session_store.list_models, sdk_results[0]["beside"]
    assert len([model for key in first.app._keys for model in owner(key[1])]) == 3, (
        "a model that was asked for twice was made twice"
    )
    done = {
        verb: first.engine.metrics.get_value("work_total", verb=verb, outcome="done")
        for verb in ("forward_backward", "optim_step", "forward")
    }
    assert done == {"forward_backward": 4, "optim_step": 4, "forward": 1}, (
        "something ran twice, or not at all"
    )
    rows = [row for rows in (*actual["sampled"], *neighbor["alone"]) for row, _ in rows] + neighbor[
        "wave"
    ]
    assert first.engine.metrics.get_value("sampled_tokens_total") == sum(map(len, rows)), (
        "a sample was drawn twice"
    )


def test_whose_fault_it_was_is_told_and_the_callers_own_is_not_tried_again(
    sdk_results, local_service
):
    """Errors name the faulty side. SDK 0.38 raises a failed future at once for either side."""
    actual, _, faulty = sdk_results[0]["faults"], *sdk_results[1:]
    kind, text, category = actual["server's"]
    assert (kind, category) == ("RequestFailedError", "server")
    assert "its log says why" in text
    assert "nobody is to see" not in text
    client = local_service.create_lora_training_client(BASE, 4, 7)
    for step in range(2):
        client.forward_backward(make_text_datums(5, step), "cross_entropy")
        client.optim_step(ADAM).result()
    assert actual["goes on"] == outputs(
        client.forward(make_text_datums(2, 0), "cross_entropy").result()
    )
    kind, text, category = actual["user's"]
    assert (kind, category) == ("RequestFailedError", "user") and "500" in text
    calls = 2 + 3 + 2  # forward_backwards, forwards, and those of the test below
    assert faulty.seen["forward_backward"] == len(FAULTS["forward_backward"]) + calls, (
        "a refusal was sent again"
    )


def test_one_key_samples_while_another_trains_and_both_get_what_they_get_alone(
    sdk_results, local_service
):
    actual = sdk_results[0]["beside"]
    client, other = (
        local_service.create_lora_training_client(BASE, 6, 3),
        local_service.create_lora_training_client(BASE, 4, 9),
    )
    other.forward_backward(make_text_datums(6, 5), "cross_entropy")
    other.optim_step(ADAM).result()
    sampler = other.save_weights_and_get_sampling_client()
    assert [sampled(sampler, [5, 9, 4 + i], 1, i) for i in range(6)] == actual["alone"]
    wave = [
        sampler.sample(ModelInput.from_ints([4, 5 + i]), 1, SamplingParams(6, 5))
        .result()
        .sequences[0]
        .tokens
        for i in range(8)
    ]
    assert wave == actual["wave"]
    assert actual["before"] == 7, "samples waited for the whole of another's call"
    assert (
        outputs(
            client.forward_backward(
                [item for i in range(80) for item in make_text_datums(12, i)], "cross_entropy"
            ).result()
        )
        == actual["learnt"]
    )
    assert client.optim_step(ADAM).result().metrics == actual["stepped"]
