"""Compute gradients of batches that rank 0 splits over the ranks, and count the bytes that each
rank receives. Not a test by itself.

    accelerate launch --config_file accelerate_configs/X.yaml tests/share_ranks_case.py STARTS OUT SIZE

STARTS: unused. OUT: folder of the result, found.pt. SIZE: ranks that share a micro-batch.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import numpy as np  # noqa: E402
import torch  # noqa: E402
from distributed_cases import CaseWorker  # noqa: E402
from helpers import random_datums  # noqa: E402

from rl import ServiceClient  # noqa: E402
from rl.client import forward_backward_microbatches  # noqa: E402
from rl.losses import get_loss  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402
from rl.runtime.verb_table import LEARNER, verb  # noqa: E402
from rl.types import Datum, ModelInput  # noqa: E402

BUDGET = 500
# name: (layout, loss, whether each micro-batch is a separate call)
CASES = {
    "padded, ppo": ("padded", "ppo", False),
    "packed, ppo": ("packed", "ppo", False),
    "shared, ppo": ("shared", "ppo", False),
    "shared, dpo": ("shared", "dpo", False),
    "packed, gspo, by micro-batch": ("packed", "gspo", True),
}


class ShareWorker(CaseWorker):
    """A worker that tells what its rank has received."""

    @verb(LEARNER, list)
    def received_bytes(self) -> int:
        return self.objects.received_bytes


def make_datums(loss: str) -> list[Datum]:
    """Return 24 groups of four answers of 80 to 200 tokens to a prompt of 12."""
    rng, made = np.random.default_rng(3), []
    for _ in range(24):
        prompt = rng.integers(3, 14, 12).tolist()
        for answer in rng.integers(80, 200, 4):
            tokens = prompt + rng.integers(3, 14, answer).tolist()
            mask = np.array([0.0] * 11 + [1.0] * answer, np.float32)
            fields = {"target_tokens": tokens[1:], "mask": mask}
            if loss == "dpo":
                fields["ref_logprobs"] = -2.6 * mask
            else:
                noise = rng.standard_normal((2, len(mask)))
                fields |= {"logprobs": mask * (0.3 * noise[0] - 2.6), "advantages": mask * noise[1]}
            made.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
    return made


def run_microbatches(client: Any, datums: list[Datum], loss: str) -> Any:
    calls = forward_backward_microbatches(client, datums, loss)
    try:
        while True:
            next(calls)
    except StopIteration as done:
        return done.value


def main(out: Path, size: int) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = ShareWorker
    settings = WorkerSettings(timeout_seconds=90, dtype="fp32")
    service, results = ServiceClient(output_dir=out, settings=settings), {}

    def run(name: str, *arguments: Any) -> Any:
        return service._driver.submit(name, *arguments).result()

    for name, (layout, loss, separate) in CASES.items():
        learner = {"layout": layout, "token_budget": BUDGET, "context_parallel_size": size}
        run("configure", learner)
        client = service.create_full_training_client("tiny:addition", seed=2)
        datums, before = make_datums(loss), run("received_bytes")
        if separate:
            output = run_microbatches(client, datums, loss)
        else:
            output = client.forward_backward(datums, loss).result()
        after = run("received_bytes")
        results[name] = {
            "gradient": run("gradient", client.model_id),
            "loss": output.metrics["loss:sum"],
            "logprobs": [one["logprobs"].to_numpy() for one in output.loss_fn_outputs],
            "received": [b - a for a, b in zip(before, after, strict=True)],
            "batch": len(pickle.dumps(datums)),
        }
        client.release()
    results["refused"] = compute_after_refusals(service)
    torch.save(results, out / "found.pt")
    service.close()


def compute_after_refusals(service: Any) -> dict[str, Any]:
    """Return the gradient of datums, and the errors of two calls before: one with a wrong target,
    and one with a loss that cannot be sent.
    """
    client = service.create_full_training_client("tiny:addition", seed=2)
    datums, errors = random_datums(8), []
    wrong = random_datums(8)
    wrong[-1].loss_fn_inputs["target_tokens"].array[0] = 99
    ppo = get_loss("ppo")
    unsendable = type(ppo)(**{**vars(ppo), "fn": lambda *_: None})
    for call in ((wrong, "ppo"), (datums, unsendable)):
        future = service._driver.submit(
            "forward_backward", client.model_id, *call, {"temperature": 1.0}, 1.0, True
        )
        errors.append(f"{type(future.exception()).__name__}: {future.exception()}")
    client.forward_backward(datums, "ppo").result()
    gradient = service._driver.submit("gradient", client.model_id).result()
    client.release()
    return {"errors": errors, "gradient": gradient}


if __name__ == "__main__":
    main(Path(sys.argv[2]), int(sys.argv[3]))
