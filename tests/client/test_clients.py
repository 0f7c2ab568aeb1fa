"""Test Tinker's verbs in process: futures, sampler and learner, saving, errors."""

import asyncio
import gc
import itertools
import json
import math
import os
import random
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import compute_relative_difference, random_datums
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl import ServiceClient, TensorData, renderers, types
from rl.client import SampleStream
from rl.distributed.checkpoint_folder import DamagedCheckpoint
from rl.errors import ContextLengthError, UserError
from rl.losses import get_loss
from rl.models import check_tensors, load_model
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


@pytest.fixture
def full_client(service):
    """Return a client for what is the same whichever weights it trains."""
    return make(service)


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


def join(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])


def weights(model_id=0) -> torch.Tensor:
    return join(_workers[None].learners[model_id].trainable.values())


def gradient(model_id=0) -> torch.Tensor:
    return join(p.grad for p in _workers[None].learners[model_id].trainable.values())


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
    rows = [output.loss_fn_outputs[0]["logprobs"].array for output in (before, after)]
    assert not np.allclose(*rows)
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
    info = client.get_info()
    assert (info.is_lora, info.lora_rank, info.model_name) == (True, 2, "tiny:addition")

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
            total += get_loss("ppo").fn(logp, logp, inputs, torch.tensor([0, len(logp)]), {})[0]
        return total, {"mine": 2.0, "with_gradient": total}

    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the metric that records gradients needs no warning
            output = client.forward_backward_custom(datums, loss).result()
    finally:
        torch.set_warn_always(False)
    assert output.metrics["with_gradient"] == output.metrics["loss:sum"]
    assert compute_relative_difference(gradient(), built_in) < 1e-5
    # under the user's name
    assert output.metrics["mine"] == 2.0 and "mine:mean" not in output.metrics


def test_forward_backward_of_nothing_is_a_no_op(full_client):
    client = full_client
    client.info  # noqa: B018  (made before the weights are looked at)
    before = weights()
    assert client.forward_backward([], "ppo").result().metrics["loss:sum"] == 0.0
    assert client.optim_step(ADAM).result().metrics["skipped"] == 1.0
    assert torch.equal(weights(), before)


def test_an_update_after_a_failed_forward_backward_is_refused(full_client):
    client, datums = full_client, random_datums(2)
    datums[0].loss_fn_inputs["logprobs"].array[:] = -1e30  # the ratio overflows
    good = client.forward_backward(random_datums(3), "importance_sampling")
    failed = client.forward_backward(datums, "importance_sampling")
    update = client.optim_step(ADAM)
    good.result()
    before = weights()
    with pytest.raises(FloatingPointError):
        failed.result()
    message = "optim_step was not run, because an earlier forward_backward failed"
    with pytest.raises(RuntimeError, match=message):
        update.result()
    assert torch.equal(weights(), before)
    client.forward_backward(random_datums(3), "importance_sampling")
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0  # the client still works


@pytest.mark.parametrize("verbs", [("forward_backward",), ("forward_backward", "optim_step")])
def test_a_failure_that_nothing_reads_is_a_warning(full_client, verbs):
    """A failure that is read, through the verb that depends on it too, is none."""
    client, datums = full_client, random_datums(2)
    datums[0].loss_fn_inputs["logprobs"].array[:] = -1e30
    submit = {
        "forward_backward": lambda: client.forward_backward(datums, "importance_sampling"),
        "optim_step": lambda: client.optim_step(ADAM),
    }
    with pytest.warns(UserWarning, match=f"{verbs[-1]} failed, and its result was not read: ") as w:
        for verb in verbs:
            submit[verb]()
        client.load_state(client.save_state("good").result().path).result()
    assert sum("was not read" in str(warning.message) for warning in w) == 1
    with warnings.catch_warnings(record=True) as read:
        warnings.simplefilter("always")
        submit["forward_backward"]()
        submit["forward_backward"]()
        with pytest.raises(RuntimeError, match="optim_step was not run"):
            submit["optim_step"]().result()
        client.load_state(client.save_state("better").result().path).result()
    assert not any("was not read" in str(warning.message) for warning in read)


