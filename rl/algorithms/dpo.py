"""Implement DPO: learn from pairs of answers which of the two is preferred, without a reward model
(Rafailov et al., arXiv 2305.18290).

The losses, DPO with its conservative form and IPO, are in rl.losses.preference_losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from rl.algorithms.method_interface import (
    Method,
    ModelFactory,
    Models,
    Progress,
    RowEvaluator,
)
from rl.algorithms.row_datums import (
    ACCURACY_METRIC,
    PairSettings,
    compute_pair_metrics,
    evaluate_by_tag,
    get_pair,
    make_answer_datum,
    train_pairs,
    truncate_datum,
)
from rl.algorithms.update import UpdateSums, add_loss_field
from rl.config import (
    DataSettings,
    Range,
    check_ranges,
    require,
)
from rl.judges import restore_full_input
from rl.rollout import Metrics
from rl.types import Datum, Problem

_SCORING_BATCH_SIZE = 512  # datums scored per call when the reference is precomputed


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """Configure the way a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 0.1")] = 0.1
    """Strength of the pull to the reference; implicit rewards are beta (log policy - log reference). For ipo the regularization tau."""
    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: -log sigmoid of the reward margin (arXiv 2305.18290). ipo: squared distance of the margin to 1 / (2 beta), which does not overfit certain preferences (arXiv 2310.12036)."""
    label_smoothing: Annotated[
        float, Range(0, 0.5, below=True, why="the chance of a wrong label")
    ] = 0.0
    """Probability that a label is wrong, below 0.5 (conservative DPO); with loss dpo."""
    length_normalise: bool | None = None
    """Take margins of means over an answer's tokens instead of sums; by default only with ipo, as its authors do."""
    reference_model: str | None = None
    """A run's folder, model folder, hub name or earlier stage of the recipe as the reference; by default the policy as it was before the first step (under a fresh LoRA adapter: the base with the adapter off, which takes no memory)."""
    reference_free: bool = False
    """No reference: rewards are beta log policy."""
    precompute_reference: bool = False
    """Score every row with the reference once, before the first step, and free its memory; otherwise score each batch during training."""

    def __post_init__(self) -> None:
        check_ranges(self)
        require(
            self,
            ("label_smoothing",),
            self.loss == "dpo",
            f"the loss is {self.loss}",
            "set loss to dpo",
        )
        if self.reference_free and (self.precompute_reference or self.reference_model):
            other = "reference_model" if self.reference_model else "precompute_reference"
            raise ValueError(
                f"reference_free means no reference, but {other} needs a reference: set either of "
                "the two"
            )


@dataclass(frozen=True, kw_only=True)
class DpoSettings(PairSettings):
    """Direct preference optimization: learn which of two answers is preferred."""

    default_learning_rates = (5e-6, 5e-7)

    preference: PreferenceSettings = PreferenceSettings()


class PreferenceMethod(Method):
    """Base class of the methods that apply a loss to pairs of a preferred and another answer, by the
    section `preference`: stored pairs, or pairs of the policy's samples.
    """

    @property
    def uses_reference(self) -> bool:
        """Return whether the implicit rewards are relative to a reference model."""
        return not self.settings.preference.reference_free

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the reference model, unless the settings exclude it."""
        if not self.uses_reference:
            return {}
        return {"reference": factory.reference(self.settings.preference.reference_model)}

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Update the policy in a single pass over the pairs. `optim/loss` and `rewards/...` are
        means over pairs, measured before each update.
        """
        metrics, totals = train_pairs(
            models, datums, self.settings, progress, loss=self._loss, config=self._config()
        )
        return metrics | self._extra_metrics(totals)

    def _extra_metrics(self, totals: UpdateSums) -> Metrics:
        """Return further metrics."""
        return {}

    @property
    def _loss(self) -> str:
        """Return the name of the loss."""
        return self.settings.preference.loss

    def _config(self) -> Metrics:
        """Return the config of the loss."""
        from rl.losses import get_loss  # imports torch, which settings and --help avoid

        settings = self.settings.preference
        config = {"beta": settings.beta}
        if settings.length_normalise is not None:
            config["length_normalise"] = float(settings.length_normalise)
        if "label_smoothing" in get_loss(settings.loss).config:
            config["label_smoothing"] = settings.label_smoothing
        return config


class DPO(PreferenceMethod, RowEvaluator):
    """Implement `dpo`."""

    Settings: ClassVar[type] = DpoSettings
    summary = "preferences: learn which of two answers is preferred, without a reward"
    headline = ACCURACY_METRIC
    reads = ("response", "rejected")
    needs_reward = False
    reads_held_out_answers = True

    def __init__(self, settings: Any):
        super().__init__(settings)
        self._reference_logprobs: dict[Any, np.ndarray] = {}  # precomputed, by prompt and answer

    def prepare_rows(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:
        """Score all rows in an order that a resume does not change, then release the reference
        model, if `precompute_reference` is set.
        """
        if not self.uses_reference or not self.settings.preference.precompute_reference:
            return
        pairs = {
            _make_datum_key(datum): datum
            for row in rows
            for datum in make_pair_datums(row, renderer, self.settings.data)
        }
        keys, datums = list(pairs), list(pairs.values())
        for i in range(0, len(keys), _SCORING_BATCH_SIZE):
            scored = models.reference.logprobs(datums[i : i + _SCORING_BATCH_SIZE])
            self._reference_logprobs.update(
                zip(keys[i : i + _SCORING_BATCH_SIZE], scored, strict=True)
            )
        models.others.pop("reference").release()

    def build_datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return two datums per row, the preferred answer's first, with the reference logprobs of
        their tokens. Raises ValueError if they were to be precomputed, and were not.
        """
        pairs = [
            datum for row in rows for datum in make_pair_datums(row, renderer, self.settings.data)
        ]
        if not self.uses_reference:
            return pairs
        if self.settings.preference.precompute_reference:
            if any(_make_datum_key(datum) not in self._reference_logprobs for datum in pairs):
                raise ValueError(
                    "a training row was not scored before the first step: leave out "
                    "precompute_reference"
                )
            scored = [self._reference_logprobs[_make_datum_key(datum)] for datum in pairs]
        else:
            scored = models.reference.logprobs(pairs)
        return add_loss_field(pairs, "ref_logprobs", scored)

    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> Metrics:
        """Return the means of `compute_pair_metrics` on held-out pairs, named `test/loss`,
        `test/rewards/...` and `test/logps/...`.
        """

        def compute_means(members: Sequence[Problem]) -> Metrics:
            pairs = self.build_datums(members, renderer, models, 0)
            return compute_pair_metrics(
                models.policy.forward(pairs, self._loss, self._config()).result().metrics
            )

        return evaluate_by_tag(rows, compute_means)


def _make_datum_key(datum: Datum) -> Any:
    """Return the datum's sequence and images as a dict key."""
    whole = restore_full_input(datum)
    return tuple(whole.token_ids()), whole.images_with_positions()


def make_pair_datums(row: Problem, renderer: Any, data: DataSettings) -> list[Datum]:
    """Return the preferred answer and the other as two datums with `mask` 1 on the answer's tokens
    and its end, cut as the data settings say.

    Raises ValueError if either answer is missing.
    """
    return [
        truncate_datum(data, make_answer_datum(row, answer, renderer)) for answer in get_pair(row)
    ]
