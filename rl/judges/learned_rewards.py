"""Compute rewards with a model in the loop: a reward model's scores of whole episodes, or a
language model's comparisons within groups.

Both score samples after sampling, a batch at a time, and their scores become part of the group's
rewards. Later steps (advantages, shaping, metrics, KL in the reward) do not depend on the source of
a reward. A reward model is one of this project's (a value head), or a published one
(`...ForSequenceClassification`, a single output).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Protocol

from rl.judges.comparison_judge import AnswerComparison, ComparisonModel, make_comparison
from rl.judges.episode_rewards import make_episode
from rl.judges.reward_scores import (
    check_finite,
    check_length,
    compute_reward_scores,
    iter_batches,
    split_by_group,
)
from rl.renderers import ConversationRenderer, Renderer
from rl.rewards import Score
from rl.rollout import Metrics, RolloutBatch, TrajectoryGroup, Transition
from rl.types import Message, ModelInput

if TYPE_CHECKING:
    from rl.client import ClassifierClient, TrainingClient


class GroupScorer(Protocol):
    """Score the episodes of groups.

    `scores_single_answers` tells whether a single answer, without others for comparison, has a
    score.
    """

    scores_single_answers: bool

    def scores(self, groups: Sequence[TrajectoryGroup]) -> Sequence[Sequence[float | Score]]:
        """Return a score for each episode, [P][G]. A `Score` also has metrics, or no reward if the
        judge failed on the episode.
        """
        ...


class RewardModel:
    """Score episodes with a model with a value head: the value at the answer's end token or, if the
    answer was cut off, at its last token.

    `renderer` is the renderer of its training. An answer is encoded by
    `renderer.reward_model_input`, token for token as in training. `shares_vocabulary` tells whether
    the policy's token ids mean the same to this model; else it reads only texts. `policy_renderer`
    is the renderer of the policy's episodes; None: formats are compared only by the prompts.
    """

    scores_single_answers = True

    def __init__(
        self,
        client: TrainingClient,
        name: str,
        renderer: Renderer,
        *,
        shares_vocabulary: bool = True,
        policy_renderer: Renderer | None = None,
    ):
        self.client, self.name, self.renderer = client, name, renderer
        self.shares_vocabulary = shares_vocabulary
        self.shares_format = (
            shares_vocabulary
            and policy_renderer is not None
            and _formats_match(renderer, policy_renderer)
        )

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        """Return the score of each episode, [P][G]. Raises UserError if an episode is too long or a
        score is not finite.
        """
        inputs = [item for group in groups for item in self._build_inputs(group)]
        check_length(
            self.client,
            max((item.length for item in inputs), default=0),
            judge=f"the reward model {self.name}",
            text="an episode",
            remedy="lower max_tokens, or use a reward model",
        )
        scores = compute_reward_scores(self.client, inputs)
        check_finite(self.name, scores)
        return split_by_group(groups, scores)

    def _build_inputs(self, group: TrajectoryGroup) -> list[ModelInput]:
        """Return the input of each episode: the policy's tokens, if the policy's prompt equals this
        model's rendering of it.

        For a policy with another renderer or vocabulary, return the conversation and the answer's
        text in this model's rendering.
        """
        inputs: list[ModelInput] = []
        # by id of the conversation, which a group's episodes share
        prompts: dict[int, ModelInput] = {}
        conversations: list[Sequence[Message]] = []  # kept alive, so that ids stay unique
        for trajectory in group.trajectories_G:
            last = trajectory.transitions[-1]
            prompt, answer = last.ob, last.ac.tokens
            reads_text = not self.shares_vocabulary or (
                "new_messages" in last.logs and not self.shares_format
            )
            messages = (
                make_episode(trajectory).messages[:-1] if reads_text else last.logs.get("messages")
            )
            if messages is not None:
                conversations.append(messages)
                if id(messages) not in prompts:
                    prompts[id(messages)] = self.renderer.build_generation_prompt(messages)
                rendered = prompts[id(messages)]
                if not (self.shares_vocabulary and self._reads_tokens(last, rendered)):
                    prompt = rendered
                    message = {"role": "assistant", "content": str(last.logs["response"])}
                    example, weights = self.renderer.build_supervised_example([*messages, message])
                    answer = [t for t, w in zip(example.token_ids(), weights, strict=True) if w]
                    if last.ac.stop_reason != "stop":  # cut off
                        answer = self.renderer.without_end_mark(answer)
            tokens = self.renderer.reward_model_input(prompt.token_ids(), answer).token_ids()
            inputs.append(ModelInput.of(tokens, prompt.images_with_positions()))
        return inputs

    def _reads_tokens(self, turn: Transition, rendered: ModelInput) -> bool:
        """Return whether a turn's tokens are those of this model's rendering: the same prompt, and
        an answer that was cut off or ends as this renderer ends it (not with a stop text).
        """
        prompt, answer = turn.ob, turn.ac
        if (
            prompt.token_ids() != rendered.token_ids()
            or prompt.images_with_positions() != rendered.images_with_positions()
        ):
            return False
        return answer.stop_reason != "stop" or self.renderer.parse_response(answer.tokens)[1]


def _formats_match(first: Renderer, second: Renderer) -> bool:
    """Return whether two renderers of the same vocabulary encode a conversation of several turns
    equally.
    """
    roles = ("user", "assistant", "user", "assistant")
    turns: list[Message] = [
        {"role": role, "content": ""} for role in roles
    ]  # works with any vocabulary
    prompts = [r.build_generation_prompt(turns[:-1]).token_ids() for r in (first, second)]
    examples = [r.build_supervised_example(turns)[0].token_ids() for r in (first, second)]
    return prompts[0] == prompts[1] and examples[0] == examples[1]


class PairwiseJudge:
    """Score an episode with a judge by the share of its group to which it is preferred, a tie
    counting half: 0 to 1, mean 1/2.

    An episode of several turns is compared as a whole, from the first difference to the other
    episode. Equal episodes tie without being shown. An answer without others in its group scores
    1/2.
    """

    scores_single_answers = False

    def __init__(self, judge: ComparisonModel):
        self.judge = judge

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        """Return the score of each episode, [P][G]."""
        pairs: list[tuple[int, int, int]] = []
        comparisons: list[AnswerComparison] = []
        for g, group in enumerate(groups):
            whole = [make_episode(trajectory).messages for trajectory in group.trajectories_G]
            for i, j in combinations(range(len(whole)), 2):
                if whole[i] != whole[j]:
                    pairs.append((g, i, j))
                    comparisons.append(make_comparison(whole[i], whole[j]))
        # wins[g][i]: number of others to which i is preferred; equal answers share the point
        wins = [
            [(len(group.trajectories_G) - 1) / 2] * len(group.trajectories_G) for group in groups
        ]
        verdicts = self.judge.compare(comparisons)
        for (g, i, j), verdict in zip(pairs, verdicts, strict=True):
            ahead = (verdict.first - verdict.second) / 2
            wins[g][i] += ahead
            wins[g][j] -= ahead
        return [
            [win / (len(of_group) - 1) if len(of_group) > 1 else 0.5 for win in of_group]
            for of_group in wins
        ]


@dataclass(eq=False)
class LearnedRewards:
    """Add a scorer's scores to groups.

    `other_weight` is the weight of the environments' rewards; with 0 they are only measured.
    Metrics of each episode: `reward/learned` and `reward/given`.
    """

    scorer: GroupScorer
    other_weight: float
    seconds: float = 0.0

    def take_seconds(self) -> Metrics:
        """Return the seconds spent on judging since the last call."""
        taken, self.seconds = {"learned": self.seconds}, 0.0
        return taken

    @property
    def scores_single_answers(self) -> bool:
        """Return whether the scorer scores a single answer without others."""
        return self.scorer.scores_single_answers

    def judge_groups(
        self, groups: Sequence[TrajectoryGroup]
    ) -> tuple[list[TrajectoryGroup], list[str]]:
        """Return (the groups with rewards, without the episodes on which the judge failed; an error
        message for each of these).

        Rewards: each episode's score at its end, plus each step's environment reward times
        `other_weight`.
        """
        begin, rewarded, errors = time.perf_counter(), [], []
        scores_P_G = self.scorer.scores(groups)
        self.seconds += time.perf_counter() - begin
        for group, scores in zip(groups, scores_P_G, strict=True):
            scores_G = [
                score if isinstance(score, Score) else Score(float(score)) for score in scores
            ]
            errors += [
                f"{score.error} (problem {group.problem_index})"
                for score in scores_G
                if score.reward is None
            ]
            members = [i for i, score in enumerate(scores_G) if score.reward is not None]
            if members:
                rewarded.append(self._add_scores(group, members, scores_G))
        return rewarded, errors

    def _add_scores(
        self, group: TrajectoryGroup, members: Sequence[int], scores_G: Sequence[Score]
    ) -> TrajectoryGroup:
        """Return the group's `members` with their scores added."""
        environment_G = group.get_total_rewards()
        weight, trajectories, finals, metrics = self.other_weight, [], [], []
        for i in members:
            trajectory, reward = group.trajectories_G[i], scores_G[i].reward
            assert reward is not None  # `members` have a reward
            turns = [replace(turn, reward=turn.reward * weight) for turn in trajectory.transitions]
            trajectories.append(replace(trajectory, transitions=turns))
            finals.append(group.final_rewards_G[i] * weight + reward)
            judged = {"reward/learned": reward, "reward/given": environment_G[i]}
            metrics.append({**group.metrics_G[i], **scores_G[i].metrics, **judged})
        return replace(
            group, trajectories_G=trajectories, final_rewards_G=finals, metrics_G=metrics
        )


def apply_learned_rewards(
    rollouts: RolloutBatch, rewards: LearnedRewards | None, *, ungrouped: bool = False
) -> RolloutBatch:
    """Return the rollouts with a model's scores added to their rewards; unchanged without such a
    model.

    If the answers have no group, a scorer that compares answers is skipped.
    """
    if rewards is None or not rollouts.groups or (ungrouped and not rewards.scores_single_answers):
        return rollouts
    from torch.profiler import record_function  # here, since help texts do not import torch

    start = time.perf_counter()
    with record_function("whetstone/judge"):
        groups, errors = rewards.judge_groups(rollouts.groups)
    seconds = rollouts.score_seconds + time.perf_counter() - start
    return replace(
        rollouts, groups=groups, errors=[*rollouts.errors, *errors], score_seconds=seconds
    )


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