def test_a_forward_whose_loss_is_not_finite_leaves_the_gradient(full_client):
    client, datums, overflows = full_client, random_datums(2), random_datums(2)
    overflows[0].loss_fn_inputs["logprobs"].array[:] = -1e30
    client.forward_backward(datums, "importance_sampling").result()
    expected = gradient()
    with pytest.raises(FloatingPointError, match="ratio overflowed. Look for"):
        client.forward(overflows, "importance_sampling").result()
    assert torch.equal(gradient(), expected)
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_loaded_state_ends_the_refusal_of_a_failed_forward_backward(full_client):
    client, datums = full_client, random_datums(2)
    path = client.save_state("good").result().path
    datums[0].loss_fn_inputs["logprobs"].array[:] = -1e30
    client.forward_backward(datums, "importance_sampling")
    client.load_state_with_optimizer(path)
    client.forward_backward(random_datums(3), "importance_sampling")
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0
    client.load_state(path + "s")
    client.forward_backward(random_datums(3), "importance_sampling")
    message = "not run, because an earlier load_state failed: .*; did you mean .*/good[?]"
    with pytest.raises(RuntimeError, match=message):
        client.optim_step(ADAM).result()


@pytest.mark.parametrize("custom", [False, True])
def test_nothing_is_left_of_a_backward_that_failed_halfway(full_client, monkeypatch, custom):
    """The next optimizer step is refused, and the step after it equals that of an undisturbed
    client.
    """
    client, data, keep = full_client, random_datums(4), AdamParams(learning_rate=0.0)
    client.forward_backward(data, "importance_sampling")
    expected = client.optim_step(keep).result().metrics["grad_norm"]
    (learner,) = _workers[None].learners.values()
    backward = learner.backend.backward

    def fails(value):
        backward(value)
        raise RuntimeError("CUDA out of memory")

    def loss(data, logprobs):
        return sum(lp.sum() for lp in logprobs), {}

    with monkeypatch.context() as patch:
        patch.setattr(learner.backend, "backward", fails)
        if custom:
            failed = client.forward_backward_custom(data, loss)
        else:
            failed = client.forward_backward(data, "importance_sampling")
        update = client.optim_step(ADAM)
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            failed.result()
        with pytest.raises(RuntimeError, match="optim_step was not run"):
            update.result()
    client.forward_backward(data, "importance_sampling")
    norm = client.optim_step(keep).result().metrics["grad_norm"]
    assert norm == pytest.approx(expected, rel=1e-6)


