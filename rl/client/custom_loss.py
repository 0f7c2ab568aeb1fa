"""Evaluate a user-defined loss: compute its gradient by the learner's logprobs (and values), from
which the learner backpropagates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl.errors import BadRequestError
from rl.types import Datum, TensorData

# (datums, a list of tensors for each requested output) -> (loss, metrics)
CustomLoss = Callable[..., tuple[torch.Tensor, dict[str, float]]]
# (logprobs of a datum, its fields as tensors) -> (loss, metrics)
PerDatumLossFn = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]

# the datum field that carries minus the gradient of each output
_GRADIENT_FIELDS = {"logprobs": "weights", "values": "value_weights"}


@dataclass(frozen=True)
class LossHandle:
    """Hold a loss of a single datum's logprobs and `inputs` (fields of the datum), made by
    `create_custom_loss`. The batch loss is the sum.

    Its metrics are named "name:sum" or "name:mean", over datums.
    """

    fn: PerDatumLossFn
    inputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the loss function."""
        return getattr(self.fn, "__name__", "custom")

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return (loss summed over datums, metrics). Raises BadRequestError if a datum lacks a
        field in `inputs`.
        """
        total, values_by_name = torch.zeros(()), dict[str, list[float]]()
        for i, (datum, logp_T) in enumerate(zip(data, logprobs, strict=True)):
            missing = [name for name in self.inputs if name not in datum.loss_fn_inputs]
            if missing:
                raise BadRequestError(
                    f"datum {i} lacks loss_fn_inputs[{missing[0]!r}], which {self.name} reads"
                )
            loss, metrics = self.fn(
                logp_T, *(datum.loss_fn_inputs[name].to_torch() for name in self.inputs)
            )
            total = total + loss
            for name, value in metrics.items():
                values_by_name.setdefault(name, []).append(_to_float(name, value))
        return total, {
            name: sum(values) / (len(values) if name.endswith(":mean") else 1)
            for name, values in values_by_name.items()
        }


def strip_datums(data: Sequence[Datum], outputs: Sequence[str]) -> list[Datum]:
    """Return the datums with `target_tokens` as their only field (zeros if absent and only values
    are requested). Raises BadRequestError for unknown outputs or a datum without targets.
    """
    unknown = [name for name in outputs if name not in _GRADIENT_FIELDS]
    if unknown or not outputs or len(set(outputs)) < len(outputs):
        raise BadRequestError(f"outputs holds 'logprobs', 'values' or both, got {tuple(outputs)}")
    bare_data = []
    for i, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None and "logprobs" in outputs:
            raise BadRequestError(
                f"datum {i} lacks loss_fn_inputs['target_tokens'] (it has "
                f"{sorted(datum.loss_fn_inputs)})"
            )
        fields = {
            "target_tokens": np.zeros(datum.model_input.length, np.int64)
            if targets is None
            else targets
        }
        bare_data.append(datum.with_inputs(fields))
    return bare_data


def evaluate_custom_loss(
    loss_fn: CustomLoss,
    data: Sequence[Datum],
    bare_data: Sequence[Datum],
    learner_outputs: Sequence[Mapping[str, TensorData]],
    outputs: Sequence[str],
) -> tuple[float, dict[str, float]]:
    """Return (loss, metrics) of the user's function on the learner's outputs `learner_outputs`, a
    mapping for each datum. Write minus its gradients into the datums of `bare_data`.

    Metrics keep the names that the function returned. Raises BadRequestError (a ValueError) if the
    result is not a (loss, metrics) pair, the loss has no gradient, or the gradient is not finite.
    """
    leaves = {
        name: [output[name].to_torch().clone().requires_grad_(True) for output in learner_outputs]
        for name in outputs
    }
    returned = loss_fn(list(data), *leaves.values())
    parts = returned if isinstance(returned, tuple) else (returned,)
    if len(parts) != 2 or not isinstance(parts[1], Mapping):
        raise BadRequestError(
            "the custom loss returns (loss, metrics), a tensor and a dict of numbers; got "
            f"{', '.join(type(part).__name__ for part in parts) or 'an empty tuple'}"
        )
    loss, metrics = parts
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.requires_grad:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BadRequestError(
            f"the custom loss returns a scalar tensor that depends on the {' or '.join(outputs)}, "
            f"got {shape}"
        )
    for name in outputs:
        gradients = torch.autograd.grad(loss, leaves[name], allow_unused=True, retain_graph=True)
        for i, (datum, leaf, gradient) in enumerate(
            zip(bare_data, leaves[name], gradients, strict=True)
        ):
            weights = torch.zeros_like(leaf) if gradient is None else -gradient
            if not bool(torch.isfinite(weights).all()):
                raise BadRequestError(
                    f"the custom loss has a gradient of NaN or infinity by the {name} of datum {i}"
                )
            datum.loss_fn_inputs[_GRADIENT_FIELDS[name]] = TensorData.from_torch(weights)
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        numbers[name] = _to_float(name, value)
    return float(loss.detach()), numbers


def _to_float(name: str, metric: Any) -> float:
    """Return a metric as a float. Raises BadRequestError if it is no number."""
    try:
        # torch warns about the conversion of a tensor that records gradients
        return float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    except (TypeError, ValueError, RuntimeError):
        raise BadRequestError(
            f"the custom loss's metric {name!r} is a number, got {type(metric).__name__}"
        ) from None
