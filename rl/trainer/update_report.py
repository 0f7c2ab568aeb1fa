"""Report the update of a step token by token, from the record in the run's folder.

Recorded by the run: the tokens, the sampler's and the learner's logprobs, the inputs and settings
of the loss. Computed from them here, in float64: the ratio, what is clipped, and the gradient by
the logprob of each token, by the same loss functions as in training (rl.losses.token_gradients).
No model is loaded.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.errors import UserError
from rl.jsonl import METRICS_FILE, Row, read_metrics
from rl.losses import compute_token_gradients, get_loss
from rl.reporting import (
    ROLLOUTS,
    UpdateRecord,
    contains_run,
    list_update_files,
    read_update_file,
)
from rl.sanitize import list_some

_LISTED = 60  # names that an error lists


@dataclass(frozen=True)
class TokenUpdate:
    """Hold the numbers of a token in an update; None: not known, or not used by the loss.

    sampled, learner: its logprob at sampling, and at the update
    ratio: the ratio of the loss; if the loss has none, exp(learner - sampled)
    clip: "low" or "high" if the ratio is outside the thresholds, else ""
    advantage: its advantage as the loss read it; of cross_entropy its weight
    gradient: d loss / d logprob, of the loss divided as in the update
    share: its share of the optimizer step's gradient: |gradient| / the sum over all tokens
    """

    text: str
    token: int
    sampled: float | None
    learner: float | None = None
    ratio: float | None = None
    clip: str = ""
    advantage: float | None = None
    gradient: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class AnswerStep:
    """Hold an answer's part in an optimizer step (or steps, if an episode is several datums)."""

    optimizer_steps: tuple[int, ...]
    tokens: tuple[TokenUpdate, ...]

    @property
    def share(self) -> float:
        return sum(token.share or 0.0 for token in self.tokens)


@dataclass(frozen=True)
class AnswerUpdate:
    """Hold an answer of a group. `passes` is empty if the update did not train on the answer;
    `tokens` then has what is known of it.
    """

    index: int
    reward: float | None
    tokens: tuple[TokenUpdate, ...]
    passes: tuple[AnswerStep, ...]


@dataclass(frozen=True)
class GroupUpdate:
    """Hold the answers to a problem."""

    group: int
    tag: str
    problem: Any
    prompt: str
    expected: str | None
    answers: tuple[AnswerUpdate, ...]

    @property
    def num_passes(self) -> int:
        return max((len(answer.passes) for answer in self.answers), default=0)


@dataclass(frozen=True)
class UpdateReport:
    """Hold the update of a step for the groups of a problem.

    calls: loss, config, divisor, optimizer step and learning rate of each forward_backward call
    notes: what the record lacks
    """

    step: int
    calls: Sequence[Mapping[str, Any]]
    groups: Sequence[GroupUpdate]
    notes: Sequence[str] = field(default_factory=tuple)


def explain_update(folder: Path, step: int, problem: str) -> UpdateReport:
    """Return the update of `step` token by token for the groups of a problem, which is named by its
    number or by tag:number.

    Raises UserError if the folder holds no run, the step was not recorded or did not sample, or
    the step has no such problem. The message names the steps or the problems there are.
    """
    if not contains_run(folder):
        raise UserError(f"{folder} holds no run: expected a folder that rl.train or train.py wrote")
    path = _find_record(folder, step)
    record = read_update_file(path)
    rows = _read_group_rows(path, step, problem)
    passes = _compute_passes(record)
    num_groups, recorded = (record.metadata[name] for name in ("groups", "recorded_groups"))
    note = (
        f"the record holds the first {recorded} of {num_groups} groups, and shares are those of "
        "their tokens"
    )
    groups = [
        _explain_group(group, members, record, passes)
        for group, members in rows.items()
        if group < recorded
    ]
    if not groups:
        raise UserError(
            f"problem {problem} of step {step} is in group {min(rows)}, and {path.name} holds the "
            f"first {recorded} groups: a smaller batch_size or group_size is recorded whole"
        )
    return UpdateReport(step, record.calls, groups, (note,) if recorded < num_groups else ())