def test_malformed_calls_are_refused_where_they_are_made(full_client):
    client, good = full_client, random_datums(1)
    chosen, rejected = [Datum(ModelInput.from_ints([3, 4]), {
        "target_tokens": [4, 5], "mask": [0.0, 1.0], "ref_logprobs": [0.0, -1.0]
    }) for _ in range(2)]  # fmt: skip
    without = chosen.with_inputs({"target_tokens": [4, 5], "mask": [0.0, 1.0]})

    def label(*labels):
        return [chosen.with_inputs({**chosen.loss_fn_inputs, "labels": labels})]

    moved = good[0].with_inputs({
        "target_tokens": good[0].loss_fn_inputs["target_tokens"],
        "advantages": good[0].loss_fn_inputs["advantages"],
        "proximal_share": good[0].loss_fn_inputs["advantages"],
    })  # fmt: skip
    fields = {"target_tokens": [4, 5, 6, 7], "logprobs": [-1.0], "advantages": [1.0]}
    short = Datum(ModelInput.from_ints([3, 4, 5, 6]), fields)
    too_long = Datum(ModelInput.from_ints([3] * 513), {"target_tokens": [3] * 513})
    sampler, params = client.save_weights_and_get_sampling_client(), SamplingParams(max_tokens=1)

    def sample(tokens, params=params, **more):
        sampler.sample(ModelInput.from_ints(tokens), 1, params, **more)

    wrong = [
        (lambda: client.forward_backward([short], "ppo"), r"\[0\.0\] \* 3 \+ logprobs"),
        (lambda: client.forward_backward(good, "ppo", {"clip_hi": 1.3}),
         "'clip_hi'; ppo takes clip_low_threshold, clip_high_threshold, temperature"),
        (lambda: client.forward_backward(good, "stable_reinforce"), "importance_sampling"),
        (lambda: client.forward_backward(good, "ppo", divisor=0.0), "divisor"),
        (lambda: client.forward([too_long], "cross_entropy"),
         "513 tokens, the model's context holds 512"),
        (lambda: client.forward_backward_custom(good, lambda data, logp: (torch.tensor(1.0), {})),
         "scalar tensor that depends on the logprobs"),
        (lambda: client.forward_backward_custom(good, lambda data, logp: (logp[0].sum(), None)),
         "a tensor and a dict of numbers; got Tensor, NoneType"),
        (lambda: client.forward_backward_custom(
            good, lambda data, logp: (logp[0].sum(), {"each": logp[0]})),
         "the custom loss's metric 'each' is a number, got Tensor"),
        (lambda: ModelInput.from_ints("12+34="), "takes token ids.*got the text '12.34='"),
        (lambda: client.forward([], "dpo", {"label_smoothing": 0.5}), "below 0.5, got 0.5"),
        (lambda: client.forward([chosen, without], "dpo"),
         r"datums 0 and 1 belong together .dpo. and only one of them has \['ref_logprobs'\]"),
        (lambda: client.forward([chosen, rejected, without, rejected], "ipo"), "datums 2 and 3"),
        (lambda: client.forward(label(0, 0), "kto"), r"datum 0: 'labels' are 1 .* got \[0\]"),
        (lambda: client.forward(label(-1, 1), "kto"), r"got \[-1, 1\]"),
        (lambda: client.forward([moved], "importance_sampling"),
         "datum 0 lacks loss_fn_inputs.'logprobs'., which proximal_share needs"),
        (lambda: client.optim_step(1e-4), "AdamParams"),
        (lambda: client.load_state(None), "is a folder, such as .*; got None"),
        (lambda: sample([3], target_prompt_logprobs=[]),
         "is a types.TensorData of token ids.*got a list"),
        (lambda: sample([3] * 6, SamplingParams(max_tokens=5000)),
         "max_tokens=5000 exceed the model's context of 512"),
        (lambda: sample([99]), "holds the id 99; the model's ids are 0 to 13"),
        (lambda: sample([]), "empty"),
        (lambda: sampler.compute_logprobs(ModelInput.from_ints([3, 14])),
         "the sequence to score holds the id 14; the model's ids are 0 to 13"),
    ]  # fmt: skip
    waiting = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2))
    for call, message in wrong:
        with pytest.raises(TypeError if message == "AdamParams" else ValueError, match=message):
            call()
    # a bad request does not fail those beside it
    assert len(waiting.result().sequences) == 1


def test_a_wait_that_is_given_up_does_not_stop_the_verbs(full_client):
    """A cancelled await does not stop its verb or the later ones."""
    sampler = full_client.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=2)

    async def script():
        slow = full_client.forward_backward(random_datums(400), "ppo")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(slow, 0.001)
        with pytest.raises(TimeoutError, match=r"keeps running: call result_async\(\) again"):
            await slow.result_async(0.001)
        samples = [asyncio.ensure_future(sampler.sample_async(PROMPT, 1, params)) for _ in range(3)]
        await asyncio.sleep(0)
        samples[1].cancel()
        return await samples[0], await samples[2]

    assert all(len(response.sequences) == 1 for response in asyncio.run(script()))
    assert full_client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_done_and_release_see_to_samples_that_wait(full_client):
    sampler = full_client.save_weights_and_get_sampling_client()
    future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2))
    end = time.monotonic() + 10
    while not future.done() and time.monotonic() < end:
        time.sleep(0.01)
    assert future.done()
    waiting = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2))
    sampler.release()
    assert len(waiting.result().sequences) == 1


