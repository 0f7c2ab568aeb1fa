"""Test `train_step`, the calls and the update of a step as one verb, beside the separate verbs."""

import gc
import statistics
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import call, make_worker, random_datums

from rl import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from rl.errors import UserError
from rl.learner import LearnerSettings
from rl.runtime import WorkerSettings

PARAMS = AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=0.5)
DATUMS = random_datums(12)
# parts of a step: (datums, loss, config, divisor)
STEPS = [
    [(DATUMS, "ppo", {}, 3.0)],
    [(DATUMS[:5], "importance_sampling", {"temperature": 0.7}, 5.0), (DATUMS[5:], "ppo", {}, 2.0)],
    [([], "ppo", {}, 1.0), (DATUMS[:1], "cispo", {}, 1.0)],
    [([], "ppo", {}, 1.0)],
]
PROMPT = ModelInput.from_ints([1, 2, 3])
PLAIN = [Datum(PROMPT, {"target_tokens": [2, 3, 4]})]
BROKEN = Datum(  # a ratio of it overflows
    PROMPT,
    {"target_tokens": [2, 3, 4], "logprobs": [-1e30] * 3, "advantages": [1.0] * 3},
)


@pytest.fixture(scope="module", params=["padded", "packed"])
def service(request, tmp_path_factory):
    learner = LearnerSettings(token_budget=30, layout=request.param)
    folder = tmp_path_factory.mktemp("out")
    with ServiceClient(output_dir=folder, settings=WorkerSettings(learner=learner)) as service:
        yield service


def make_clients(service, kind, count=2):
    """Return clients with the same weights."""
    if kind == "lora":
        return [service.create_lora_training_client("tiny:addition", rank=4) for _ in range(count)]
    return [service.create_full_training_client("tiny:addition", seed=3) for _ in range(count)]


def run_separate_verbs(client, calls, params):
    outputs = [
        client.forward_backward(data, loss, config, divisor=divisor)
        for data, loss, config, divisor in calls
    ]
    return outputs, client.optim_step(params)


def score(client):
    outputs = client.forward(DATUMS, "ppo").result().loss_fn_outputs
    return np.concatenate([output["logprobs"].array for output in outputs])


def read(outputs, update):
    """Return all results of a step as plain values."""
    results = [future.result() for future in outputs]
    arrays = [
        {name: value.array.tolist() for name, value in output.items()}
        for result in results
        for output in result.loss_fn_outputs
    ]
    return arrays, [result.metrics for result in results], update.result().metrics


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_step_has_the_bits_of_the_separate_verbs(service, kind):
    one, other = make_clients(service, kind)
    for i, calls in enumerate(STEPS * 2):
        params = replace(PARAMS, learning_rate=0.01 / (i + 1))
        if i == 2:  # a gradient that is accumulated before the step
            for client in (one, other):
                client.forward_backward(DATUMS[2:6], "cispo").result()
        step, separate = one.train_step(calls, params), run_separate_verbs(other, calls, params)
        assert read(*step) == read(*separate)
        assert ("skipped" in step[1].result().metrics) == (i % 4 == 3)
        assert np.array_equal(score(one), score(other))
    assert one.version == other.version == 6


@pytest.mark.parametrize("bad", [0, 1])
def test_a_loss_that_is_not_finite_changes_nothing(service, bad):
    """In the first step AdamW has no state; later it has. The next step has the bits of a client
    that has not seen the bad loss, so gradient and moments are untouched.
    """
    one, other = make_clients(service, "full")
    for _ in range(3):
        calls = [(DATUMS[1:], "ppo", {}, 1.0), (DATUMS[1:4], "ppo", {}, 1.0)]
        calls[bad] = ([BROKEN], "importance_sampling", {}, 1.0)
        before, version = score(one), one.version
        one.forward_backward(DATUMS[:3], "ppo").result()  # it is dropped too
        outputs, update = one.train_step(calls, PARAMS)
        for future in (*outputs, update):
            with pytest.raises(FloatingPointError, match="gradients .* were dropped"):
                future.result()
        assert np.array_equal(score(one), before) and one.version == version
        assert read(*one.train_step(STEPS[1], PARAMS)) == read(*other.train_step(STEPS[1], PARAMS))
        assert np.array_equal(score(one), score(other))


