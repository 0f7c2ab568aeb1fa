"""Hold the results of a learner's calls on the device, and copy them to the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.distributed import collectives
from rl.errors import OtherRankFailed
from rl.learner.microbatches import RankBatch
from rl.losses import LossSpec

# the arguments of `Learner.run_share`: share, loss, config, options
LearnerCall = tuple[RankBatch, LossSpec, Mapping[str, float], Mapping[str, Any]]
# outputs by datum index, and sums of metrics
CallOutput = tuple[dict[int, dict[str, np.ndarray]], dict[str, float]]


@dataclass
class LaunchedCall:
    """Hold the results of a call whose micro-batches are launched.

    sums   of the metrics, float64 [] each
    parts  of each micro-batch: the length of each datum by its index, and the outputs of all
           tokens, [T] or [T, K] each
    """

    loss: LossSpec
    backward: bool
    sums: dict[str, Tensor]
    parts: list[tuple[Mapping[int, int], Mapping[str, Tensor]]] = field(default_factory=list)

    def add(self, name: str, metric: Tensor) -> None:
        """Add a micro-batch's sum of a metric."""
        total = metric.detach().to(self.sums["loss:sum"].device, torch.float64)
        self.sums[name] = self.sums[name] + total if name in self.sums else total


def adds_gradient(calls: Sequence[LearnerCall]) -> bool:
    """Return whether any call has a backward and a datum."""
    return any(options["backward"] and len(share.datums) > 0 for share, *_, options in calls)


def sum_over_ranks(losses: Sequence[Tensor], *, failed: bool) -> Tensor:
    """Return the loss of each call over all ranks, then the number of ranks that failed, fp32
    [C + 1].

    Every rank gets the sums: otherwise the others would wait for a rank with a bad datum.
    """
    status = torch.stack([*losses, torch.full_like(losses[0], failed)]).float()
    collectives.all_sum_([status])
    return status


def read_sums(calls: Sequence[LaunchedCall], status: Tensor) -> list[dict[str, float]]:
    """Return this rank's sums of each call as numbers, in one copy from the device. `status`: of
    `sum_over_ranks`.

    Raises OtherRankFailed if another rank failed, and FloatingPointError on every rank if the sum
    of a call's losses over all ranks is not finite.
    """
    tensors = [tensor for call in calls for tensor in call.sums.values()]
    values = torch.cat([torch.stack(tensors), status.double()]).tolist()
    *losses, failures = values[len(tensors) :]
    if failures:
        raise OtherRankFailed
    for call, loss in zip(calls, losses, strict=True):
        if not math.isfinite(loss):
            dropped = "The gradients since the last step were dropped; the weights are unchanged. "
            raise FloatingPointError(
                f"the loss ({call.loss.fn.__name__}) is {loss}: a logprob or an input is not "
                f"finite, or a ratio overflowed. {dropped * call.backward}Look for logprobs far "
                "below the others in the datums, or lower the learning rate"
            )
    numbers = iter(values)
    sums = [{name: next(numbers) for name in call.sums} for call in calls]
    for call, total in zip(calls, sums, strict=True):
        if not call.parts:  # another rank reports the results
            del total["loss:sum"]
    return sums


def collect_outputs(
    parts: Sequence[tuple[Mapping[int, int], Mapping[str, Tensor]]],
) -> dict[int, dict[str, np.ndarray]]:
    """Return the outputs of all tokens by datum index.

    parts: of each micro-batch, the length of each datum by its index, and its outputs, [T] or
    [T, K] each. A single copy brings them to the host, as fp32.
    """
    outputs: dict[int, dict[str, np.ndarray]] = {i: {} for lengths, _ in parts for i in lengths}
    tensors = [tensor.float() for _, token_outputs in parts for tensor in token_outputs.values()]
    if not tensors:
        return outputs
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu().numpy()
    start = 0
    for lengths, token_outputs in parts:
        ends = np.cumsum([*lengths.values()])[:-1]
        for name, tensor in token_outputs.items():
            array = flat[start : start + tensor.numel()].reshape(tensor.shape)
            start += tensor.numel()
            for i, rows in zip(lengths, np.split(array, ends), strict=True):
                outputs[i][name] = rows
    return outputs
