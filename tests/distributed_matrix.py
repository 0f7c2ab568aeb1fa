"""What one launch of several processes (or one) computes; tests/test_distributed.py compares launches. Not a test by itself.

    accelerate launch --config_file ... tests/distributed_matrix.py STARTS OUT

Every rank runs this script and makes the same calls on a Worker. STARTS: saved models to begin from, made by
`write_starts` in one process. OUT: rank 0 writes results.pt and saved models there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import make_worker, random_datums

from rl import distributed
from rl.learner import LearnerSettings
from rl.losses import LossSpec
from rl.sampler import Request
from rl.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams
from rl.worker import ModelSpec, SamplerSettings, Worker, WorkerSettings

DIVISOR = 7.0
# With lr 0, beta1 0 and no clipping AdamW changes no weight, and its first moment is the step's gradient.
LOOK = AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0, eps=1.0)
STARTS = ("tied", "untied", "lora_tied", "lora_untied")
PROMPT = [3, 4, 12, 5, 6, 13]

# name: (start, loss, settings of the learner, sizes of the calls)
GRADIENTS: dict[str, tuple[str, str, dict[str, Any], list[int]]] = {
    "tied, 1 x 8": ("tied", "ppo", {}, [8]),
    "tied, 8 x 1": ("tied", "ppo", {"token_budget": 1}, [8]),
    "tied, small, calls of 3 and 5": ("tied", "ppo", {"token_budget": 20}, [3, 5]),
    "tied, packed, checkpointing": ("tied", "cross_entropy", {"layout": "packed", "gradient_checkpointing": True}, [1, 7]),
    "tied, plain logits": ("tied", "cross_entropy", {"token_budget": 20, "fused": False}, [8]),
    "tied, over the sequence": ("tied", "sequence", {"token_budget": 20, "layout": "padded"}, [3, 5]),
    "untied": ("untied", "ppo", {"token_budget": 20}, [8]),
    "untied, checkpointing": ("untied", "ppo", {"token_budget": 20, "gradient_checkpointing": True}, [3, 5]),
    "untied, plain logits": ("untied", "cross_entropy", {"token_budget": 1, "fused": False}, [8]),
    "lora tied": ("lora_tied", "ppo", {"token_budget": 20}, [3, 5]),
    "lora tied, plain logits": ("lora_tied", "ppo", {"fused": False}, [8]),
    "lora untied, checkpointing": ("lora_untied", "cross_entropy", {"token_budget": 20, "gradient_checkpointing": True}, [8]),
}


def sequence_loss(logp_T, entropy_T, inputs, cu_seqlens, config):
    """One ratio a sequence, the exponential of the mean log ratio: what is not a sum over tokens."""
    total = logp_T.new_zeros(())
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        ratio = (logp_T[start:end] - inputs["logprobs"][start:end]).mean().exp()
        total = total - torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * inputs["advantages"][start:end].sum()
    return total, {}


def loss_and_datums(loss: str, datums: list[Datum]) -> tuple[str | LossSpec, list[Datum]]:
    if loss == "sequence":
        return LossSpec(sequence_loss, ("target_tokens", "advantages", "logprobs"), ("mask",)), datums
    if loss == "cross_entropy":
        fields = {"target_tokens": "target_tokens", "weights": "mask"}
        return loss, [Datum(d.model_input, {k: d.loss_fn_inputs[v] for k, v in fields.items()}) for d in datums]
    return loss, datums


def write_starts(folder: Path) -> None:
    """Models with no weight at its initial zero or one, so that every gradient counts."""
    untied = make_worker()
    model = untied.learners[0].model
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.05 * torch.randn(model.lm_head.weight.shape))
    model.save_pretrained(str(folder / "untied_base"))
    for name in STARTS:
        base = "tiny:addition" if name.endswith("_tied") or name == "tied" else str(folder / "untied_base")
        worker = make_worker(base, lora=LoraConfig(rank=3, seed=5) if name.startswith("lora") else None)
        worker.save_state(0, str(folder / name), {}, None)


class Launch:
    """A worker, and one model on it at a time."""

    def __init__(self, starts: Path, out: Path):
        self.starts, self.out = starts, out
        self.worker = Worker(WorkerSettings(timeout_seconds=60))
        self.next_id = 0
        self.results: dict[str, Any] = {}

    def begin(self, start: str, path: Path | None = None, optimizer: bool = False, **learner: Any) -> int:
        """A model from a saved state, in the place of the one before."""
        if self.next_id:
            self.worker.forget_model(self.next_id - 1)
        settings = LearnerSettings(**learner)
        self.worker.settings = replace(self.worker.settings, learner=settings)
        path = path or self.starts / start
        base = "tiny:addition" if start in ("tied", "lora_tied") else str(self.starts / "untied_base")
        spec = ModelSpec(base, lora=LoraConfig(rank=3, seed=5) if start.startswith("lora") else None, seed=1)
        self.worker.create_model(self.next_id, spec, str(path), optimizer)
        self.next_id += 1
        return self.next_id - 1

    def look(self, model: int) -> tuple[torch.Tensor, float]:
        """The accumulated gradient on rank 0, and its norm as the step reports it."""
        norm = self.worker.optim_step(model, LOOK)["grad_norm"]
        tensors = self.worker.learners[model].optimizer_tensors()
        moments = [tensors[f"{name}/exp_avg"].reshape(-1) for name in self.worker.learners[model].trainable] if tensors else []
        return (torch.cat(moments) if distributed.rank() == 0 else torch.empty(0)), norm

    def call(self, model: int, datums: list[Datum], loss: str = "ppo", divisor: float = DIVISOR) -> tuple[list, dict[str, float]]:
        fn, datums = loss_and_datums(loss, datums)
        return self.worker.forward_backward(model, datums, fn, {}, divisor, True)

    def weights(self, model: int) -> torch.Tensor:
        return torch.cat([p.reshape(-1).clone() for _, p in self.worker.learners[model].weights()])

    # ------------------------------------------------------------------------------------------------------ what is done

    def gradients(self) -> None:
        datums = random_datums(8)
        for name, (start, loss, settings, calls) in GRADIENTS.items():
            model = self.begin(start, **settings)
            at, logprobs, total = 0, [], 0.0
            for size in calls:
                outputs, metrics = self.call(model, datums[at : at + size], loss)
                logprobs += [o["logprobs"] for o in outputs]
                total += metrics.get("loss:sum", 0.0)
                at += size
            gradient, norm = self.look(model)
            values = np.concatenate(logprobs) if logprobs else None
            self.results[name] = {"gradient": gradient, "norm": norm, "logprobs": values, "loss": total}

    def unequal_shares(self) -> None:
        """Ranks with nothing to learn, one datum for two ranks, none at all, a forward in between, what was dropped."""
        model = self.begin("untied", token_budget=1)
        ordered = sorted(random_datums(8), key=lambda d: -d.model_input.length)
        for datum in ordered[1::2]:  # dealt out longest first, one a micro-batch: the second rank's
            for name in ("mask", "advantages"):
                datum.loss_fn_inputs[name].array[:] = 0.0
        self.call(model, ordered)
        self.results["one rank all masked"] = self.look(model)
        self.call(model, ordered[:1])
        self.results["one datum"] = self.look(model)
        self.call(model, [])
        self.results["no datum"] = self.worker.optim_step(model, LOOK)
        self.call(model, ordered[:3])
        self.worker.forward_backward(model, ordered[3:], "ppo", {}, 1.0, False)
        self.call(model, ordered[3:])
        self.results["a forward in between"] = self.look(model)
        self.call(model, ordered[:5])
        self.worker.drop_gradients(model)
        self.call(model, ordered[5:])
        self.results["what was dropped is gone"] = self.look(model)
        self.call(model, ordered, divisor=DIVISOR * 2)
        self.results["wrong divisor"] = self.look(model)

    def failures(self) -> None:
        """A call with a loss that is not finite, and a finite loss whose gradient is not: neither leaves a trace."""
        model, datums = self.begin("tied", token_budget=1), random_datums(6)
        before = self.weights(model)
        self.call(model, datums[:2])
        broken = random_datums(3, seed=9)
        broken[1].loss_fn_inputs["logprobs"].array[:] = -np.inf
        failed = [False] * distributed.world()
        try:
            self.call(model, broken, "importance_sampling")
        except FloatingPointError:  # on every rank, not only the one whose datum it is
            failed = self.worker.objects.all_gather(True)
        self.call(model, datums)
        self.results["after a failed call"] = self.look(model)
        self.call(model, datums, divisor=1e-45)
        skipped = self.worker.optim_step(model, AdamParams(learning_rate=0.1))
        same = torch.equal(before, self.weights(model))
        self.results["not finite"] = {"failed": failed, "skipped": skipped, "weights_unchanged": same}
        self.call(model, datums)
        self.results["after a gradient that was not finite"] = self.look(model)

    def updates(self) -> None:
        """Five updates with clipping and every setting changing; the weights and what the ranks sample from them."""
        for start in ("untied", "lora_tied"):
            model = self.begin(start, token_budget=20)
            norms = []
            for step in range(5):
                datums = random_datums(3 + step, seed=step)
                self.call(model, datums[:2])
                self.call(model, datums[2:])
                params = AdamParams(1e-3 * (step + 1), 0.8 + 0.02 * step, 0.9, 1e-3, 0.1 * step, grad_clip_norm=0.05 * (5 - step))
                norms.append(self.worker.optim_step(model, params)["grad_norm"])
            weights = self.weights(model)
            self.results[f"updates, {start}"] = {"norms": norms, "weights": weights, **self.sampled(model)}
            path = self.out / start
            self.worker.save_state(model, str(path), {"note": 1}, None)
            self.worker.save_for_sampler(model, str(path) + "_sampler", False, None)
            self.worker.save_for_sampler(model, str(path) + "_merged", True, None)
            self.results[f"resumed, {start}"] = self.resumed(start, path, model)

    def sampled(self, model: int) -> dict[str, Any]:
        """Samples that end at once on one rank and run to the limit on the other; then a single request for all ranks."""
        self.worker.snapshot(model, 1)
        long = Request(prompt=PROMPT, num_samples=2, params=SamplingParams(max_tokens=40, stop=[]), seed=5, problem=1)
        short = Request(prompt=PROMPT[:3], num_samples=2, params=SamplingParams(max_tokens=1), seed=5, problem=2)
        both, _ = self.worker.sample(1, [long, short])
        alone, _ = self.worker.sample(1, [short])
        nothing, _ = self.worker.sample(1, [])
        self.worker.snapshot(model, 2)  # the same weights into what is there, or into a fork
        again, _ = self.worker.sample(2, [long])
        scored = self.worker.compute_logprobs(2, [PROMPT, PROMPT[:2]])
        sequence = both[0].sequences[0].tokens if both else []
        text = PROMPT + sequence if distributed.rank() == 0 else None
        text = next(t for t in self.worker.objects.all_gather(text) if t is not None)
        datum = Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": text[1:], "weights": [1.0] * (len(text) - 1)})
        outputs, _ = self.worker.forward_backward(model, [datum], "cross_entropy", {}, 1.0, False)
        for version in (1, 2):
            self.worker.forget_version(version)
        if distributed.rank() != 0:
            return {}
        assert nothing == [] and alone[0].sequences[0].tokens == both[1].sequences[0].tokens
        return {
            "tokens": [s.tokens for response in both for s in response.sequences],
            "logprobs": [s.logprobs for response in both for s in response.sequences],
            "again": [s.tokens for response in again for s in response.sequences],
            "scored": scored,
            "learner": outputs[0]["logprobs"][len(PROMPT) - 1 :].tolist(),
        }

    def resumed(self, start: str, path: Path, model: int) -> dict[str, Any]:
        """Two more updates, on the model as it is and on one made from what it saved."""
        ends = []
        for source in (None, path):
            if source is not None:
                model = self.begin(start, source, True, token_budget=20)
            ends.append(self.two_updates(model))
        return {"same_bits": torch.equal(*ends), "weights": ends[1], "version": self.worker.learners[model].version}

    def two_updates(self, model: int) -> torch.Tensor:
        for step in range(2):
            self.call(model, random_datums(5, seed=20 + step))
            self.worker.optim_step(model, AdamParams(2e-3, 0.9, 0.95, 1e-3, grad_clip_norm=0.1))
        return self.weights(model)

    def other_decoder(self) -> None:
        """The sampler that runs the model's own forward, which is copied whole at the first snapshot."""
        self.worker.settings = replace(self.worker.settings, sampler=SamplerSettings(kind="hf"))
        self.results["hf decoder"] = self.sampled(self.begin("tied"))

    def describe(self) -> None:
        accelerator, learner = self.worker.accelerator, self.worker.learners[self.next_id - 1]
        self.results["launch"] = {
            "distributed_type": accelerator.distributed_type.value,
            "num_processes": accelerator.num_processes,
            "wrapped": type(learner.backend.wrapped).__name__,
            "own_numel": sum(p.numel() for p in learner.model.parameters()),
        }


def main(starts: Path, out: Path) -> None:
    torch.set_num_threads(1)
    launch = Launch(starts, out)
    steps: list[Callable[[], None]] = [
        launch.gradients,
        launch.unequal_shares,
        launch.failures,
        launch.updates,
        launch.other_decoder,
        launch.describe,
    ]
    for step in steps:
        step()
    if distributed.rank() == 0:
        torch.save(launch.results, out / "results.pt")
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
