"""Define the settings of models that compute the reward: reward models, comparison models, rubric
models. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.config.check_config import require
from rl.config.fields import check_ranges
from rl.config.number_range import Positive, Range, Size


def is_api_address(target: str) -> bool:
    """Return whether `target` is the address of an API and not the name of weights."""
    return target.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class LearnedRewardSettings:
    """Hold the settings of models that compute the reward."""

    reward_model: str | None = None
    """Reward model to train against: an earlier stage, the folder of a reward_model run, a checkpoint of such a run, or a published model (folder or hub name) with a ...ForSequenceClassification class and a single output, which reads conversations with its tokenizer and chat template. The reward setting is then only measured (see other_reward_weight)."""
    reward_models: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Several reward models with their weights, instead of reward_model; the scores are added up and each is logged (reward/learned/<name>): --reward-models org/one 1 runs/rm 0.5; in a recipe a mapping."""
    comparison_model: str | None = None
    """Language model that compares answers (an earlier stage, a run's folder, a folder of weights, a hub name). It reads each pair of answers of a group in both orders; the probabilities of A, B and tie are used. Reward: the share of the group's other answers to which an answer is preferred."""
    rubric_model: str | None = None
    """Language model that answers each question of rubric about each answer (specified like comparison_model, or the address of an OpenAI-compatible API: http://localhost:8000/v1, with #MODEL at its end if it has several models; the key is read from OPENAI_API_KEY). Reward: the weighted mean of the results, 0 to 1; each result is logged as rubric/<its first words>."""
    rubric: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Questions with their weights, phrased so that yes is good (or with a negative weight): --rubric "Is it polite?" 1 "Is it right?" 3; in a recipe a mapping."""
    rubric_reading: Literal["yes_no", "score"] = "yes_no"
    """Way to read the rubric model. yes_no: the probability of yes against no; nothing is sampled. score: the model writes a text, and the last "Score: N" is read, N from 0 to rubric_scale; an answer without such a line is left out and counted."""
    rubric_scale: Positive = 10.0
    """Highest score N (rubric_reading score)."""
    rubric_max_tokens: Size = 256
    """Maximum number of tokens that the rubric model writes for a question (rubric_reading score)."""
    rubric_renderer: str | None = None
    """Renderer of the rubric model: chat_template, role_colon or plain; default: the recommended renderer of the model."""
    other_reward_weight: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Weight of reward (or rewards) next to the model's score; 0: measure it without training on it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.reward_models and self.reward_model is not None:
            raise ValueError(
                f"reward_models replaces reward_model: add {self.reward_model} to reward_models with its weight, or leave reward_model out"
            )
        if len({name for name, _ in self.reward_models}) < len(self.reward_models):
            raise ValueError(
                f"reward_models names a model twice: {', '.join(name for name, _ in self.reward_models)}"
            )
        if self.weighted_reward_models and self.comparison_model is not None:
            name = "reward_models score" if self.reward_models else "reward_model scores"
            raise ValueError(
                f"{name} answers and comparison_model compares them: set reward models or comparison_model, not both"
            )
        if self.rubric_model is not None and len(self.model_names) > 1:
            raise ValueError(
                f"rubric_model computes the reward by itself: leave out {self.model_names[0]} or rubric_model"
            )
        if self.other_reward_weight and not self.model_names:
            raise ValueError(
                "other_reward_weight requires reward_model, reward_models, comparison_model or rubric_model: set any of these, or leave other_reward_weight out"
            )
        if (self.rubric_model is None) != (not self.rubric):
            raise ValueError(
                'rubric and rubric_model go together: --rubric-model NAME --rubric "Is the answer polite?" 1'
            )
        options = ("rubric_reading", "rubric_renderer")
        require(
            self,
            options,
            self.rubric_model is not None,
            "no rubric_model is set",
            "set rubric_model",
        )
        if self.rubric_renderer is not None and is_api_address(self.rubric_model or ""):
            raise ValueError(
                f"rubric_renderer {self.rubric_renderer} has no effect: the server at {self.rubric_model} applies its model's chat template; leave it out"
            )
        for name in self.loaded_model_names:
            if is_api_address(name):
                raise ValueError(
                    f"{name} is an address, which only rubric_model takes: a reward model or a comparison model is loaded here"
                )
        written = self.rubric_reading == "score"
        require(
            self,
            ("rubric_scale", "rubric_max_tokens"),
            written,
            "rubric_reading is yes_no",
            "set rubric_reading to score",
        )

    @property
    def model_names(self) -> list[str]:
        """Return the names of all configured models."""
        return [
            *(name for name, _ in self.weighted_reward_models),
            *(name for name in (self.comparison_model, self.rubric_model) if name is not None),
        ]

    @property
    def loaded_model_names(self) -> list[str]:
        """Return the names of the configured models that the run loads."""
        api = {self.rubric_model} if is_api_address(self.rubric_model or "") else set()
        return [name for name in self.model_names if name not in api]

    @property
    def weighted_reward_models(self) -> tuple[tuple[str, float], ...]:
        """Return the reward models with their weights: reward_models, or reward_model with weight
        1.
        """
        return self.reward_models or (
            () if self.reward_model is None else ((self.reward_model, 1.0),)
        )
