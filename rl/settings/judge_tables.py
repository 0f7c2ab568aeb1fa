"""The section of methods' settings about models whose judgement is the reward. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.settings.checks import only_with
from rl.settings.ranges import Positive, Range, Size, check_ranges


@dataclass(frozen=True, kw_only=True)
class LearnedRewardSettings:
    """A model in the loop whose judgement is the reward."""

    reward_model: str | None = None
    """Learn from a reward model's scores: an earlier stage, the folder of a reward_model run, a checkpoint of one, or a published model (folder or hub name) whose class is ...ForSequenceClassification with one output, which reads conversations with its own tokenizer and chat template. What reward says is then only measured (see other_reward_weight)."""
    reward_models: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Several reward models and their weights, added up and each logged (reward/learned/<name>), instead of reward_model: --reward-models org/one 1 runs/rm 0.5; in a recipe a mapping."""
    comparison_model: str | None = None
    """Learn from comparisons instead: a language model (an earlier stage, a run's folder, a folder of weights, a hub name) is shown the answers of a group two by two, in both orders, and the probabilities of A, B and tie are read. Reward: the share of its group that an answer is preferred to."""
    rubric_model: str | None = None
    """Learn from a rubric instead: a language model (named like comparison_model) is asked each question of rubric about each answer. Reward: the weighted mean of its readings, 0 to 1; each is logged as rubric/<its first words>."""
    rubric: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Questions and their weights, put so that yes is good (or with a negative weight): --rubric "Is it polite?" 1 "Is it right?" 3; in a recipe a mapping."""
    rubric_reading: Literal["yes_no", "score"] = "yes_no"
    """yes_no: the probability of yes against no, nothing is sampled. score: the judge writes, and the last "Score: N" is read, N from 0 to rubric_scale; an answer for which it writes none is left out and counted."""
    rubric_scale: Positive = 10.0
    """score: the best N."""
    rubric_max_tokens: Size = 256
    """score: how much the judge may write to a question."""
    rubric_renderer: str | None = None
    """chat_template, role_colon or plain; by default the one recommended for the judge."""
    other_reward_weight: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Of what reward (or rewards) says, beside the model's judgement: 0 measures it and learns nothing from it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.reward_models and self.reward_model is not None:
            raise ValueError(
                f"reward_models stands in the place of reward_model: add {self.reward_model} to it with its weight, or leave it out"
            )
        if len({name for name, _ in self.reward_models}) < len(self.reward_models):
            raise ValueError(
                f"reward_models names a model twice: {', '.join(name for name, _ in self.reward_models)}"
            )
        if self.scoring and self.comparison_model is not None:
            name = "reward_models score" if self.reward_models else "reward_model scores"
            raise ValueError(
                f"{name} answers and comparison_model compares them: name one of the two"
            )
        if self.rubric_model is not None and len(self.named) > 1:
            raise ValueError(f"rubric_model judges by itself: leave out {self.named[0]}, or it")
        if self.other_reward_weight and not self.named:
            raise ValueError(
                "other_reward_weight stands beside a reward_model, reward_models, comparison_model or rubric_model: name one, or leave it out"
            )
        if (self.rubric_model is None) != (not self.rubric):
            raise ValueError(
                'rubric and rubric_model go together: --rubric-model NAME --rubric "Is the answer polite?" 1'
            )
        options = ("rubric_reading", "rubric_renderer")
        only_with(self, options, self.rubric_model is not None, "no rubric_model is named", "name one")
        written = self.rubric_reading == "score"
        only_with(
            self,
            ("rubric_scale", "rubric_max_tokens"),
            written,
            "rubric_reading is yes_no",
            "set rubric_reading to score",
        )

    @property
    def named(self) -> list[str]:
        """The models that were named, if any were."""
        return [
            *(name for name, _ in self.scoring),
            *(name for name in (self.comparison_model, self.rubric_model) if name is not None),
        ]

    @property
    def scoring(self) -> tuple[tuple[str, float], ...]:
        """The reward models and their weights: reward_models, or reward_model with weight 1."""
        return self.reward_models or (
            () if self.reward_model is None else ((self.reward_model, 1.0),)
        )
