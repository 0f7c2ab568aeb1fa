"""Test Tinker's verbs in process: futures, sampler and learner, saving, errors."""

import asyncio
import itertools
import json
import math
import os
import random
import time

import numpy as np
import pytest
import torch
from helpers import compute_relative_difference, random_datums

from rl import ServiceClient, TensorData, renderers, types
from rl.client import SampleStream
from rl.distributed.checkpoint_folder import DamagedCheckpoint
from rl.errors import BadRequestError
from rl.losses import get_loss
from rl.models import info as model_info
from rl.sampler import SamplingRequest
from rl.types import AdamParams, Datum, ModelInput, SamplingParams

ADAM = AdamParams(learning_rate=3e-3, eps=1e-8)
PROMPT = ModelInput.from_ints([3, 4, 12, 5, 6, 13])


@pytest.fixture
def service(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out", seed=3) as service:
        yield service


@pytest.fixture(params=["full", "lora"])
def client(request, service):
    return make(service, request.param)


def test_a_stream_counts_the_samples_that_have_not_finished(service):
    """Compare with the samples that are shorter so far than at the end."""
    stream = SampleStream(service.create_sampling_client(base_model="tiny:addition"))
    params = SamplingParams(max_tokens=24, stop=[3, 4, 5])
    request = SamplingRequest(prompt=[3, 4, 12], params=params, num_samples=12, seed=1)
    ticket, dropped = stream.add(request), stream.add(SamplingRequest(prompt=[3, 4], params=params))
    assert stream.num_unfinished == 13
    stream.drop(dropped)
    assert stream.num_unfinished == 12
    counts, partial, finished = [], [], {}
    while stream.busy:
        output = stream.run_steps(1, partial_tickets=True)
        finished |= output.finished
        counts.append(stream.num_unfinished)
        partial.append(output.partial_output.get(ticket, {}))
    final = [len(sequence.tokens) for sequence in finished[ticket].sequences]
    assert len(set(counts)) > 3 and counts == [
        sum(len(sequence.tokens) < final[i] for i, sequence in samples.items())
        for samples in partial
    ]


def test_loading_a_sampler_frees_the_caches_of_streams_without_requests(service):
    """The next request of such a stream has nothing to reuse; a running one goes on."""
    stream = SampleStream(service.create_sampling_client(base_model="tiny:addition"))
    requests = itertools.count()

    def sample(loads: str) -> int:
        params = SamplingParams(max_tokens=4, temperature=0.5)
        prompt = [3, 4, 12, 5, 6, 13] * 8
        ticket = stream.add(SamplingRequest(prompt=prompt, problem=next(requests), params=params))
        parts = [stream.run_steps(1)]
        if loads == "while it runs":
            service.create_sampling_client(base_model="tiny:ascii-small")
        while ticket not in parts[-1].finished:
            parts.append(stream.run_steps(1))
        if loads == "after it":
            service.create_sampling_client(base_model="tiny:ascii-small")
        return sum(part.counters["prefix_cached_tokens"] for part in parts)

    cached = [sample(loads) for loads in ("", "", "while it runs", "after it", "", "")]
    assert cached[0] == cached[4] == 0 < cached[1] == cached[2] == cached[3] == cached[5]


def make(service, kind="full"):
    if kind == "lora":
        return service.create_lora_training_client("tiny:addition", rank=4, seed=2)
    return service.create_full_training_client("tiny:addition", seed=2)


_workers: dict = {}


@pytest.fixture(autouse=True)
def keep_worker(monkeypatch):
    """Store the worker of each driver, so that a test can inspect weights and gradients."""
    from rl.runtime import worker_group

    original = worker_group._execute

    def execute(worker, verb, arguments):
        _workers[None] = worker
        return original(worker, verb, arguments)

    monkeypatch.setattr(worker_group, "_execute", execute)
    yield
    _workers.clear()


def weights(model_id=0) -> torch.Tensor:
    return torch.cat(
        [
            p.detach().reshape(-1).clone()
            for p in _workers[None].learners[model_id].trainable.values()
        ]
    )


def gradient(model_id=0) -> torch.Tensor:
    return torch.cat(
        [p.grad.reshape(-1).clone() for p in _workers[None].learners[model_id].trainable.values()]
    )


def train(client, steps=3):
    for step in range(steps):
        client.forward_backward(random_datums(6, seed=step), "importance_sampling", divisor=10.0)
        client.optim_step(ADAM).result()


# ----------------------------------------------------------------------------------------- learning


def test_verbs_run_in_order_and_futures_are_both_waited_for_and_awaited(client):
    datums = random_datums(4)
    first = client.forward_backward(datums, "ppo")
    second = client.optim_step(ADAM)
    third = client.forward(datums, "ppo")
    assert second.result().metrics["grad_norm"] > 0
    before, after = first.result(), third.result()
    assert not np.allclose(
        before.loss_fn_outputs[0]["logprobs"].array, after.loss_fn_outputs[0]["logprobs"].array
    )
    assert set(before.metrics) >= {"loss:sum", "clipped_low:sum"}

    async def script():
        submitted = await client.forward_backward_async(datums, "ppo")
        update = await client.optim_step_async(ADAM)
        return await submitted, await update

    forward, update = asyncio.run(script())
    assert forward.metrics["loss:sum"] == pytest.approx(after.metrics["loss:sum"], rel=1e-6)
    assert update.metrics["grad_norm"] > 0


def test_clients_are_futures_of_themselves(service):
    client = service.create_lora_training_client("tiny:addition", rank=2).result()
    assert client.get_info().is_lora
    assert client.get_info().lora_rank == 2
    assert client.get_info().model_name == "tiny:addition"

    async def script():
        other = await service.create_lora_training_client_async("tiny:addition", rank=3)
        sampler = await other.save_weights_and_get_sampling_client_async()
        response = await sampler.sample_async(PROMPT, 2, SamplingParams(max_tokens=3))
        values = await sampler.compute_logprobs_async(PROMPT)
        return other.get_info().lora_rank, response, values

    rank, response, values = asyncio.run(script())
    assert rank == 3
    assert len(response.sequences) == 2
    assert values[0] is None
    assert len(values) == PROMPT.length


def test_custom_loss_gives_the_gradient_of_the_built_in_one(client):
    datums = random_datums(5)
    client.forward_backward(datums, "ppo").result()
    built_in = gradient()
    # clears the gradient, changes no weight
    client.optim_step(AdamParams(learning_rate=0.0)).result()

    def loss(data, logprobs):
        total = 0.0
        for datum, logp in zip(data, logprobs, strict=True):
            inputs = {n: v.to_torch() for n, v in datum.loss_fn_inputs.items()}
            total = (
                total + get_loss("ppo").fn(logp, logp, inputs, torch.tensor([0, len(logp)]), {})[0]
            )
        return total, {"mine": 2.0}

    output = client.forward_backward_custom(datums, loss).result()
    assert compute_relative_difference(gradient(), built_in) < 1e-5
    # under the user's name
    assert output.metrics["mine"] == 2.0 and "mine:mean" not in output.metrics


def test_a_custom_loss_that_ignores_the_logprobs_is_told_so(client):
    with pytest.raises(ValueError, match="scalar tensor that depends on the logprobs"):
        client.forward_backward_custom(
            random_datums(1), lambda data, logprobs: (torch.tensor(1.0), {})
        )


def test_forward_backward_of_nothing_is_a_no_op(client):
    client.info  # noqa: B018  (made before the weights are looked at)
    before = weights()
    assert client.forward_backward([], "ppo").result().metrics["loss:sum"] == 0.0
    assert client.optim_step(ADAM).result().metrics["skipped"] == 1.0
    assert torch.equal(weights(), before)


def test_an_update_after_a_failed_forward_backward_is_refused(client):
    datums = random_datums(2)
    datums[0].loss_fn_inputs["logprobs"].array[:] = -1e30  # the ratio overflows
    good = client.forward_backward(random_datums(3), "importance_sampling")
    failed = client.forward_backward(datums, "importance_sampling")
    update = client.optim_step(ADAM)
    good.result()
    before = weights()
    with pytest.raises(FloatingPointError):
        failed.result()
    with pytest.raises(
        RuntimeError, match="optim_step was not run, because an earlier forward_backward failed"
    ):
        update.result()
    assert torch.equal(weights(), before)
    client.forward_backward(random_datums(3), "importance_sampling")
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0  # the client still works


@pytest.mark.parametrize("custom", [False, True])
def test_nothing_is_left_of_a_backward_that_failed_halfway(service, monkeypatch, custom):
    """The next optimizer step is refused, and the step after it equals that of an undisturbed
    client.
    """
    client, data, keep = make(service), random_datums(4), AdamParams(learning_rate=0.0)
    client.forward_backward(data, "importance_sampling")
    expected = client.optim_step(keep).result().metrics["grad_norm"]
    (learner,) = _workers[None].learners.values()
    backward = learner.backend.backward

    def fails(value):
        backward(value)
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(learner.backend, "backward", fails)
        if custom:
            failed = client.forward_backward_custom(
                data, lambda data, logprobs: (sum(lp.sum() for lp in logprobs), {})
            )
        else:
            failed = client.forward_backward(data, "importance_sampling")
        update = client.optim_step(ADAM)
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            failed.result()
        with pytest.raises(RuntimeError, match="optim_step was not run"):
            update.result()
    client.forward_backward(data, "importance_sampling")
    assert client.optim_step(keep).result().metrics["grad_norm"] == pytest.approx(
        expected, rel=1e-6
    )


def test_malformed_calls_are_refused_where_they_are_made(client):
    datum = Datum(
        ModelInput.from_ints([3, 4, 5, 6]),
        {"target_tokens": [4, 5, 6, 7], "logprobs": [-1.0], "advantages": [1.0]},
    )
    with pytest.raises(ValueError, match=r"\[0\.0\] \* 3 \+ logprobs"):
        client.forward_backward([datum], "ppo")
    good = random_datums(1)
    with pytest.raises(
        ValueError,
        match="'clip_hi'; ppo takes clip_low_threshold, clip_high_threshold, temperature",
    ):
        client.forward_backward(good, "ppo", {"clip_hi": 1.3})
    with pytest.raises(ValueError, match="importance_sampling"):
        client.forward_backward(good, "stable_reinforce")
    with pytest.raises(ValueError, match="divisor"):
        client.forward_backward(good, "ppo", divisor=0.0)
    too_long = Datum(ModelInput.from_ints([3] * 513), {"target_tokens": [3] * 513})
    with pytest.raises(ValueError, match="513 tokens, the model's context holds 512"):
        client.forward([too_long], "cross_entropy")
    with pytest.raises(TypeError, match="AdamParams"):
        client.optim_step(1e-4)


def test_arguments_at_the_edge_of_a_range_are_refused(service):
    client = make(service)
    with pytest.raises(BadRequestError, match="below 0.5, got 0.5"):
        client.forward([], "dpo", {"label_smoothing": 0.5})
    sampler = client.save_weights_and_get_sampling_client()
    with pytest.raises(BadRequestError, match="is a types.TensorData of token ids.*got a list"):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1), target_prompt_logprobs=[])


