"""Compute gradients of a vision model in a launch; test_image_ranks.py compares them. Not a test
itself.

    accelerate launch --config_file ... tests/image_ranks_case.py START OUT

START: a tiny vision model. Rows have zero to three images of several sizes. A micro-batch holds few
rows, so the ranks run different ones. If only a single row has an image, the share of the other
rank has none at all.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import numpy as np  # noqa: E402
import torch  # noqa: E402
from distributed_cases import CaseWorker  # noqa: E402
from seeing import chunk, encode_parts  # noqa: E402

from rl import ServiceClient  # noqa: E402
from rl.images import get_image_reader  # noqa: E402
from rl.learner import LearnerSettings  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402
from rl.types import Datum, SamplingParams  # noqa: E402

# (images of each row, loss, trained parameters)
CASES = {
    "mixed, cross_entropy, all weights": ((0, 1, 3, 1, 0, 2, 1), "cross_entropy", {}),
    "mixed, ppo, all weights": ((0, 1, 3, 1, 0, 2, 1), "ppo", {}),
    "one sees, ppo, all weights": ((0, 0, 1, 0), "ppo", {}),
    "one sees, ppo, lora": ((0, 0, 1, 0), "ppo", {"rank": 2}),
    "mixed, ppo, lora on the tower too": ((0, 1, 3, 1), "ppo", {"rank": 2, "train_vision": True}),
    "nobody sees, ppo, all weights": ((0, 0, 0), "ppo", {}),
}
SIZES = ((32, 32), (16, 24), (40, 16))


def row(tokenizer, images: int, seed: int):
    parts = ["<|user|>"]
    for i in range(images):
        parts += [
            "<|vision_start|>",
            chunk(10 * seed + i, *SIZES[(seed + i) % 3]),
            "<|vision_end|>",
        ]
    text = "how many?" + "so " * (seed % 4)
    return get_image_reader(tokenizer).resolve_tokens(
        encode_parts(tokenizer, *parts, f"{text}<|end|><|assistant|>{seed}")
    )


def data(tokenizer, counts, loss: str) -> list[Datum]:
    rng, results = np.random.default_rng(7), []
    for seed, images in enumerate(counts):
        whole = row(tokenizer, images, seed)
        n = whole.length - 1
        fields = {"target_tokens": np.array(whole.token_ids()[1:])}
        mask = (np.arange(n) >= n - 4).astype(np.float32)
        if loss == "ppo":
            fields |= {
                "logprobs": mask * (-4 + 0.2 * rng.standard_normal(n)),
                "advantages": mask * rng.standard_normal(n),
                "mask": mask,
            }
        else:
            fields |= {"weights": mask * rng.uniform(0.5, 1.0, n)}
        results.append(Datum(whole.truncate(n), fields))
    return results


def main(start: Path, out: Path) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = CaseWorker
    settings = WorkerSettings(
        timeout_seconds=90, dtype="fp32", learner=LearnerSettings(token_budget=120)
    )
    service, results = ServiceClient(output_dir=out, settings=settings), {}
    for case, (counts, loss, lora) in CASES.items():
        made = (
            service.create_lora_training_client(str(start), seed=5, **lora)
            if lora
            else service.create_full_training_client(str(start))
        )
        tokenizer = made.get_tokenizer()
        made.forward_backward(data(tokenizer, counts, loss), loss, divisor=7.0).result()
        results[case] = service._driver.submit("gradient", made.model_id).result()
        if case.startswith("mixed, ppo, all"):
            sampler = made.save_weights_and_get_sampling_client()
            prompts = [row(tokenizer, images, seed) for seed, images in enumerate((0, 1, 3))]
            params = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
            drawn = [sampler.sample(prompt, 2, params).result() for prompt in prompts]
            results["drawn"] = [
                (s.tokens, s.logprobs) for response in drawn for s in response.sequences
            ]
        made.release()
        print(case, flush=True)  # the last completed case, if a launch hangs
    torch.save(results, out / "found.pt")
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
