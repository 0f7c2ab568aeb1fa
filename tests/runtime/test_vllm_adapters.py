"""Test LoRA adapters that are sent to vLLM servers as adapters, on a stub that loads them with PEFT."""

import numpy as np
import pytest
from test_vllm import (
    BASE,
    PARAMS,
    check_logprobs,
    connect_services,
    drain,
    learner_logprobs,
    read,
    sample,
    start_stubs,
    update,
)
from whole_runs import train

from rl.client import SampleStream
from rl.errors import UserError
from rl.sampler import SamplingRequest
from rl.types import ModelInput, SamplingParams


def make_policy(service, rank=4, **options):
    options = {"train_unembed": False, **options}  # the head is tied to the embedding
    return service.create_lora_training_client(BASE, rank=rank, seed=2, **options)


@pytest.fixture
def servers():
    """Yield a function that starts stubs with --enable-lora."""
    with start_stubs() as start:
        yield lambda count=1, lora_rank=8: start(count, lora_rank)


@pytest.fixture
def connect(tmp_path):
    with connect_services(tmp_path) as make:
        yield make


def test_samples_of_every_version_have_the_learners_logprobs(servers, connect):
    """The model is loaded once, and each version as an adapter under its own name. An adapter that
    nobody samples from any more is unloaded, and its folder removed.
    """
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    names = []
    for version in range(4):
        sampler = policy.save_weights_and_get_sampling_client()
        for prompt, sequence in sample(sampler):
            assert (sequence.version, sequence.versions) == (version, None)
            check_logprobs(policy, [(prompt, sequence)])
        names.append(stub.bodies[-1]["model"])
        update(policy)
    assert len(set(names)) == 4 and len(stub.folders) == 1
    assert list(stub.adapters)[-1] == names[-1]
    assert stub.unloaded == names[: len(stub.unloaded)] and len(stub.unloaded) >= 2


def test_an_older_version_samples_the_same_while_its_client_lives(servers, connect):
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    old = policy.save_weights_and_get_sampling_client()
    first = sample(old)
    update(policy)
    new = sample(policy.save_weights_and_get_sampling_client())
    assert read(sample(old)) == read(first) != read(new)
    assert len(stub.folders) == 1 and not stub.unloaded


def test_samples_in_flight_keep_the_adapter_that_they_began_with(servers, connect):
    """All their tokens have its version, also those sampled after newer adapters were loaded."""
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    update(policy)
    stub.token_seconds = 0.03
    stream = SampleStream(policy.save_weights_and_get_sampling_client())
    params = SamplingParams(max_tokens=30, temperature=0.7, stop=[])
    old = stream.add(SamplingRequest(prompt=[3, 4], params=params))
    assert not stream.run_steps(2).finished
    update(policy)
    stream.switch_weights(policy.save_weights_and_get_sampling_client())
    new = stream.add(SamplingRequest(prompt=[3, 5], params=params))
    finished = drain(stream)
    (a,), (b,) = finished[old].sequences, finished[new].sequences
    assert (a.version, a.versions, b.version, b.versions) == (1, None, 2, None)
    check_logprobs(policy, [([3, 5], b)])
    (expected,) = learner_logprobs(policy, [([3, 4], a.tokens)], 0.7)
    assert np.abs(expected - a.logprobs).max() > 1e-3


def test_a_restarted_server_gets_the_model_and_the_adapter_again(servers, connect):
    """Also older adapters that are still sampled from."""
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    old = policy.save_weights_and_get_sampling_client()
    first = sample(old)
    stub.version, stub.adapters = "default", {}
    stub.model.get_input_embeddings().weight.data.zero_()
    update(policy)
    check_logprobs(policy, sample(policy.save_weights_and_get_sampling_client()))
    assert len(stub.folders) == 2 and stub.folders[0] == stub.folders[1]
    assert len(stub.adapters) == 2 and read(sample(old)) == read(first)


def test_a_server_that_kept_an_old_adapter_is_an_error(servers, connect):
    """It has loaded the new adapter by name, with the old weights."""
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    sample(policy.save_weights_and_get_sampling_client())
    for _ in range(3):
        update(policy)
    stub.fault = "old adapter"
    with pytest.raises(UserError, match="other logprobs with a LoRA adapter than the learner"):
        sample(policy.save_weights_and_get_sampling_client())


