"""Helpers that several tests share."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch

from rl.distributed import collectives
from rl.learner import LearnerSettings
from rl.models.tiny_models import get_model_preset
from rl.runtime import SamplerSettings, WorkerSettings
from rl.runtime.training_worker import ModelSpec, TrainingWorker
from rl.runtime.verb_table import VERBS
from rl.types import AdamParams, Datum, ModelInput

VOCABULARY = 14  # of tiny:addition


def make_worker(
    base: str = "tiny:addition", *, lora=None, seed: int = 1, value_head: bool = False, **learner
) -> TrainingWorker:
    """Return a worker with model 0, perturbed so that no weight is at its initial zero or one (a
    LoRA's B is 0, norms are 1).
    """
    worker = TrainingWorker(
        WorkerSettings(learner=LearnerSettings(**learner), sampler=SamplerSettings())
    )
    worker.create_model(
        0, ModelSpec(base, lora=lora, seed=seed, value_head=value_head), None, False
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in worker.learners[0].trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return worker


def call(worker: TrainingWorker, verb: str, *arguments):
    """Run a verb as the driver runs it on a single process."""
    spec = VERBS[verb]
    reduce = spec.reduce or (lambda parts: parts[0])
    if spec.split is not None:
        arguments = getattr(worker, spec.split)(*arguments)[collectives.rank()]
    return reduce([getattr(worker, verb)(*arguments)])


class SeparateCalls(SimpleNamespace):
    """A stand-in for a training client. Its `train_step` calls its `forward_backward` and
    `optim_step`.
    """

    def train_step(self, calls, params):
        outputs = [
            self.forward_backward(data, loss, config, divisor=divisor)
            for data, loss, config, divisor in calls
        ]
        return outputs, self.optim_step(params)


def random_datums(
    count: int, *, seed: int = 0, low: int = 2, high: int = 9, vocabulary: int = VOCABULARY
) -> list[Datum]:
    """Return RL datums of unequal lengths, with off-policy logprobs, advantages of both signs and
    masked positions.
    """
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


def gradient(worker: TrainingWorker) -> torch.Tensor:
    """Return all gradients of model 0 as a single vector."""
    return torch.cat([p.grad.reshape(-1) for p in worker.learners[0].trainable.values()])


def gather_targets(logp_TV: torch.Tensor, datum: Datum) -> torch.Tensor:
    """Return the logprobs of a datum's targets, of logprobs of the whole vocabulary."""
    targets_T = datum.loss_fn_inputs["target_tokens"].to_torch().long()
    return logp_TV.gather(-1, targets_T[:, None])[:, 0]


def float32_bound(terms: int, magnitude: float = 1.0, factor: float = 2.0) -> float:
    """Return the bound on the difference between two float32 computations of a number: factor *
    2^-24 * sqrt(terms) * magnitude.

    2^-24 is float32's unit roundoff. `terms` is the number of additions along the longest path from
    inputs to result, over all sums on it (a product of matrices of inner size n adds n). Each
    addition rounds once. The CPU's instruction set decides the order and which operations are
    fused. At worst the errors add up to `terms` roundoffs; independent errors add up to about
    sqrt(terms) (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4; `factor` is its
    constant). `magnitude` is the size of the rounded values: the largest sum of absolute terms if
    the result is a difference of sums, 1 for relative comparisons.
    """
    return factor * 2.0**-24 * math.sqrt(terms) * magnitude


def path_terms(base: str = "tiny:addition", tokens: int = 16, vocabulary: int = VOCABULARY) -> int:
    """Return `terms` for a gradient of a tiny preset: the sums of a forward over `tokens`
    positions, and the same again for its backward.
    """
    preset = get_model_preset(base)
    head = preset.hidden // preset.heads
    # input projections, scores, softmax and weighted sum, output projection
    attention = preset.hidden + head + 2 * tokens + preset.hidden
    block = attention + 2 * preset.hidden + preset.hidden + preset.mlp  # two norms, up, down
    return 2 * (preset.layers * block + 2 * preset.hidden + vocabulary)


# The bound for the norm of a gradient or an update: 8e-6. Up to 1.1e-6 was measured on three
# instruction sets. A divisor that is wrong by the number of processes is off by 0.5, a missing
# token of some fifty by 0.01 or more, bfloat16 sums by 2e-3, tf32 products by 3e-4.
GRADIENT_BOUND = float32_bound(path_terms())


def compute_relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


ADAM = AdamParams(learning_rate=1e-3, eps=1e-3)
