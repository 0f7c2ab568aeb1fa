"""A user's own loss: its gradient by the learner's logprobs (and values), which the learner then
goes back through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl.errors import BadRequestError
from rl.types import Datum, TensorData

# of the datums and, for each output asked for, a list of tensors
CustomLoss = Callable[..., tuple[torch.Tensor, dict[str, float]]]
# of a datum's logprobs and its fields, as tensors
PerDatumLossFn = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]

# what carries minus the gradient by each output
_FIELDS = {"logprobs": "weights", "values": "value_weights"}


@dataclass(frozen=True)
class LossHandle:
    """A loss of one datum's logprobs and `inputs` (fields of it), made by `create_custom_loss`: the
    batch's is the sum.

    Its metrics are named "name:sum" or "name:mean", over datums.
    """

    fn: PerDatumLossFn
    inputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "custom")

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total, sums = torch.zeros(()), dict[str, list[float]]()
        for i, (datum, logp_T) in enumerate(zip(data, logprobs, strict=True)):
            lacking = [name for name in self.inputs if name not in datum.loss_fn_inputs]
            if lacking:
                raise BadRequestError(
                    f"datum {i} lacks loss_fn_inputs[{lacking[0]!r}], which {self.name} reads"
                )
            loss, metrics = self.fn(
                logp_T, *(datum.loss_fn_inputs[name].to_torch() for name in self.inputs)
            )
            total = total + loss
            for name, value in metrics.items():
                sums.setdefault(name, []).append(float(value))
        return total, {
            name: sum(found) / (len(found) if name.endswith(":mean") else 1)
            for name, found in sums.items()
        }


def bare_datums(data: Sequence[Datum], outputs: Sequence[str]) -> list[Datum]:
    """The datums with their targets alone."""
    unknown = [name for name in outputs if name not in _FIELDS]
    if unknown or not outputs or len(set(outputs)) < len(outputs):
        raise BadRequestError(
            f"outputs is one or both of 'logprobs' and 'values', got {tuple(outputs)}"
        )
    bare = []
    for i, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise BadRequestError(
                f"data is a list of types.Datum, got one that holds a {type(datum).__name__}"
            )
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None and "logprobs" in outputs:
            raise BadRequestError(
                f"datum {i} lacks loss_fn_inputs['target_tokens'] (it has {sorted(datum.loss_fn_inputs)})"
            )
        fields = {
            "target_tokens": np.zeros(datum.model_input.length, np.int64)
            if targets is None
            else targets
        }
        bare.append(datum.with_inputs(fields))
    return bare


def evaluate(
    loss_fn: CustomLoss,
    data: Sequence[Datum],
    bare: Sequence[Datum],
    found: Sequence[Mapping[str, TensorData]],
    outputs: Sequence[str],
) -> tuple[float, dict[str, float]]:
    """(loss, metrics) of the user's function on what was found for each datum; minus its gradients
    are put into `bare`.

    Metrics keep the names the user gave them. Raises ValueError for what no gradient can be taken
    of.
    """
    leaves = {
        name: [output[name].to_torch().clone().requires_grad_(True) for output in found]
        for name in outputs
    }
    answer = loss_fn(list(data), *leaves.values())
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
        raise BadRequestError(
            f"the custom loss returns (loss, metrics), a tensor and a dict of numbers; got {type(answer).__name__}"
        )
    loss, metrics = answer
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.requires_grad:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BadRequestError(
            f"the custom loss returns a scalar tensor that depends on the {' or '.join(outputs)}, got {shape}"
        )
    for name in outputs:
        gradients = torch.autograd.grad(loss, leaves[name], allow_unused=True, retain_graph=True)
        for i, (datum, leaf, gradient) in enumerate(
            zip(bare, leaves[name], gradients, strict=True)
        ):
            weights = torch.zeros_like(leaf) if gradient is None else -gradient
            if not bool(torch.isfinite(weights).all()):
                raise BadRequestError(
                    f"the custom loss has a gradient of NaN or infinity by the {name} of datum {i}"
                )
            datum.loss_fn_inputs[_FIELDS[name]] = TensorData.from_torch(weights)
    return float(loss.detach()), {name: _plain(name, value) for name, value in metrics.items()}


def _plain(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadRequestError(
            f"the custom loss's metric {name!r} is a number, got {type(value).__name__}"
        ) from None
