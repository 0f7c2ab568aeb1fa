"""Train a reward model from preference pairs, in either of two forms.

scalar: a head that gives every answer a score r, with P(first preferred) = sigmoid(r_1 - r_2)
(Bradley and Terry 1952). comparison: the language model, shown both answers, learns to say which is
better, A or B (rl.judges.comparison_judge). `rlhf`, `grpo` and `ppo` use either form as their
reward:
--reward-model, or --comparison-model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rl.algorithms.method_interface import Models, Progress, RowEvaluator
from rl.algorithms.row_datums import (
    ACCURACY_METRIC,
    PairSettings,
    get_pair,
    train_pairs,
)
from rl.algorithms.update import train_single_pass
from rl.config import Weight, check_ranges, require
from rl.errors import UnusedSettingError
from rl.judges import (
    AnswerComparison,
    ComparisonModel,
    compute_reward_scores,
    make_comparison_prompt,
    make_verdict_examples,
    swap_answers,
)
from rl.renderers import renderer_for_row
from rl.rollout import Metrics, compute_calibration_error, supervised_datum
from rl.types import Datum, ModelInput, Problem


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """Configure the training on pairs."""

    form: Literal["scalar", "comparison"] = "scalar"
    """scalar: a value head read at an answer's last token, trained so that the preferred answer scores higher (Bradley-Terry). comparison: the language model says A or B to a prompt that shows both answers, each pair in both orders."""
    centre_coef: Weight = 0.0
    """scalar: pull the two scores of a pair towards a sum of 0, such as 0.01 (arXiv 2312.09244); it changes no preference, only the position of 0."""

    def __post_init__(self) -> None:
        check_ranges(self)
        require(
            self,
            ("centre_coef",),
            self.form == "scalar",
            f"the form is {self.form}",
            "set form to scalar",
        )


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(PairSettings):
    """Reward modeling: learn to tell which of two answers is preferred."""

    default_learning_rates = (1e-4, 1e-5)

    reward_modelling: RewardModelOptions = RewardModelOptions()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.on_too_long == "cut" and self.data.max_row_tokens is not None:
            raise ValueError(
                "a reward model reads its score at an answer's end, which cutting removes: set "
                "on_too_long to skip"
            )
        for name in ("reward", "rewards"):
            if getattr(self.data, name):
                raise UnusedSettingError(
                    name,
                    f"a reward model samples no answers that a reward could score: leave {name} "
                    "out",
                )