def test_a_released_model_leaves_only_its_samplers_weights(full_client, service):
    train(full_client, 1)
    learner = weakref.ref(_workers[None].learners[0])
    sampler = full_client.save_weights_and_get_sampling_client()
    request = PROMPT, 1, SamplingParams(max_tokens=4, seed=1)
    expected = sampler.sample(*request).result().sequences[0].tokens
    full_client.release()
    assert sampler.sample(*request).result().sequences[0].tokens == expected
    gc.collect()
    assert learner() is None


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
        difference = out["logprobs"].array - datum.loss_fn_inputs["logprobs"].array
        worst = max(worst, np.abs(difference[actions]).max())
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
    output = client.forward(datums, "importance_sampling").result()
    assert compute_largest_difference(output, datums) > 1e-3
    if temperature != 1.0:  # and it would notice another temperature
        datums = sampled_datums(client, temperature)
        output = client.forward(datums, "importance_sampling", {"temperature": 1.0}).result()
        assert compute_largest_difference(output, datums) > 0.05


def test_a_second_update_on_the_same_samples_is_scored_as_they_were_drawn(full_client):
    client, seen = full_client, []
    datums = sampled_datums(client, 0.7)
    for _ in range(2):
        output = client.forward_backward(datums, "ppo").result()
        assert output.metrics["temperature:mean"] == 0.7
        client.optim_step(AdamParams(learning_rate=1e-9)).result()

    def loss(data, logprobs):
        seen.extend(logprobs)
        return sum(lp.sum() for lp in logprobs), {}

    client.forward_backward_custom(datums, loss).result()
    expected = client.forward(datums, "ppo", {"temperature": 0.7}).result().loss_fn_outputs
    np.testing.assert_allclose(seen[0].detach(), expected[0]["logprobs"].array, atol=1e-5)


def test_weights_sampled_at_two_temperatures_ask_which(full_client):
    client, data = full_client, random_datums(1)
    sampler = client.save_weights_and_get_sampling_client()
    for temperature in (1.0, 0.3, 0.0):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, temperature=temperature)).result()
    with pytest.raises(ValueError, match=r"temperatures \[1.0, 0.3\].*loss_fn_config"):
        client.forward(data, "ppo").result()
    metrics = client.forward(data, "ppo", {"temperature": 0.3}).result().metrics
    assert metrics["temperature:mean"] == 0.3


def test_truncated_samples_are_not_trained_on(full_client):
    client = full_client
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample(PROMPT, 2, SamplingParams(max_tokens=2, top_p=0.5)).result()
    with pytest.raises(ValueError, match="top_k=-1 and top_p=1"):
        client.forward_backward(random_datums(2), "ppo").result()
    client.forward_backward([], "ppo").result()
    # a concurrent evaluation may be truncated
    sampler.sample(PROMPT, 2, SamplingParams(max_tokens=2)).result()
    client.forward_backward(random_datums(2), "ppo").result()


def test_weights_loaded_from_a_saved_folder_sample_as_those_in_memory(service, client):
    train(client)
    path = client.save_weights_for_sampler("a").result().path
    params = SamplingParams(max_tokens=8, seed=11, temperature=0.9)
    samplers = (
        client.save_weights_and_get_sampling_client(),
        service.create_sampling_client(model_path=path),
    )
    here, present = (sampler.sample(PROMPT, 4, params).result() for sampler in samplers)
    assert [s.tokens for s in here.sequences] == [s.tokens for s in present.sequences]
    # the learner also knows the temperature of samples from the folder: they belong to its version
    tokens = PROMPT.to_ints()
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    assert client.forward(random_datums(1), "ppo").result().metrics["temperature:mean"] == 0.9
    output = client.forward([datum], "cross_entropy", {"temperature": 1.0}).result()
    scores = samplers[0].compute_logprobs(PROMPT).result()
    learner = output.loss_fn_outputs[0]["logprobs"].array
    np.testing.assert_allclose(scores[1:], learner, atol=1e-5)
    # the folder can be trained on
    before, again = weights(), service.create_training_client_from_state(path).result()
    assert torch.equal(weights(again.model_id), before)