def test_an_answer_of_another_adapter_is_not_used(servers, connect):
    (stub, other), urls = servers(2)
    sampler = make_policy(connect(urls)).save_weights_and_get_sampling_client()
    sample(sampler)
    stub.fault, num_bodies = "other adapter", len(other.bodies)
    with pytest.warns(UserWarning, match="answered with the adapter 'base', expected"):
        samples = sample(sampler)
    assert len(samples) == 6 and len(other.bodies) == num_bodies + 3  # a request for each prompt


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"rank": 16}, "rank 8 at most, and this adapter has rank 16.*--max-lora-rank"),
        ({}, {"train_unembed": True}, "train_unembed, of a head that is tied"),
        ({"loads_at_run_time": False}, {}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_adapters_that_a_server_cannot_load_are_refused_before_the_first_sample(
    changes, options, message, servers, connect
):
    (stub,), urls = servers()
    for name, value in changes.items():
        setattr(stub, name, value)
    with pytest.raises(UserError, match=message):
        make_policy(connect(urls), **options).save_weights_and_get_sampling_client()
    assert not stub.folders


def test_scores_and_prompt_logprobs_are_the_learners(servers, connect):
    """Each token is scored by a request. The most likely tokens of a prompt are refused."""
    _, urls = servers()
    policy = make_policy(connect(urls))
    update(policy)
    sampler = policy.save_weights_and_get_sampling_client()
    text = [3, 4, 5, 0, 7, 0]
    prompt = ModelInput.from_ints(text)
    (expected,) = learner_logprobs(policy, [(text[:1], text[1:])], 1.0)
    response = sampler.sample(prompt, 2, PARAMS, include_prompt_logprobs=True).result()
    for logprobs in (sampler.compute_logprobs(prompt).result(), response.prompt_logprobs):
        assert logprobs[0] is None
        np.testing.assert_allclose(logprobs[1:], expected, atol=1e-5)
    assert sampler.compute_logprobs(ModelInput.from_ints([3])).result() == [None]
    with pytest.raises(ValueError, match="leave topk_prompt_logprobs out"):
        sampler.sample(prompt, 1, PARAMS, topk_prompt_logprobs=2).result()


def test_servers_with_and_without_adapters_do_not_mix(servers, connect):
    (first, _), urls = servers(2)
    first.lora_rank = 0
    with pytest.raises(UserError, match="some vLLM servers .* --enable-lora"):
        connect(urls)


def test_full_weights_and_saved_adapters_are_loaded_into_such_servers_too(servers, connect):
    """Layers have other names there."""
    (stub,), urls = servers()
    service = connect(urls)
    policy = service.create_full_training_client(BASE, seed=2)
    update(policy)
    check_logprobs(policy, sample(policy.save_weights_and_get_sampling_client()))
    assert not stub.adapters
    stub.fault = "old weights"
    update(policy)
    with pytest.raises(UserError, match="kept old weights"):
        sample(policy.save_weights_and_get_sampling_client())


@pytest.mark.parametrize(
    "options", ["", pytest.param("--max-steps-off-policy 2", marks=pytest.mark.slow)]
)
def test_runs_learn_from_adapters(options, servers, tmp_path):
    (stub, _), urls = servers(2)
    words = (
        f"grpo --base-model {BASE} --dataset addition --reward exact_match --steps 5 "
        "--batch-size 4 --group-size 2 --max-tokens 5 --eval-limit 4 --save-every 0 --lora-rank 8 "
        f"--sampler vllm --sampler-url {' '.join(urls)} --sampler-folder {tmp_path} {options}"
    )
    rows = train(words, tmp_path / "run")
    assert len(rows) == 6 and len(stub.folders) == 1 and len(stub.unloaded) >= 2
    for row in rows[1:] if not options else ():
        assert abs(row["optim/kl_sample_train_v2"]) < 1e-8
    assert not list(tmp_path.glob("whetstone-vllm-*/*"))
