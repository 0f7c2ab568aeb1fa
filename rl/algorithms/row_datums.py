"""Provide the shared parts of methods that learn from rows: truncation of datums, and metrics of
each held-out set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.algorithms.method_interface import Models, Progress, RowSettings
from rl.algorithms.update import LossCall, UpdateSums, run_updates
from rl.config import DataSettings, PreferenceDataSettings, RowLoopSettings
from rl.data import LengthLimits
from rl.renderers import renderer_for_row
from rl.rollout import Metrics, count_action_tokens, supervised_datum
from rl.types import Datum, Problem

ACCURACY_METRIC = "test/rewards/accuracies"


@dataclass(frozen=True, kw_only=True)
class PairSettings(RowSettings):
    """Base class of the settings of a method that learns from pairs of answers."""

    data: PreferenceDataSettings = PreferenceDataSettings()
    loop: RowLoopSettings = RowLoopSettings(keep_best=ACCURACY_METRIC)


def get_pair(row: Problem) -> tuple[str, str]:
    """Return (preferred answer, other answer) of a row. Raises ValueError if either is missing."""
    if row.response is None or row.rejected is None:
        raise ValueError(
            f"row {row.index} of {row.tag} is not a pair: it has "
            f"{'no rejected' if row.response else 'no preferred'} answer"
        )
    return row.response, row.rejected


def make_answer_datum(row: Problem, answer: str, renderer: Any) -> Datum:
    """Return the row's prompt and an answer as a datum with `mask` 1 on the answer's tokens and its
    end.
    """
    model_input, weights = renderer_for_row(renderer, row).build_supervised_example(
        [*row.messages, {"role": "assistant", "content": answer}]
    )
    return supervised_datum(model_input, weights, "mask")


def train_pairs(
    models: Models,
    datums: Sequence[Datum],
    settings: Any,
    progress: Progress,
    *,
    loss: str,
    config: Mapping[str, float],
) -> tuple[Metrics, UpdateSums]:
    """Train a single pass over pairs of adjacent datums by a loss whose unit is a pair. Return
    metrics, those of `compute_pair_metrics` with the loss as `optim/loss`, and the sums.
    """
    pairs = [datums[i : i + 2] for i in range(0, len(datums), 2)]
    totals = run_updates(
        models,
        pairs,
        lambda part: [LossCall([d for pair in part for d in pair], loss, config, len(part))],
        settings,
        progress,
    )
    return summarize_means(totals, compute_pair_metrics(totals.sums), datums), totals


def summarize_means(totals: UpdateSums, means: Metrics, datums: Sequence[Datum]) -> Metrics:
    """Return the metrics of an update whose means over pairs or answers are `means`, with the loss
    as `optim/loss`.
    """
    return {
        **totals.summarize(),
        "optim/loss": means.pop("loss"),
        **means,
        "optim/tokens": count_action_tokens(datums),
    }


def compute_pair_metrics(sums: Mapping[str, float]) -> Metrics:
    """Return a pair loss's sums as means over pairs: loss, `rewards/chosen`, `rejected`, `margins`,
    `accuracies`, and `logps/...` of a loss on logprobs.
    """
    pairs = max(1.0, sums.get("pairs:sum", 0.0))
    chosen, rejected = (
        sums.get(f"{side}_rewards:sum", 0.0) / pairs for side in ("chosen", "rejected")
    )
    return {
        "loss": sums.get("loss:sum", 0.0) / pairs,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": sums.get("ranked_right:sum", 0.0) / pairs,
        **{
            f"logps/{side}": sums[f"{side}_logps:sum"] / pairs
            for side in ("chosen", "rejected")
            if f"{side}_logps:sum" in sums
        },
    }


def truncate_datum(data: DataSettings, datum: Datum) -> Datum:
    """Truncate a datum to `max_row_tokens`, if the data settings cut rows that are too long.

    The answer loses its end, including its end token, so that the model does not learn to stop in
    the middle of a sentence. The check of the rows ensures that some of it remains.
    """
    return cut_datum(datum, LengthLimits.from_settings(data).row_cut)


def cut_datum(datum: Datum, longest: int | None) -> Datum:
    """Return the datum of the first `longest` tokens of its sequence, less if these would end
    within an image; None: no limit.
    """
    if longest is None or datum.model_input.length < longest:
        return datum
    model_input = datum.model_input.truncate(longest - 1)  # inputs exclude the last token
    fields = datum.loss_fn_inputs.items()
    return Datum(model_input, {name: v.array[: model_input.length] for name, v in fields})


def evaluate_by_tag(
    rows: Sequence[Problem], evaluate: Callable[[Sequence[Problem]], Mapping[str, float]]
) -> Metrics:
    """Return `test/...` of all rows and, if the rows come from several data sets, `test/<tag>/...`
    of each data set.
    """
    metrics = {f"test/{name}": value for name, value in evaluate(rows).items()}
    sets: dict[str, list[Problem]] = {}
    for row in rows:
        sets.setdefault(row.tag, []).append(row)
    for tag, members in sorted(sets.items()) if len(sets) > 1 else ():
        metrics |= {
            f"test/{tag.replace('/', '-')}/{name}": value
            for name, value in evaluate(members).items()
        }
    return metrics