def test_a_sample_that_fills_the_context_can_be_scored(service):
    """A frozen reference scores such samples of a run: the last token is not fed."""
    sampler = service.create_sampling_client(base_model="tiny:addition")
    sequence = sampler.sample(PROMPT, 1, SamplingParams(stop=[])).result().sequences[0]
    tokens = [*PROMPT.to_ints(), *sequence.tokens]
    assert len(tokens) == sampler.info["max_context"] + 1
    scores = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(scores[len(PROMPT.to_ints()) :], sequence.logprobs, atol=1e-4)
    with pytest.raises(ContextLengthError, match="exceeds the model's context"):
        sampler.compute_logprobs(ModelInput.from_ints([*tokens, 1])).result()


def test_seeds_repeat_and_members_of_a_group_differ(full_client):
    sampler = full_client.save_weights_and_get_sampling_client()

    def draw(**settings):
        params = SamplingParams(max_tokens=10, stop=[], **settings)
        return [tuple(s.tokens) for s in sampler.sample(PROMPT, 6, params).result().sequences]

    assert draw(seed=1) == draw(seed=1) and draw(seed=1) != draw(seed=2)
    assert len(set(draw(seed=1))) == 6
    assert draw() != draw()  # without a seed every call draws new samples


def test_samples_asked_for_one_by_one_run_as_one_batch_and_are_the_same(full_client):
    sampler = full_client.save_weights_and_get_sampling_client()
    prompts = [ModelInput.from_ints([3, 4, 12, 5, i, 13]) for i in range(2, 10)]
    params, verbs = SamplingParams(max_tokens=6, seed=5), []
    single = [sampler.sample(p, 2, params).result().sequences for p in prompts]
    worker = _workers[None]
    sample = worker.sample
    worker.sample = lambda *a: (verbs.append(len(a[1])), sample(*a))[1]
    futures = [sampler.sample(p, 2, params) for p in prompts]
    together = [f.result().sequences for f in futures]

    async def gathered():
        return await asyncio.gather(*(sampler.sample_async(p, 2, params) for p in prompts))

    by_gather = [r.sequences for r in asyncio.run(gathered())]
    assert verbs == [8, 8]  # two batches of eight requests, not sixteen single requests
    for a, b, c in zip(single, together, by_gather, strict=True):
        assert [s.tokens for s in a] == [s.tokens for s in b] == [s.tokens for s in c]


# ------------------------------------------------------------------------------------------- saving


def test_state_goes_on_bit_for_bit(service, client):
    """A saved state continues in a new client and in the client that saved it."""
    train(client, 2)
    path = client.save_state("two", metadata={"note": "half way"}).result().path
    state = json.loads(Path(path, "state.json").read_text())
    assert state["metadata"] == {"note": "half way"}
    saved = weights()
    train(client, 2)
    undisturbed = weights()
    resumed = service.create_training_client_from_state_with_optimizer(path)
    train(resumed, 2)
    assert torch.equal(weights(resumed.model_id), undisturbed)
    client.load_state_with_optimizer(path).result()
    assert torch.equal(weights(), saved)
    train(client, 2)
    assert torch.equal(weights(), undisturbed)
    client.load_state(path).result()  # weights only: Adam restarts
    assert torch.equal(weights(), saved)
    train(client, 2)
    loaded = weights()
    fresh = service.create_training_client_from_state(path)
    train(fresh, 2)
    assert torch.equal(weights(fresh.model_id), loaded)
    assert not torch.equal(loaded, undisturbed)


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
    resumed = service.create_training_client_from_state_with_optimizer(path)
    samplers = (
        service.create_sampling_client(path), resumed.save_weights_and_get_sampling_client())  # fmt: skip
    for sampler in samplers:
        assert sampler.compute_logprobs(PROMPT).result() == expected


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT.to_ints()])).logits


