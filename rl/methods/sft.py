"""Supervised fine-tuning: cross-entropy on worked responses, on all that the assistant says in a
conversation, or on whole texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rl.episodes import supervised_datum
from rl.methods.base import EvaluatesRows, Models, Progress
from rl.methods.rows import by_tag, cut_to
from rl.methods.steps import one_pass
from rl.settings import (
    AnswerDataSettings,
    ModelSettings,
    OptimSettings,
    RowLoopSettings,
    SamplingSettings,
    check_ranges,
    check_substeps,
    without_samples,
)
from rl.types import Datum, Problem

LOSS = "test/loss"
_LOOKED_AT = 256  # rows whose tokens are counted for the console


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """What is learnt of a row."""

    train_on: Literal["all_assistant", "last_assistant"] = "all_assistant"
    """Of a conversation: every message of the assistant, or the last alone. (A text without a prompt is learnt whole.)"""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Supervised fine-tuning: learn to say what the data says."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: AnswerDataSettings = field(default_factory=AnswerDataSettings)
    sft: SftOptions = field(default_factory=SftOptions)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: RowLoopSettings = field(default_factory=RowLoopSettings)

    def __post_init__(self) -> None:
        check_substeps(self)
        without_samples(self, "sft learns from the data's answers")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (1e-4 if self.model.lora_rank else 1e-5)


class Sft(EvaluatesRows):
    """Method class of `sft`: its training hooks and the models that a run loads for them.
    Subclasses inherit both.
    """

    online = False
    headline = LOSS
    reads = staticmethod(lambda settings: ("response",))
    needs_reward = False
    ranks_held_out = ranks_where_there = True

    def __init__(self, settings: SftSettings):
        self.settings = settings

    def datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Prompt and response as one sequence; what is learnt (with its end mark) carries weight 1."""
        return [self._datum(row, renderer) for row in rows]

    def _datum(self, row: Problem, renderer: Any) -> Datum:
        return cut_to(
            self.settings.data, response_datum(row, renderer, self.settings.sft.train_on), row
        )

    def longest(self, row: Problem, renderer: Any) -> int:
        """Renders the row as it is learnt, so that one that cannot be is found before the first
        step; no longer than with its answer.
        """
        if self.settings.sft.train_on == "all_assistant" and any(
            message["role"] == "assistant" for message in row.messages
        ):
            response_datum(row, renderer, "all_assistant")
        return 0

    def learn(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]:
        """One pass; the loss is the mean negative logprob of a learnt token, `optim/loss`."""
        settings = self.settings
        return one_pass(
            models,
            datums,
            loss="cross_entropy",
            config={},
            normalise="tokens",
            optim=settings.optim,
            loop=settings.loop,
            progress=progress,
            peak=settings.learning_rate,
        )

    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> dict[str, float]:
        """`test/loss` (nats a token), `test/token_accuracy` (share of tokens that are the likeliest
        where they stand); of each set as well.
        """
        return by_tag(rows, lambda members: self._evaluate(members, renderer, models))

    def _evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> dict[str, float]:
        rows = [row for row in rows if row.response is not None]
        if not rows:  # held-out problems may have none where they are there to be asked
            return {}
        sums = (
            models.policy.forward(
                self.datums(rows, renderer, models, 0), "cross_entropy", {"token_accuracy": 1.0}
            )
            .result()
            .metrics
        )
        tokens = max(1.0, sums["weights:sum"])
        return {
            "loss": sums["loss:sum"] / tokens,
            "token_accuracy": sums["likeliest:sum"] / tokens,
            "tokens": tokens,
        }

    def remark(self, rows: Sequence[Problem], renderer: Any) -> str:
        """Which tokens are trained, and their share, of the first rows."""
        looked = rows[:_LOOKED_AT]
        learnt = [self._datum(row, renderer).loss_fn_inputs["weights"].array != 0 for row in looked]
        share, tokens = sum(int(np.count_nonzero(w)) for w in learnt), sum(len(w) for w in learnt)
        turns = any(message["role"] == "assistant" for row in looked for message in row.messages)
        what = "the assistant's answers" if not turns else {
            "all_assistant": "every message of the assistant (--train-on last_assistant for the last alone)",
            "last_assistant": "the assistant's last message (--train-on all_assistant for every one)",
        }[self.settings.sft.train_on]  # fmt: skip
        if all(not row.messages for row in looked):
            what = "whole texts"
        return f"sft trains {what}: {share / max(1, tokens):.1%} of the tokens of the first {len(looked)} rows, {tokens / len(looked):.0f} tokens a row"

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


def response_datum(row: Problem, renderer: Any, train_on: str = "last_assistant") -> Datum:
    """A row's prompt and response as one sequence; the response's tokens (and its end) carry weight
    1, of a text without a prompt all.
    """
    if row.response is None:
        raise ValueError(
            f"row {row.index} of {row.tag} has no response to learn: its cell is empty, or its column is to be named with --response-column"
        )
    if not row.messages:
        tokens = renderer.build_text(row.response).to_ints()
        return supervised_datum(tokens, [1.0] * len(tokens))
    messages = [*row.messages, {"role": "assistant", "content": row.response}]
    model_input, weights = renderer.build_supervised_example(messages, train_on)
    return supervised_datum(model_input, weights)
