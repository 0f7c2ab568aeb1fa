"""Test vLLM servers as the sampler, on a stub that answers exactly and has each known fault."""

import base64
import copy
import errno
import hashlib
import io
import math
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from helpers import random_datums
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm_stub import StubServer, vllm_server
from whole_runs import RECIPE, train

from rl import ServiceClient
from rl.algorithms import METHODS
from rl.client import SampleStream
from rl.config import RunSettings, parse_run
from rl.errors import UserError
from rl.memory_plan import LaunchShape
from rl.renderers import get_renderer
from rl.runtime import SamplerSettings, WorkerSettings
from rl.sampler import SamplingRequest
from rl.trainer.memory_requirements import compute_stage_needs
from rl.trainer.self_test import self_test
from rl.types import PARAMETER_BOUNDS, AdamParams, Datum, ModelInput, SamplingParams, TensorData
from rl.vllm import ServerPool, VllmDecoder, VllmEngine, VllmServerError, server_pool
from rl.vllm.transfer_validation import FolderManifest, find_transfer_error

BASE = "tiny:addition-small"
PARAMS = SamplingParams(max_tokens=6, temperature=0.7)


def encode_array(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def corrupt_reply(fault, reply):
    reply = copy.deepcopy(reply)
    choice = reply["choices"][0]
    content = choice["logprobs"]["content"]
    if fault == "dies":
        return None
    if fault == "hangs":
        time.sleep(6)
    elif fault == "http 500":
        return 500, {"error": "out of memory"}
    elif fault == "http 400":
        return 400, {"error": "cannot do this"}
    elif fault == "other tokens":
        choice["token_ids"] = [(token + 1) % 12 for token in choice["token_ids"]]
    elif fault == "outside":
        choice["token_ids"][0] = content[0]["token_id"] = 10**6
    elif fault == "no logprobs":
        choice["logprobs"] = None
    elif fault == "missing logprob":
        del content[-1]
    elif fault == "nan":
        content[0]["logprob"] = math.nan
    elif fault == "truncated":
        choice["token_ids"] = choice["token_ids"][:1]
        choice["logprobs"]["content"] = content[:1]
        choice["weight_versions"][0]["end"] = 1
        choice["finish_reason"] = "abort"
    elif fault == "too long":
        choice["token_ids"] = [3] * 26
    elif fault == "old version":
        choice["weight_versions"][0]["version"] = "default"
    elif fault == "infinite":
        choice["weight_versions"][0]["end"] = math.inf
    elif fault == "no versions":
        choice["weight_versions"] = None
    elif fault == "several":
        reply["choices"] *= 2
    elif fault == "no experts":
        choice["routed_experts"] = None
    elif fault == "experts of another sample":
        choice["routed_experts"] = encode_array(np.zeros((3, 4, 2), np.uint8))
    elif fault == "unknown experts":
        shape = (len(choice["token_ids"]) + 2, 4, 2)
        choice["routed_experts"] = encode_array(np.full(shape, 99, np.uint8))
    elif fault == "other adapter":
        reply["model"] = "base"
    elif fault == "no json":
        return 200, "text"
    return 200, reply


FAULTS = {
    "dies": "is not reachable",
    "hangs": "within 3 s",
    "http 500": "HTTP 500: .*out of memory",
    "other tokens": "logprobs of other tokens",
    "outside": r"the token 1000000, outside",
    "no logprobs": "without token ids, logprobs or weight versions",
    "missing logprob": "logprobs of other tokens",
    "nan": "returned the logprob nan",
    "truncated": "truncated sample: finish_reason 'abort' after 1 of",
    "too long": "26 tokens, expected 1 to 6",
    "old version": "sampled with the weights 'default'.*restarted",
    "no versions": "without token ids, logprobs or weight versions",
    "infinite": "without token ids, logprobs or weight versions",
    "several": r"returned \d samples, expected \d",
    "no json": "returned str, not an object",
}


@contextmanager
def start_stubs():
    """Yield a function that starts stubs and returns (the stubs, their addresses)."""
    with ExitStack() as stack:

        def start(count=1, lora_rank=0):
            stubs = [StubServer() for _ in range(count)]
            for stub in stubs:
                stub.lora_rank = lora_rank
            urls = tuple(stack.enter_context(vllm_server(stub, corrupt_reply)) for stub in stubs)
            return stubs, urls

        yield start


@contextmanager
def connect_services(folder):
    """Yield a function that creates a service which samples from these addresses."""
    with ExitStack() as stack:

        def make(urls, seconds=60.0, rows=1024):
            sampler = SamplerSettings(
                kind="vllm", urls=urls, request_seconds=seconds, folder=str(folder), max_rows=rows
            )
            settings = WorkerSettings(dtype="fp32", sampler=sampler)
            return stack.enter_context(
                ServiceClient(output_dir=folder / "out", seed=3, settings=settings)
            )

        yield make


@pytest.fixture(autouse=True)
def quick_attempts(monkeypatch):
    monkeypatch.setattr(server_pool, "_RETRY_SECONDS", 0.05)


@pytest.fixture
def servers():
    with start_stubs() as start:
        yield start


@pytest.fixture
def connect(tmp_path):
    with connect_services(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def stub_pair(tmp_path_factory):
    """Yield two stubs, their addresses and a policy that samples from them."""
    folder = tmp_path_factory.mktemp("pair")
    with start_stubs() as start, connect_services(folder) as make:
        stubs, urls = start(2)
        yield stubs, urls, make_policy(make(urls))


def make_policy(service, kind="full"):
    if kind == "full":
        return service.create_full_training_client(BASE, seed=2)
    return service.create_lora_training_client(BASE, rank=4, seed=2)


def update(policy):
    policy.forward_backward(random_datums(8, seed=1), "importance_sampling", divisor=10.0)
    policy.optim_step(AdamParams(learning_rate=1e-2, eps=1e-8)).result()


def learner_logprobs(policy, samples, temperature):
    """Return the logprobs of each pair of a prompt and its answer's tokens."""
    datums = []
    for prompt, answer in samples:
        tokens = [*prompt, *answer]
        targets = TensorData(np.array(tokens[1:], np.int64))
        datums.append(Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets}))
    output = policy.forward(datums, "cross_entropy", {"temperature": temperature}).result()
    return [
        row["logprobs"].array[-len(answer) :]
        for row, (_, answer) in zip(output.loss_fn_outputs, samples, strict=True)
    ]


