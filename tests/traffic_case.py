"""Count the bytes that a rank sends to others in a step, or in the forward and backward of a
mixture of experts. Not a test by itself.

    accelerate launch --config_file X.yaml tests/traffic_case.py MODEL OUT MICRO_BATCHES EXPERT_SIZE

EXPERT_SIZE: ranks that divide the experts; 0: a step of a dense model.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
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
    """

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.bytes = world, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[1].split(".")[0]
            leaves = [torch.utils._pytree.tree_leaves(argument) for argument in [*args[:2], (), ()]]
            first, second = (
                sum(t.nbytes for t in some if torch.is_tensor(t)) for some in leaves[:2]
            )
            if "allgather" in name:
                self.bytes["all_gather"] += first - second
            elif "reduce_scatter" in name:
                self.bytes["reduce_scatter"] += second - first
            elif name == "allreduce_":
                self.bytes["all_reduce"] += 2 * (self.world - 1) * first // self.world
            elif name == "alltoall_base_":
                ranks = len(args[4])  # 0: a message of the counts of rows
                self.bytes["all_to_all"] += (ranks - 1) * second // ranks if ranks else 0
            else:
                self.bytes[name] += first
        return func(*args, **(kwargs or {}))


def main(model: str, out: str, micro_batches: int, expert_size: int) -> None:
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
    with SentBytes(world) as counted:
        step(3)
    kinds = sorted(counted.bytes)
    totals = torch.tensor([float(counted.bytes[kind]) for kind in kinds], dtype=torch.float64)
    collectives.all_sum_([totals])
    if collectives.rank() == 0:
        means = dict(zip(kinds, (totals / world).tolist(), strict=True))
        wrapped = type(worker.learners[0].backend.wrapped).__name__
        Path(out).write_text(json.dumps({"bytes": means, "wrapped": wrapped}))
    worker.free_model(0)
    collectives.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