def _find_record(folder: Path, step: int) -> Path:
    """Return the record of a step. Raises UserError, naming the recorded steps, if it has none."""
    files = list_update_files(folder / ROLLOUTS)
    if step in files:
        return files[step]
    metrics = read_metrics(folder / METRICS_FILE) if (folder / METRICS_FILE).exists() else []
    rows = [row for row in metrics if row["step"] == step]
    known = (
        f"the recorded steps are {list_some(files, _LISTED)}" if files else "no step is recorded"
    )
    trained = [row for row in rows if "progress/batch" in row]
    if trained and "sampler/temperature" not in trained[-1]:
        raise UserError(
            f"step {step} of {folder} belongs to the stage {trained[-1].get('stage')}, which "
            f"learns from rows and samples no answers; {known}"
        )
    if any((folder / ROLLOUTS).glob(f"step_{step:06d}*.jsonl")):
        reason = (
            "has samples but no record of its update: the run is older than such records, or its "
            "method computes the loss itself (forward_backward_custom)"
        )
    elif trained:
        reason = "kept no samples: a run keeps those of every rollouts_every steps"
    else:
        last = max((row["step"] for row in metrics), default=0)
        reason = f"is not a training step of this run, whose last step is {last}"
    raise UserError(
        f"step {step} of {folder} {reason}; {known}. Repeat the run with --rollouts-every 1 to "
        "record every step"
    )


def _read_group_rows(record: Path, step: int, problem: str) -> dict[int, list[Mapping[str, Any]]]:
    """Return the rows of the problem's samples by group. Raises UserError, naming the problems of
    the step, if there are none.
    """
    path = record.with_name(record.name.replace(".update.safetensors", ".jsonl"))
    groups: dict[int, list[Mapping[str, Any]]] = {}
    names: dict[str, None] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                name = f"{row['tag']}:{row['problem']}"
                names[name] = None
                if problem in (name, str(row["problem"])):
                    groups.setdefault(row["group"], []).append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): `why` shows the tokens of that file"
        ) from error
    if groups:
        return groups
    names = dict.fromkeys(sorted(names, key=lambda name: (len(name), name)))
    tags = {name.rpartition(":")[0] for name in names}
    listed = names if len(tags) > 1 else {name.rpartition(":")[2]: None for name in names}
    raise UserError(
        f"step {step} has no samples of problem {problem!r}; its problems are "
        f"{list_some(listed, _LISTED)}"
    )


# Of each datum: its optimizer steps, and the numbers of its tokens in each, [5, n]: learner
# logprob, ratio, -1 or 1 if the ratio is below or above the thresholds, gradient, share.
_Passes = dict[int, list[tuple[int, np.ndarray]]]


def _compute_passes(record: UpdateRecord) -> _Passes:
    """Return the passes over each datum. A datum that an optimizer step holds several times (in
    several pairs) has the sum of its gradients.
    """
    passes: _Passes = {}
    for step in sorted({call["optimizer_step"] for call in record.calls}):
        columns_by_datum: dict[int, np.ndarray] = {}
        for k, call in enumerate(record.calls):
            if call["optimizer_step"] != step:
                continue
            for number, columns in _compute_call(record, k):
                if number in columns_by_datum:
                    columns_by_datum[number][3] += columns[3]
                else:
                    columns_by_datum[number] = columns
        total = sum(float(np.abs(columns[3]).sum()) for columns in columns_by_datum.values())
        for number, columns in columns_by_datum.items():
            share = np.abs(columns[3]) / (total or 1.0)
            passes.setdefault(number, []).append((step, np.vstack([columns, share])))
    return passes


