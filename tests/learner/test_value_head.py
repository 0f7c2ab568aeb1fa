"""Test the value head: its values against a direct computation, its gradients against a custom
loss, and its file, which is separate from the model's weights.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    call,
    compute_relative_difference,
    gather_targets,
    make_worker,
    random_datums,
)
from safetensors.torch import load_file

from rl import ServiceClient, types
from rl.runtime import worker_group
from rl.runtime.training_worker import ModelSpec
from rl.types import AdamParams, Datum, ModelInput, SamplingParams

ADAM = AdamParams(learning_rate=3e-3, eps=1e-8)


_workers: list = []


@pytest.fixture(autouse=True)
def keep_worker(monkeypatch):
    """Store the driver's worker, so that a test can read weights and gradients."""
    original = worker_group._execute

    def execute(worker, verb, arguments):
        _workers[:] = [worker]
        return original(worker, verb, arguments)

    monkeypatch.setattr(worker_group, "_execute", execute)
    yield
    _workers.clear()


@pytest.fixture
def service(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out", seed=3) as service:
        yield service


@pytest.fixture(params=["full", "lora"])
def client(request, service):
    return make(service, request.param)


def make(service, kind="full", value_head=True):
    if kind == "lora":
        return service.create_lora_training_client(
            "tiny:addition", rank=4, seed=2, value_head=value_head
        )
    return service.create_full_training_client("tiny:addition", seed=2, value_head=value_head)


def critic_datums(count=6, seed=0):
    """Return RL datums with returns and old values at their actions."""
    rng = np.random.default_rng(seed + 50)
    datums = random_datums(count, seed=seed)
    for datum in datums:
        mask = datum.loss_fn_inputs["mask"].array
        for name in ("returns", "values_old"):
            datum.loss_fn_inputs[name] = types.TensorData(
                mask * rng.standard_normal(len(mask)), "float32"
            )
    return datums


def learner_of(client):
    assert client.info  # wait until the model exists
    return _workers[0].learners[client.model_id]


def perturb_weights(client, steps=2):
    """Train for a few steps, so that values are not 0."""
    for i in range(steps):
        client.forward_backward(critic_datums(seed=i), "ppo", {"value_coef": 1.0}, divisor=4.0)
        client.optim_step(ADAM).result()


def gradients(client):
    """Return all gradients, zeros for missing ones: values do not reach an adapter on the output
    head.
    """
    parameters = learner_of(client).trainable.values()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([grad.reshape(-1) for grad in grads])


def drop_client_gradients(client):
    client._driver.submit("drop_gradients", client.model_id).result()


def plain_values(client, tokens):
    """Apply the head to the model's last hidden state."""
    model = learner_of(client).model
    with torch.no_grad():
        hidden = model(
            input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False
        ).hidden_states[-1]
        head = dict(model.named_modules())[
            "base_model.model.value_head" if client.info["lora_rank"] else "value_head"
        ]
        return (hidden[0] @ head.weight[0] + head.bias).numpy()


def test_values_are_the_head_on_the_last_hidden_state(client):
    datums = critic_datums()
    outputs = client.forward(datums, "importance_sampling").result().loss_fn_outputs
    assert all(not output["values"].array.any() for output in outputs)  # zero at first
    perturb_weights(client)
    outputs = client.forward(datums, "importance_sampling").result().loss_fn_outputs
    single = client.compute_values([d.model_input for d in datums]).result()
    for datum, output, values in zip(datums, outputs, single, strict=True):
        expected = plain_values(client, datum.model_input.to_ints())
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(output["values"].array, expected, atol=2e-6)
        np.testing.assert_allclose(values, expected, atol=2e-6)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_of_the_value_loss_is_that_of_a_custom_loss(client, clip):
    perturb_weights(client)
    datums = critic_datums(seed=9)
    config = {"value_clip": clip} if clip else {}
    total = client.forward_backward(datums, "value", config).result().metrics["loss:sum"]
    named = gradients(client)
    drop_client_gradients(client)

    def loss_fn(data, values):
        loss = torch.zeros(())
        for datum, v in zip(data, values, strict=True):
            mask, returns, old = (
                datum.loss_fn_inputs[n].to_torch() for n in ("mask", "returns", "values_old")
            )
            squared = (v - returns) ** 2
            if clip:
                squared = torch.maximum(
                    squared, (torch.clip(v, old - clip, old + clip) - returns) ** 2
                )
            loss = loss + 0.5 * squared[mask != 0].sum()
        return loss, {"mine": 1.0}

    output = client.forward_backward_custom(datums, loss_fn, outputs=("values",)).result()
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5) and total > 0
    assert compute_relative_difference(gradients(client), named) < 1e-5
    drop_client_gradients(client)
    # As a term of a policy loss, it adds value_coef times this gradient to the policy's gradient.
    client.forward_backward(datums, "ppo").result()
    policy = gradients(client)
    drop_client_gradients(client)
    client.forward_backward(datums, "ppo", {"value_coef": 0.3, **config}).result()
    assert compute_relative_difference(gradients(client), policy + 0.3 * named) < 1e-5