def test_a_wait_that_is_given_up_does_not_stop_the_verbs(client):
    """A cancelled await does not stop its verb or the later ones."""
    sampler = client.save_weights_and_get_sampling_client()

    async def script():
        slow = client.forward_backward(
            [d for i in range(60) for d in random_datums(50, seed=i)], "ppo"
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(slow, 0.001)
        samples = [
            asyncio.ensure_future(sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=2)))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        samples[1].cancel()
        return await samples[0], await samples[2]

    assert all(len(response.sequences) == 1 for response in asyncio.run(script()))
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_done_and_release_see_to_samples_that_wait(client):
    sampler = client.save_weights_and_get_sampling_client()
    future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2))
    for _ in range(1000):
        if future.done():
            break
        time.sleep(0.01)
    assert future.done()
    waiting = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2))
    sampler.release()
    assert len(waiting.result().sequences) == 1


def test_one_bad_request_does_not_fail_those_beside_it(client):
    sampler = client.save_weights_and_get_sampling_client()
    good = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="max_tokens=5000 exceed the model's context of 512"):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=5000))
    with pytest.raises(
        ValueError, match="the sequence to score holds the id 14; the model's ids are 0 to 13"
    ):
        sampler.compute_logprobs(ModelInput.from_ints([3, 14]))
    assert len(good.result().sequences) == 1


