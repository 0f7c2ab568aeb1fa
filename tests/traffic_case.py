"""Count the bytes that a rank sends to others in a step, or in the forward and backward of a
mixture of experts. Not a test by itself.

    accelerate launch --config_file X.yaml tests/traffic_case.py MODEL OUT MICRO_BATCHES EXPERT_SIZE LOCAL

EXPERT_SIZE: ranks that divide the experts; 0: a step of a dense model. LOCAL: ranks of a machine.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from helpers import random_datums  # noqa: E402

from rl.distributed import collectives  # noqa: E402
from rl.learner import LearnerSettings  # noqa: E402
from rl.runtime import WorkerSettings  # noqa: E402
from rl.runtime.training_worker import ModelSpec, TrainingWorker  # noqa: E402
from rl.types import AdamParams  # noqa: E402

ROWS, LENGTH = 8, 64  # of a micro-batch


class SentBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Count the bytes by collective, as a ring sends them, and rows to experts as if they were
    spread evenly. Unknown collectives are counted under their name, not dropped.

    `crossing`: those of groups with ranks of several machines, if each has `local` ranks.
    """

    def __init__(self, world: int, local: int) -> None:
        super().__init__()
        self.world, self.local = world, local
        self.bytes, self.crossing = Counter[str](), Counter[str]()

    def add(self, name: str, count: int, group: Any) -> None:
        self.bytes[name] += count
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        if len({rank // self.local for rank in ranks}) > 1:
            self.crossing[name] += count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[1].split(".")[0]
            leaves = [torch.utils._pytree.tree_leaves(argument) for argument in [*args[:2], (), ()]]
            first, second = (
                sum(t.nbytes for t in some if torch.is_tensor(t)) for some in leaves[:2]
            )
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(group).size()
            if "allgather" in name:
                self.add("all_gather", first - second, group)
            elif "reduce_scatter" in name:
                self.add("reduce_scatter", second - first, group)
            elif name == "allreduce_":
                self.add("all_reduce", 2 * (size - 1) * first // size, group)
            elif name == "alltoall_base_":
                ranks = len(args[4])  # 0: a message of the counts of rows
                self.add("all_to_all", (ranks - 1) * second // ranks if ranks else 0, group)
            else:
                self.add(name, first, group)
        return func(*args, **(kwargs or {}))


def main(model: str, out: str, micro_batches: int, expert_size: int, local: int) -> None:
    learner = LearnerSettings(
        token_budget=ROWS * LENGTH, layout="padded", expert_parallel_size=max(1, expert_size)
    )
    worker = TrainingWorker(WorkerSettings(learner=learner, dtype="fp32"))
    worker.create_model(0, ModelSpec(model), None, False)
    world = collectives.world()
    batch = random_datums(ROWS * micro_batches * world, low=LENGTH, high=LENGTH + 1, vocabulary=500)

    def step(version: int) -> None:
        shares = worker.split_batch(0, batch, "ppo", {"temperature": 1.0}, 1.0, True)
        worker.forward_backward(*shares[collectives.rank()])
        if not expert_size:
            worker.optim_step(0, AdamParams(learning_rate=1e-4))
            worker.free_version(version - 1)
            worker.snapshot(0, version)

    if not expert_size:
        worker.snapshot(0, 0)
        step(1)  # ZeRO-3 learns the order of the layers
        step(2)
    with SentBytes(world, local) as counted:
        step(3)
    result: dict[str, Any] = {}
    for field in ("bytes", "crossing"):
        kinds = sorted(counts := getattr(counted, field))
        totals = torch.tensor([float(counts[kind]) for kind in kinds], dtype=torch.float64)
        collectives.all_sum_([totals])
        result[field] = dict(zip(kinds, (totals / world).tolist(), strict=True))
    if collectives.rank() == 0:
        result["wrapped"] = type(worker.learners[0].backend.wrapped).__name__
        Path(out).write_text(json.dumps(result))
    worker.free_model(0)
    collectives.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
