"""Test the transfer of weights over NCCL with the library of a GPU.

Twin of test_vllm_nccl.py, which needs more packages than a machine for GPU tests may have.
"""

import pytest
import torch

from rl.vllm.nccl_transfer import NcclSender


@pytest.mark.gpu
def test_the_library_of_a_gpu_takes_the_calls():
    """A communicator of this rank alone: one with workers needs more GPUs."""
    sender = NcclSender()
    sender.connect(0)
    sender.broadcast(torch.arange(100, dtype=torch.uint8))
    held, size = torch.cuda.memory_reserved(), 32 << 20
    for _ in range(40):
        sender.broadcast(torch.zeros(size, dtype=torch.uint8))
    assert torch.cuda.memory_reserved() - held < 3 * size
    sender.abort()