# ---------------------------------------------------------------------- the sampler and the learner


def sampled_datums(client, temperature, count=8, max_tokens=12):
    sampler = client.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    sequences = sampler.sample(PROMPT, count, params).result().sequences
    datums = []
    for sequence in sequences:
        tokens, zeros = PROMPT.to_ints() + sequence.tokens, [0.0] * (PROMPT.length - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": zeros + sequence.logprobs,
            "advantages": zeros + [1.0] * len(sequence.tokens),
        }
        datums.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return datums


def compute_largest_difference(output, datums) -> float:
    worst = 0.0
    for out, datum in zip(output.loss_fn_outputs, datums, strict=True):
        actions = datum.loss_fn_inputs["advantages"].array != 0
        worst = max(
            worst,
            np.abs(out["logprobs"].array - datum.loss_fn_inputs["logprobs"].array)[actions].max(),
        )
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_learner_agree_after_every_weight_sync(client, temperature):
    """By default the learner scores at the temperature of the last samples."""
    for _ in range(3):
        datums = sampled_datums(client, temperature)
        output = client.forward_backward(datums, "importance_sampling").result()
        assert compute_largest_difference(output, datums) < 1e-4
        assert output.metrics["temperature:mean"] == temperature
        client.optim_step(ADAM).result()
    # the samples now come from an older version: the comparison would notice
    assert (
        compute_largest_difference(client.forward(datums, "importance_sampling").result(), datums)
        > 1e-3
    )