def check_logprobs(policy, samples):
    """Check that samples have the logprobs of the learner's weights."""
    pairs = [(prompt, sequence.tokens) for prompt, sequence in samples]
    for (_, sequence), expected in zip(samples, learner_logprobs(policy, pairs, 0.7), strict=True):
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)


def drain(stream):
    """Run a stream to its end, close it and return what it finished."""
    finished = {}
    while stream.busy:
        finished |= stream.run_steps().finished
    stream.close()
    return finished


def sample(sampler, num_prompts=3, num_samples=2, params=PARAMS):
    requests = [
        SamplingRequest(prompt=[3, 4 + i, 5], num_samples=num_samples, params=params, problem=i)
        for i in range(num_prompts)
    ]
    responses, counters = sampler.sample_many(requests).result()
    assert counters["finished_samples"] == num_prompts * num_samples
    return [
        (request.prompt, sequence)
        for request, response in zip(requests, responses, strict=True)
        for sequence in response.sequences
    ]


def read(samples):
    return [(s.tokens, s.logprobs, s.version, s.stop_reason) for _, s in samples]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_samples_have_the_learners_logprobs_after_every_update(kind, servers, connect):
    """With full weights and merged adapters. The sampled tokens differ within a group and between
    versions, and each sample has its version.
    """
    (stub,), urls = servers()
    policy = make_policy(connect(urls), kind)
    seen = []
    for version in range(3):
        sampler = policy.save_weights_and_get_sampling_client()
        samples = sample(sampler)
        for prompt, sequence in samples:
            assert (sequence.version, sequence.temperature) == (version, 0.7)
            check_logprobs(policy, [(prompt, sequence)])
        assert len({tuple(sequence.tokens) for _, sequence in samples}) > 1
        seen.append([sequence.logprobs for _, sequence in samples])
        text = [3, 4, 5, 6, 7]
        scores = sampler.compute_logprobs(ModelInput.from_ints(text)).result()
        targets = TensorData(np.array(text[1:], np.int64))
        datum = Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": targets})
        output = policy.forward([datum], "cross_entropy").result().loss_fn_outputs[0]
        np.testing.assert_allclose(scores[1:], output["logprobs"].array, atol=1e-5)
        update(policy)
    assert seen[0] != seen[1] != seen[2]
    assert len(stub.folders) == 3


def test_a_merged_model_is_copied_in_host_memory_alone(servers, connect, monkeypatch):
    """A copy of the base on the GPU at every update may not fit."""
    _, urls = servers()
    policy = make_policy(connect(urls), "lora")
    update(policy)

    def copy_on_device(parameter, memo):
        raise AssertionError("a parameter was copied on its device")

    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", copy_on_device)
    check_logprobs(policy, sample(policy.save_weights_and_get_sampling_client()))


def test_an_older_version_is_loaded_again_and_samples_the_same(servers, connect):
    """vLLM holds a single version: a client of another version makes the servers load it."""
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    old = policy.save_weights_and_get_sampling_client()
    first = sample(old)
    update(policy)
    new = sample(policy.save_weights_and_get_sampling_client())
    again = sample(old)
    assert read(again) == read(first) != read(new)
    assert len(stub.folders) == 3 and stub.folders[0] == stub.folders[2]


def test_the_base_below_an_adapter_and_a_saved_folder(servers, connect):
    (stub,), urls = servers()
    service = connect(urls)
    policy = make_policy(service, "lora")
    fresh = make_policy(service, "lora")  # a fresh adapter does not change the model
    sample(policy.save_weights_and_get_sampling_client())
    update(policy)
    check_logprobs(fresh, sample(policy.get_base_sampling_client()))
    path = policy.save_weights_for_sampler("new").result().path
    saved = sample(service.create_sampling_client(model_path=path))
    check_logprobs(policy, saved)
    assert len(stub.folders) == 1  # the policy's only


