"""Measure the bytes that processes hand to collectives in an optimizer step.

`scaling.py --measure` and a test start this script:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 2 \\
      bench/scaling_measure.py MODEL OUT.json MICRO_BATCHES

Every process runs the worker's verbs itself, in the same order, so that a dispatch mode sees each
collective's tensors.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.distributed import collectives  # noqa: E402
from rl.learner import LearnerSettings  # noqa: E402
from rl.runtime import WorkerSettings  # noqa: E402
from rl.runtime.training_worker import ModelSpec, TrainingWorker  # noqa: E402
from rl.types import (
    AdamParams,
    Datum,  # noqa: E402
    ModelInput,
)

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
LENGTH = 64
# Index of the collective's argument that holds the whole tensor: the output of all-gather, the
# input of reduce-scatter.
WHOLE = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allgather_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
}


class Collectives(TorchDispatchMode):
    """Count bytes by collective; unknown collectives are counted under their name, not dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[1].split(".")[0]
            kind, whole = WHOLE.get(name, (name, 0))
            tensors = (
                [t for t in tree_iter(args[whole]) if isinstance(t, torch.Tensor)] if args else []
            )
            self.bytes[kind] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def datums(count: int) -> list[Datum]:
    rng = np.random.default_rng(0)
    mask = np.ones(LENGTH, np.float32)
    fields = {
        "target_tokens": rng.integers(0, 4096, LENGTH),
        "logprobs": -mask,
        "advantages": mask,
        "mask": mask,
    }
    return [
        Datum(ModelInput.from_ints(rng.integers(0, 4096, LENGTH).tolist()), fields)
        for _ in range(count)
    ]


def write_model(folder: Path) -> str:
    """Write the measured model with random weights and return its folder.

    Call this before launching the processes: in several processes, transformers writes in only
    the first.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    AutoModelForCausalLM.from_config(Qwen2Config(**MODEL)).save_pretrained(folder)
    return str(folder)


def main(model: str, out: Path, micro_batches: int) -> None:
    worker = TrainingWorker(
        WorkerSettings(learner=LearnerSettings(token_budget=8 * LENGTH, layout="padded"))
    )
    worker.create_model(0, ModelSpec(model), None, False)
    worker.snapshot(0, 0)
    batch = datums(8 * micro_batches * collectives.world())

    def step(version: int) -> None:
        worker.forward_backward(0, batch, "ppo", {"temperature": 1.0}, 1.0, True)
        worker.optim_step(0, AdamParams(learning_rate=1e-4))
        worker.free_version(version - 1)
        worker.snapshot(0, version)

    # ZeRO-3 learns the order of the layers in the first step.
    for version in (1, 2):
        step(version)
    times = []
    for version in (3, 4, 5):
        begin = time.perf_counter()
        step(version)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    counted = Collectives()
    with counted:
        step(6)
    if collectives.rank() == 0:
        found = {"bytes": dict(counted.bytes), "seconds": seconds, "world": collectives.world()}
        found["wrapped"] = type(worker.learners[0].backend.wrapped).__name__
        out.write_text(json.dumps(found))
    worker.free_model(0)
    collectives.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
