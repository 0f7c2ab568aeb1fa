"""Run a plain training loop on any number of ranks and write samples, scores and versions to
found.json.

    python tests/roles_case.py OUT SAMPLER_RANKS LORA_RANK SAMPLER_KIND DTYPE
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl import ServiceClient
from rl.runtime import SamplerSettings, WorkerSettings
from rl.sampler import SamplingRequest
from rl.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData

PROMPTS = [[3, 12, 5], [7, 12, 4, 13], [9], [4, 4, 12]]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, stop=[])


def sample_prompts(client, seed: int) -> list:
    requests = [
        SamplingRequest(prompt=p, num_samples=3, params=PARAMS, seed=seed, problem=i)
        for i, p in enumerate(PROMPTS)
    ]
    responses, _ = client.sample_many(requests).result()
    return [[s.tokens, s.logprobs, s.version] for response in responses for s in response.sequences]


def make_datums(samples: list) -> list[Datum]:
    """Return a datum of each sample with its prompt; the advantage depends on the sampled tokens."""
    results = []
    for i, (tokens, logprobs, _) in enumerate(samples):
        prompt = PROMPTS[i // 3]
        pad = [0.0] * (len(prompt) - 1)
        good = float(sum(tokens) % 3 - 1)
        inputs = {
            "target_tokens": TensorData([*prompt[1:], *tokens], "int64"),
            "logprobs": TensorData([*pad, *logprobs], "float32"),
            "advantages": TensorData([*pad, *[good] * len(tokens)], "float32"),
        }
        results.append(Datum(ModelInput.from_ints([*prompt, *tokens[:-1]]), inputs))
    return results


def main(out: Path, sampler_ranks: int, lora: int, kind: str, dtype: str) -> None:
    actual: dict = {}
    settings = WorkerSettings(
        sampler_ranks=sampler_ranks,
        timeout_seconds=60,
        dtype=dtype,
        sampler=SamplerSettings(kind=kind),
    )
    with ServiceClient(output_dir=out / "run", seed=3, settings=settings) as service:
        made = (
            service.create_lora_training_client("tiny:addition", rank=lora, seed=2)
            if lora
            else service.create_full_training_client("tiny:addition", seed=1)
        )
        first = sampler = made.save_weights_and_get_sampling_client()
        for step in range(3):
            actual[f"drawn {step}"] = sample_prompts(sampler, step)
            made.forward_backward(
                make_datums(actual[f"drawn {step}"]), "importance_sampling", divisor=12.0
            )
            made.optim_step(AdamParams(learning_rate=1e-2))
            sampler = made.save_weights_and_get_sampling_client()  # `first` keeps its version
        actual["drawn by the first weights"] = sample_prompts(first, 9)
        actual["drawn by the last weights"] = sample_prompts(sampler, 9)
        one_by_one = [
            sampler.sample(
                ModelInput.from_ints(p), 2, SamplingParams(max_tokens=4, seed=5, stop=[])
            )
            for p in PROMPTS
        ]
        actual["one by one"] = [
            s.tokens for future in one_by_one for s in future.result().sequences
        ]
        saved = made.save_weights_for_sampler("saved")  # the result is not awaited yet
        again = service.create_sampling_client(saved.result().path)
        actual["of the folder"] = sample_prompts(again, 9)
        if lora:
            actual["of the base"] = sample_prompts(made.get_base_sampling_client(), 9)
        scores = sampler.compute_logprobs_many([ModelInput.from_ints(p) for p in PROMPTS]).result()
        actual["scores"] = scores
        outputs = (
            made.forward(make_datums(actual["drawn by the last weights"]), "importance_sampling")
            .result()
            .loss_fn_outputs
        )
        actual["learner"] = [output["logprobs"].tolist() for output in outputs]
        actual["versions"] = [first.version, sampler.version, again.version, made.version]
        if lora:  # an adapter of another scale, which ranks that sample must take over too
            other = service.create_lora_training_client(
                "tiny:addition", rank=lora, seed=4, alpha=None
            )
            other.forward_backward(
                make_datums(actual["drawn 0"]), "importance_sampling", divisor=12.0
            )
            other.optim_step(AdamParams(learning_rate=1e-2))
            made.load_state(other.save_state("other").result().path).result()
            actual["of another scale"] = sample_prompts(
                made.save_weights_and_get_sampling_client(), 9
            )
            expected = (
                other.forward(make_datums(actual["of another scale"]), "importance_sampling")
                .result()
                .loss_fn_outputs
            )
            actual["of another scale, by the learner it came from"] = [
                output["logprobs"].tolist() for output in expected
            ]
        top = SamplingParams(max_tokens=4, top_k=2, seed=1, stop=[])
        fresh = made.save_weights_and_get_sampling_client()
        made.optim_step(AdamParams(learning_rate=0.0))
        fresh.sample(ModelInput.from_ints([3]), 1, top).result()
        # not awaited: the transfer is in progress when the service closes
        made.save_weights_and_get_sampling_client()
    with ServiceClient(output_dir=out / "later", seed=3, settings=settings) as later:
        other = later.create_full_training_client("tiny:addition-small", seed=1)
        actual["a later service"] = sample_prompts(other.save_weights_and_get_sampling_client(), 4)
    (out / "found.json").write_text(json.dumps(actual))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