def test_a_second_update_on_the_same_samples_is_scored_as_they_were_drawn(client):
    datums = sampled_datums(client, 0.7)
    for _ in range(2):
        output = client.forward_backward(datums, "ppo").result()
        assert output.metrics["temperature:mean"] == 0.7
        client.optim_step(AdamParams(learning_rate=1e-9)).result()
    seen = []
    client.forward_backward_custom(
        datums,
        lambda data, logprobs: (seen.extend(logprobs) or sum(lp.sum() for lp in logprobs), {}),
    ).result()
    expected = client.forward(datums, "ppo", {"temperature": 0.7}).result().loss_fn_outputs
    np.testing.assert_allclose(seen[0].detach(), expected[0]["logprobs"].array, atol=1e-5)


def test_weights_sampled_at_two_temperatures_ask_which(client):
    sampler = client.save_weights_and_get_sampling_client()
    for temperature in (1.0, 0.3, 0.0):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, temperature=temperature)).result()
    with pytest.raises(ValueError, match=r"temperatures \[1.0, 0.3\].*loss_fn_config"):
        client.forward(random_datums(1), "ppo").result()
    assert (
        client.forward(random_datums(1), "ppo", {"temperature": 0.3})
        .result()
        .metrics["temperature:mean"]
        == 0.3
    )


def test_the_wrong_temperature_would_be_seen(client):
    datums = sampled_datums(client, 0.7)
    output = client.forward(datums, "importance_sampling", {"temperature": 1.0}).result()
    assert compute_largest_difference(output, datums) > 0.05


def test_truncated_samples_are_not_trained_on(client):
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample(PROMPT, 2, SamplingParams(max_tokens=2, top_p=0.5)).result()
    with pytest.raises(ValueError, match="top_k=-1 and top_p=1"):
        client.forward_backward(random_datums(2), "ppo").result()
    client.forward_backward([], "ppo").result()
    # a concurrent evaluation may be truncated
    sampler.sample(PROMPT, 2, SamplingParams(max_tokens=2)).result()
    client.forward_backward(random_datums(2), "ppo").result()


def test_weights_loaded_from_a_saved_folder_sample_as_those_in_memory(client):
    train(client)
    path = client.save_weights_for_sampler("a").result().path
    loaded = client.service.create_sampling_client(model_path=path)
    params = SamplingParams(max_tokens=8, seed=11, temperature=0.9)
    here = client.save_weights_and_get_sampling_client().sample(PROMPT, 4, params).result()
    present = loaded.sample(PROMPT, 4, params).result()
    assert [s.tokens for s in here.sequences] == [s.tokens for s in present.sequences]
    # the learner also knows the temperature of samples from the folder: they belong to its version
    assert client.forward(random_datums(1), "ppo").result().metrics["temperature:mean"] == 0.9


