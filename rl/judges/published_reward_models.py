"""Score with published reward models (`...ForSequenceClassification`, a single output), and with
several reward models at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.errors import UserError
from rl.judges.episode_rewards import make_episode
from rl.judges.reward_scores import JUDGE_BATCH_SIZE
from rl.renderers import ConversationRenderer
from rl.rewards import Score
from rl.rollout import TrajectoryGroup

if TYPE_CHECKING:
    from rl.client import ClassifierClient
    from rl.judges.learned_rewards import GroupScorer


class PublishedRewardModel:
    """Score episodes with a classifier with a single output: the logit of the conversation that
    ends in the last answer.

    The conversation is rendered from its messages with the model's tokenizer and chat template. An
    answer that was cut off is rendered like any other, since a template has no form for such
    answers; use `cut_off_penalty` to penalize them.
    """

    scores_single_answers = True

    def __init__(self, client: ClassifierClient, name: str):
        self.client, self.name = client, name
        self.renderer = ConversationRenderer(client.get_tokenizer(), name)

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        """Return the score of each episode, [P][G]. Raises UserError if an input is too long or a
        score is not finite.
        """
        episodes = [
            make_episode(trajectory) for group in groups for trajectory in group.trajectories_G
        ]
        inputs = [tuple(self.renderer.build_conversation(episode.messages)) for episode in episodes]
        self._check_length(max(map(len, inputs), default=0))
        distinct = list(
            dict.fromkeys(inputs)
        )  # equal answers to the same conversation are scored once
        values: list[float] = []
        for start in range(0, len(distinct), JUDGE_BATCH_SIZE):
            values += self.client.compute_scores(
                distinct[start : start + JUDGE_BATCH_SIZE]
            ).result()
        if not all(math.isfinite(score) for score in values):
            raise UserError(
                f"the reward model {self.name} returned "
                f"{sum(not math.isfinite(s) for s in values)} scores that are not finite"
            )
        score_of = dict(zip(distinct, values, strict=True))
        scores = (score_of[tokens] for tokens in inputs)
        return [[next(scores) for _ in group.trajectories_G] for group in groups]

    def _check_length(self, longest: int) -> None:
        limit = self.client.info["max_context"]
        if limit is not None and longest > limit:
            raise UserError(
                f"the reward model {self.name} reads at most {limit} tokens, a conversation with "
                f"its answer has {longest}: lower max_tokens, or use a reward model with a longer "
                "context"
            )


class WeightedRewardModels:
    """Score with several reward models: an episode's score is the weighted sum of their scores, and
    each score is a metric, `reward/learned/<name>`.

    `models` are (name, scorer, weight). The metric's name is the last part of a name that looks
    like a path.
    """

    scores_single_answers = True

    def __init__(self, models: Sequence[tuple[str, GroupScorer, float]]):
        self.models = models
        short = [name.rstrip("/").rsplit("/", 1)[-1] for name, _, _ in models]
        self.names = [
            word if short.count(word) == 1 else f"{word}-{i}"
            for i, word in enumerate(short, start=1)
        ]

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[Score]]:
        """Return the weighted score of each episode, [P][G]."""
        tables = [scorer.scores(groups) for _, scorer, _ in self.models]
        weights = [weight for _, _, weight in self.models]
        return [
            [
                self._weighted_sum([table[p][g] for table in tables], weights)
                for g in range(len(group.trajectories_G))
            ]
            for p, group in enumerate(groups)
        ]

    def _weighted_sum(self, scores: Sequence[float | Score], weights: Sequence[float]) -> Score:
        """Return the weighted sum of an episode's scores."""
        values = [float(score) for score in scores if not isinstance(score, Score)]
        assert len(values) == len(weights)  # reward models return numbers
        metrics = {
            f"reward/learned/{name}": value for name, value in zip(self.names, values, strict=True)
        }
        return Score(
            sum(weight * value for weight, value in zip(weights, values, strict=True)), metrics
        )
