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
from rl.models import is_value_head
from rl.sampler import Decoder, score
from rl.types import Datum

# bytes of host memory at most for the copy of the original weights; a larger model has only as many
# of its tensors perturbed
MOVED_BYTES = 4 * 2**30
STEP = 0.25  # relative to a tensor's root mean square
FROM_NOTHING = 0.05  # absolute step of a tensor of zeros: a fresh adapter's B


@dataclass
class Seen:
    """Hold by datum index the learner's logprobs [T] and the sampler's, before and after the
    weights were perturbed.

    `sizes`: the largest magnitude of the gradient of each trained tensor, with perturbed weights.
    `frozen`: tensors that are not trained and had a gradient. `moved`: number of perturbed trained
    tensors.
    """

    learner: dict[int, np.ndarray] = field(default_factory=dict)
    sampler: dict[int, np.ndarray] = field(default_factory=dict)
    learner_moved: dict[int, np.ndarray] = field(default_factory=dict)
    sampler_moved: dict[int, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    moved: int = 0

    @classmethod
    def together(cls, parts: Sequence[Seen]) -> Seen:
        """Merge the reports of all ranks."""
        report = cls(
            sizes={name: max(part.sizes[name] for part in parts) for name in parts[0].sizes},
            moved=parts[0].moved,
        )
        for part in parts:
            for name in ("learner", "sampler", "learner_moved", "sampler_moved"):
                getattr(report, name).update(getattr(part, name))
            report.frozen += [name for name in part.frozen if name not in report.frozen]
        return report


def prove(policy: Any, sampler: Any, datums: Sequence[Datum], temperature: float) -> Seen:
    """Run `look` on every rank, on a TrainingClient and a SamplingClient of its current weights.
    Return the merged report. The weights are unchanged afterwards.
    """
    driver = policy._driver
    if driver.far is None:
        return driver.submit(
            "prove", policy.model_id, sampler._version_id, list(datums), temperature
        ).result()
    datums, texts, images = _read_as(datums)

    def sampler_logprobs(version_id: int) -> dict[int, np.ndarray]:
        rows = driver.submit("compute_logprobs", version_id, texts, temperature, images).result()
        return {i: np.array(row[1:], dtype=np.float64) for i, row in enumerate(rows)}

    report, snapshot = driver.submit("prove_learner", policy.model_id, datums, temperature).result()
    moved_version_id = policy._context.next_version_id()
    report.sampler = sampler_logprobs(sampler._version_id)
    driver.far.send(
        snapshot, moved_version_id
    ).result()  # the same transfer as for an update's weights
    report.sampler_moved = sampler_logprobs(moved_version_id)
    driver.submit("forget_version", moved_version_id).result()
    return report


def _read_as(datums: Sequence[Datum]) -> tuple[list[Datum], list[list[int]], list[Sequence[Any]]]:
    """Return (the datums, the texts that a sampler scores for them, their images)."""
    # Without recorded experts: with perturbed weights learner and sampler choose experts
    # independently.
    datums = [
        Datum(source.model_input, source.loss_fn_inputs, temperature=source.temperature)
        for source in datums
    ]
    texts = [
        [*datum.model_input.flat(), int(datum.loss_fn_inputs["target_tokens"].array[-1])]
        for datum in datums
    ]
    return datums, texts, [datum.model_input.placed() for datum in datums]


def _said_by(
    learner: Learner, datums: Sequence[Datum], temperature: float
) -> dict[int, np.ndarray]:
    """Return the learner's logprobs of the targets by datum index, float64 [T]."""
    outputs, _ = learner.run(
        datums, get_loss("cross_entropy"), {}, temperature=temperature, divisor=1.0, backward=False
    )
    return {i: output["logprobs"].astype(np.float64) for i, output in outputs.items()}


def look_at_learner(
    learner: Learner, datums: Sequence[Datum], temperature: float, stage: Callable[[], Any]
) -> tuple[Seen, Any]:
    """Return this rank's report without a sampler, and the result of `stage()` on the perturbed
    weights.
    """
    report = Seen(learner=_said_by(learner, datums, temperature))
    with _moved(learner) as names:
        report.moved = len(names)
        snapshot = stage()
        report.learner_moved = _said_by(learner, datums, temperature)
        report.sizes, report.frozen = _gradient(learner, datums, temperature)
    return report, snapshot


def look(
    learner: Learner,
    decoder: Decoder,
    datums: Sequence[Datum],
    temperature: float,
    share: Callable[[Sequence[int]], Sequence[int]],
) -> Seen:
    """Return this rank's report. `share`: returns the indices of the datums that this rank's
    sampler scores.
    """
    datums, texts, images = _read_as(datums)
    indices = share([len(text) for text in texts])

    def logprobs() -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Return (the learner's logprobs, the sampler's) by datum index."""
        from_learner = _said_by(learner, datums, temperature)
        from_sampler = score(
            decoder, [texts[i] for i in indices], temperature, [images[i] for i in indices]
        )
        return from_learner, {
            i: np.array(row[1:], dtype=np.float64)
            for i, row in zip(indices, from_sampler, strict=True)
        }

    report = Seen()
    report.learner, report.sampler = logprobs()
    try:
        with _moved(learner) as names:
            report.moved = len(names)
            decoder.load_(learner.weights())
            report.learner_moved, report.sampler_moved = logprobs()
            report.sizes, report.frozen = _gradient(learner, datums, temperature)
    finally:
        decoder.load_(learner.weights())
    return report


def _gradient(
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
        for name, size in learner.backend.gradient_sizes().items()
        if not is_value_head(name)
    }
    frozen = [
        name
        for name, p in learner.model.named_parameters()
        if name not in learner.trainable and p.grad is not None
    ]
    learner.drop_gradients()
    return sizes, frozen


@contextlib.contextmanager
def _moved(learner: Learner) -> Iterator[list[str]]:
    """Perturb the learner's weights within the context, and yield the names of the changed tensors:
    all of them if a copy fits into MOVED_BYTES.
    """
    names = _within(
        learner.parameter_shapes, [name for name in learner.trainable if not is_value_head(name)]
    )
    originals = {name: tensor.cpu() for name, tensor in learner.backend.exact(names)}
    try:
        learner.backend.load_weights(
            {name: _elsewhere(tensor) for name, tensor in originals.items()}
        )
        yield names
    finally:
        learner.drop_gradients()
        learner.backend.load_weights(originals)


def _within(shapes: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return as many of the names as fit into MOVED_BYTES in float32, evenly spaced from the first
    to the last.
    """
    total = sum(4 * shapes[name].numel() for name in names)
    stride = -(-total // MOVED_BYTES) if total else 1
    return list(names[::stride])


def _elsewhere(tensor: Tensor) -> Tensor:
    """Return the tensor plus a fixed cosine pattern. No random numbers are used, so that a run's
    generators are unchanged.
    """
    values = tensor.float()
    size = float(values.square().mean().sqrt()) * STEP or FROM_NOTHING
    pattern = torch.cos(
        1.7 * torch.arange(values.numel(), dtype=torch.float32, device=values.device) + 0.3
    ).reshape(values.shape)
    return (values + size * pattern).to(tensor.dtype)
