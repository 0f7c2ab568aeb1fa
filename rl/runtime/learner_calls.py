"""Split the arguments of the verbs that compute gradients among the ranks, and merge the ranks'
results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.learner import Learner
from rl.losses import LossSpec, get_loss
from rl.runtime.sample_temperatures import resolve_temperatures
from rl.runtime.verb_table import merge_by_index
from rl.types import AdamParams, Datum, merge_counters


def resolve_loss(loss_fn: str | LossSpec) -> LossSpec:
    """Return the loss of a name. A name is sent to the ranks as it is: its functions may not
    pickle.
    """
    return get_loss(loss_fn) if isinstance(loss_fn, str) else loss_fn


def split_call(
    learner: Learner,
    model_id: int,
    datums: Sequence[Datum],
    loss_fn: str | LossSpec,
    config: Mapping[str, float],
    divisor: float,
    backward: bool,
    entropy: bool = False,
    adapters: bool = True,
    sampling_temperatures: Sequence[float | None] | None = None,
    part: int | None = None,
) -> list[tuple[Any, ...]]:
    """Return by rank the arguments of the verb `forward_backward`: its share of the batch, and what
    it needs of the whole batch. Ranks with the same share get the same object.

    `sampling_temperatures`: the temperature at which each datum was sampled, if known.
    "temperature" in `config` overrides it. `part`: only that micro-batch.
    """
    loss = resolve_loss(loss_fn)
    if backward and datums and "advantages" in loss.required:
        learner.sampling_record.check_untruncated()
    settings = dict(config)
    temperature = settings.pop("temperature", None)
    if temperature is None and loss.at_sampling_temperature and datums:
        temperatures = resolve_temperatures(
            sampling_temperatures or [None] * len(datums),
            learner.sampling_record.scoring_temperature,
        )
    else:
        temperatures = [1.0 if temperature is None else float(temperature)] * max(len(datums), 1)
    shares = learner.split_batch(datums, loss.group, temperatures[: len(datums)], part)
    # exact if all are equal
    total, distinct = sum(temperatures), len(set(temperatures))
    mean = temperatures[0] if distinct == 1 else total / len(temperatures)
    options = {"divisor": divisor, "backward": backward, "entropy": entropy}
    call = (loss_fn, settings, {**options, "use_adapters": adapters}, mean)
    arguments = {id(share): (model_id, share, *call) for share in shares}
    return [arguments[id(share)] for share in shares]


def split_train_step(
    learner: Learner, model_id: int, calls: Sequence[Sequence[Any]], params: AdamParams
) -> list[tuple[Any, ...]]:
    """Return by rank the arguments of the verb `train_step`: the arguments of `forward_backward`
    for each of `calls`, without the model. Ranks with the same shares get the same object.
    """
    ranks = list(zip(*(split_call(learner, model_id, *call) for call in calls), strict=True))
    unique = {
        tuple(map(id, arguments)): (model_id, [call[1:] for call in arguments], params)
        for arguments in ranks
    }
    return [unique[tuple(map(id, arguments))] for arguments in ranks]


def merge_outputs(parts: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return (outputs in datum order, metrics) of the ranks' (outputs, sums, temperature)."""
    sums = merge_counters([part[1] for part in parts])
    metrics = {"loss:sum": 0.0, **sums, "temperature:mean": parts[0][2]}
    return merge_by_index([part[0] for part in parts]), metrics


def merge_microbatch(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return (outputs by datum index, sums, temperature, number of micro-batches) of all ranks."""
    outputs = {i: output for part in parts for i, output in part[0].items()}
    return outputs, merge_counters([part[1] for part in parts]), *parts[0][2:]


def merge_train_step(parts: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
    """Return (what `merge_outputs` returns for each call, metrics of the update) of all ranks."""
    outputs = [merge_outputs(call) for call in zip(*(part[0] for part in parts), strict=True)]
    return outputs, parts[0][1]
