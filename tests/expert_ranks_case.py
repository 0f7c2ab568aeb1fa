"""Compute gradients of models with experts in a launch; test_expert_ranks.py compares them. Not a
test itself.

    accelerate launch --config_file ... tests/expert_ranks_case.py STARTS OUT

STARTS: a tiny model of each family. The first datum is routed to experts 0 and 2, all others to
experts 0 and 1: the ranks reach different experts, and no rank reaches expert 3.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import numpy as np  # noqa: E402
import torch  # noqa: E402
from distributed_cases import CaseWorker  # noqa: E402
from helpers import random_datums  # noqa: E402

from rl import ServiceClient  # noqa: E402
from rl.learner import LearnerSettings  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402

COLUMNS = {"qwen3_moe": 8, "dbrx": 8, "deepseek_v3": 6}  # experts per token over all layers
CASES = ("qwen3_moe", "deepseek_v3", "qwen3_moe lora", "dbrx")


def data(columns: int) -> list:
    datums = random_datums(6, seed=3, vocabulary=60)
    for i, datum in enumerate(datums):
        datum.experts = np.tile(
            np.array([0, 1 if i else 2], np.int16), (datum.model_input.length, columns // 2)
        )
    return datums


def main(starts: Path, out: Path) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = CaseWorker
    settings = WorkerSettings(
        timeout_seconds=60,
        dtype="fp32",
        learner=LearnerSettings(token_budget=12, router_replay=True),
    )
    service, results = ServiceClient(output_dir=out, settings=settings), {}
    for case in CASES:
        name, _, lora = case.partition(" ")
        if lora:
            parts = {"train_mlp": False, "train_unembed": False, "train_experts": True}
            client = service.create_lora_training_client(
                str(starts / name), rank=2, seed=5, **parts
            )
        else:
            client = service.create_full_training_client(str(starts / name))
        client.forward_backward(data(COLUMNS[name]), "ppo", divisor=7.0).result()
        results[case] = service._driver.submit("gradient", client.model_id).result()
        client.release()
        print(case, flush=True)  # the last completed case, if a launch hangs
    torch.save(results, out / "found.pt")
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
