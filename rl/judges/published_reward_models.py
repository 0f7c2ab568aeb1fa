"""Score with published reward models (`...ForSequenceClassification`, a single output), and with
several reward models at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.judges.episode_rewards import make_episode
from rl.judges.reward_scores import (
    check_finite,
    check_length,
    iter_batches,
    split_by_group,
)
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
        check_length(
            self.client,
            max(map(len, inputs), default=0),
            judge=f"the reward model {self.name}",
            text="a conversation with its answer",
            remedy="lower max_tokens, or use a reward model",
        )
        # equal answers to the same conversation are scored once
        distinct = list(dict.fromkeys(inputs))
        scores = [
            score
            for batch in iter_batches(distinct)
            for score in self.client.compute_scores(batch).result()
        ]
        check_finite(self.name, scores)
        score_of = dict(zip(distinct, scores, strict=True))
        return split_by_group(groups, (score_of[tokens] for tokens in inputs))


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
        scores = zip(*(itertools.chain.from_iterable(table) for table in tables), strict=True)
        return split_by_group(groups, map(self._sum_scores, scores))

    def _sum_scores(self, scores: Sequence[float | Score]) -> Score:
        """Return the weighted sum of an episode's scores."""
        values = [float(score) for score in scores if not isinstance(score, Score)]
        assert len(values) == len(scores)  # reward models return numbers
        total = sum(model[2] * value for model, value in zip(self.models, values, strict=True))
        names = (f"reward/learned/{name}" for name in self.names)
        return Score(total, dict(zip(names, values, strict=True)))