def _compute_call(record: UpdateRecord, k: int) -> list[tuple[int, np.ndarray]]:
    """Return each datum of a call with its learner logprobs, ratios, clipping and gradients."""
    call, members = record.calls[k], record.arrays[f"call/{k}/datums"].tolist()
    if not members:
        return []
    positions = record.list_tokens(members)
    cuts = np.cumsum([0, *(record.ends[members] - record.starts[members])])
    logp_T = torch.from_numpy(record.arrays[f"call/{k}/logprobs"]).double()
    result = compute_token_gradients(
        get_loss(call["loss"]),
        logp_T,
        {
            name.removeprefix("input/"): torch.from_numpy(array)[positions]
            for name, array in record.arrays.items()
            if name.startswith("input/")
        },
        torch.from_numpy(cuts),
        call["config"],
    )
    learner = logp_T.numpy()
    sampled = record.arrays["sampled"].astype(np.float64)[positions]
    ratio = np.exp(learner - sampled) if result.ratio_T is None else result.ratio_T.numpy()
    outside = np.zeros(len(ratio))
    if result.low_T is not None and result.high_T is not None:
        outside -= ratio < result.low_T.numpy()
        outside += ratio > result.high_T.numpy()
    gradient = result.gradient_T.numpy() / call["divisor"]
    columns = np.split(np.stack([learner, ratio, outside, gradient]), cuts[1:-1], axis=1)
    return list(zip(members, columns, strict=True))


def _explain_group(
    group: int, rows: Sequence[Row], record: UpdateRecord, passes: _Passes
) -> GroupUpdate:
    """Return the answers of a group."""
    first = rows[0]
    expected = first.get("answer")
    return GroupUpdate(
        group,
        str(first["tag"]),
        first["problem"],
        str(first.get("prompt", "")),
        None if expected is None else str(expected),
        tuple(_explain_answer(group, row, record, passes) for row in rows),
    )


def _list_turns(row: Row) -> list[list[TokenUpdate]]:
    """Return the sampled tokens of each turn of a row, with the sampler's logprobs."""
    sampled_turns = [turn for turn in row.get("turns", ()) if turn["sampled"]]
    entries = [(turn["tokens"], turn["token_ids"], turn["logprobs"]) for turn in sampled_turns] or [
        (row["tokens"], row["response_tokens"], row["logprobs"])
    ]
    return [
        [TokenUpdate(*values) for values in zip(texts, tokens, logprobs, strict=True)]
        for texts, tokens, logprobs in entries
    ]


def _explain_answer(group: int, row: Row, record: UpdateRecord, passes: _Passes) -> AnswerUpdate:
    """Return an answer with its passes. Raises UserError if the record is of other tokens."""
    turns = _list_turns(row)
    numbers = [n for n in record.list_datums(group, row["index"]) if n in passes]
    steps = []
    for p in range(max((len(passes[number]) for number in numbers), default=0)):
        filled = [list(turn) for turn in turns]
        members = [number for number in numbers if p < len(passes[number])]
        for number in members:
            _fill_turns(filled, number, passes[number][p][1], record, row)
        optimizer_steps = sorted({passes[number][p][0] for number in members})
        steps.append(AnswerStep(tuple(optimizer_steps), tuple(itertools.chain(*filled))))
    plain = tuple(itertools.chain(*turns))
    return AnswerUpdate(row["index"], row.get("reward"), plain, tuple(steps))


def _fill_turns(
    turns: list[list[TokenUpdate]],
    number: int,
    columns: np.ndarray,
    record: UpdateRecord,
    row: Row,
) -> None:
    """Fill in the numbers of a datum at the tokens of its turns."""
    positions = slice(record.starts[number], record.ends[number])
    places = [(turn, i) for turn in record.turns[number] for i in range(len(turns[turn]))]
    targets = record.arrays["target_tokens"][positions].tolist()
    if [turns[turn][i].token for turn, i in places] != targets:
        raise UserError(
            f"the record of the update and the samples of group {row['group']}, answer "
            f"{row['index']} have different tokens: they are files of different runs"
        )
    names = [f"input/{name}" for name in ("advantages", "weights")]
    credits = next((record.arrays[n][positions] for n in names if n in record.arrays), None)
    for j, (turn, i) in enumerate(places):
        learner, ratio, outside, gradient, share = columns[:, j].tolist()
        turns[turn][i] = replace(
            turns[turn][i],
            learner=learner,
            ratio=None if math.isnan(ratio) else ratio,
            clip={-1: "low", 0: "", 1: "high"}[outside],
            advantage=None if credits is None else float(credits[j]),
            gradient=gradient,
            share=share,
        )
