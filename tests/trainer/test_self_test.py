"""Test the self-test: it passes silently, names a planted fault, and leaves no trace."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import random_datums
from safetensors.torch import load_file
from whole_runs import train

from rl import ServiceClient
from rl.renderers import get_renderer
from rl.runtime import consistency, training_worker
from rl.trainer import self_test as module
from rl.trainer.self_test import SelfTestFailed, self_test
from rl.types import AdamParams, SamplingParams, TensorData

QUESTIONS = [[{"role": "user", "content": text}] for text in ("3+4=", "5+16=")]
PARAMS = SamplingParams(max_tokens=5, temperature=0.8)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=3) as service:
        yield service


@pytest.fixture(scope="module", params=["full", "fresh lora", "trained lora", "value head"])
def policy(request, service):
    full = request.param in ("full", "value head")
    if full:
        client = service.create_full_training_client(
            "tiny:addition-small", seed=2, value_head=request.param != "full"
        )
    else:
        client = service.create_lora_training_client("tiny:addition-small", rank=4, seed=2)
    if request.param != "fresh lora":
        client.forward_backward(random_datums(8, seed=1), "importance_sampling", divisor=10.0)
        client.optim_step(AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    yield client
    client.release()


# for tests that do not depend on the kind of policy
ONE = pytest.mark.parametrize("policy", ["full"], indirect=True)


@pytest.fixture
def sampler(policy):
    sampler = policy.save_weights_and_get_sampling_client()
    yield sampler
    sampler.release()


@pytest.fixture
def run(policy, sampler):
    renderer = get_renderer("plain", policy.get_tokenizer())
    return lambda params=PARAMS: self_test(policy, sampler, QUESTIONS, renderer, params, seed=7)


@pytest.fixture
def healthy(run):
    run()


def test_what_is_right_passes(run, policy, sampler):
    def observe():
        """Return logprobs and samples of the policy."""
        config, params = {"temperature": 1.0}, replace(PARAMS, seed=1)
        scored = policy.forward(random_datums(3, seed=5), "importance_sampling", config).result()
        drawn = sampler.sample(random_datums(1, seed=5)[0].model_input, 3, params).result()
        rows = [output["logprobs"].array.tolist() for output in scored.loss_fn_outputs]
        return rows, [(s.tokens, s.logprobs) for s in drawn.sequences]

    before, text = observe(), run()
    assert "changed weights reach the sampler" in text and "get a gradient" in text
    reached, of = text.split("sampler, and ")[1].split(" trained tensors")[0].split(" of ")
    assert reached == of and int(of) > 10
    assert observe() == before


def patch_decoders(monkeypatch, change):
    """Make the checked decoder load its weights through `change` from now on."""
    real = training_worker.TrainingWorker.check_sync

    def look(worker, model_id, version_id, *rest):
        decoder = worker.versions[version_id].decoder
        load = decoder.load_
        monkeypatch.setattr(decoder, "load_", lambda pieces: load(change(pieces)), raising=False)
        return real(worker, model_id, version_id, *rest)

    monkeypatch.setattr(training_worker.TrainingWorker, "check_sync", look)


def test_a_hand_over_that_delivers_nothing(run, monkeypatch):
    patch_decoders(monkeypatch, lambda pieces: ())
    with pytest.raises(SelfTestFailed, match="the weight sync delivers nothing"):
        run()


@pytest.mark.parametrize("number", [0, 5, -1])
def test_a_tensor_or_an_adapter_left_out(run, monkeypatch, number, healthy):
    """Drop a tensor: the first (an embedding, or its adapter), an inner tensor, or the last."""

    def without(pieces):
        whole = [(name, tensor.clone()) for name, tensor in pieces]
        del whole[number]
        return whole

    patch_decoders(monkeypatch, without)
    with pytest.raises(SelfTestFailed, match="only a part of the weights|delivers nothing"):
        run()


@ONE
@pytest.mark.parametrize(("fraction", "passes"), [(2e-4, True), (4e-3, False)])
def test_rounding_grows_with_the_change_of_perturbed_weights(run, monkeypatch, fraction, passes):
    """A difference at one token: rounding as measured with vLLM, and less than any tensor makes."""
    real, change = module.check_sync, 0.25  # nats

    def shifted(*inputs):
        report = real(*inputs)
        for i, learner in report.learner.items():
            report.learner_perturbed[i] = learner + change
            report.sampler_perturbed[i] = report.sampler[i] + change
            report.sampler_perturbed[i][-1] += fraction * change
        return report

    monkeypatch.setattr(module, "check_sync", shifted)
    if passes:
        run()
    else:
        with pytest.raises(SelfTestFailed, match="only a part of the weights"):
            run()


@ONE
def test_a_stale_version_label(run, sampler, monkeypatch):
    created = sampler._future.result()
    monkeypatch.setitem(created, "version", 0)
    real = sampler.sample_many

    def stale(requests):
        future = real(requests)
        responses, counters = future.result()
        for response in responses:
            for sequence in response.sequences:
                sequence.version += 1
        return type("Done", (), {"result": lambda self: (responses, counters)})()

    monkeypatch.setattr(sampler, "sample_many", stale)
    with pytest.raises(SelfTestFailed, match="labeled version"):
        run()


def shift_fields(names, by):
    real = module.trajectory_to_datums

    def made(trajectory):
        results = []
        for datum in real(trajectory):
            inputs = dict(datum.loss_fn_inputs)
            for name in names:
                inputs[name] = TensorData(np.roll(inputs[name].array, by), "float32")
            results.append(datum.with_inputs(inputs))
        return results

    return made


@ONE
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("names", [("mask",), ("logprobs",), ("mask", "logprobs")])
def test_a_mask_or_logprobs_shifted_by_one(run, monkeypatch, names, by):
    monkeypatch.setattr(module, "trajectory_to_datums", shift_fields(names, by))
    message = "not the tokens that were sampled|not the logprobs of the sampled tokens"
    with pytest.raises(SelfTestFailed, match=message):
        run()


@ONE
def test_a_fragment_taken_for_an_ended_answer(run, monkeypatch):
    def swap(sequence):
        return replace(
            sequence, stop_reason="stop" if sequence.stop_reason == "length" else "length"
        )

    real = module._sample_answers
    monkeypatch.setattr(
        module, "_sample_answers", lambda *args: [(prompt, swap(s)) for prompt, s in real(*args)]
    )
    with pytest.raises(SelfTestFailed, match="stop_reason"):
        run()


@ONE
def test_another_temperature_than_that_which_is_trained_at(run, monkeypatch):
    real = module.check_sync
    monkeypatch.setattr(module, "check_sync", lambda *args: real(*args[:3], 1.0))
    with pytest.raises(SelfTestFailed, match="disagree on the logprobs of the same tokens"):
        run(replace(PARAMS, temperature=0.5))


def test_gradients_that_do_not_arrive_or_reach_what_is_frozen(run, policy, monkeypatch):
    real = consistency._measure_gradient

    def one_less(*args):
        sizes, frozen = real(*args)
        return {**sizes, next(iter(sizes)): 0.0}, frozen

    monkeypatch.setattr(consistency, "_measure_gradient", one_less)
    with pytest.raises(SelfTestFailed, match="no gradient reaches 1 of"):
        run()
    monkeypatch.setattr(
        consistency, "_measure_gradient", lambda *args: (real(*args)[0], ["model.norm.weight"])
    )
    with pytest.raises(SelfTestFailed, match="frozen tensors have a gradient: model.norm.weight"):
        run()


def test_nothing_stays_of_a_self_test_that_fails(run, policy, monkeypatch):
    """The weights are also restored if the check itself fails."""

    def score() -> list[list[float]]:
        config, datums = {"temperature": 1.0}, random_datums(3, seed=5)
        scored = policy.forward(datums, "importance_sampling", config).result()
        return [output["logprobs"].array.tolist() for output in scored.loss_fn_outputs]

    before = score()
    with monkeypatch.context() as patch:
        patch.setattr(consistency, "_measure_gradient", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
    assert score() == before
    run()


def test_moved_tensors_are_all_of_them_or_as_many_as_memory_holds(monkeypatch):
    shapes = {f"t{i}": torch.Size([100]) for i in range(10)}
    assert consistency._select_within_limit(shapes, list(shapes)) == list(shapes)
    monkeypatch.setattr(consistency, "MAX_PERTURBED_BYTES", 1300)
    assert consistency._select_within_limit(shapes, list(shapes)) == ["t0", "t4", "t8"]
    assert not torch.equal(consistency._perturb(torch.zeros(4)), torch.zeros(4))
    moved = consistency._perturb(torch.full((64,), -3.0)) + 3.0
    assert 0.5 < float(moved.abs().max()) <= 0.75


WORDS = (
    "--base-model tiny:addition-small --dataset addition --steps 2 --batch-size 4 --group-size 2 "
    "--max-tokens 4 --learning-rate 1e-3 --entropy-coef 0.05"
)


@pytest.mark.slow
@pytest.mark.parametrize("words", [f"grpo {WORDS} --lora-rank 4", f"ppo {WORDS}"])
def test_a_run_is_the_same_with_and_without(words, tmp_path):
    tested, other = tmp_path / "with", tmp_path / "without"
    rows = train(words, tested)
    assert train(f"{words} --no-self-test", other) == rows and rows[-1]["optim/grad_norm"] > 0
    # not the process's generator, which no part of a run uses
    files = [p for p in tested.rglob("*.safetensors") if p.name != "rng.safetensors"]
    assert len(files) >= 2
    for path in files:
        a, b = load_file(path), load_file(other / path.relative_to(tested))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), path
    config = json.loads((other / "config.json").read_text())
    assert config["options"]["self_test"] is False