def test_compute_logprobs_against_the_learner(client):
    train(client)
    sampler = client.save_weights_and_get_sampling_client()
    tokens = PROMPT.to_ints()
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    learner = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].array
    np.testing.assert_allclose(sampler.compute_logprobs(PROMPT).result()[1:], learner, atol=1e-5)


def test_a_sample_that_fills_the_context_can_be_scored(service):
    """A frozen reference scores such samples of a run: the last token is not fed."""
    sampler = service.create_sampling_client(base_model="tiny:addition")
    sequence = sampler.sample(PROMPT, 1, SamplingParams(stop=[])).result().sequences[0]
    tokens = [*PROMPT.to_ints(), *sequence.tokens]
    assert len(tokens) == sampler.info["max_context"] + 1
    scores = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(scores[len(PROMPT.to_ints()) :], sequence.logprobs, atol=1e-4)
    with pytest.raises(BadRequestError, match="exceeds the model's context"):
        sampler.compute_logprobs(ModelInput.from_ints([*tokens, 1])).result()


def test_seeds_repeat_and_members_of_a_group_differ(client):
    sampler = client.save_weights_and_get_sampling_client()

    def draw(**settings):
        return [
            tuple(s.tokens)
            for s in sampler.sample(PROMPT, 6, SamplingParams(max_tokens=10, stop=[], **settings))
            .result()
            .sequences
        ]

    assert draw(seed=1) == draw(seed=1) and draw(seed=1) != draw(seed=2)
    assert len(set(draw(seed=1))) == 6
    assert draw() != draw()  # without a seed every call draws new samples


def test_samples_asked_for_one_by_one_run_as_one_batch_and_are_the_same(client):
    sampler = client.save_weights_and_get_sampling_client()
    prompts = [ModelInput.from_ints([3, 4, 12, 5, i, 13]) for i in range(2, 10)]
    params = SamplingParams(max_tokens=6, seed=5)
    single = [sampler.sample(p, 2, params).result().sequences for p in prompts]
    verbs = []
    worker_sample = type(_workers[None]).sample
    _workers[None].sample = lambda *a: (verbs.append(len(a[1])), worker_sample(_workers[None], *a))[
        1
    ]
    futures = [sampler.sample(p, 2, params) for p in prompts]
    together = [f.result().sequences for f in futures]

    async def gathered():
        return await asyncio.gather(*(sampler.sample_async(p, 2, params) for p in prompts))

    by_gather = [r.sequences for r in asyncio.run(gathered())]
    assert verbs == [8, 8]  # two batches of eight requests, not sixteen single requests
    for a, b, c in zip(single, together, by_gather, strict=True):
        assert [s.tokens for s in a] == [s.tokens for s in b] == [s.tokens for s in c]


def test_bad_prompts_are_refused(client):
    sampler = client.save_weights_and_get_sampling_client()
    with pytest.raises(ValueError, match="holds the id 99; the model's ids are 0 to 13"):
        sampler.sample(ModelInput.from_ints([99]), 1, SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="empty"):
        sampler.sample(ModelInput.empty(), 1, SamplingParams(max_tokens=1))


# ------------------------------------------------------------------------------------------- saving


def test_state_with_optimizer_goes_on_bit_for_bit(service, client):
    train(client, 3)
    path = client.save_state("three", metadata={"note": "half way"}).result().path
    train(client, 3)
    undisturbed = weights()
    resumed = service.create_training_client_from_state_with_optimizer(path)
    train(resumed, 3)
    assert torch.equal(weights(resumed.model_id), undisturbed)
    assert json.loads(open(os.path.join(path, "state.json")).read())["metadata"] == {
        "note": "half way"
    }
    fresh = service.create_training_client_from_state(path)  # weights only: Adam restarts
    train(fresh, 3)
    assert not torch.equal(weights(fresh.model_id), undisturbed)


def test_load_state_with_and_without_optimizer(client):
    train(client, 2)
    path = client.save_state("two").result().path
    saved = weights()
    train(client, 2)
    undisturbed = weights()
    client.load_state_with_optimizer(path).result()
    assert torch.equal(weights(), saved)
    train(client, 2)
    assert torch.equal(weights(), undisturbed)
    client.load_state(path).result()
    assert torch.equal(weights(), saved)
    train(client, 2)
    loaded = weights()
    fresh = client.service.create_training_client_from_state(path)
    train(fresh, 2)
    assert torch.equal(weights(fresh.model_id), loaded)  # the optimizer is new in both


