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
from distributed_cases import make_client, open_case, submit  # noqa: E402
from seeing import chunk, encode_parts  # noqa: E402

from rl.images import get_image_reader  # noqa: E402
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
        image = chunk(10 * seed + i, *SIZES[(seed + i) % 3])
        parts += ["<|vision_start|>", image, "<|vision_end|>"]
    text = "how many?" + "so " * (seed % 4)
    inputs = encode_parts(tokenizer, *parts, f"{text}<|end|><|assistant|>{seed}")
    return get_image_reader(tokenizer).resolve_tokens(inputs)


def data(tokenizer, counts, loss: str) -> list[Datum]:
    rng, results = np.random.default_rng(7), []
    for seed, images in enumerate(counts):
        whole = row(tokenizer, images, seed)
        n = whole.length - 1
        fields = {"target_tokens": np.array(whole.token_ids()[1:])}
        mask = (np.arange(n) >= n - 4).astype(np.float32)
        if loss == "ppo":
            logprobs, advantages = -4 + 0.2 * rng.standard_normal(n), rng.standard_normal(n)
            fields |= {"logprobs": mask * logprobs, "advantages": mask * advantages, "mask": mask}
        else:
            fields |= {"weights": mask * rng.uniform(0.5, 1.0, n)}
        results.append(Datum(whole.truncate(n), fields))
    return results


def draw(client) -> list:
    """Return samples of prompts with no, one and three images."""
    sampler, tokenizer = client.save_weights_and_get_sampling_client(), client.get_tokenizer()
    prompts = [row(tokenizer, images, seed) for seed, images in enumerate((0, 1, 3))]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    drawn = [sampler.sample(prompt, 2, params).result() for prompt in prompts]
    return [(s.tokens, s.logprobs) for response in drawn for s in response.sequences]


def main(start: Path, out: Path) -> None:
    with open_case(out, token_budget=120) as (service, results):
        for case, (counts, loss, lora) in CASES.items():
            client = make_client(service, start, lora)
            datums = data(client.get_tokenizer(), counts, loss)
            client.forward_backward(datums, loss, divisor=7.0).result()
            results[case] = submit(service, "gradient", client.model_id)
            if case.startswith("mixed, ppo, all"):
                results["drawn"] = draw(client)
            client.release()
            print(case, flush=True)  # the last completed case, if a launch hangs


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
