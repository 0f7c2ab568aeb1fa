"""A plugin of vLLM: its NCCL transfer works on a CPU, with the library of nccl_stub.c."""

from contextlib import nullcontext


class NoStream:
    cuda_stream = None

    def synchronize(self):
        pass


def register():
    import torch
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    def join(info, parallel):
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return pynccl.PyNcclCommunicator.from_unique_id_bytes(
            info.nccl_unique_id_bytes, rank + info.rank_offset, info.world_size, device="cpu"
        )

    nccl_engine.worker_init_process_group = join
    pynccl.current_stream = NoStream
    packed_tensor._get_streams = lambda device, count: [NoStream()] * count
    torch.cuda.stream = lambda stream: nullcontext()
    torch.accelerator.device_index = lambda index: nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None