def test_weights_for_the_sampler_can_be_trained_on(service, client):
    train(client)
    path = client.save_weights_for_sampler("w").result().path
    before = weights()
    again = service.create_training_client_from_state(path).result()
    assert torch.equal(weights(again.model_id), before)


def test_an_adapter_on_an_earlier_checkpoint_survives_a_move(service, tmp_path):
    full = make(service)
    train(full)
    base = full.save_state("taught").result().path + "/model"
    adapter = service.create_lora_training_client(base, rank=2, seed=1)
    train(adapter)
    adapter.save_state("adapted").result()
    expected = adapter.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()
    (tmp_path / "out").rename(tmp_path / "moved")
    path = str(tmp_path / "moved" / "checkpoints" / "adapted")
    assert service.create_sampling_client(path).compute_logprobs(PROMPT).result() == expected
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert (
        resumed.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result() == expected
    )


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT.to_ints()])).logits


def test_what_is_saved_for_the_sampler_loads_in_transformers_and_peft(client):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rl.models import load_model

    train(client)
    expected = logits_of(_workers[None].learners[0].model)
    path = client.save_weights_for_sampler("plain").result().path
    if client.get_info().is_lora:
        base = load_model("tiny:addition", seed=0).model
        loaded = PeftModel.from_pretrained(base, path)
        merged = client.save_weights_for_sampler("merged", merged=True).result().path
        torch.testing.assert_close(
            logits_of(AutoModelForCausalLM.from_pretrained(merged)), expected, rtol=1e-4, atol=1e-4
        )
    else:
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert AutoTokenizer.from_pretrained(path).encode("1+2=") == [3, 12, 4, 13]
    torch.testing.assert_close(logits_of(loaded), expected, rtol=1e-5, atol=1e-5)


def test_a_name_stays_and_must_be_one(client):
    client.save_state("once").result()
    with pytest.raises(ValueError, match="exists already"):
        client.save_state("once").result()
    with pytest.raises(ValueError, match="exists already"):
        client.save_weights_for_sampler("taken").result()
        client.save_weights_for_sampler("taken").result()
    for name in ("a/b", "../up", "", ".hidden"):
        with pytest.raises(ValueError, match="letters, digits"):
            client.save_state(name)


def test_a_sampling_client_writes_nothing_and_its_name_may_be_used_again(client):
    client.save_weights_and_get_sampling_client().sample(
        PROMPT, 1, SamplingParams(max_tokens=2)
    ).result()
    first = client.save_weights_and_get_sampling_client("once")
    client.forward_backward(random_datums(2), "ppo")
    client.optim_step(AdamParams(learning_rate=1e-2)).result()
    second = client.save_weights_and_get_sampling_client("once")
    before, after = (sampler.compute_logprobs(PROMPT).result() for sampler in (first, second))
    assert before != after
    assert not os.path.exists(client.service.output_dir)


def test_a_gradient_is_not_lost_in_a_checkpoint(client):
    client.forward_backward(random_datums(2), "ppo")
    with pytest.raises(ValueError, match="call optim_step first"):
        client.save_state("half").result()