def test_a_failed_step_leaves_its_tensors_to_no_garbage_collection(service):
    (client,) = make_clients(service, "full", 1)
    counts = []

    def fail():
        outputs, update = client.train_step([([BROKEN], "importance_sampling", {}, 1.0)], PARAMS)
        for future in (*outputs, update):
            with pytest.raises(FloatingPointError):
                future.result()
        del outputs, update, future  # the error's traceback has this frame

    try:
        for _ in range(6):
            fail()
            client.train_step([([], "ppo", {}, 1.0)], PARAMS)[1].result()  # ends the verb before
            if not counts:
                gc.collect()
                gc.disable()
            counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    finally:
        gc.enable()
    # tensors of earlier tests may end meanwhile
    assert statistics.median(after - before for before, after in pairwise(counts)) == 0, counts


def test_a_step_after_a_failed_call_is_refused(service):
    one, other = make_clients(service, "full")
    one.forward_backward(DATUMS, "ppo")
    failed = one.forward_backward([BROKEN], "importance_sampling")
    outputs, update = one.train_step(STEPS[0], PARAMS)
    with pytest.raises(FloatingPointError):
        failed.result()
    for future in (*outputs, update):
        with pytest.raises(RuntimeError, match="train_step was not run, because an earlier"):
            future.result()
    assert read(*one.train_step(STEPS[1], PARAMS)) == read(*other.train_step(STEPS[1], PARAMS))


def test_a_step_that_does_not_begin_drops_the_gradient_before_it(service):
    """A loss with ratios is refused after samples from a truncated distribution."""
    one, other = make_clients(service, "full")
    one.forward_backward(PLAIN, "cross_entropy").result()
    params = SamplingParams(max_tokens=2, top_k=3)
    one.save_weights_and_get_sampling_client().sample(PROMPT, 1, params).result()
    outputs, update = one.train_step(STEPS[0], PARAMS)
    for future in (*outputs, update):
        with pytest.raises(ValueError, match="top_k"):
            future.result()
    calls = [(PLAIN, "cross_entropy", {}, 1.0)]
    assert read(*one.train_step(calls, PARAMS)) == read(*other.train_step(calls, PARAMS))


def test_a_call_without_memory_begins_no_update(monkeypatch):
    """AdamW's first step would allocate two numbers for each weight."""
    worker, updates = make_worker(token_budget=30), []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a: (updates.append(1), step(*a)))

    def fail(*arguments):
        raise torch.OutOfMemoryError

    calls = [(DATUMS, "ppo", {}, 1.0, True)]
    with monkeypatch.context() as patch:
        patch.setattr(worker.learners[0].backend, "backward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            call(worker, "train_step", 0, calls, PARAMS)
    assert not updates and not worker.learners[0].has_gradient
    call(worker, "train_step", 0, calls, PARAMS)
    assert len(updates) == 1


def test_a_step_drops_the_gradient_before_it_if_a_server_does_not_sleep(monkeypatch):
    worker = make_worker(token_budget=30)
    calls = [(DATUMS, "ppo", {}, 1.0, True)]
    call(worker, "forward_backward", 0, *calls[0])

    def sleep():
        raise UserError("the server has ended")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "server_pool", SimpleNamespace(can_sleep=True, sleep=sleep))
        with pytest.raises(UserError, match="has ended"):
            call(worker, "train_step", 0, calls, PARAMS)
    assert "skipped" in worker.optim_step(0, PARAMS)


def test_wrong_arguments_are_refused_at_the_call(service):
    (client,) = make_clients(service, "full", 1)
    for params in (None, {"learning_rate": 0.1}):
        with pytest.raises(TypeError, match="train_step takes a single types.AdamParams"):
            client.train_step([(DATUMS, "ppo", {}, 1.0)], params)
    with pytest.raises(ValueError, match="no calls"):
        client.train_step([], PARAMS)
    with pytest.raises(ValueError, match="divisor"):
        client.train_step([(DATUMS, "ppo", {}, 0.0)], PARAMS)
    with pytest.raises(ValueError, match="ppoo"):
        client.train_step([(DATUMS, "ppoo", {}, 1.0)], PARAMS)
    assert client.version == 0
