"""Compare two processes that share a sampler with two that each hold a whole sampler: their
samples, training and weight transfer.

    accelerate launch --config_file ... tests/teams_case.py MODELS OUT CASE ...

Models run one after another in the same processes, with the same seeds, so each learns the same.
MODELS: folders of base models, of which CASE names some. OUT/found.json: results by "alone",
"together" and "together, in pages", and "a sum left out" of the first case.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from roles_case import PROMPTS, make_datums, sample_prompts

from rl import ServiceClient
from rl.client import SampleStream
from rl.distributed import collectives
from rl.errors import UserError
from rl.runtime import SamplerSettings, WorkerSettings, check_sync, worker_group
from rl.runtime.training_worker import TrainingWorker
from rl.runtime.verb_table import verb
from rl.sampler import SamplingRequest
from rl.types import AdamParams, ModelInput, SamplingParams

# rank of the adapter; 0: all weights are trained
CASES = {"qwen3": 0, "qwen2": 4, "llama": 4, "granite": 4, "gemma": 0, "olmo2": 4, "gemma3_text": 4}


class CaseWorker(TrainingWorker):
    """A worker with verbs that inspect samplers, and a verb that breaks the sums between ranks."""

    @verb(reduce=lambda parts: [part["numbers"] for part in parts])
    def held(self, model_id: int) -> dict:
        """Return the number of elements that this rank's sampler holds."""
        sizes = [
            buffer.numel() for buffer in self.latest_decoders[model_id].weights.buffers.values()
        ]  # type: ignore[attr-defined]
        return {"numbers": sum(sizes)}

    @verb()
    def hold(self, tp: int, cache: str) -> None:
        """Share each later sampler between `tp` ranks, as if launched with that setting."""
        sampler = SamplerSettings(tp=tp, cache=cache, kv_cache_tokens=4096)
        self.settings = replace(self.settings, sampler=sampler)
        self.tp_group = collectives.get_rank_group(tp, 60)
        self.reports_results = self.tp_group is None or self.tp_group.rank == 0

    @verb()
    def leave_sums_out(self) -> None:
        collectives.RankGroup.all_reduce_ = lambda self, x: x  # type: ignore[method-assign]


def run_stream(client) -> list:
    """Sample from a stream while requests join it; return the samples of each ticket."""
    params = SamplingParams(max_tokens=6, temperature=0.8, stop=[])
    with SampleStream(client) as stream:
        result: dict = {}
        tickets = []
        for i, prompt in enumerate(PROMPTS):
            tickets.append(
                stream.add(
                    SamplingRequest(prompt=prompt, num_samples=2, params=params, seed=4, problem=i)
                )
            )
            result |= stream.run_steps(2, partial_tickets=True).finished
        remaining = stream.unfinished()
        assert set(remaining) == set(tickets) - set(result)
        while stream.busy:
            result |= stream.run_steps().finished
        return [
            [s.tokens, s.logprobs, s.version]
            for ticket in tickets
            for s in result[ticket].sequences
        ]


def run_flow(service: ServiceClient, folder: Path, lora: int) -> dict:
    """Run two steps from that model, and every way in which weights reach a sampler."""
    actual: dict = {}
    made = (
        service.create_lora_training_client(str(folder), rank=lora, seed=2)
        if lora
        else service.create_full_training_client(str(folder))
    )
    first = sampler = made.save_weights_and_get_sampling_client()
    for step in range(2):
        actual[f"drawn {step}"] = sample_prompts(sampler, step)
        made.forward_backward(
            make_datums(actual[f"drawn {step}"]), "importance_sampling", divisor=12.0
        )
        # a larger rate would carry rounding into the second update: 1e-5 in the logprobs of OLMo-2
        made.optim_step(AdamParams(learning_rate=1e-2))
        sampler = made.save_weights_and_get_sampling_client()  # the first sampler keeps its weights
    actual["by the last weights"] = sample_prompts(sampler, 9)
    actual["by the first weights"] = sample_prompts(first, 9)
    actual["of a stream"] = run_stream(sampler)
    actual["of the folder"] = sample_prompts(
        service.create_sampling_client(made.save_weights_for_sampler("saved").result().path), 9
    )
    if lora:
        whole = made.save_weights_for_sampler("whole", merged=True).result().path
        actual["of the merged folder"] = sample_prompts(service.create_sampling_client(whole), 9)
        actual["of the base"] = sample_prompts(made.get_base_sampling_client(), 9)
    actual["scores"] = sampler.compute_logprobs_many(
        [ModelInput.from_ints(p) for p in PROMPTS]
    ).result()
    seen = check_sync(made, sampler, make_datums(actual["by the last weights"])[:4], 1.0)
    pairs = [(seen.learner, seen.sampler), (seen.learner_perturbed, seen.sampler_perturbed)]
    actual["off"] = [
        max(float(abs(learner[i] - sampler[i]).max()) for i in learner)
        for learner, sampler in pairs
    ]
    actual["moved"] = max(
        float(abs(seen.sampler[i] - seen.sampler_perturbed[i]).max()) for i in seen.sampler
    )
    actual["held"] = service._driver.submit("held", made.model_id).result()
    actual["parameters"] = made.info["parameters"]
    return actual


def main(models: Path, out: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = CaseWorker  # type: ignore[misc]
    result: dict = {}
    service = ServiceClient(seed=3, settings=WorkerSettings(timeout_seconds=60, dtype="fp32"))
    ways = {"alone": (1, "auto"), "together": (2, "auto"), "together, in pages": (2, "paged")}
    for name, way in ways.items():
        service.output_dir = str(out / name)
        service._driver.submit("hold", *way).result()
        result[name] = {case: run_flow(service, models / case, CASES[case]) for case in cases}
        print(name, flush=True)  # shows where a launch hangs
    service._driver.submit("leave_sums_out").result()
    made = service.create_full_training_client(str(models / cases[0]))
    try:
        broken = made.save_weights_and_get_sampling_client()
        assert broken.version == 0  # waits for it, and raises its error
        result["a sum left out"] = sample_prompts(broken, 0)
    except UserError as error:
        result["a sum left out"] = str(error)
    (out / "found.json").write_text(json.dumps(result))
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
