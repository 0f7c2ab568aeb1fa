"""A script with several services, in sequence and concurrently, run by test_services.py.

Usage: two_services.py OUT
"""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from helpers import random_datums  # noqa: E402

from rl import ServiceClient, types  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.runtime import WorkerSettings  # noqa: E402

PROMPT = types.ModelInput.from_ints([3, 4, 12, 5, 6, 13])


def use(service: ServiceClient, seed: int) -> list:
    client = service.create_full_training_client("tiny:addition", seed=seed)
    client.forward_backward(random_datums(6, seed=seed), "ppo", divisor=10.0)
    norm = (
        client.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-3))
        .result()
        .metrics["grad_norm"]
    )
    sampler = client.save_weights_and_get_sampling_client()
    tokens = [
        s.tokens
        for s in sampler.sample(PROMPT, 3, types.SamplingParams(max_tokens=5, seed=1))
        .result()
        .sequences
    ]
    return [norm, client.info["world"], tokens]


def get_refusal(out: Path) -> str:
    """Return the error of a service with another precision than the first service's."""
    try:
        ServiceClient(
            output_dir=out, settings=WorkerSettings(dtype="bf16")
        ).create_full_training_client("tiny:addition").result()
    except UserError as error:
        return str(error)
    return "nothing"


def main(out: Path) -> None:
    results = {}
    with ServiceClient(output_dir=out / "a", seed=1) as first:
        results["first"] = use(first, 1)
    again = ServiceClient(output_dir=out / "b", seed=1)  # after the first was closed
    results["again"] = use(again, 1)
    neighbor = ServiceClient(output_dir=out / "c", seed=1)  # while the second is open
    results["beside"] = use(neighbor, 2)
    results["again, with another beside it"] = use(again, 1)
    again.close("success", detail="done").result()
    results["beside, alone"] = use(neighbor, 2)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        results["another dtype"] = get_refusal(out / "d")
    # The last service is not closed: the end of the script closes it.
    (out / "result.json").write_text(json.dumps(results))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    main(Path(sys.argv[1]))