def test_a_model_of_another_shape_is_scored_in_this_process(servers, connect):
    """At any temperature, while the server samples for the policy."""
    (stub,), urls = servers()
    service = connect(urls)
    policy = make_policy(service)
    stub.token_seconds = 0.03
    stream = SampleStream(policy.save_weights_and_get_sampling_client())
    params = SamplingParams(max_tokens=20, temperature=0.7, stop=[])
    stream.add(SamplingRequest(prompt=[3, 4], params=params))
    assert not stream.run_steps(2).finished
    teacher = service.create_sampling_client(base_model="tiny:addition", seed=5)
    other = service.create_full_training_client("tiny:addition", seed=5)
    text = [3, 4, 5, 6, 7]
    (scores,) = teacher.compute_logprobs_many([ModelInput.from_ints(text)], 0.7).result()
    datum = Datum(
        ModelInput.from_ints(text[:-1]), {"target_tokens": TensorData(np.array(text[1:], np.int64))}
    )
    output = other.forward([datum], "cross_entropy", {"temperature": 0.7}).result()
    np.testing.assert_allclose(scores[1:], output.loss_fn_outputs[0]["logprobs"].array, atol=1e-5)
    with pytest.raises(UserError, match="open another stream"):
        stream.switch_weights(teacher)
        stream.run_steps(1)
    stream.switch_weights(policy.save_weights_and_get_sampling_client())
    finished = drain(stream)
    ((sequence,),) = [response.sequences for response in finished.values()]
    check_logprobs(policy, [([3, 4], sequence)])
    assert len(stub.folders) == 2 and len(set(stub.folders)) == 2


def test_a_group_is_requested_at_once_and_its_samples_depend_on_their_number_alone(
    servers, connect
):
    """A group, its slices, and parts of the size that a server allows have the same samples."""
    (stub,), urls = servers()
    sampler = make_policy(connect(urls)).save_weights_and_get_sampling_client()

    def sample_tokens(first=0, count=5, problem=0):
        request = SamplingRequest(
            prompt=[3, 4], num_samples=count, params=PARAMS, first_index=first, problem=problem
        )
        (response,), _ = sampler.sample_many([request]).result()
        return [sequence.tokens for sequence in response.sequences]

    group = sample_tokens()
    assert len(stub.bodies) == 2  # with the check at the start
    assert group == sample_tokens(0, 2) + sample_tokens(2, 3) != sample_tokens(problem=1)
    assert len(set(map(tuple, group))) > 1
    assert stub.bodies[-1]["sampling_params"]["n"] == 5


def test_a_group_is_requested_in_parts_of_the_size_that_the_server_decodes(servers, connect):
    (stub,), urls = servers()
    stub.max_num_seqs = 2
    sampler = make_policy(connect(urls)).save_weights_and_get_sampling_client()
    samples = sample(sampler, 1, 5)
    assert sorted(body["sampling_params"].get("n") for body in stub.bodies[1:]) == [1, 2, 2]
    stub.max_num_seqs = 256
    assert read(sample(sampler, 1, 5)) == read(samples)


@pytest.mark.parametrize(("rows", "most"), [(6, 6), (2, 2), (1024, 24)])
def test_a_server_gets_no_more_samples_at_once_than_max_rows(rows, most, servers, connect):
    """A request's time limit would otherwise include its time in the server's queue."""
    (stub,), urls = servers()
    sampler = make_policy(connect(urls, rows=rows)).save_weights_and_get_sampling_client()
    in_flight, seen, generate, lock = [], [], stub.generate, threading.Lock()
    barrier = threading.Barrier(8)  # of the requests, where all may run at once

    def record(prompt, params, name=None):
        with lock:
            in_flight.append(params["n"])
            seen.append(sum(in_flight))
        if rows == 1024:
            barrier.wait(60)
        reply = generate(prompt, params, name)
        with lock:
            in_flight.remove(params["n"])
        return reply

    stub.generate = record
    sample(sampler, 8, 3)
    assert max(seen) == most


def test_every_number_reaches_the_server(servers, connect):
    (stub,), urls = servers()
    sampler = make_policy(connect(urls)).save_weights_and_get_sampling_client()
    numbers = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2}
    numbers |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 2.0}
    assert {*numbers, "max_tokens", "seed"} == set(PARAMETER_BOUNDS), "add the new number here"
    sample(sampler, 1, 1, SamplingParams(max_tokens=6, **numbers))
    sent = stub.bodies[-1]["sampling_params"]
    assert {name: sent[name] for name in numbers} == numbers and sent["max_tokens"] == 6


