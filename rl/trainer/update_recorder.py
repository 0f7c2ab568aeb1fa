"""Record what the update of a batch computed for each sampled token, for the batches whose rollouts
are written.

Recorded are the learner's logprobs of every forward_backward call, as the update used them, the
inputs of its loss, and the entropies, which the forward computes beside the logprobs.
rl.trainer.update_report reads the record, and the page of the run shows ratios and entropies.

A file rollouts/step_000010.update.safetensors holds flat arrays over the actions of its datums:

    target_tokens, sampled           the token, and the sampler's logprob
    input/NAME                       an input of the loss, such as advantages
    datums                           int64 [D, 4]: group, index in the group, part of the episode,
                                     number of action tokens
    turns, turn_counts               the turns of all datums, and their number in each
    call/K/datums, call/K/logprobs   of call K: the datums in order, and the learner's logprobs
    call/K/entropies                 and the learner's entropies, in nats, at the loss's temperature

and as metadata, in JSON, the loss, config, divisor, optimizer step and learning rate of each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.rollout import TrajectoryGroup
from rl.types import AdamParams, Datum

MAX_RECORDED_TOKENS = 1_000_000  # action tokens of a file, each counted once for every call
_UNRECORDED_INPUTS = ("target_tokens", "versions")


@dataclass
class _BackwardCall:
    """Hold the arguments and the pending result of a forward_backward call."""

    data: Sequence[Datum]
    loss: str
    config: Mapping[str, Any]
    divisor: float
    outputs: Future
    optimizer_step: int
    scale: float = 1.0


@dataclass(frozen=True)
class _DatumSource:
    """Locate a datum in the rollouts: group, index, part of the episode, its turns, and the
    positions of its actions.
    """

    group: int
    index: int
    part: int
    turns: Sequence[int]
    positions: np.ndarray
    sampled: np.ndarray


class UpdateRecorder:
    """Record the learner calls of an update (a CallRecorder) and build its record."""

    def __init__(self) -> None:
        self._calls: list[_BackwardCall] = []
        self._learning_rates: list[float] = []

    def record_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, Any],
        divisor: float,
        outputs: Future,
    ) -> None:
        step = len(self._learning_rates)
        self._calls.append(_BackwardCall(list(data), loss, config, divisor, outputs, step))

    def record_scale(self, factor: float) -> None:
        for call in self._calls:
            if call.optimizer_step == len(self._learning_rates):
                call.scale *= factor

    def record_step(self, params: AdamParams) -> None:
        self._learning_rates.append(params.learning_rate)

    def build_record(
        self, groups: Sequence[TrajectoryGroup], max_tokens: int = MAX_RECORDED_TOKENS
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Return the arrays and the metadata of the record; None if no call trained on a rollout.

        The record holds whole groups, from the first, of at most `max_tokens` tokens.
        """
        sources = _index_datums(groups)
        num_groups = self._count_fitting_groups(sources, len(groups), max_tokens)
        numbers: dict[int, int] = {}
        datums: list[tuple[Datum, _DatumSource]] = []
        arrays: dict[str, np.ndarray] = {}
        calls = []
        for k, call in enumerate(self._calls):
            outputs = call.outputs.result()[0]
            members: list[int] = []
            logprobs: list[np.ndarray] = []
            entropies: list[np.ndarray] = []
            for datum, output in zip(call.data, outputs, strict=True):
                source = sources.get(id(datum.model_input))
                if source is None or source.group >= num_groups or "logprobs" not in output:
                    continue
                if id(datum) not in numbers:
                    numbers[id(datum)] = len(datums)
                    datums.append((datum, source))
                members.append(numbers[id(datum)])
                logprobs.append(np.asarray(output["logprobs"], np.float32)[source.positions])
                if "entropy" in output:
                    entropies.append(np.asarray(output["entropy"], np.float32)[source.positions])
            arrays[f"call/{k}/datums"] = np.asarray(members, np.int64)
            arrays[f"call/{k}/logprobs"] = np.concatenate([np.zeros(0, np.float32), *logprobs])
            if entropies and len(entropies) == len(logprobs):
                arrays[f"call/{k}/entropies"] = np.concatenate(entropies)
            step = call.optimizer_step
            rate = self._learning_rates[step] if step < len(self._learning_rates) else None
            calls.append(
                {
                    "loss": call.loss,
                    "config": dict(call.config),
                    "divisor": call.divisor / call.scale,
                    "optimizer_step": step,
                    "learning_rate": rate,
                    "datums": len(call.data),
                }
            )
        if not datums:
            return None
        arrays |= _flatten_datums(datums)
        return arrays, {"calls": calls, "groups": len(groups), "recorded_groups": num_groups}

    def _count_fitting_groups(
        self, sources: Mapping[int, _DatumSource], count: int, max_tokens: int
    ) -> int:
        """Return the number of groups, from the first, whose tokens fit in."""
        tokens = np.zeros(count, np.int64)
        for call in self._calls:
            for datum in call.data:
                if (source := sources.get(id(datum.model_input))) is not None:
                    tokens[source.group] += len(source.positions)
        return int((np.cumsum(tokens) <= max_tokens).sum())


def _index_datums(groups: Sequence[TrajectoryGroup]) -> dict[int, _DatumSource]:
    """Return the source of each datum by the id of its model_input, which a method keeps when it
    adds or replaces loss inputs.
    """
    return {id(key): source for key, source in _list_sources(groups)}


def _list_sources(groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[Any, _DatumSource]]:
    for g, group in enumerate(groups):
        for i, trajectory in enumerate(group.trajectories_G):
            for part, (datum, turns) in enumerate(trajectory.datums):
                positions = np.flatnonzero(datum.loss_fn_inputs["mask"].array)
                sampled = datum.loss_fn_inputs["logprobs"].array[positions]
                yield datum.model_input, _DatumSource(g, i, part, turns, positions, sampled)


def _flatten_datums(datums: Sequence[tuple[Datum, _DatumSource]]) -> dict[str, np.ndarray]:
    """Return the arrays of the datums, one after the other. An input that a datum lacks is NaN."""
    names = {
        name: None
        for datum, _ in datums
        for name, value in datum.loss_fn_inputs.items()
        if name not in _UNRECORDED_INPUTS and value.array.ndim == 1
    }
    arrays = {
        "target_tokens": np.concatenate(
            [d.loss_fn_inputs["target_tokens"].array[s.positions] for d, s in datums]
        ),
        "sampled": np.concatenate([source.sampled for _, source in datums]),
        "datums": np.asarray(
            [[s.group, s.index, s.part, len(s.positions)] for _, s in datums], np.int64
        ),
        "turns": np.asarray([turn for _, s in datums for turn in s.turns], np.int64),
        "turn_counts": np.asarray([len(s.turns) for _, s in datums], np.int64),
    }
    for name in names:
        arrays[f"input/{name}"] = np.concatenate(
            [
                d.loss_fn_inputs[name].array[s.positions]
                if name in d.loss_fn_inputs
                else np.full(len(s.positions), np.nan, np.float32)
                for d, s in datums
            ]
        ).astype(np.float32)
    return arrays
