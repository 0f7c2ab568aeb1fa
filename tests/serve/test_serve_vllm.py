"""Test a server whose clients' adapters are sampled from vLLM servers, on a stub."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from helpers import random_datums
from serving import BASE, Wire, run_server, unpack_sequences
from test_vllm import check_logprobs, learner_logprobs, sample, start_stubs

from rl import ServiceClient
from rl.client import SampleStream
from rl.errors import UserError
from rl.runtime import SamplerSettings, WorkerSettings
from rl.sampler import SamplingRequest
from rl.serve import ServedBaseModel, ServeSettings
from rl.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData


@pytest.fixture
def servers():
    with start_stubs() as start:
        yield lambda count=1, lora_rank=8: start(count, lora_rank)


@pytest.fixture
def connect(tmp_path):
    """Yield a function that creates a service of many clients, as serve.py does."""
    with ExitStack() as stack:

        def make(urls):
            sampler = SamplerSettings(kind="vllm", urls=urls, folder=str(tmp_path / "weights"))
            settings = WorkerSettings(dtype="fp32", sampler=sampler, share_bases=True)
            service = ServiceClient(output_dir=tmp_path / "out", seed=3, settings=settings)
            return stack.enter_context(service)

        yield make


def make_trained(service, seed, **options):
    options = {"train_unembed": False, **options}
    client = service.create_lora_training_client("tiny:addition-small", 4, seed, **options)
    client.forward_backward(random_datums(8, seed=seed), "importance_sampling", divisor=10.0)
    client.optim_step(AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    return client


def check_samples(policy, sampler):
    check_logprobs(policy, sample(sampler))


def test_servers_hold_the_adapters_of_several_clients(servers, connect):
    """Each adapter is loaded once, however often its client samples in between."""
    (stub,), urls = servers()
    service = connect(urls)
    policies = [make_trained(service, seed) for seed in (2, 3, 4)]
    samplers = [policy.save_weights_and_get_sampling_client() for policy in policies]
    for _ in range(2):
        for policy, sampler in zip(policies, samplers, strict=True):
            check_samples(policy, sampler)
    assert len(stub.folders) == 1 and len(stub.adapters) == 3
    assert stub.calls.count("/v1/load_lora_adapter") == 3
    scores = samplers[0].compute_logprobs(ModelInput.from_ints([3, 4, 5, 6])).result()
    (expected,) = learner_logprobs(policies[0], [([3], [4, 5, 6])], 1.0)
    np.testing.assert_allclose(scores[1:], expected, atol=1e-5)


def test_samples_of_two_clients_are_made_at_the_same_time(servers, connect):
    (stub,), urls = servers()
    service = connect(urls)
    policies = [make_trained(service, seed) for seed in (2, 3)]
    stub.token_seconds = 0.02
    streams = [SampleStream(p.save_weights_and_get_sampling_client()) for p in policies]
    params = SamplingParams(max_tokens=20, temperature=0.7, stop=[])
    for stream in streams:
        stream.add(SamplingRequest(prompt=[3, 4], params=params))
    finished = [{}, {}]
    assert not any(stream.run_steps(1).finished for stream in streams)
    while any(stream.busy for stream in streams):
        for stream, responses in zip(streams, finished, strict=True):
            responses |= stream.run_steps().finished if stream.busy else {}
    for policy, responses in zip(policies, finished, strict=True):
        ((sequence,),) = [response.sequences for response in responses.values()]
        check_logprobs(policy, [([3, 4], sequence)])


def test_other_weights_are_sampled_from_in_this_process(servers, connect):
    """Full weights, an adapter on a tied head, a rank above the servers', and the base."""
    (stub,), urls = servers()
    service = connect(urls)
    full = service.create_full_training_client("tiny:addition-small", seed=2)
    check_samples(full, full.save_weights_and_get_sampling_client())
    with pytest.warns(UserWarning, match="train_unembed.* sampled from in this process"):
        tied = make_trained(service, 2, train_unembed=True)
    check_samples(tied, tied.save_weights_and_get_sampling_client())
    sample(service.create_sampling_client(base_model="tiny:addition-small"))
    assert not stub.folders and not stub.adapters


def test_a_server_that_lost_its_adapters_gets_them_again(servers, connect):
    (stub,), urls = servers()
    policy = make_trained(connect(urls), 2)
    sampler = policy.save_weights_and_get_sampling_client()
    check_samples(policy, sampler)
    stub.version, stub.adapters = "default", {}
    with pytest.warns(UserWarning, match="does not exist"), pytest.raises(UserError):
        sample(sampler)
    check_samples(policy, sampler)


@pytest.mark.filterwarnings("ignore:.*its samples are requested again")
def test_a_client_over_http_samples_from_its_adapter(servers, tmp_path):
    (stub,), urls = servers()
    sampler = SamplerSettings(kind="vllm", urls=urls, folder=str(tmp_path / "weights"))
    worker = WorkerSettings(dtype="fp32", sampler=sampler)
    bases = (ServedBaseModel(BASE, BASE),)
    with run_server(ServeSettings(bases, tmp_path / "out", worker=worker)) as served:
        wires = Wire(served)
        wires.open()
        body = wires.model_body()
        body["lora_config"] |= {"train_unembed": False}
        model = wires.wait(wires.post("create_model", **body))["model_id"]
        answer = wires.sample(wires.sampler(model, 1), 0, [3, 4, 5], max_tokens=6, temperature=1.0)
        ((drawn, logprobs, _),) = unpack_sequences(answer)
        assert stub.bodies[-1]["model"] in stub.adapters
        tokens = [3, 4, 5, *drawn]
        targets = TensorData(np.array(tokens[1:], np.int64))
        datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets})
        (row,) = wires.score(model, 2, [datum])
        np.testing.assert_allclose(logprobs, row[2:], atol=1e-5)
        stub.fault, name = "http 500", f"{wires.session}:sample:0"  # no fault of a client
        assert wires.wait(wires.ask_sample(name, 1, [3, 4, 5]))["category"] == "server"
        body = {"model": name, "prompt": [4, 5], "max_tokens": 2}
        refused = wires.http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and float(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "server_error"


def test_servers_without_adapters_are_refused(servers, connect):
    _, urls = servers(lora_rank=0)
    with pytest.raises(UserError, match="start them with --enable-lora"):
        connect(urls)