def test_prompt_logprobs_come_with_samples(servers, connect):
    """They are untempered, come with the first sample only, and equal those of the in-process
    sampler.
    """
    (stub,), urls = servers()
    service = connect(urls)
    policy = make_policy(service)
    update(policy)
    here = service.create_sampling_client(policy.save_weights_for_sampler("w").result().path)
    sampler = policy.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints([3, 4, 5, 6, 3])
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
    response, expected = (
        client.sample(prompt, 3, PARAMS, **options).result() for client in (sampler, here)
    )
    assert [len(s.tokens) > 0 for s in response.sequences] == [True] * 3
    np.testing.assert_allclose(response.prompt_logprobs_np, expected.prompt_logprobs_np, atol=1e-5)
    assert response.topk_prompt_logprobs[0] is expected.topk_prompt_logprobs[0] is None
    rows = zip(response.topk_prompt_logprobs[1:], expected.topk_prompt_logprobs[1:], strict=True)
    for row, right in rows:
        np.testing.assert_allclose(row, right, atol=1e-5)
    sent = [body["sampling_params"].get("prompt_logprobs") for body in stub.bodies[-3:]]
    assert sorted(sent, key=str)[0] == 3 and sorted(sent, key=str)[1] is None
    assert sampler.sample(prompt, 1, PARAMS).result().prompt_logprobs is None
    stub.fault = "no prompt logprobs"
    with (
        pytest.warns(UserWarning, match="returned no logprobs of a prompt"),
        pytest.raises(UserError, match="3 attempts"),
    ):
        sampler.sample(prompt, 1, PARAMS, **options).result()


def test_greedy_and_stops(servers, connect):
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    sampler = policy.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=6, temperature=0.0)
    ((_, greedy),) = sample(sampler, 1, 1, params)
    stop = greedy.tokens[0]
    params = SamplingParams(max_tokens=6, temperature=0.0, stop=[stop])
    ((_, stopped),) = sample(sampler, 1, 1, params)
    assert (stopped.tokens, stopped.stop_reason) == ([stop], "stop")
    assert stop in stub.bodies[-1]["sampling_params"]["stop_token_ids"]


def test_what_servers_do_not_return_is_refused(servers, connect):
    _, urls = servers()
    policy = make_policy(connect(urls))
    sampler = policy.save_weights_and_get_sampling_client()
    for fields, message in (
        ({"target_prompt_tokens": np.array([[5]])}, "no logprobs of other tokens"),
        ({"params": SamplingParams(max_tokens=300)}, "raise the server's --max-model-len"),
        (
            {"params": SamplingParams(max_tokens=3, top_k=2, untruncated_logprobs=True)},
            "untruncated_logprobs",
        ),
    ):
        request = SamplingRequest(prompt=[3, 4], **{"params": PARAMS, **fields})
        with pytest.raises(ValueError, match=message):
            sampler.sample_many([request]).result()


def run_self_test(policy, sampler, temperature, *advises):
    renderer = get_renderer("plain", policy.get_tokenizer())
    questions = [[{"role": "user", "content": text}] for text in ("3+4=", "5+16=")]
    params = SamplingParams(max_tokens=5, temperature=temperature)
    return self_test(policy, sampler, questions, renderer, params, 7, *advises)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_self_test_passes_and_shows_the_agreement(kind, temperature, servers, connect):
    _, urls = servers()
    policy = make_policy(connect(urls), kind)
    sampler = policy.save_weights_and_get_sampling_client()
    text = run_self_test(policy, sampler, temperature)
    assert "vLLM against the learner: KL" in text and "above 0.01 in 0%" in text
    check_logprobs(policy, sample(sampler, 1, 1))  # the policy's weights are restored


# --------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("advises", [False, True])
def test_the_self_test_advises_a_correction_where_none_is_set(advises, servers, connect):
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    stub.logprob_error = 0.02
    sampler = policy.save_weights_and_get_sampling_client()
    text = run_self_test(policy, sampler, 0.7, advises)
    assert ("consider --correction truncate" in text) == advises and "in 100% of" in text


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "hangs"])
def test_servers_that_misbehave_are_named_and_their_samples_are_made_by_others(fault, stub_pair):
    """First a single server has the fault, then both; afterwards both sample again."""
    (bad, good), urls, policy = stub_pair
    bad.fault = good.fault = None
    update(policy)
    sampler = policy.save_weights_and_get_sampling_client()
    sample(sampler, 1, 1)  # makes the servers load the weights
    bad.fault = fault
    with pytest.warns(UserWarning, match=f"{urls[0]}.*{FAULTS[fault]}.*requested again"):
        samples = sample(sampler)
    check_logprobs(policy, samples)
    good.fault = fault
    with (
        pytest.warns(UserWarning, match=urls[1]),
        pytest.raises(UserError, match=f"{FAULTS[fault]}.*3 attempts"),
    ):
        sample(sampler, 1, 1)
    bad.fault = good.fault = None
    update(policy)
    num_bodies = len(bad.bodies)
    sample(policy.save_weights_and_get_sampling_client())
    assert len(bad.bodies) > num_bodies


