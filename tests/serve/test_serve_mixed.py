"""Test that several tenants sample in one batch over a shared base model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import random_datums
from sampler_models import one_thread  # noqa: F401
from serving import BASE, Wire, hold_requests, server, unpack_sequences

from rl.client import SampleStream, ServiceClient
from rl.errors import UserError
from rl.runtime import SamplerSettings, WorkerSettings
from rl.sampler import Engine, SamplingRequest
from rl.types import AdamParams, SamplingParams

LEARN = AdamParams(learning_rate=0.05)


@pytest.fixture
def mixed_steps(monkeypatch):
    """Record the adapters of each engine step that runs several."""
    seen, step = [], Engine.step

    def noting(self):
        numbers = {job.request.adapter_id for job in (*self._running.values(), *self._waiting)}
        if len(numbers) > 1:
            seen.append(numbers)
        return step(self)

    monkeypatch.setattr(Engine, "step", noting)
    return seen


@pytest.fixture(scope="module", params=["auto", "paged"])
def service(request, tmp_path_factory):
    sampler = SamplerSettings(cache=request.param, kv_cache_tokens=8192)
    settings = WorkerSettings(share_bases=True, sampler=sampler)
    folder = tmp_path_factory.mktemp("out")
    with ServiceClient(output_dir=folder, seed=1, settings=settings) as service:
        yield service


def trained(service, rank, seed, **parts):
    """Return a client with a LoRA trained away from its zero initialization."""
    client = service.create_lora_training_client(BASE, rank, seed, **parts)
    client.forward_backward(random_datums(4, seed=seed), "importance_sampling")
    client.optim_step(LEARN).result()
    return client


def make_request(i: int) -> SamplingRequest:
    params = SamplingParams(max_tokens=5 + i % 7, temperature=0.0 if i % 4 == 0 else 1.0, stop=[])
    return SamplingRequest(
        prompt=[3 + i % 5, 4, 12] + [5] * (i % 3), params=params, seed=7, problem=i,
        num_samples=1 + i % 2,
    )  # fmt: skip


def check(result, expected):
    assert [s.tokens for s in result.sequences] == [s.tokens for s in expected.sequences]
    for got, target in zip(result.sequences, expected.sequences, strict=True):
        np.testing.assert_allclose(got.logprobs, target.logprobs, atol=1e-5)
        assert got.version == target.version


def test_a_mixed_stream_draws_for_each_what_it_draws_alone_while_one_learns(service, mixed_steps):
    models = [
        trained(service, 4, 2),
        trained(service, 9, 3, train_mlp=False),
        trained(service, 1, 4, train_attn=False),
    ]
    models[1].save_weights_for_sampler("kept").result()
    saved = models[1].save_weights_for_sampler("again").result().path
    clients = [model.save_weights_and_get_sampling_client() for model in models]
    clients.append(service.create_sampling_client(base_model=BASE))
    clients.append(service.create_sampling_client(model_path=saved))
    assert len({client.mix_group for client in clients}) == 1 and clients[0].mix_group is not None
    asking = [(clients[i % len(clients)], make_request(i)) for i in range(20)]
    results, tickets, late = {}, {}, None
    with SampleStream(clients[0], mixed=True) as stream:
        while asking or stream.busy:
            for client, request in asking[:3]:
                tickets[stream.add(request, client)] = (client, request)
            del asking[:3]
            # new weights of a model while its old ones are being sampled
            if late is None and len(tickets) == 9:
                models[0].forward_backward(random_datums(4, seed=9), "importance_sampling")
                models[0].optim_step(LEARN).result()
                late = models[0].save_weights_and_get_sampling_client()
                tickets[stream.add(make_request(50), late)] = (late, make_request(50))
            if len(tickets) in (6, 15):
                stream.recompute_cache()  # recomputes every cache, each with its adapter
            results |= stream.run_steps(3).finished
    assert late is not None and results.keys() == tickets.keys() and max(map(len, mixed_steps)) >= 4
    for ticket, (client, request) in tickets.items():
        check(results[ticket], client.sample_many([request]).result()[0][0])
    request, drawn = replace(make_request(1), num_samples=4), set()
    for client in clients:
        drawn.add(tuple(client.sample_many([request]).result()[0][0].sequences[0].tokens))
    assert len(drawn) >= 3, "the models draw the same, so a mix-up would not show"


def test_a_running_request_keeps_weights_that_are_released_meanwhile(service):
    model, other = trained(service, 4, 2), trained(service, 4, 3)
    client, second = (each.save_weights_and_get_sampling_client() for each in (model, other))
    request = replace(make_request(3), num_samples=4)
    expected = client.sample_many([request]).result()[0][0]
    with SampleStream(second, mixed=True) as stream:
        ticket = stream.add(request, client)
        results = dict(stream.run_steps(2).finished)
        assert ticket not in results
        client.release()
        model.forward_backward(random_datums(4, seed=9), "importance_sampling")
        model.optim_step(LEARN).result()
        model.save_weights_and_get_sampling_client()
        while stream.busy:
            results |= stream.run_steps(3).finished
    check(results[ticket], expected)


def test_what_cannot_be_mixed_says_so(service, tmp_path):
    first, full = trained(service, 2, 2), service.create_full_training_client(BASE)
    client, other = (model.save_weights_and_get_sampling_client() for model in (first, full))
    assert client.mix_group is not None and other.mix_group is None
    with pytest.raises(UserError, match=r"mixed=False"):
        SampleStream(other, mixed=True)
    with SampleStream(client, mixed=True) as stream:
        with pytest.raises(UserError, match=r"another base"):
            stream.add(make_request(0), other)
        with pytest.raises(UserError, match=r"add\(request, client\)"):
            stream.add(make_request(0))
    with SampleStream(client) as stream, pytest.raises(UserError, match=r"mixed=True"):
        stream.add(make_request(0), other)
    hf = WorkerSettings(share_bases=True, sampler=SamplerSettings(kind="hf"))
    with ServiceClient(output_dir=tmp_path, seed=1, settings=hf) as generic:
        assert trained(generic, 2, 2).save_weights_and_get_sampling_client().mix_group is None


def test_a_tenant_whose_weights_diverged_fails_alone(tmp_path, mixed_steps):
    with server(tmp_path) as served:
        a, b = Wire(served), Wire(served)
        a.open(), b.open()
        good, bad = a.model(0, seed=1), b.model(0, seed=2)
        for client, model, rate in ((a, good, 0.05), (b, bad, 1e30)):
            client.wait(client.ask(model, 1, random_datums(3, seed=1), "importance_sampling"))
            client.wait(client.step(model, 2, learning_rate=rate))
        sampler, broken = a.sampler(good, 3), b.sampler(bad, 3)
        ask = ([5, 6, 7], 4)
        single = unpack_sequences(a.sample(sampler, 0, *ask, max_tokens=30, seed=1))
        tickets = []
        with hold_requests(served):
            for i in range(3):
                tickets.append((b, b.ask_sample(broken, i, [5, 6, 7], 3, max_tokens=30)))
                tickets.append((a, a.ask_sample(sampler, 10 + i, *ask, max_tokens=30, seed=1)))
        for client, ticket in tickets:
            answer = client.wait(ticket, "SampleResponse")
            if client is b:
                assert answer["category"] == "user" and "NaN" in answer["error"]
            else:
                tokens = [tokens for tokens, *_ in unpack_sequences(answer)]
                assert tokens == [tokens for tokens, *_ in single]
        assert mixed_steps
