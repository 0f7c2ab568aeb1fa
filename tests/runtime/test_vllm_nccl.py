"""Test weights that vLLM servers get over NCCL, with a library that works on the CPU."""

import os
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_vllm
import torch
from nccl_workers import NcclWorkers, build_library
from safetensors.torch import save_file
from test_vllm import (
    check_logprobs,
    connect,  # noqa: F401  (a fixture)
    make_policy,
    quick_attempts,  # noqa: F401  (a fixture)
    sample,
    servers,  # noqa: F401  (a fixture)
    update,
)

from rl import ServiceClient
from rl.errors import UserError
from rl.processes import find_descendants
from rl.runtime import SamplerSettings, WorkerSettings
from rl.vllm import nccl_transfer
from rl.vllm.nccl_transfer import NcclError, NcclSender, pack_tensors, read_tensors

VLLM = "WHETSTONE_VLLM"  # variable with the command of a real vLLM


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def start(library, servers, connect, monkeypatch):  # noqa: F811
    """Yield a function that starts stubs with workers, which hold other weights of the model, and
    returns (the stubs, a service that sends them weights).
    """
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(library))
    monkeypatch.setattr(nccl_transfer, "_BUFFER_BYTES", 10_000)

    def make(count=1, seconds=60.0, kind="full"):
        stubs, urls = servers(count)
        sample(make_policy(connect(urls), kind).save_weights_and_get_sampling_client())
        for stub in stubs:
            stub.workers = NcclWorkers(library, 2)
            stub.folders.clear()
        return stubs, connect(urls, seconds)

    return make


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_weights_arrive_over_nccl_at_every_update(kind, start):
    """In several buffers, at two workers of each of two servers. No server reads a folder."""
    stubs, service = start(2, kind=kind)
    policy = make_policy(service, kind)
    for _ in range(3):
        update(policy)
        check_logprobs(policy, sample(policy.save_weights_and_get_sampling_client(), 6))
    round_ = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    for stub in stubs:
        first = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
        assert stub.workers.calls == [round_[0], round_[2], *first, *round_ * 3]
        assert not stub.folders and stub.workers.buffers > 2


@pytest.mark.parametrize("restarts", [False, True])
def test_a_server_without_its_communicator_gets_another(restarts, start):
    """After a restart, and after an update that a killed run has begun."""
    (stub,), service = start()
    policy = make_policy(service)
    if restarts:
        sample(policy.save_weights_and_get_sampling_client())
        stub.workers.leave()
        stub.version = "default"
    else:
        stub.workers.is_active = True
    update(policy)
    check_logprobs(policy, sample(policy.save_weights_and_get_sampling_client()))
    assert not stub.folders


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("refuses", "HTTP 500.*init_weight_transfer_engine failed"),
        ("dies", "HTTP 500.*update_weights failed"),
        ("hangs", "update_weights within 3 s"),
    ],
)
def test_a_server_that_fails_during_a_transfer_costs_its_own_samples(fault, text, start):
    (bad, good), service = start(2, seconds=3.0)
    policy = make_policy(service)
    update(policy)
    bad.workers.fault = fault
    began = time.monotonic()
    with pytest.warns(UserWarning, match=text):
        samples = sample(policy.save_weights_and_get_sampling_client(), 6)
    check_logprobs(policy, samples)
    assert time.monotonic() - began < 30
    bad.workers.ends_hang.set()
    bad.workers.fault, bad.version = None, "default"
    bad.workers.is_active = False
    num_bodies = len(bad.bodies)
    update(policy)
    check_logprobs(policy, sample(policy.save_weights_and_get_sampling_client(), 6))
    assert len(bad.bodies) > num_bodies  # it has the next weights


def test_the_error_of_a_transfer_that_fails_on_this_side_is_shown(start, monkeypatch):
    stubs, service = start()
    policy = make_policy(service)
    pack = nccl_transfer.pack_tensors

    def fail(folder, size):
        buffers = pack(folder, size)
        yield next(buffers)
        raise OSError("the disk has gone")

    monkeypatch.setattr(nccl_transfer, "pack_tensors", fail)
    with pytest.raises(UserError, match="no vLLM server.*NCCL: the disk has gone") as caught:
        sample(policy.save_weights_and_get_sampling_client())
    assert "sampler_folder" not in str(caught.value)


