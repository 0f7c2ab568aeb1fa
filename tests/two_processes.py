"""A plain script that uses the clients, run by test_two_processes.py under several launches.

Usage: two_processes.py OUT
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from helpers import random_datums  # noqa: E402

from rl import ServiceClient, types  # noqa: E402


def main(out: Path) -> None:
    service = ServiceClient(output_dir=out)
    client = service.create_full_training_client("tiny:addition", seed=2)
    steps = []
    for i, sizes in enumerate(([3, 4], [7], [1, 6], [1])):
        datums, losses = random_datums(sum(sizes), seed=i), []
        for size in sizes:
            part, datums = datums[:size], datums[size:]
            losses.append(
                client.forward_backward(part, "ppo", divisor=10.0).result().metrics["loss:sum"]
            )
        params = types.AdamParams(learning_rate=1e-3 * (i + 1), eps=1e-3, grad_clip_norm=0.1)
        steps.append([*losses, client.optim_step(params).result().metrics["grad_norm"]])
    client.forward_backward([], "ppo").result()
    sampler = client.save_weights_and_get_sampling_client()
    prompts = [types.ModelInput.from_ints([3, 4, 12, 5, last, 13]) for last in (6, 7, 8)]
    params = types.SamplingParams(max_tokens=6, seed=1)
    futures = [
        sampler.sample(prompt, n, params) for prompt, n in zip(prompts, (5, 1, 2), strict=True)
    ]
    sequences = [sequence for future in futures for sequence in future.result().sequences]
    client.save_state("end").result()
    result = {
        "steps": steps,
        "tokens": [sequence.tokens for sequence in sequences],
        "logprobs": [sequence.logprobs for sequence in sequences],
        "launch": [client.info["distributed_type"], client.info["wrapped"], client.info["world"]],
    }
    (out / "result.json").write_text(json.dumps(result))
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
