"""A look at learner and sampler side by side, before anything is learned: the same datums, the same
weights, then other weights.

The other weights are the learner's own, each tensor moved by a quarter of its size, which go the
way that an update's go: from the learner to the sampler, adapter or not. What did not arrive shows
in the logprobs. Afterwards the weights are put back as they were.
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

# of host memory at most for the copy that is put back; larger models have as many of their tensors
# moved
MOVED_BYTES = 4 * 2**30
STEP = 0.25  # of a tensor's root mean square
FROM_NOTHING = 0.05  # what a tensor of zeros is moved by: a fresh adapter's B


@dataclass
class Seen:
    """Of each datum, by index: the learner's logprobs [T] and the sampler's, before and after the
    weights were moved.

    `sizes`: the largest magnitude of the gradient at each trained tensor, with moved weights.
    `frozen`: tensors that are not trained and had a gradient. `moved`: how many of the trained
    tensors were.
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
        """What all ranks saw."""
        whole = cls(
            sizes={name: max(part.sizes[name] for part in parts) for name in parts[0].sizes},
            moved=parts[0].moved,
        )
        for part in parts:
            for name in ("learner", "sampler", "learner_moved", "sampler_moved"):
                getattr(whole, name).update(getattr(part, name))
            whole.frozen += [name for name in part.frozen if name not in whole.frozen]
        return whole


def prove(policy: Any, sampler: Any, datums: Sequence[Datum], temperature: float) -> Seen:
    """`look`, on every rank, at a TrainingClient and a SamplingClient of the weights that it has
    now. Leaves no trace.
    """
    driver = policy._driver
    if driver.far is None:
        return driver.submit(
            "prove", policy.model_id, sampler._version_id, list(datums), temperature
        ).result()
    datums, texts, images = _read_as(datums)

    def read(version_id: int) -> dict[int, np.ndarray]:
        found = driver.submit("compute_logprobs", version_id, texts, temperature, images).result()
        return {i: np.array(one[1:], dtype=np.float64) for i, one in enumerate(found)}

    seen, moved = driver.submit("prove_learner", policy.model_id, datums, temperature).result()
    other = policy._context.next_version_id()
    seen.sampler = read(sampler._version_id)
    driver.far.send(moved, other).result()  # by the way that an update's weights go
    seen.sampler_moved = read(other)
    driver.submit("forget_version", other).result()
    return seen


def _read_as(datums: Sequence[Datum]) -> tuple[list[Datum], list[list[int]], list[Sequence[Any]]]:
    """(the datums, the texts that a sampler reads of them, their images)."""
    # Without the experts that were noted: with moved weights both sides are to choose for
    # themselves.
    datums = [
        Datum(one.model_input, one.loss_fn_inputs, temperature=one.temperature) for one in datums
    ]
    texts = [
        [*datum.model_input.flat(), int(datum.loss_fn_inputs["target_tokens"].array[-1])]
        for datum in datums
    ]
    return datums, texts, [datum.model_input.placed() for datum in datums]


def _said_by(
    learner: Learner, datums: Sequence[Datum], temperature: float
) -> dict[int, np.ndarray]:
    outputs, _ = learner.run(
        datums, get_loss("cross_entropy"), {}, temperature=temperature, divisor=1.0, backward=False
    )
    return {i: found["logprobs"].astype(np.float64) for i, found in outputs.items()}


def look_at_learner(
    learner: Learner, datums: Sequence[Datum], temperature: float, stage: Callable[[], Any]
) -> tuple[Seen, Any]:
    """This rank's part of `look` without a sampler, and what `stage` gives of the moved weights."""
    seen = Seen(learner=_said_by(learner, datums, temperature))
    with _moved(learner) as names:
        seen.moved = len(names)
        staged = stage()
        seen.learner_moved = _said_by(learner, datums, temperature)
        seen.sizes, seen.frozen = _gradient(learner, datums, temperature)
    return seen, staged


def look(
    learner: Learner,
    decoder: Decoder,
    datums: Sequence[Datum],
    temperature: float,
    share: Callable[[Sequence[int]], Sequence[int]],
) -> Seen:
    """This rank's part. `share`: which of the datums this rank's sampler reads."""
    datums, texts, images = _read_as(datums)
    mine = share([len(text) for text in texts])

    def logprobs() -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        said = _said_by(learner, datums, temperature)
        read = score(decoder, [texts[i] for i in mine], temperature, [images[i] for i in mine])
        return said, {
            i: np.array(found[1:], dtype=np.float64) for i, found in zip(mine, read, strict=True)
        }

    seen = Seen()
    seen.learner, seen.sampler = logprobs()
    try:
        with _moved(learner) as names:
            seen.moved = len(names)
            decoder.load_(learner.weights())
            seen.learner_moved, seen.sampler_moved = logprobs()
            seen.sizes, seen.frozen = _gradient(learner, datums, temperature)
    finally:
        decoder.load_(learner.weights())
    return seen


def _gradient(
    learner: Learner, datums: Sequence[Datum], temperature: float
) -> tuple[dict[str, float], list[str]]:
    """(largest magnitude by trained tensor, what is frozen and had one) of the datums' mean
    logprob; dropped again.
    """
    tokens = sum(datum.model_input.length for datum in datums)
    plain = [
        datum.with_inputs({"target_tokens": datum.loss_fn_inputs["target_tokens"]})
        for datum in datums
    ]
    learner.run(
        plain,
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
    """The learner with other weights: the names of the tensors that were moved. All of them, where
    a copy of them fits.
    """
    names = _within(
        learner.parameter_shapes, [name for name in learner.trainable if not is_value_head(name)]
    )
    kept = {name: tensor.cpu() for name, tensor in learner.backend.exact(names)}
    try:
        learner.backend.load_weights({name: _elsewhere(tensor) for name, tensor in kept.items()})
        yield names
    finally:
        learner.drop_gradients()
        learner.backend.load_weights(kept)


def _within(shapes: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """As many of the names as MOVED_BYTES holds in float32, evenly from the first to the last."""
    total = sum(4 * shapes[name].numel() for name in names)
    every = -(-total // MOVED_BYTES) if total else 1
    return list(names[::every])


def _elsewhere(tensor: Tensor) -> Tensor:
    """A tensor near to it, by a pattern and not by chance (a run's generators are not to notice)."""
    whole = tensor.float()
    size = float(whole.square().mean().sqrt()) * STEP or FROM_NOTHING
    pattern = torch.cos(
        1.7 * torch.arange(whole.numel(), dtype=torch.float32, device=whole.device) + 0.3
    ).reshape(whole.shape)
    return (whole + size * pattern).to(tensor.dtype)
