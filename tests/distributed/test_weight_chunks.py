"""Test that weights reach another rank in chunks: over NCCL on a machine with two GPUs, over gloo
elsewhere.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(REPO)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), port], env=environment, **pipes)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    # the weights in the dtypes that the sampler keeps
    size = 4 * 317 * 11 + 2 * 2000 * 3 + 8 + 2 * 512 * 64
    assert f"received 4 tensors {size} bytes" in outputs[1]