def test_a_transfer_that_was_given_up_does_not_wait_for_workers(library, monkeypatch):
    """Also if they join later. A broadcast would otherwise run on the GPU without an end."""
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(library))
    sender, workers = NcclSender(), NcclWorkers(library, 1)
    with ThreadPoolExecutor(1) as executor:
        connection = executor.submit(sender.connect, 1)
        time.sleep(0.2)  # until it waits
        sender.abort()
        workers.info = {
            "nccl_unique_id_b64": sender.unique_id,
            "rank_offset": 1,
            "world_size": 2,
        }
        with pytest.raises(RuntimeError, match="NCCL returned"):
            workers.join(0)
        with pytest.raises(NcclError, match="has ended"):
            connection.result(20)
    with pytest.raises(NcclError, match="has ended"):
        sender.broadcast(torch.zeros(1, dtype=torch.uint8))


def test_a_machine_without_nccl_refuses_such_a_server(library, servers, connect, monkeypatch):  # noqa: F811
    (stub,), urls = servers()
    stub.workers = NcclWorkers(library, 1)
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "no-such-library.so")
    with pytest.raises(UserError, match="no-such-library.*without --weight-transfer-config"):
        connect(urls)


def test_buffers_end_as_vllm_counts_and_hold_aligned_tensors(tmp_path):
    sizes = [3, 10, 1, 40, 7]
    written = {f"a{i}": torch.randn(n, dtype=torch.bfloat16) for i, n in enumerate(sizes)}
    written |= {f"b{i}": torch.randn(n) for i, n in enumerate(sizes)}
    written |= {f"c{i}": torch.randn(n).to(torch.float8_e4m3fn) for i, n in enumerate(sizes)}
    written["scalar"] = torch.tensor(3.0)
    save_file(written, tmp_path / "model.safetensors")
    tensors = read_tensors(tmp_path)
    assert sorted(tensors) == sorted(written)
    for size in (0, 19, 20, 39, 100, 10**6):
        left = list(tensors)
        for buffer in pack_tensors(tensors.values(), size):
            start = 0
            while start <= size and left:  # as vLLM's workers
                expected = written[left.pop(0)]
                part = buffer[start : start + expected.nbytes]
                part = part.view(expected.dtype).view(expected.shape)
                assert torch.equal(part.float(), expected.float())
                start += expected.nbytes
            assert start == buffer.numel()
        assert not left


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install the plugin of vLLM for the processes that this one starts."""
    info = tmp_path / "plugin" / "nccl_on_cpu-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl-on-cpu\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nnccl_on_cpu = nccl_on_cpu:register\n"
    (info / "entry_points.txt").write_text(entry)
    module = Path(__file__).with_name("nccl_on_cpu.py")
    (info.parent / module.name).write_text(module.read_text())
    paths = [str(info.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.timeout(1800)
@pytest.mark.skipif(VLLM not in os.environ, reason=f"{VLLM} names no command of a real vLLM")
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_real_engine_gets_weights_over_nccl(kind, library, plugin, tmp_path, monkeypatch):
    """At every update, and after the server has been killed."""
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(library))
    monkeypatch.setattr(nccl_transfer, "_BUFFER_BYTES", 200_000)
    monkeypatch.setattr(test_vllm, "BASE", "tiny:addition")
    sizes, send = [], NcclSender.broadcast
    monkeypatch.setattr(
        NcclSender, "broadcast", lambda self, data: sizes.append(data.numel()) or send(self, data)
    )
    option = shlex.join(["--weight-transfer-config", '{"backend": "nccl"}'])
    command = f"{os.environ[VLLM]} {option}"
    sampler = SamplerSettings(kind="vllm", command=command, request_seconds=300.0)
    settings = WorkerSettings(dtype="fp32", sampler=sampler)
    with ServiceClient(output_dir=tmp_path / "out", seed=3, settings=settings) as service:
        policy = make_policy(service, kind)
        for number in range(4):
            sizes.clear()
            samples = sample(policy.save_weights_and_get_sampling_client(), 4)
            check_logprobs(policy, samples)
            assert len(sizes) > 1
            if number == 2:
                for pid in find_descendants(os.getpid()):
                    if b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
            update(policy)