def test_a_loss_on_both_outputs(client):
    perturb_weights(client)
    datums = critic_datums(seed=4)

    def loss_fn(data, logprobs, values):
        return sum((lp * v).sum() for lp, v in zip(logprobs, values, strict=True)), {}

    client.forward_backward_custom(datums, loss_fn, outputs=("logprobs", "values")).result()
    both = gradients(client)
    drop_client_gradients(client)
    learner = learner_of(client)
    for datum in datums:  # each separately, through the module itself
        ids = torch.tensor([datum.model_input.to_ints()])
        out = learner.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        values = learner.head.value_head(out.hidden_states[-1][0])
        logp = gather_targets(out.logits[0].log_softmax(-1), datum)
        (logp * values).sum().backward()
    assert compute_relative_difference(gradients(client), both) < 1e-5


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_saved_beside_the_model_and_restored(service, kind):
    client = make(service, kind)
    perturb_weights(client)
    prompts = [d.model_input for d in critic_datums()]
    before = client.compute_values(prompts).result()
    path = client.save_state("a").result().path
    (file,) = Path(path, "model").glob("*.safetensors")
    assert not [name for name in load_file(file) if "value" in name]
    sampler_path = client.save_weights_for_sampler("s").result().path
    plain = make(service, kind, value_head=False).save_weights_for_sampler("plain").result().path
    names = [{file.name for file in Path(folder).iterdir()} for folder in (sampler_path, plain)]
    assert names[0] == names[1]
    same = service.create_training_client_from_state_with_optimizer(path)
    perturb_weights(client)
    for ours in (same, service.create_training_client_from_state(path)):
        for a, b in zip(ours.compute_values(prompts).result(), before, strict=True):
            np.testing.assert_array_equal(a, b)
    perturb_weights(same)  # with the optimizer's state, the same steps give the same bits
    assert torch.equal(all_weights(same), all_weights(client))
    client.load_state(path).result()
    np.testing.assert_array_equal(client.compute_values(prompts).result()[0], before[0])
    bare = service.create_training_client_from_state(path, value_head=False)
    assert not bare.info["value_head"]
    assert json.loads(Path(path, "state.json").read_text())["spec"]["value_head"]
    with pytest.raises(ValueError, match="weights for sampling only"):
        service.create_training_client_from_state(sampler_path).compute_values(prompts)
    fresh = service.create_training_client_from_state(plain, value_head=True)
    assert not fresh.compute_values(prompts).result()[0].any()
    assert all_weights(bare).numel() == all_weights(client).numel() - fresh.info["hidden_size"] - 1


def all_weights(client):
    """Return all trained weights as a single vector."""
    return torch.cat(
        [p.detach().reshape(-1).clone() for p in learner_of(client).trainable.values()]
    )


def test_the_sampler_does_not_know_of_it(client):
    without = make(client.service, "lora" if client.info["lora_rank"] else "full", value_head=False)
    params = SamplingParams(max_tokens=5, seed=1)
    prompt = ModelInput.from_ints([3, 4, 12, 5, 6, 13])
    samples = [
        c.save_weights_and_get_sampling_client().sample(prompt, 3, params).result().sequences
        for c in (client, without)
    ]
    assert [s.tokens for s in samples[0]] == [s.tokens for s in samples[1]]
    perturb_weights(client, 1)
    # The second version replaces the first or is kept in addition to it.
    sampler = client.save_weights_and_get_sampling_client()
    sequence = sampler.sample(prompt, 1, params).result().sequences[0]
    tokens = prompt.to_ints() + sequence.tokens
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    scored = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].array
    np.testing.assert_allclose(scored[-len(sequence.tokens) :], sequence.logprobs, atol=1e-5)


def test_what_needs_values_says_so(service):
    client, datums = make(service, value_head=False), critic_datums(2)
    for compute in (
        lambda: client.forward_backward(datums, "value"),
        lambda: client.forward_backward(datums, "ppo", {"value_coef": 0.1}),
        lambda: client.compute_values([datums[0].model_input]),
        lambda: client.forward_backward_custom(
            datums, lambda d, v: (v[0].sum(), {}), outputs=("values",)
        ),
    ):
        with pytest.raises(ValueError, match="value_head=True"):
            compute()
    with_head = make(service)
    for name, config, field in (
        ("ppo", {"value_coef": 0.1}, "returns"),
        ("ppo", {"value_coef": 0.1, "value_clip": 0.2}, "values_old"),
        ("ppo", {"kl_coef": 0.1}, "ref_logprobs"),
        ("value", {}, "mask"),
    ):
        lacking = [
            Datum(d.model_input, {k: v for k, v in d.loss_fn_inputs.items() if k != field})
            for d in datums
        ]
        with pytest.raises(ValueError, match=field):
            with_head.forward_backward(lacking, name, config)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        with_head.forward_backward(datums, "ppo", {"kl_kind": "k4"})


def test_without_the_fused_head_too():
    results = []
    for fused in (True, False):
        worker = make_worker(fused=fused)
        worker.create_model(1, ModelSpec("tiny:addition", seed=1, value_head=True), None, False)
        with torch.no_grad():
            for p in worker.learners[1].trainable.values():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
        config = {"value_coef": 0.5, "entropy_coef": 0.1}
        arguments = critic_datums(), "ppo", config, 1.0, True
        outputs, metrics = call(worker, "forward_backward", 1, *arguments)
        grads = torch.cat([p.grad.reshape(-1) for p in worker.learners[1].trainable.values()])
        values = np.concatenate([output["values"] for output in outputs])
        results.append((values, metrics["entropy:sum"], grads))
    (fused_values, fused_entropy, fused_grads), (values, entropy, grads) = results
    np.testing.assert_allclose(fused_values, values, atol=1e-5)
    assert fused_entropy == pytest.approx(entropy, rel=1e-5)
    assert compute_relative_difference(fused_grads, grads) < 1e-5
