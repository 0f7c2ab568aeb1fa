"""Test router replay with vLLM servers: samples hold the experts that the server routed to."""

import numpy as np
import pytest
from test_router_replay import mixture_that_adds, record_own_experts
from test_vllm import corrupt_reply, sample, update
from vllm_stub import StubServer, vllm_server
from whole_runs import train

from rl import ServiceClient
from rl.errors import UserError
from rl.learner import LearnerSettings
from rl.runtime import SamplerSettings, WorkerSettings


@pytest.fixture
def base(tmp_path):
    mixture_that_adds(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def server():
    stub = StubServer()
    stub.returns_experts = True
    with vllm_server(stub, corrupt_reply) as url:
        yield stub, url


def connect(url, folder):
    sampler = SamplerSettings(kind="vllm", urls=(url,), folder=str(folder), router_replay=True)
    settings = WorkerSettings(
        dtype="fp32", sampler=sampler, learner=LearnerSettings(router_replay=True)
    )
    return ServiceClient(output_dir=folder / "out", seed=3, settings=settings)


def test_samples_hold_the_experts_of_prompt_and_answer(base, server, tmp_path):
    stub, url = server
    with connect(url, tmp_path) as service:
        policy = service.create_full_training_client(base, seed=2)
        update(policy)
        for prompt, sequence in sample(policy.save_weights_and_get_sampling_client()):
            expected = record_own_experts(stub.model, [*prompt, *sequence.tokens][:-1])
            assert sequence.experts.dtype == np.int16
            np.testing.assert_array_equal(np.sort(sequence.experts), np.sort(expected))
        assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no experts", "returned no experts"),
        ("experts of another sample", r"returned experts of shape \(3, 4, 2\)"),
        ("unknown experts", r"in \[99, 99\], expected .* in \[0, 3\]"),
    ],
)
def test_samples_with_wrong_experts_are_not_used(fault, message, base, server, tmp_path):
    stub, url = server
    with connect(url, tmp_path) as service:
        policy = service.create_full_training_client(base, seed=2)
        sampler = policy.save_weights_and_get_sampling_client()
        stub.fault = fault
        with pytest.warns(UserWarning, match="returned"), pytest.raises(UserError, match=message):
            sample(sampler)


def test_servers_that_return_no_experts_are_refused_at_the_start(server, tmp_path):
    stub, url = server
    stub.returns_experts = False
    with pytest.raises(UserError, match="--enable-return-routed-experts"):
        connect(url, tmp_path)


def test_a_run_replays_the_experts_of_a_server(base, server, tmp_path):
    """In fp32 learner and server route alike, except for a rare tie."""
    stub, url = server
    words = (
        f"grpo --base-model {base} --batch-size 4 --group-size 4 --max-tokens 5 --dataset addition "
        "--renderer plain --eval-every 0 --rollouts-every 0 --steps 2 --router-replay --sampler "
        f"vllm --sampler-url {url} --sampler-folder {tmp_path}"
    )
    rows = train(words, tmp_path / "run")
    shares = [row["optim/rerouted"] for row in rows if "optim/rerouted" in row]
    assert len(shares) == 2 and shares[0] <= 0.02
