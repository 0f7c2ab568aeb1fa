"""Test that weights reach another rank in chunks: over NCCL on a machine with two GPUs, over gloo
elsewhere. Count the bytes of a service with a rank that only samples.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl.distributed import collectives

REPO = Path(__file__).resolve().parents[2]
RANK = """
import os, sys, torch
from rl.distributed import collectives
from rl.learner import ModelSpec
from rl.runtime.weight_sync import WeightSnapshot, WeightTransfer
import torch.distributed as dist
from dataclasses import replace

rank, port = int(sys.argv[1]), int(sys.argv[2])
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(rank)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
group = collectives.ObjectGroup(60.0, collectives.BridgeMembers(rank, 2, store, f"rank {rank}"))
generator = torch.Generator().manual_seed(0)
dtypes = {"wide": torch.float32, "half": torch.bfloat16, "none": torch.float32, "last": torch.float64, "long": torch.float32}
shapes = {"wide": (317, 11), "half": (2000, 3), "none": (0, 4), "last": (), "long": (512, 64)}
narrow = {"long": torch.bfloat16}  # the sampler keeps it in fewer bytes
tensors = {name: torch.randn(shapes[name], generator=generator).to(dtypes[name]) for name in shapes}
spec = ModelSpec("tiny:addition", None, None, 0, False)
snapshot = WeightSnapshot(0, spec, ("tiny:addition", None, 0), 7, tensors)
if rank == 0:
    for chunk in snapshot.iter_chunks(1001, narrow):
        group.broadcast_verb(chunk)
        group.broadcast_buffer(chunk.payload)
        group.gather(None)
    group.broadcast_verb("end")
else:
    loaded = {}
    class Decoder:
        def load_(self, named):
            loaded.update({name: tensor.clone() for name, tensor in named})
    manifest = snapshot.make_manifest().with_dtypes(narrow)
    transfer, payload_bytes = WeightTransfer(manifest, Decoder(), None, 0.0), 0
    while (chunk := group.broadcast_verb(None)) != "end":
        buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
        payload_bytes += buffer.nbytes
        transfer.receive(replace(chunk, payload=group.broadcast_buffer(buffer)))
        group.gather(None)
    transfer.check_complete()
    assert loaded.keys() == tensors.keys() - {"none"}
    for name, tensor in loaded.items():
        dtype = narrow.get(name, dtypes[name])
        assert tensor.is_cuda == cuda and torch.equal(tensor.cpu(), tensors[name].to(dtype))
        assert tensor.dtype == dtype
    assert payload_bytes == sum(tensor.nbytes for tensor in loaded.values())
    print("received", len(loaded), "tensors", payload_bytes, "bytes", flush=True)