def test_a_damaged_checkpoint_is_refused_before_anything_changes(client):
    train(client, 1)
    path = client.save_state("good").result().path
    before = weights()
    file = os.path.join(path, "optimizer.safetensors")
    content = bytearray(open(file, "rb").read())
    content[len(content) // 2] ^= 1
    open(file, "wb").write(bytes(content))
    with pytest.raises(
        DamagedCheckpoint, match="optimizer.safetensors does not match the checksum"
    ):
        client.load_state_with_optimizer(path).result()
    assert torch.equal(weights(), before)


def test_a_checkpoint_expires(client):
    path = client.save_state("brief", ttl_seconds=0.2).result().path
    kept = client.save_state("kept", ttl_seconds=3600).result().path
    time.sleep(0.3)
    with pytest.raises(DamagedCheckpoint, match="expired"):
        client.load_state(path).result()
    client.save_state("next").result()
    assert not os.path.exists(path) and os.path.exists(kept)


def test_closed_services_say_so(tmp_path):
    service = ServiceClient(output_dir=tmp_path)
    client = make(service)
    client.info  # noqa: B018
    service.close()
    service.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.forward(random_datums(1), "ppo")


def test_wrong_addresses_are_told_what_is_right(service, tmp_path):
    with pytest.raises(ValueError, match="tiny:addition"):
        service.create_full_training_client("tiny:adition").result()
    with pytest.raises(ValueError, match="no model folder"):
        service.create_full_training_client("./not/there").result()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no config.json"):
        service.create_full_training_client(str(tmp_path / "empty")).result()
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        service.create_full_training_client("someone/some-model").result()
    with pytest.raises(ValueError, match="no checkpoint"):
        service.create_training_client_from_state(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="alpha"):
        service.create_lora_training_client("tiny:addition", alpha=0.0).result()
    with pytest.raises(ValueError, match="base_url"):
        ServiceClient(base_url="http://localhost:1")


def test_a_folder_without_tokenizer_works_with_ids(service, tmp_path):
    from rl.models import load_model

    load_model("tiny:addition").model.save_pretrained(tmp_path / "bare")
    client = service.create_full_training_client(str(tmp_path / "bare"))
    assert len(sampled_datums(client, 1.0)) == 8
    with pytest.raises(ValueError, match="has no tokenizer"):
        client.get_tokenizer()


# ----------------------------------------------------------------------------- a script of Tinker's


def test_a_script_in_the_manner_of_tinkers_guide_runs_unchanged(tmp_path, monkeypatch):
    """Groups, centred advantages, weights saved and loaded by path in every batch."""
    monkeypatch.setenv("WHETSTONE_OUTPUT_DIR", str(tmp_path / "mine"))
    service = ServiceClient()
    training_client = service.create_lora_training_client(base_model="tiny:addition", rank=32)
    name = model_info.get_recommended_renderer_name("tiny:addition")
    renderer = renderers.get_renderer(name, training_client.get_tokenizer())
    params = types.SamplingParams(max_tokens=3, stop=renderer.get_stop_sequences())
    adam_params = types.AdamParams(learning_rate=4e-3)
    rng, history = random.Random(0), []
    for batch_idx in range(6):
        saved = training_client.save_weights_for_sampler(name=f"{batch_idx:06d}").result()
        sampling_client = service.create_sampling_client(model_path=saved.path)
        datums, all_rewards = [], []
        for _ in range(8):
            convo = [{"role": "user", "content": f"{rng.randint(10, 99)}+{rng.randint(10, 99)}="}]
            model_input = renderer.build_generation_prompt(convo)
            result = sampling_client.sample(
                prompt=model_input, num_samples=8, sampling_params=params
            ).result()
            # an easy target: answers that begin with 1
            texts = [renderer.parse_response(seq.tokens)[0]["content"] for seq in result.sequences]
            rewards = [float(text.startswith("1")) for text in texts]
            all_rewards += rewards
            advantages = [r - sum(rewards) / len(rewards) for r in rewards]
            if all(a == 0 for a in advantages):
                continue
            for seq, advantage in zip(result.sequences, advantages, strict=True):
                tokens, zeros = model_input.to_ints() + seq.tokens, [0.0] * (model_input.length - 1)
                inputs = {
                    "target_tokens": tokens[1:], "logprobs": zeros + list(seq.logprobs),
                    "advantages": zeros + [advantage] * len(seq.tokens),
                }  # fmt: skip
                fields = {k: TensorData.from_torch(torch.tensor(v)) for k, v in inputs.items()}
                read = types.ModelInput.from_ints(tokens=tokens[:-1])
                datums.append(types.Datum(model_input=read, loss_fn_inputs=fields))
        fwd_bwd_future = training_client.forward_backward(datums, loss_fn="importance_sampling")
        optim_future = training_client.optim_step(adam_params)
        fwd_bwd_future.result()
        optim_future.result()
        history.append(sum(all_rewards) / len(all_rewards))
    service.close()
    assert history[-1] > history[0] + 0.3 and not math.isnan(history[-1]), history