def test_a_server_that_hangs_is_named_after_the_time_limit(servers, connect):
    (bad, _), urls = servers(2)
    sampler = make_policy(connect(urls, 3.0)).save_weights_and_get_sampling_client()
    bad.fault = "hangs"
    with pytest.warns(UserWarning, match=f"{urls[0]}.*{FAULTS['hangs']}.*requested again"):
        sample(sampler)


def test_a_failure_that_passes_costs_an_attempt(servers, connect):
    (stub,), urls = servers()
    sampler = make_policy(connect(urls)).save_weights_and_get_sampling_client()
    stub.fault, stub.max_faults = "http 500", 2
    sample(sampler, 1, 1)


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_a_server_refuses_fails_alone(streams, servers, connect):
    (stub,), urls = servers()
    policy = make_policy(connect(urls, rows=1))  # one request after the other
    sampler = policy.save_weights_and_get_sampling_client()
    sample(sampler, 1, 1)
    stub.fault, stub.max_faults = "http 400", 1
    requests = [SamplingRequest(prompt=[3, 4 + i], params=PARAMS, problem=i) for i in range(3)]
    if streams:
        stream = SampleStream(sampler)
        for request in requests:
            stream.add(request)
        responses = list(dict(sorted(drain(stream).items())).values())
    else:
        futures = [sampler.sample(ModelInput.from_ints(r.prompt), 1, PARAMS) for r in requests]
        responses = [future.future().exception() or future.result() for future in futures]
    assert isinstance(responses[0], UserError) and "cannot do this" in str(responses[0])
    check_logprobs(
        policy,
        [(r.prompt, s.sequences[0]) for r, s in zip(requests[1:], responses[1:], strict=True)],
    )


def test_samples_go_to_the_server_with_the_fewest(servers, connect):
    stubs, urls = servers(2)
    for stub in stubs:
        stub.max_num_seqs = 2
    sampler = make_policy(connect(urls)).save_weights_and_get_sampling_client()
    stubs[0].token_seconds = 0.02
    sample(sampler, 10, 4)
    assert min(len(stub.bodies) for stub in stubs) > 4


@pytest.mark.parametrize(("count", "failing"), [(1, None), (2, None), (1, "/resume")])
def test_a_server_that_kept_old_weights_ends_the_run(count, failing, servers, connect):
    (stub, *_), urls = servers(count)
    policy = make_policy(connect(urls))
    sample(policy.save_weights_and_get_sampling_client())
    update(policy)
    stub.fault, stub.failing_path = "old weights", failing
    sampler = policy.save_weights_and_get_sampling_client()
    with pytest.raises(UserError, match=f"{urls[0]} does not hold the weights.*kept old weights"):
        sample(sampler)
    assert stub.running.is_set()


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/weight_checker"])
def test_a_load_that_fails_resumes_the_server_and_its_samples_are_refused(path, servers, connect):
    """The other server repeats the running sample with only the new weights."""
    (bad, good), urls = servers(2)
    policy = make_policy(connect(urls))
    bad.token_seconds = 0.05
    stream = SampleStream(policy.save_weights_and_get_sampling_client())
    params = SamplingParams(max_tokens=20, temperature=0.7, stop=[])
    stream.add(SamplingRequest(prompt=[3, 4], params=params))
    assert not stream.run_steps(2).finished and bad.bodies[1:] and not good.bodies[1:]
    update(policy)
    bad.failing_path = path
    stream.switch_weights(policy.save_weights_and_get_sampling_client())
    with pytest.warns(UserWarning, match=f"{urls[0]}.*HTTP 500"):
        finished = drain(stream)
    assert bad.running.is_set()
    ((sequence,),) = [response.sequences for response in finished.values()]
    if path == "/pause":  # the server still has and reports the old weights
        assert bad.version.endswith("-1")
        return
    assert bad.version.endswith("-incomplete") and sequence.version == 1
    check_logprobs(policy, [([3, 4], sequence)])


def test_a_server_that_failed_in_a_load_is_no_fallback(servers, connect):
    (bad, good), urls = servers(2)
    policy = make_policy(connect(urls))
    sample(policy.save_weights_and_get_sampling_client())
    update(policy)
    bad.failing_path = "/weight_checker"
    sampler = policy.save_weights_and_get_sampling_client()
    with pytest.warns(UserWarning, match=f"{urls[0]}.*no samples are sent to it"):
        sample(sampler, 1, 1)
    good.fault, num_bodies = "http 500", len(bad.bodies)
    with (
        pytest.warns(UserWarning, match=urls[1]),
        pytest.raises(UserError, match=f"{urls[1]}.*3 attempts"),
    ):
        sample(sampler, 1, 1)
    assert len(bad.bodies) == num_bodies


@pytest.mark.parametrize("value", [{}, [], {"checksums": None}])
def test_a_load_that_is_answered_in_another_form_names_the_server(value, servers, connect):
    (stub,), urls = servers()
    sampler = make_policy(connect(urls)).save_weights_and_get_sampling_client()
    stub.checksum_reply = value
    with pytest.raises(UserError, match=f"{urls[0]} answered a load of weights in another form"):
        sample(sampler, 1, 1)