class RewardModelTraining(RowEvaluator):
    """Implement `reward_model`."""

    Settings = RewardModelSettings
    summary = "preferences: train a model that predicts which of two answers is preferred"
    headline = ACCURACY_METRIC
    reads = ("response", "rejected")
    needs_reward = False
    reads_held_out_answers = True

    def __init__(self, settings: RewardModelSettings):
        super().__init__(settings)
        self.scalar = settings.reward_modelling.form == "scalar"
        self.value_head = self.keeps_value_head = self.scalar

    def build_datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return two datums per row. scalar: the preferred answer's first. comparison: the pair in
        both orders.
        """
        make = make_scored_pair if self.scalar else make_comparison_pair
        return [datum for row in rows for datum in make(row, renderer)]

    def longest(self, row: Problem, renderer: Any) -> int:
        """Return, for comparison, the length of the prompt that shows both answers with the longest
        verdict; for scalar 0.
        """
        if self.scalar:
            return 0
        examples = make_verdict_examples(_make_comparison(row), renderer)
        return max(example.length for example, _ in examples)

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Update the model in a single pass. `optim/loss` is a mean over pairs (scalar) or over the
        tokens of the verdict (comparison).
        """
        settings = self.settings
        if not self.scalar:
            return train_single_pass(
                models,
                datums,
                settings,
                progress,
                loss="cross_entropy",
                config={},
                rows=[i // 2 for i in range(len(datums))],
            )
        config = {"centre_coef": settings.reward_modelling.centre_coef}
        metrics, _ = train_pairs(
            models, datums, settings, progress, loss="bradley_terry", config=config
        )
        return metrics

    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> Metrics:
        """Return metrics on held-out pairs: `test/loss` (-log P of the preference), accuracy,
        margin and calibration error of P.
        """
        if self.scalar:
            whole = [datum.model_input for row in rows for datum in make_scored_pair(row, renderer)]
            scores = np.array(compute_reward_scores(models.policy, whole))
            return {
                "test/rewards/chosen": float(scores[0::2].mean()),
                "test/rewards/rejected": float(scores[1::2].mean()),
                **compute_preference_metrics(scores[0::2] - scores[1::2]),
            }
        sampler = models.policy.save_weights_and_get_sampling_client()
        comparisons = list(map(_make_comparison, rows))
        verdicts = ComparisonModel(sampler, renderer).compare(comparisons)
        sampler.release()
        wins, losses, ties, consistent = (
            np.array([getattr(verdict, name) for verdict in verdicts])
            for name in ("first", "second", "tie", "consistent")
        )
        return {
            **compute_preference_metrics(np.log(wins) - np.log(losses)),
            "test/comparison/tie": float(ties.mean()),
            "test/comparison/consistent": float(consistent.mean()),
        }


def make_scored_pair(row: Problem, renderer: Any) -> list[Datum]:
    """Return datums of the preferred answer and the other, as `Renderer.reward_model_input` encodes
    them: the value is read at the last position, the end token.

    Template text after that token is dropped, since no sampled answer has it. The mask marks the
    end of the prompt, so that the prompt can be shared. The target of the last position is unused.
    """
    datums, renderer = [], renderer_for_row(renderer, row)
    for answer in get_pair(row):
        example, weights = renderer.build_supervised_example(
            [*row.messages, {"role": "assistant", "content": answer}]
        )
        learnt = np.flatnonzero(weights)
        begin, whole = int(learnt[0]), example.token_ids()
        judged = renderer.reward_model_input(whole[:begin], whole[begin : int(learnt[-1]) + 1])
        # images precede the answer
        model_input = ModelInput.of(judged.token_ids(), example.images_with_positions())
        tokens = model_input.token_ids()
        mask = np.arange(1, len(tokens) + 1) >= begin
        datums.append(Datum(model_input, {"target_tokens": [*tokens[1:], 0], "mask": mask}))
    return datums


def make_comparison_pair(row: Problem, renderer: Any) -> list[Datum]:
    """Return two supervised datums that train the verdict of a comparison.

    The first datum shows the preferred answer first (verdict A), the second datum shows it second
    (verdict B).
    """
    comparison = _make_comparison(row)
    examples = [
        renderer.build_supervised_example(
            [*make_comparison_prompt(ordered), {"role": "assistant", "content": label}]
        )
        for ordered, label in ((comparison, "A"), (swap_answers(comparison), "B"))
    ]
    return [supervised_datum(model_input.to_ints(), weights) for model_input, weights in examples]


def _make_comparison(row: Problem) -> AnswerComparison:
    """Return the comparison of a row's two answers."""
    return AnswerComparison(row.messages, *get_pair(row))


def compute_preference_metrics(margins: np.ndarray) -> Metrics:
    """Return metrics of the log odds [P] that the model gives to the preferred answers: loss,
    margin, accuracy (a tie is half) and calibration error.
    """
    right = (np.sign(margins) + 1) / 2
    sure = 1 / (1 + np.exp(-np.abs(margins)))
    return {
        "test/loss": float(np.logaddexp(0.0, -margins).mean()),
        "test/rewards/margins": float(margins.mean()),
        ACCURACY_METRIC: float(right.mean()),
        "test/rewards/calibration_error": compute_calibration_error(sure.tolist(), right.tolist()),
    }
