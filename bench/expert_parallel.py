"""Count the bytes that a rank sends for a micro-batch of a mixture of experts under FSDP2, with and
without `--expert-parallel-size`.

    python bench/expert_parallel.py     # results/expert_parallel.csv: about a minute

Two and four gloo processes train a small Qwen3-MoE, and every collective of a micro-batch (forward
and backward, no update) is counted. The same formula gives the bytes of Qwen3-30B-A3B, in bf16 with
gradient checkpointing. A rank of W sends (W - 1) / W of what is gathered or scattered. Symbols:
W ranks, N ranks that divide the experts, T tokens of a micro-batch, K experts per token, D hidden
size, L layers with experts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.harness import REPO, RESULTS, make_parser, write_table  # noqa: E402
from bench.scaling import make_datums  # noqa: E402
from rl.memory_plan import ModelShape, ModelSkeleton  # noqa: E402

SMALL = dict(vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2,
             moe_intermediate_size=96, intermediate_size=96)  # fmt: skip
A3B = dict(vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
           num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
           moe_intermediate_size=768, intermediate_size=6144)  # fmt: skip
LENGTH, ROWS = 32, 4
GB = 1e9


def modelled_bytes(
    shape: ModelShape, world: int, size: int, tokens: int, *, number: int = 4, recomputes: bool
) -> dict[str, float]:
    """Return the bytes that a rank sends for a micro-batch.

    `number`: bytes of a weight or an activation in messages. `recomputes`: gradient checkpointing
    runs each forward, with its messages, twice. Weights of layers are gathered for the forward and
    the backward, the rest once; gradients are scattered in fp32. Rows are sent to experts and back,
    in the forward and in the backward, evenly spread.
    """
    experts, dense = shape.layers * shape.layer_experts, shape.layers * shape.layer
    dense -= experts
    share, divided = (world - 1) / world, (world / size - 1) / (world / size)
    outside = shape.parameters - dense - experts
    local = experts / size
    gathered = number * (share * (2 * dense + outside) + divided * 2 * local)
    scattered = 4 * (share * (dense + outside) + divided * local)
    rows = shape.layers * tokens * shape.experts_per_token * shape.hidden * (size - 1) / size
    return {
        "gathered": gathered,
        "scattered": scattered,
        "exchanged": number * rows * (6 if recomputes else 4),
    }


class SentBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Count the bytes that this rank sends to others, by kind of collective."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.sent = rank, {"gathered": 0, "scattered": 0, "exchanged": 0, "other": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[-1].split(".")[0]
        if func.namespace == "c10d":
            sizes = [
                sum(t.nbytes for t in torch.utils._pytree.tree_leaves(a) if torch.is_tensor(t))
                for a in args[:2]
            ]
            if name == "_allgather_base_":
                self.sent["gathered"] += sizes[0] - sizes[1]
            elif name == "_reduce_scatter_base_":
                self.sent["scattered"] += sizes[1] - sizes[0]
            elif name == "alltoall_base_" and args[4]:  # else the counts of rows
                width = sizes[1] // max(1, len(args[1]))
                place = self.rank % len(args[4])
                self.sent["exchanged"] += sizes[1] - args[4][place] * width
            else:
                self.sent["other"] += sizes[0]
        return func(*args, **(kwargs or {}))


def run_rank(model: str, out: Path, size: int) -> None:
    """Run a micro-batch in each process of a launch, and write the bytes that each sends."""
    from rl.distributed import collectives
    from rl.learner import LearnerSettings
    from rl.runtime import WorkerSettings
    from rl.runtime.training_worker import ModelSpec, TrainingWorker

    settings = LearnerSettings(
        token_budget=ROWS * LENGTH, layout="padded", expert_parallel_size=size
    )
    worker = TrainingWorker(WorkerSettings(learner=settings, dtype="fp32"))
    worker.create_model(0, ModelSpec(model), None, False)
    batch = make_datums(ROWS * collectives.world(), LENGTH, SMALL["vocab_size"])
    shares = worker.split_batch(0, batch, "ppo", {"temperature": 1.0}, 1.0, True)
    with SentBytes(collectives.rank()) as counted:
        worker.forward_backward(*shares[collectives.rank()])
    totals = torch.tensor([float(n) for n in counted.sent.values()])
    collectives.all_sum_([totals])
    if collectives.rank() == 0:
        means = (totals / collectives.world()).tolist()
        out.write_text(json.dumps(dict(zip(counted.sent, means, strict=True))))
    worker.free_model(0)
    collectives.shutdown()


def measure(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of processes and of ranks that divide the experts."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    model = str(folder / "model")
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL)).save_pretrained(model)
    shape, config = ModelSkeleton(model, None, None).shape, "accelerate_configs/fsdp2.yaml"
    for world, size in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        out = folder / f"{world}-{size}.json"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(REPO / config), "--num_processes", str(world), __file__]
        command += ["--rank", model, str(out), str(size)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{world} processes failed:\n{done.stderr[-3000:]}")
        expected = modelled_bytes(shape, world, size, ROWS * LENGTH, recomputes=False)
        measured = json.loads(out.read_text())
        yield from (
            {"model": "small", "ranks": world, "expert_parallel_size": size, "kind": kind,
             "measured_bytes": round(measured[kind]), "modelled_bytes": round(expected[kind])}
            for kind in expected
        )  # fmt: skip


def calculate(folder: Path, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the modelled rows of Qwen3-30B-A3B."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(**A3B, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder / "a3b")
    shape = ModelSkeleton(str(folder / "a3b"), None, None).shape
    for world, size in ((8, 1), (8, 8), (64, 1), (64, 8), (64, 64)):
        sent = modelled_bytes(shape, world, size, tokens, number=2, recomputes=True)
        yield from (
            {"model": "30B-A3B", "ranks": world, "expert_parallel_size": size, "kind": kind,
             "measured_bytes": "", "modelled_bytes": round(value)}
            for kind, value in sent.items()
        )  # fmt: skip
        print(f"  30B-A3B, {world} ranks, expert_parallel_size {size}: "
              f"{sum(sent.values()) / GB:.1f} GB a micro-batch of {tokens} tokens",
              {kind: round(value / GB, 1) for kind, value in sent.items()})  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:  # a process of `measure`
        return run_rank(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(Path(folder)))
        for row in rows:
            print("  ", *(f"{key} {value}" for key, value in row.items()))
        rows += calculate(Path(folder), args.tokens)
    write_table(args.out / "expert_parallel.csv", rows)


if __name__ == "__main__":
    main()
