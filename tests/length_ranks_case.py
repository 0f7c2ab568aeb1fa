"""Compute gradients of preference pairs of a longrope model; some pairs have answers on both sides
of its original length. This is not a test by itself.

    accelerate launch --config_file accelerate_configs/X.yaml tests/length_ranks_case.py START OUT

START is a saved model with an original length of 32 tokens. The results are written to
OUT/found.pt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import numpy as np  # noqa: E402
import torch  # noqa: E402
from distributed_cases import CaseWorker  # noqa: E402

from rl import ServiceClient  # noqa: E402
from rl.learner import LearnerSettings  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402
from rl.types import Datum, ModelInput  # noqa: E402

# Pairs by the lengths of prompt, chosen and rejected. Rows of more than 32 tokens have other
# frequencies.
BOTH, SHORT, LONG = (20, 8, 40), (12, 5, 9), (40, 9, 3)
CASES: dict[str, tuple[Sequence[tuple[int, int, int]], dict | None]] = {
    "one pair on both sides": ([BOTH], None),
    "some on both sides": ([SHORT, BOTH, LONG, SHORT, (6, 27, 48), (20, 40, 8)], None),
    "none": ([SHORT, LONG, SHORT], None),
    "some, lora": ([SHORT, BOTH, LONG], {"rank": 3}),
}


def pairs(lengths: Sequence[tuple[int, int, int]]) -> list[Datum]:
    rng, results = np.random.default_rng(3), []
    for prompt, *answers in lengths:
        request = rng.integers(3, 40, prompt).tolist()
        for answer in answers:
            tokens = request + rng.integers(3, 40, answer).tolist()
            mask = np.array([0.0] * (prompt - 1) + [1.0] * answer, np.float32)
            results.append(
                Datum(
                    ModelInput.from_ints(tokens[:-1]),
                    {"target_tokens": tokens[1:], "mask": mask, "ref_logprobs": -3.5 * mask},
                )
            )
    return results


def main(start: Path, out: Path) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = CaseWorker
    settings = WorkerSettings(
        timeout_seconds=90, dtype="fp32", learner=LearnerSettings(token_budget=130)
    )
    service, results = ServiceClient(output_dir=out, settings=settings), {}
    for case, (lengths, lora) in CASES.items():
        made = (
            service.create_lora_training_client(str(start), seed=5, **lora)
            if lora
            else service.create_full_training_client(str(start))
        )
        made.forward_backward(pairs(lengths), "dpo", divisor=3.0).result()
        results[case] = service._driver.submit("gradient", made.model_id).result()
        made.release()
        print(case, flush=True)  # shows where a launch hangs
    torch.save(results, out / "found.pt")
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