def test_proxies_of_the_environment_are_not_used(servers, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    _, urls = servers()
    assert ServerPool(urls, "nonce").max_context == 256


def test_a_sample_that_was_requested_after_a_load_has_no_older_weights(servers, connect):
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    sample(policy.save_weights_and_get_sampling_client())
    old = stub.version
    update(policy)
    sampler = policy.save_weights_and_get_sampling_client()
    sample(sampler, 1, 1)
    stub.version = old
    with pytest.raises(UserError, match=f"sampled with the weights '{old}'"):
        sample(sampler, 1, 1)


def test_which_servers_have_the_weights_is_known_on_every_rank(servers):
    """A failure of a request from before a load does not count against the loaded server."""
    _, urls = servers(2)
    pool = ServerPool(urls, "nonce")  # the pool of a rank that loads no weights
    first, second = (pool.add_weights(0, version) for version in (0, 1))
    pool.set_weights(first, [True, True])
    pool.set_weights(second, [False, True])
    assert {pool.send(lambda server: server.url) for _ in range(4)} == {urls[1]}
    assert pool.find_versions(second, second) == {second: 1}
    assert pool.find_versions(second, first) == {first: 0, second: 1}
    pool.servers[1].needs_reload = True

    def fail(server):
        raise VllmServerError(server.url, "rejects it", rejected=True)

    with pytest.raises(UserError, match="rejects it"):
        pool.send(fail)
    assert pool.servers[1].needs_reload
    seen = []

    def fail_late(server):
        seen.append(server.url)
        if len(seen) == 1:
            pool.set_weights(pool.add_weights(0, 2), [False, True])
            raise VllmServerError(server.url, "fails")
        return server.url

    assert pool.send(fail_late) == urls[1] and not pool.servers[1].needs_reload


def test_an_address_that_is_written_in_two_ways_is_one_server(servers):
    _, (url,) = servers()
    assert len(ServerPool((url, f"{url}/", f"{url}/v1"), "nonce").servers) == 1


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_full_disk_names_the_setting_of_the_folder(error, servers):
    _, urls = servers()

    def write(folder):
        raise error

    decoder = VllmDecoder(ServerPool(urls, "nonce"), 14, None, 0)
    with pytest.raises(UserError, match="no room for the weights.*set sampler_folder"):
        decoder.replace_weights(write, 0)


@pytest.mark.parametrize("ending", ["cancel", "close", "pool"])
def test_samples_that_nobody_waits_for_are_not_requested(ending, servers):
    (stub,), urls = servers()
    pool = ServerPool(urls, "nonce", max_rows=1)
    decoder = VllmDecoder(pool, 14, None, 0)
    decoder.replace_weights(None, 0)
    pool.set_weights(decoder.weights_id, [True])
    blocked = threading.Event()
    pool.executor.submit(blocked.wait)
    engine = VllmEngine(decoder)
    request_id = engine.add(SamplingRequest(prompt=[3, 4], num_samples=4, params=PARAMS))
    {"cancel": lambda: engine.cancel(request_id), "close": engine.close, "pool": pool.close}[
        ending
    ]()
    blocked.set()
    pool.executor.shutdown(wait=True)
    assert len(stub.bodies) == 1  # the check at the start


@pytest.mark.parametrize("ending", ["cancel", "pool"])
def test_requests_that_wait_for_rows_end_with_those_who_wait_for_them(ending, servers):
    (stub,), urls = servers()
    pool = ServerPool(urls, "nonce", max_rows=2)
    decoder = VllmDecoder(pool, 14, None, 0)
    decoder.replace_weights(None, 0)
    pool.set_weights(decoder.weights_id, [True])
    engine = VllmEngine(decoder)
    with pool.reserve_rows(2):  # others are being sampled
        request_id = engine.add(SamplingRequest(prompt=[3, 4], num_samples=2, params=PARAMS))
        while not pool._next_in_line.locked():
            time.sleep(0.01)
        engine.cancel(request_id) if ending == "cancel" else pool.close()
    pool.executor.shutdown(wait=True)
    assert len(stub.bodies) == 1  # the check at the start


def test_the_end_of_a_process_drops_the_queued_samples(servers):
    (stub,), urls = servers()
    stub.token_seconds = 0.2
    code = (
        "from rl.vllm import ServerPool\n"
        f"pool = ServerPool({urls!r}, 'nonce', max_rows=1)\n"
        "for _ in range(20): pool.executor.submit(pool.servers[0].sample, [0], {})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert len(stub.bodies) <= 3


def test_scores_do_not_wait_for_queued_samples(servers, connect):
    (stub,), urls = servers()
    policy = make_policy(connect(urls, rows=1))
    sampler = policy.save_weights_and_get_sampling_client()
    stub.token_seconds = 0.03
    stream = SampleStream(sampler)
    params = SamplingParams(max_tokens=10, temperature=0.7, stop=[])
    stream.add(SamplingRequest(prompt=[3, 4], num_samples=8, params=params))
    stream.run_steps(1)
    sampler.compute_logprobs(ModelInput.from_ints([3, 4, 5])).result()
    stream.close()
    assert "prompt_logprobs" in stub.bodies[-1]["sampling_params"] and len(stub.bodies) < 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"release": "0.11.2"}, "^http://127[^ ]* runs vLLM 0.11.2; supported: 0.32.x"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"quantization": "fp8"}, "quantizes its weights"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ({"max_num_seqs": math.inf}, "does not answer as a vLLM server .OverflowError"),
    ],
)
def test_a_server_that_cannot_work_is_refused_at_the_start(changes, message, servers, connect):
    (stub,), urls = servers()
    for name, value in changes.items():
        setattr(stub, name, value)
    with pytest.raises(UserError, match=message):
        connect(urls)


