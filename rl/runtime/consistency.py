"""Compare the logprobs of learner and sampler before training: on the same datums, with the same
weights, then with perturbed weights.

The perturbed weights are the learner's, each tensor changed by a quarter of its root mean square.
They are sent the way that an update's weights are sent: from the learner to the sampler, adapter or
not. A tensor that did not arrive shows in the logprobs. Afterwards the original weights are
restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.learner import Learner
from rl.losses import get_loss
from rl.models import is_value_head_parameter
from rl.types import Datum

# bytes of host memory at most for the copy of the original weights; a larger model has only as many
# of its tensors perturbed
MAX_PERTURBED_BYTES = 4 * 2**30
RELATIVE_STEP = 0.25  # relative to a tensor's root mean square
ZERO_TENSOR_STEP = 0.05  # absolute step of a tensor of zeros: a fresh adapter's B


@dataclass
class ConsistencyReport:
    """Hold by datum index the learner's logprobs [T] and the sampler's, before and after the
    weights were perturbed.

    `gradient_sizes`: the largest magnitude of the gradient of each trained tensor, with perturbed
    weights. `frozen_with_gradient`: tensors that are not trained and had a gradient.
    `num_perturbed`: number of perturbed trained tensors.
    """

    learner: dict[int, np.ndarray] = field(default_factory=dict)
    sampler: dict[int, np.ndarray] = field(default_factory=dict)
    learner_perturbed: dict[int, np.ndarray] = field(default_factory=dict)
    sampler_perturbed: dict[int, np.ndarray] = field(default_factory=dict)
    gradient_sizes: dict[str, float] = field(default_factory=dict)
    frozen_with_gradient: list[str] = field(default_factory=list)
    num_perturbed: int = 0

    @classmethod
    def merge(cls, parts: Sequence[ConsistencyReport]) -> ConsistencyReport:
        """Merge the reports of all ranks."""
        report = cls(
            gradient_sizes={
                name: max(part.gradient_sizes[name] for part in parts)
                for name in parts[0].gradient_sizes
            },
            num_perturbed=parts[0].num_perturbed,
        )
        for part in parts:
            for name in ("learner", "sampler", "learner_perturbed", "sampler_perturbed"):
                getattr(report, name).update(getattr(part, name))
            report.frozen_with_gradient += [
                name
                for name in part.frozen_with_gradient
                if name not in report.frozen_with_gradient
            ]
        return report


def check_sync(
    policy: Any, sampler: Any, datums: Sequence[Datum], temperature: float
) -> ConsistencyReport:
    """Run `measure` on every rank, on a TrainingClient and a SamplingClient of its current weights.
    Return the merged report. The weights are unchanged afterwards.
    """
    driver = policy._driver
    version_id = sampler._version_id
    if driver.router is None:
        call = (policy.model_id, version_id, list(datums), temperature)
        return driver.submit("check_sync", *call).result()[0]
    datums, texts, images = make_texts(datums)

    def sampler_logprobs(version_id: int) -> dict[int, np.ndarray]:
        rows = driver.submit("compute_logprobs", version_id, texts, temperature, images)
        return to_arrays(dict(enumerate(rows.result())))

    call = (policy.model_id, None, datums, temperature)
    report, snapshot = driver.submit("check_sync", *call).result()
    moved_version_id = policy._context.next_version_id()
    report.sampler = sampler_logprobs(version_id)
    # the same transfer as for an update's weights
    driver.router.send_weights(snapshot, moved_version_id).result()
    report.sampler_perturbed = sampler_logprobs(moved_version_id)
    driver.submit("free_version", moved_version_id).result()
    return report


def make_texts(
    datums: Sequence[Datum],
) -> tuple[list[Datum], list[list[int]], list[Sequence[Any]]]:
    """Return (the datums, the texts that a sampler scores for them, their images)."""
    # Without recorded experts: with perturbed weights learner and sampler choose experts
    # independently.
    datums = [
        Datum(source.model_input, source.loss_fn_inputs, temperature=source.temperature)
        for source in datums
    ]
    texts = [
        [*datum.model_input.token_ids(), int(datum.loss_fn_inputs["target_tokens"].array[-1])]
        for datum in datums
    ]
    return datums, texts, [datum.model_input.images_with_positions() for datum in datums]


def to_arrays(rows: Mapping[int, Sequence[Any]]) -> dict[int, np.ndarray]:
    """Return a sampler's logprobs of the targets by datum index, float64 [T]."""
    return {i: np.array(row[1:], dtype=np.float64) for i, row in rows.items()}