def test_what_is_saved_for_the_sampler_loads_in_transformers_and_peft(client):
    train(client)
    expected = logits_of(_workers[None].learners[0].model)
    path = client.save_weights_for_sampler("plain").result().path
    if client.get_info().is_lora:
        loaded = PeftModel.from_pretrained(load_model("tiny:addition", seed=0).model, path)
        merged = client.save_weights_for_sampler("merged", merged=True).result().path
        actual = logits_of(AutoModelForCausalLM.from_pretrained(merged))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert AutoTokenizer.from_pretrained(path).encode("1+2=") == [3, 12, 4, 13]
    torch.testing.assert_close(logits_of(loaded), expected, rtol=1e-5, atol=1e-5)


def test_a_name_stays_and_must_be_one(full_client):
    client = full_client
    for save in (client.save_state, client.save_weights_for_sampler):
        save("once").result()
        with pytest.raises(ValueError, match="exists already"):
            save("once").result()
    for name in ("a/b", "../up", "", ".hidden"):
        with pytest.raises(ValueError, match="letters, digits"):
            client.save_state(name)


def test_a_sampling_client_writes_nothing_and_its_name_may_be_used_again(client):
    params = SamplingParams(max_tokens=2)
    client.save_weights_and_get_sampling_client().sample(PROMPT, 1, params).result()
    first = client.save_weights_and_get_sampling_client("once")
    client.forward_backward(random_datums(2), "ppo")
    client.optim_step(AdamParams(learning_rate=1e-2)).result()
    second = client.save_weights_and_get_sampling_client("once")
    before, after = (sampler.compute_logprobs(PROMPT).result() for sampler in (first, second))
    assert before != after
    assert not os.path.exists(client.service.output_dir)


def test_a_gradient_is_not_lost_in_a_checkpoint(full_client):
    full_client.forward_backward(random_datums(2), "ppo")
    with pytest.raises(ValueError, match="call optim_step first"):
        full_client.save_state("half").result()


def test_a_damaged_checkpoint_is_refused_before_anything_changes(full_client):
    train(full_client, 1)
    path = full_client.save_state("good").result().path
    before, file = weights(), Path(path, "optimizer.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    message = "optimizer.safetensors does not match the checksum"
    with pytest.raises(DamagedCheckpoint, match=message):
        full_client.load_state_with_optimizer(path).result()
    assert torch.equal(weights(), before)


def test_a_checkpoint_expires(full_client):
    path = full_client.save_state("brief", ttl_seconds=0.2).result().path
    kept = full_client.save_state("kept", ttl_seconds=3600).result().path
    time.sleep(0.3)
    with pytest.raises(DamagedCheckpoint, match="expired"):
        full_client.load_state(path).result()
    full_client.save_state("next").result()
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
    (tmp_path / "empty").mkdir()
    for base, message in {
        "tiny:adition": "tiny:addition",
        "./not/there": "no model folder",
        str(tmp_path / "empty"): "no config.json",
        "someone/some-model": "HF_HUB_OFFLINE",
    }.items():
        with pytest.raises(ValueError, match=message):
            service.create_full_training_client(base).result()
    with pytest.raises(ValueError, match="no checkpoint"):
        service.create_training_client_from_state(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="alpha"):
        service.create_lora_training_client("tiny:addition", alpha=0.0).result()


def test_a_checkpoint_of_another_rank_is_refused_with_both_ranks(service):
    first, other = [service.create_lora_training_client("tiny:addition", r) for r in (2, 3)]
    saved = first.save_state("of-another-rank").result().path
    with pytest.raises(UserError, match=r"the model's is \(3, .*The adapters have different ranks"):
        other.load_state(saved).result()


def test_an_adapter_of_another_width_has_no_other_rank():
    for part, shape, other in (("A", (8, 4), (8, 6)), ("B", (4, 8), (6, 8))):
        name = f"q_proj.lora_{part}.weight"
        with pytest.raises(UserError, match=r"the model's is \(\d, \d\)$"):
            check_tensors("saved", {name: shape}, {name: torch.zeros(other)})


def test_a_folder_without_tokenizer_works_with_ids(service, tmp_path):
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