def test_no_server_at_the_start(servers, connect, monkeypatch):
    with pytest.raises(UserError, match="http://127.0.0.1:9 is not reachable.*vllm serve"):
        connect(("http://127.0.0.1:9",))
    for key in ("secret\u200b", "secret\nsecret"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(UserError, match="^VLLM_API_KEY holds characters that no key has"):
            connect(("http://127.0.0.1:9",))


# ------------------------------------------------------------------------------ streams, settings


def test_new_weights_during_a_stream_show_in_the_versions_of_the_tokens(servers, connect):
    """The server continues with the new weights, and each token is labelled with the weights that
    sampled it.
    """
    (stub,), urls = servers()
    policy = make_policy(connect(urls))
    stub.token_seconds = 0.03
    stream = SampleStream(policy.save_weights_and_get_sampling_client())
    params = SamplingParams(max_tokens=30, temperature=0.7, stop=[])
    prompts = {}
    for i in range(3):
        prompt = [3, 4 + i]
        ticket = stream.add(SamplingRequest(prompt=prompt, params=params, seed=i))
        prompts[ticket] = prompt
    assert not stream.run_steps(2).finished
    update(policy)
    new_client = policy.save_weights_and_get_sampling_client()
    sample(new_client, 1, 1)  # like an evaluation, before the stream switches weights
    stream.switch_weights(new_client)
    finished = drain(stream)
    assert finished.keys() == prompts.keys()
    for ticket, response in finished.items():
        (sequence,) = response.sequences
        assert sequence.versions == sorted(sequence.versions) and set(sequence.versions) == {0, 1}
        assert len(sequence.versions) == len(sequence.tokens) == 30 and sequence.version == 0
        (expected,) = learner_logprobs(policy, [(prompts[ticket], sequence.tokens)], 0.7)
        new = np.array(sequence.versions) == 1
        np.testing.assert_allclose(np.array(sequence.logprobs)[new], expected[new], atol=1e-5)
        assert np.abs(np.array(sequence.logprobs) - expected)[~new].max() > 1e-3


def test_runs_learn_from_servers(servers, tmp_path):
    """Off-policy sampling continues during updates; each trained group has its age."""
    (stub, _), urls = servers(2)
    words = (
        f"grpo --base-model {BASE} --dataset addition --reward exact_match --steps 5 "
        "--batch-size 4 --group-size 2 --max-tokens 5 --eval-limit 4 --save-every 0 "
        f"--sampler vllm --sampler-url {' '.join(urls)} --sampler-folder {tmp_path}"
    )
    lockstep = train(words, tmp_path / "lockstep")
    assert len(lockstep) == 6 and len(stub.folders) >= 7  # includes the self-test
    folders = len(stub.folders)
    rows = train(f"{words} --max-steps-off-policy 2", tmp_path / "off policy")
    assert len(rows) == 6 and len(stub.folders) > folders + 5
    for row in lockstep[1:]:
        assert abs(row["optim/kl_sample_train_v2"]) < 1e-8
    assert not list(tmp_path.glob("whetstone-vllm-*/*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sampler-url http://a:1", "sampler is auto"),
        ("--sampler vllm --sampler-url host:8000", "expected such as http://localhost:8000"),
        ("{vllm} --sampler-tp 2", "--tensor-parallel-size"),
        ("{vllm} --sampler-cache paged", "--sampler-cache is a setting of the sampler in this"),
        ("{vllm} --sampler-ranks 1", "leave sampler_ranks at 0"),
        ("{vllm} --max-steps-off-policy 2 --recompute-cache", "leave recompute_cache out"),
        ("{vllm} --replay {tmp}", "a replay repeats a run bit for bit"),
    ],
)
def test_settings_that_do_not_combine_are_refused_before_the_start(
    words, message, tmp_path, capsys
):
    """No server is running, and none is called."""
    words = words.format(vllm="--sampler vllm --sampler-url http://127.0.0.1:9", tmp=tmp_path)
    with pytest.raises((UserError, SystemExit)) as caught:
        train(f"grpo --base-model {BASE} --dataset addition {words}", tmp_path / "run")
    shown = re.sub(r"[\s│]+", " ", f"{caught.value} {capsys.readouterr().err}")
    assert message in shown and "not reachable" not in shown


# ------------------------------------------------------------- weights of several forms, and plans