def compute_learner_logprobs(
    learner: Learner, datums: Sequence[Datum], temperature: float
) -> dict[int, np.ndarray]:
    """Return the learner's logprobs of the targets by datum index, float64 [T]."""
    outputs, _ = learner.run(
        datums, get_loss("cross_entropy"), {}, temperature=temperature, divisor=1.0, backward=False
    )
    return {i: output["logprobs"].astype(np.float64) for i, output in outputs.items()}


def measure(
    learner: Learner,
    datums: Sequence[Datum],
    temperature: float,
    send_weights: Callable[[], Any],
    compute_sampler_logprobs: Callable[[], dict[int, np.ndarray]],
) -> tuple[ConsistencyReport, Any]:
    """Return this rank's report, and the result of `send_weights()` on the perturbed weights.
    `compute_sampler_logprobs`: returns those of this rank's share, by the weights sent last.
    """
    report = ConsistencyReport(learner=compute_learner_logprobs(learner, datums, temperature))
    report.sampler = compute_sampler_logprobs()
    with _perturbed_weights(learner) as names:
        report.num_perturbed = len(names)
        sent = send_weights()
        report.learner_perturbed = compute_learner_logprobs(learner, datums, temperature)
        report.sampler_perturbed = compute_sampler_logprobs()
        report.gradient_sizes, report.frozen_with_gradient = _measure_gradient(
            learner, datums, temperature
        )
    return report, sent


def _measure_gradient(
    learner: Learner, datums: Sequence[Datum], temperature: float
) -> tuple[dict[str, float], list[str]]:
    """Return (largest gradient magnitude by trained tensor, frozen tensors that had a gradient) of
    the datums' mean logprob. The gradients are dropped again.
    """
    tokens = sum(datum.model_input.length for datum in datums)
    bare = [
        datum.with_inputs({"target_tokens": datum.loss_fn_inputs["target_tokens"]})
        for datum in datums
    ]
    learner.run(
        bare,
        get_loss("cross_entropy"),
        {},
        temperature=temperature,
        divisor=float(tokens),
        backward=True,
    )
    sizes = {
        name: size
        for name, size in learner.backend.max_gradient_magnitudes().items()
        if not is_value_head_parameter(name)
    }
    frozen = [
        name
        for name, p in learner.model.named_parameters()
        if name not in learner.trainable and p.grad is not None
    ]
    learner.drop_gradients()
    return sizes, frozen


@contextlib.contextmanager
def _perturbed_weights(learner: Learner) -> Iterator[list[str]]:
    """Perturb the learner's weights within the context, and yield the names of the changed tensors:
    all of them if a copy fits into MAX_PERTURBED_BYTES.
    """
    names = _select_within_limit(
        learner.parameter_shapes,
        [name for name in learner.trainable if not is_value_head_parameter(name)],
    )
    originals = {name: tensor.cpu() for name, tensor in learner.backend.iter_master_weights(names)}
    try:
        learner.backend.load_weights({name: _perturb(tensor) for name, tensor in originals.items()})
        yield names
    finally:
        learner.drop_gradients()
        learner.backend.load_weights(originals)


def _select_within_limit(shapes: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return as many of the names as fit into MAX_PERTURBED_BYTES in float32, evenly spaced from
    the first to the last.
    """
    total = sum(4 * shapes[name].numel() for name in names)
    return list(names[:: max(1, -(-total // MAX_PERTURBED_BYTES))])


def _perturb(tensor: Tensor) -> Tensor:
    """Return the tensor plus a fixed cosine pattern. No random numbers are used, so that a run's
    generators are unchanged.
    """
    values = tensor.float()
    size = float(values.square().mean().sqrt()) * RELATIVE_STEP or ZERO_TENSOR_STEP
    pattern = torch.cos(
        1.7 * torch.arange(values.numel(), dtype=torch.float32, device=values.device) + 0.3
    ).reshape(values.shape)
    return (values + size * pattern).to(tensor.dtype)
