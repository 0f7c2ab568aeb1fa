"""Implement supervised fine-tuning: cross-entropy on worked responses, on all assistant messages of
a conversation, or on whole texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.algorithms.method_interface import Models, Progress, RowEvaluator, RowSettings
from rl.algorithms.row_datums import evaluate_by_tag, truncate_datum
from rl.algorithms.update import train_single_pass
from rl.config import AnswerDataSettings, check_ranges
from rl.data import ProblemSet
from rl.renderers import TrainOn, renderer_for_row
from rl.rollout import Metrics, supervised_datum
from rl.types import Datum, Problem

LOSS_METRIC = "test/loss"
_SAMPLE_ROWS = 256  # number of rows of which tokens are counted for the console


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """Configure the trained tokens of a row."""

    train_on: TrainOn = "all_assistant"
    """Of a conversation: every assistant message, or only the last. (A text without a prompt is trained as a whole.)"""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class SftSettings(RowSettings):
    """Supervised fine-tuning: learn to reproduce the data's answers."""

    default_learning_rates = (1e-4, 1e-5)

    data: AnswerDataSettings = AnswerDataSettings()
    sft: SftOptions = SftOptions()


class SFT(RowEvaluator):
    """Implement `sft`."""

    Settings = SftSettings
    summary = "supervised fine-tuning on worked responses, conversations or plain texts"
    headline = LOSS_METRIC
    reads = ("response",)
    needs_reward = False
    reads_held_out_answers = reads_optional_answers = True

    def __init__(self, settings: SftSettings):
        super().__init__(settings)
        self.train_on = settings.sft.train_on

    def build_datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return prompt and response as a single sequence; trained tokens (including the end token)
        have weight 1.
        """
        return [self._datum(row, renderer) for row in rows]

    def _datum(self, row: Problem, renderer: Any) -> Datum:
        """Return the datum of a row, cut to the data settings' limit."""
        return truncate_datum(self.settings.data, make_response_datum(row, renderer, self.train_on))

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Update the policy in a single pass. `optim/loss` is the mean negative logprob of a
        trained token.
        """
        return train_single_pass(
            models, datums, self.settings, progress, loss="cross_entropy", config={}
        )

    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> Metrics:
        """Return `test/loss` (nats per token) and `test/token_accuracy` (share of tokens that are
        the most likely at their position), also of each data set.
        """
        return evaluate_by_tag(rows, lambda members: self._evaluate(members, renderer, models))

    def _evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> Metrics:
        """Return the metrics of the rows that have a response; {} if none has."""
        rows = [row for row in rows if row.response is not None]
        if not rows:  # held-out problems for sampling may have no response
            return {}
        datums = self.build_datums(rows, renderer, models, 0)
        config = {"token_accuracy": 1.0}
        sums = models.policy.forward(datums, "cross_entropy", config).result().metrics
        tokens = max(1.0, sums["weights:sum"])
        return {
            "loss": sums["loss:sum"] / tokens,
            "token_accuracy": sums["argmax_match:sum"] / tokens,
            "tokens": tokens,
        }

    def describe_data(self, problems: ProblemSet, renderer: Any) -> str:
        """Return a message about the trained tokens and their share of a sample of the rows."""
        trained_rows = self.settings.loop.batch_size * self.settings.loop.steps
        inspected = problems.batch(0, max(1, min(_SAMPLE_ROWS, len(problems), trained_rows)), 0)
        trained = [
            self._datum(row, renderer).loss_fn_inputs["weights"].array != 0 for row in inspected
        ]
        share, tokens = sum(int(np.count_nonzero(w)) for w in trained), sum(len(w) for w in trained)
        turns = any(message["role"] == "assistant" for row in inspected for message in row.messages)
        description = "the responses, not the prompts" if not turns else {
            "all_assistant": "every message of the assistant (--train-on last_assistant for only "
            "the last)",
            "last_assistant": "the assistant's last message (--train-on all_assistant for all of "
            "them)",
        }[self.train_on]  # fmt: skip
        if all(not row.messages for row in inspected):
            description = "whole texts"
        return (
            f"sft trains on {description}. In a sample of {len(inspected)} rows these are "
            f"{share / max(1, tokens):.1%} of the tokens; a row has {tokens / len(inspected):.0f} "
            "tokens on average"
        )


def make_response_datum(row: Problem, renderer: Any, train_on: TrainOn = "last_assistant") -> Datum:
    """Return a row's prompt and response as a single sequence. The response's tokens (and its end)
    have weight 1; of a text without a prompt, all tokens.

    Raises ValueError if the row has no response.
    """
    if row.response is None:
        raise ValueError(
            f"row {row.index} of {row.tag} has no response to learn: its cell is empty, or its "
            "column must be named with --response-column"
        )
    if not row.messages:
        tokens = renderer.build_text(row.response).to_ints()
        return supervised_datum(tokens, [1.0] * len(tokens))
    messages = [*row.messages, {"role": "assistant", "content": row.response}]
    model_input, weights = renderer_for_row(renderer, row).build_supervised_example(
        messages, train_on
    )
    return supervised_datum(model_input, weights)
