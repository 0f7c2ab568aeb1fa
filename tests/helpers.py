"""Small things several tests need."""

from __future__ import annotations

import numpy as np
import torch

from rl.learner import LearnerSettings
from rl.types import AdamParams, Datum, ModelInput
from rl.worker import ModelSpec, SamplerSettings, Worker, WorkerSettings

VOCABULARY = 14  # of tiny:addition


def make_worker(base: str = "tiny:addition", *, lora=None, seed: int = 1, value_head: bool = False, **learner) -> Worker:
    """A worker with model 0, perturbed so that no weight is at its initial zero or one (a LoRA's B is 0, norms are 1)."""
    worker = Worker(WorkerSettings(learner=LearnerSettings(**learner), sampler=SamplerSettings()))
    worker.create_model(0, ModelSpec(base, lora=lora, seed=seed, value_head=value_head), None, False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in worker.learners[0].trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return worker


def call(worker: Worker, verb: str, *arguments):
    """A verb as the driver runs it on one process."""
    return worker.merge(verb, [getattr(worker, verb)(*arguments)])


def random_datums(count: int, *, seed: int = 0, low: int = 2, high: int = 9, vocabulary: int = VOCABULARY) -> list[Datum]:
    """RL datums of unequal lengths with logprobs off the policy, advantages of both signs and masked positions."""
    rng = np.random.default_rng(seed)
    datums = []
    for _ in range(count):
        n = int(rng.integers(low, high))
        mask = (rng.random(n) < 0.7).astype(np.float32)
        mask[-1] = 1.0
        datums.append(
            Datum(
                ModelInput.from_ints(rng.integers(0, vocabulary, n).tolist()),
                {
                    "target_tokens": rng.integers(0, vocabulary, n),
                    "logprobs": mask * (-2.6 + 0.3 * rng.standard_normal(n)),
                    "advantages": mask * rng.standard_normal(n),
                    "mask": mask,
                },
            )
        )
    return datums


def gradient(worker: Worker) -> torch.Tensor:
    """All gradients of model 0 as one vector."""
    return torch.cat([p.grad.reshape(-1) for p in worker.learners[0].trainable.values()])


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


ADAM = AdamParams(learning_rate=1e-3, eps=1e-3)
