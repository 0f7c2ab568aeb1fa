"""Implement KTO: learn from answers labeled good or bad, without pairs (Ethayarajh et al., arXiv
2402.01306).

The loss is in rl.losses.preference_losses. Its z, the distance of the policy from the reference, is
estimated in each optimizer step on the batch's prompts with mismatched answers (the paper's section
4.1), by a forward pass without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np

from rl.algorithms.method_interface import (
    ModelFactory,
    Models,
    Progress,
    RowEvaluator,
    RowSettings,
)
from rl.algorithms.row_datums import (
    cut_datum,
    evaluate_by_tag,
    make_answer_datum,
    summarize_means,
    truncate_datum,
)
from rl.algorithms.update import (
    LossCall,
    add_loss_field,
    add_loss_inputs,
    run_updates,
)
from rl.config import (
    DataFormat,
    NotNegative,
    PreferenceDataSettings,
    Range,
    check_ranges,
)
from rl.data import read_label
from rl.errors import UserError
from rl.rollout import Metrics
from rl.types import Datum, Problem


@dataclass(frozen=True, kw_only=True)
class LabelledDataSettings(PreferenceDataSettings):
    """Configure data of answers labeled good or bad."""

    data_format: DataFormat = "unpaired"
    """unpaired: prompt, completion and label (true or false). preferences: of each pair the preferred answer is good, the other bad."""


@dataclass(frozen=True, kw_only=True)
class KtoOptions:
    """Configure the way a label becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 0.1")] = 0.1
    """Strength of the pull to the reference, which is the policy as it was before the first step."""
    desirable_weight: NotNegative = 1.0
    """Weight of good answers; if they are fewer than bad ones, raise it so that weight times number is 1 to 4/3 times that of the bad ones."""
    undesirable_weight: NotNegative = 1.0
    """Weight of bad answers."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class KtoSettings(RowSettings):
    """Kahneman-Tversky optimization: learn from answers labeled good or bad, without pairs."""

    default_learning_rates = (5e-6, 1e-6)

    data: LabelledDataSettings = LabelledDataSettings()
    kto: KtoOptions = KtoOptions()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loop.batch_size < 2 * self.optim.num_substeps:
            raise ValueError(
                "kto needs two or more rows per optimizer step, because it pairs prompts with "
                "answers of other rows: raise batch_size or lower num_substeps"
            )


class KTO(RowEvaluator):
    """Implement `kto`."""

    Settings = KtoSettings
    summary = "preferences: answers labeled good or bad, without pairs"
    headline = "test/loss"
    reads = ("response",)
    needs_reward = False
    reads_held_out_answers = True

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the reference model."""
        return {"reference": factory.reference()}

    def __init__(self, settings: KtoSettings):
        super().__init__(settings)
        # prompts of the batch, each with an answer of the next row
        self._mismatched: list[Datum] = []
        self._row_indices: list[int] = []  # the row of each answer of the batch

    def longest(self, row: Problem, renderer: Any) -> int:
        """Return the tokens of the prompt with the bad answer of a pair; 0 if the row has none.

        Raises UserError if the row has a label other than true or false.
        """
        if row.rejected is None:
            try:
                list_labeled_answers(row)
            except ValueError as error:
                raise UserError(str(error)) from error
            return 0
        return make_answer_datum(row, row.rejected, renderer).model_input.length + 1

    def build_datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return a datum for each answer, with its label and the reference logprobs. Keep the
        mismatched datums for z, cut to what the row checks and the model's context allow.
        """
        limits = (self.settings.data.max_row_tokens, models.policy.info["max_context"])
        limit = min((tokens for tokens in limits if tokens is not None), default=None)
        answers = [list_labeled_answers(row) for row in rows]
        # Answers of the next row: the other answer of the same row would not be mismatched.
        others = [*answers[1:], *answers[:1]]
        answers_D = [
            self._datum(row, text, good, renderer)
            for row, of_row in zip(rows, answers, strict=True)
            for text, good in of_row
        ]
        mismatched = [
            cut_datum(self._datum(row, of_next[i % len(of_next)][0], True, renderer), limit)
            for row, of_row, of_next in zip(rows, answers, others, strict=True)
            for i in range(len(of_row))
        ]
        self._row_indices = [i for i, of_row in enumerate(answers) for _ in of_row]
        scored = models.reference.logprobs([*answers_D, *mismatched])
        datums = add_loss_field([*answers_D, *mismatched], "ref_logprobs", scored)
        self._mismatched = datums[len(answers_D) :]
        return datums[: len(answers_D)]

    def _datum(self, row: Problem, answer: str, good: bool, renderer: Any) -> Datum:
        """Return a datum with `mask` on the answer and `labels` 1 (good) or -1 (bad)."""
        datum = truncate_datum(self.settings.data, make_answer_datum(row, answer, renderer))
        labels = np.full(datum.model_input.length, 1.0 if good else -1.0)
        return add_loss_inputs(datum, labels=labels)

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Update the policy in a single pass. `optim/loss`, `rewards/...` and `optim/kl_ref_k1` (z)
        are measured before each update.
        """
        distances = []

        def make_calls(part: Sequence[tuple[Datum, Datum]]) -> list[LossCall]:
            answers, mismatched = [list(side) for side in zip(*part, strict=True)]
            distances.append(self._estimate_kl(models, mismatched))
            return [LossCall(answers, "kto", self._config(distances[-1]), len(answers))]

        pairs = list(zip(datums, self._mismatched, strict=True))
        totals = run_updates(
            models, pairs, make_calls, self.settings, progress, rows=self._row_indices
        )
        metrics = summarize_means(totals, compute_label_metrics(totals.sums), datums)
        return {**metrics, "optim/kl_ref_k1": float(np.mean(distances))}

    def _estimate_kl(self, models: Models, mismatched: Sequence[Datum]) -> float:
        """Return z: the mean over mismatched prompts and answers of the sum of lp - ref, at least
        0.
        """
        result = models.policy.forward(mismatched, "kto", self._config(0.0)).result()
        gaps = []
        for datum, output in zip(mismatched, result.loss_fn_outputs, strict=True):
            ref_T = datum.loss_fn_inputs["ref_logprobs"].array
            gap_T = output["logprobs"].array.astype(np.float64) - ref_T
            gaps.append(gap_T[datum.action_mask].sum())
        return max(0.0, float(np.mean(gaps)))

    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> Metrics:
        """Return the means of `compute_label_metrics` on held-out answers, named `test/loss` and
        `test/rewards/...`.
        """

        def compute_means(members: Sequence[Problem]) -> Metrics:
            answers = self.build_datums(members, renderer, models, 0)
            # the answers of a single row are mismatched with no other prompt: z is at least 0
            kl = self._estimate_kl(models, self._mismatched) if len(members) > 1 else 0.0
            result = models.policy.forward(answers, "kto", self._config(kl)).result()
            return compute_label_metrics(result.metrics)

        return evaluate_by_tag(rows, compute_means)

    def _config(self, kl: float) -> Metrics:
        """Return the config of the loss."""
        return {**asdict(self.settings.kto), "kl": kl}


def list_labeled_answers(row: Problem) -> list[tuple[str, bool]]:
    """Return (answer, whether it is good) of a row: a labeled answer, or the two answers of a pair.

    An answer without a label is good. Raises ValueError if the row has no answer, or a label other
    than true or false.
    """
    if row.response is None:
        raise ValueError(f"row {row.index} of {row.tag} has no answer to learn from")
    if row.rejected is not None:
        return [(row.response, True), (row.rejected, False)]
    return [(row.response, read_label(row.meta.get("label", True)))]


def compute_label_metrics(sums: Mapping[str, float]) -> Metrics:
    """Return the loss's sums as means: of good answers (`rewards/chosen`), of bad answers
    (`rejected`), and their difference (`margins`).
    """
    answers, good = sums["answers:sum"], sums["good:sum"]
    chosen = sums["good_rewards:sum"] / max(1.0, good)
    rejected = sums["bad_rewards:sum"] / max(1.0, answers - good)
    return {
        "loss": sums["loss:sum"] / max(1.0, answers),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
    }