def digests_of(folder, seed, dtype, changed=()):
    """Write a folder of two layers, with other weights for the tensors named in `changed`; return
    the weights and their manifest.
    """
    folder.mkdir()
    weights = {}
    for i, name in enumerate(["a.q_proj", "a.k_proj", "a.v_proj", "a.norm", "b.o_proj"]):
        generator = torch.Generator().manual_seed(seed + i + (100 if name in changed else 0))
        shape = (8,) if "norm" in name else (8, 4)
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator)
    save_file(weights, folder / "model.safetensors")
    return weights, FolderManifest(folder, dtype)


def shard_digests(weights, ranks, dtype=torch.float32):
    """Return the checksums that a server reports for these weights, sharded over `ranks` processes."""
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    fused = {
        "a.qkv_proj.weight": [weights.pop(f"a.{part}_proj.weight") for part in "qkv"],
        **{name: [tensor] for name, tensor in weights.items()},
    }
    held = {}
    for name, parts in fused.items():
        for rank in range(ranks):
            cut = [part if "norm" in name else part.chunk(ranks)[rank] for part in parts]
            values = torch.cat(cut).view(torch.uint8).numpy().tobytes()
            held[f"dp0:pp0:pcp0:tp{rank}:{name}"] = hashlib.sha256(values).hexdigest()
    return held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_that_was_not_taken_over_shows_in_every_form(ranks, dtype, tmp_path):
    """Weights are fused, in the server's dtype and sharded over two processes; each tensor is
    tested in turn.
    """
    old, old_digests = digests_of(tmp_path / "old", 1, str(dtype))
    previous = (old_digests, shard_digests(old, ranks, dtype))
    assert find_transfer_error(*previous, None, ranks) is None
    for name in ("a.q_proj", "a.v_proj", "a.norm", "b.o_proj"):
        new, digests = digests_of(tmp_path / name, 1, str(dtype), changed=(name,))
        assert (
            find_transfer_error(digests, shard_digests(new, ranks, dtype), previous, ranks) is None
        )
        error = find_transfer_error(digests, previous[1], previous, ranks)
        assert "a.qkv_proj" in error if "proj" in name and "a." in name else name in error
        # a tensor that changed although the learner's did not
        assert find_transfer_error(old_digests, shard_digests(new, ranks, dtype), previous, ranks)


def test_a_change_in_the_rows_of_one_part_changes_no_other(tmp_path):
    """Both servers (data-parallel replicas) must load the change."""
    old, old_digests = digests_of(tmp_path / "old", 1, "torch.float32")
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["b.o_proj.weight"][-1] += 1
    (tmp_path / "new").mkdir()
    save_file(new, tmp_path / "new" / "model.safetensors")
    digests = FolderManifest(tmp_path / "new", "torch.float32")
    replica = {key.replace("dp0", "dp1"): digest for key, digest in shard_digests(old, 2).items()}
    previous = old_digests, shard_digests(old, 2) | replica
    error = find_transfer_error(digests, shard_digests(new, 2) | replica, previous, 2)
    assert "1 of 12 parameters differ (b.o_proj.weight)" in error
    replica = {key.replace("dp0", "dp1"): digest for key, digest in shard_digests(new, 2).items()}
    assert find_transfer_error(digests, shard_digests(new, 2) | replica, previous, 2) is None


def test_a_server_of_another_model_is_refused(tmp_path):
    _, digests = digests_of(tmp_path / "old", 1, "torch.float32")
    error = find_transfer_error(digests, {"dp0:pp0:pcp0:tp0:other": "0"}, None, 1)
    assert "names no parameter" in error


def test_a_plan_counts_no_sampler_on_the_learners(tmp_path):
    words = f"grpo --base-model {BASE} --dataset addition --reward exact_match".split()
    external = [*words, "--sampler", "vllm", "--sampler-url", "http://127.0.0.1:9"]
    launch, names = LaunchShape(cuda=False, bf16=False), []
    for line in (words, external):
        run = parse_run(line, METHODS, RECIPE, options=RunSettings)
        (needs,) = compute_stage_needs(run, launch, 16, traced=False)
        names.append({item.name for item in needs.plan.items if item.sample})
    assert "KV cache" in names[0] and "KV cache" not in names[1]


def test_a_run_resumes_with_another_server(servers, tmp_path):
    """The address is not part of the run's identity, because the first server may no longer exist."""
    stubs, urls = servers(2)
    words = (
        f"grpo --base-model {BASE} --dataset addition --reward exact_match --batch-size 4 "
        "--group-size 2 --max-tokens 5 --eval-every 0 --save-every 1 --sampler vllm "
    )
    train(f"{words} --steps 2 --sampler-url {urls[0]}", tmp_path / "run")
    stubs[0].fault = "dies"
    rows = train(f"{words} --steps 4 --sampler-url {urls[1]} --resume", tmp_path / "run")
    assert len(rows) == 4
    assert all(abs(row["optim/kl_sample_train_v2"]) < 1e-8 for row in rows[-2:])
    assert len(stubs[1].folders) >= 2