group.close()
os._exit(0)  # as ranks of a run end: torch's threads abort a slow teardown
"""


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL needs a GPU for each rank")
def test_a_rank_receives_the_weights_bit_for_bit():
    outputs = run_ranks(RANK)
    # the weights in the dtypes that the sampler keeps
    size = 4 * 317 * 11 + 2 * 2000 * 3 + 8 + 2 * 512 * 64
    assert f"received 4 tensors {size} bytes" in outputs[1]


def run_ranks(code: str, **environment: str) -> list[str]:
    """Run two ranks of a launch and return their outputs. Code gets its rank and a port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(REPO), **environment}
    common |= {"MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), port],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            **pipes,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs


# Counts what rank 0 gives to gloo while a service sends its weights three times: the first time in
# the learner's dtype, cut while it is sent, then from chunks that are cut before.
SERVICE = """
import sys
import numpy as np, torch
from rl.distributed import collectives

sent = {"buffers": 0, "verbs": 0}

class Counting:
    def __init__(self, group, name):
        self.group, self.name = group, name
    def __getattr__(self, name):
        return getattr(self.group, name)
    def broadcast(self, tensor, source):
        sent[self.name] += tensor.nbytes
        return self.group.broadcast(tensor, source)
    def send(self, tensors, to, tag):
        sent[self.name] += sum(tensor.nbytes for tensor in tensors)
        return self.group.send(tensors, to, tag)

make_group = collectives.BridgeMembers.group
def group(self, name, *inputs):
    made = make_group(self, name, *inputs)
    return Counting(made, name) if name in sent else made
collectives.BridgeMembers.group = group

from rl import AdamParams, Datum, ModelInput, ServiceClient
from rl.runtime import WorkerSettings, weight_sync

weight_sync.CHUNK_BYTES = 2**16  # several chunks, of which the last is smaller
settings = WorkerSettings(sampler_ranks=1, SETTINGS)
with ServiceClient(settings=settings) as service:
    client = service.create_full_training_client("tiny:addition")
    ids = np.arange(1, 9)
    fields = {"target_tokens": ids[1:], "weights": np.ones(7, np.float32)}
    datum = Datum(ModelInput.from_ints(ids[:-1].tolist()), fields)
    for _ in range(3):
        before = dict(sent)
        sampler = client.save_weights_and_get_sampling_client()
        version = sampler.version  # waits for the weights
        print("sent", version, *(sent[name] - before[name] for name in sent), flush=True)
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(AdamParams(learning_rate=1e-3)).result()
"""


@pytest.mark.parametrize(
    ("settings", "width"),
    [pytest.param("", 4, marks=pytest.mark.slow), ('dtype="bf16"', 2)],
)
def test_the_bytes_of_a_service_are_those_of_the_weights_and_a_little_more(settings, width):
    """The payloads are every weight once, in the sampler's dtype. The verbs take less than 1 kB for a
    chunk, and a manifest.
    """
    from rl.models import load_model

    weights = sum(p.numel() for p in load_model("tiny:addition", seed=0).model.parameters())
    chunks = -(-width * weights // 2**16)
    output = run_ranks(SERVICE.replace("SETTINGS", settings))[0]
    lines = [line.split()[1:] for line in output.splitlines() if line.startswith("sent ")]
    assert [int(version) for version, *_ in lines] == [0, 1, 2], output
    for _, payload, verbs in lines:
        assert int(payload) == width * weights
        assert 0 < int(verbs) < 1000 * chunks + 20_000


class RecordingBuffer:
    """A buffer that records its copy to the GPU, with the stream that is current."""

    def __init__(self, name: str, calls: list[tuple[str, str, object]], current: list[object]):
        self.name, self.calls, self.current = name, calls, current

    def cuda(self, non_blocking: bool) -> str:
        assert non_blocking  # the host does not wait
        self.calls.append(("copy", self.name, self.current[-1]))
        return f"{self.name} on the GPU"


def test_a_chunk_is_copied_to_the_gpu_while_the_chunk_before_is_sent(monkeypatch):
    """A stream executes its calls in order; those of two streams overlap."""
    calls, current = [], []

    class Use:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, *inputs):
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", Use)
    staging = collectives.StagingBuffers()
    first, second, third, other = (RecordingBuffer(n, calls, current) for n in ("1", "2", "3", "4"))

    def broadcast(staged):
        calls.append(("send", staged[0], current[-1]))

    sent = [staging.send(first, broadcast, second), staging.send(second, broadcast, third)]
    # the transfer of `third` has failed, and the next begins with another chunk
    sent.append(staging.send(other, broadcast, None))
    assert sent == [f"{n} on the GPU" for n in "124"]
    assert [call[:2] for call in calls] == [
        ("copy", "1"), ("send", "1"), ("copy", "2"), ("send", "2"), ("copy", "3"), ("copy", "4"),
        ("send", "4"),
    ]  # fmt: skip
    streams = [stream for *_, stream in calls]
    a, b = streams[0], streams[2]
    assert a is not b and streams == [a, a, b, b, a, b, b]
