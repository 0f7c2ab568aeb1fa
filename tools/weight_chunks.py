"""Measure the work of rank 0 for the chunks in which it sends weights to sampler ranks.

    python tools/weight_chunks.py      # results/weight_chunks.csv: about a minute, five rows

`checksum_gb_per_s`: two layers of a 7B in bf16, by the CPU time of one thread. `verb_ms`: the tenth
percentile of the times of a chunk's verb to another process over gloo, with 8 bytes of weights.
tools/scaling.py takes the slowest of both from here.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.harness import RESULTS, make_parser, show, write_table  # noqa: E402
from rl.distributed import collectives  # noqa: E402
from rl.learner import ModelSpec  # noqa: E402
from rl.runtime.weight_sync import GPU_CHUNK_BYTES, WeightSnapshot, cut_payloads  # noqa: E402

# The matrices of a layer of Qwen2.5-7B.
LAYER = ((3584, 3584), (512, 3584), (512, 3584), (3584, 3584), *[(18_944, 3584)] * 3)
LAYERS, ROUNDS, VERBS, ROWS = 2, 7, 350, 5


def make_snapshot(tensors: dict[str, torch.Tensor], size: int) -> WeightSnapshot:
    """Return a snapshot that is cut into chunks of `size` bytes."""
    spec = ModelSpec("", None, None, 0, False)
    payloads = list(cut_payloads(tensors.items(), size))
    return WeightSnapshot(0, spec, ("", None, 0), 0, {}, payloads)


def measure_checksum_rate() -> float:
    """Return bytes/s: the median of ROUNDS."""
    shapes = [shape for _ in range(LAYERS) for shape in LAYER]
    tensors = {str(i): torch.randn(shape).bfloat16() for i, shape in enumerate(shapes)}
    snapshot, rates = make_snapshot(tensors, GPU_CHUNK_BYTES), []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        num_bytes = sum(chunk.num_bytes for chunk in snapshot.iter_chunks())
        rates.append(num_bytes / (time.thread_time() - begin))
    return statistics.median(rates)


def exchange_verbs(rank: int, port: int) -> list[float]:
    """Send VERBS verbs of chunks from rank 0 to rank 1. Return the seconds of each on this rank."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    members = collectives.BridgeMembers(rank, 2, store, f"rank {rank}")
    group, seconds = collectives.ObjectGroup(60.0, members), []
    chunk = next(make_snapshot({"weights": torch.zeros(1).double()}, 8).iter_chunks())
    for _ in range(VERBS):
        begin = time.perf_counter()
        sent = group.broadcast_verb(chunk if rank == 0 else None)
        payload = chunk.payload if rank == 0 else torch.empty(sent.num_bytes, dtype=torch.uint8)
        group.broadcast_buffer(payload)
        group.gather(None)
        seconds.append(time.perf_counter() - begin)
    group.close()
    return seconds


def measure_verb_seconds() -> float:
    """Return the tenth percentile of the seconds of a verb on rank 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    other = subprocess.Popen([sys.executable, __file__, "--rank-1", str(port)])
    try:
        return statistics.quantiles(exchange_verbs(0, port), n=10)[0]
    finally:
        other.wait(60)


def main() -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--rank-1"]:
        exchange_verbs(1, int(sys.argv[2]))
        return
    args = make_parser(__doc__, output=RESULTS / "weight_chunks.csv").parse_args()
    rows = []
    for _ in range(ROWS):
        row = {
            "chunk_mib": GPU_CHUNK_BYTES // 2**20,
            "checksum_gb_per_s": round(measure_checksum_rate() / 1e9, 1),
            "verb_ms": round(1e3 * measure_verb_seconds(), 2),
        }
        show(row)
        rows.append(row)
    write_table(args.output, rows)


if __name__ == "__main__":
    main()
