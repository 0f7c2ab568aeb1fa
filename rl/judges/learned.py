"""Rewards from a model in the loop: a reward model's scores of whole episodes, or a language
model's comparisons within groups.

Both score what was sampled after it was sampled, a batch at a time, and their scores become part of
the group's rewards: whatever comes after (advantages, shaping, metrics, KL in the reward) does not
know where a reward is from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Protocol

from rl.episodes import Rollouts, TrajectoryGroup
from rl.errors import UserError
from rl.judges.comparison import Comparison, ComparisonModel, comparison_of
from rl.judges.episode_rewards import episode_of
from rl.judges.reward_scores import AT_ONCE, scores_of
from rl.renderers import Renderer
from rl.rewards import Score
from rl.types import Message, ModelInput

if TYPE_CHECKING:
    from rl.clients import TrainingClient


class GroupScorer(Protocol):
    """`scores_alone`: whether an answer without others to be compared with has a score."""

    scores_alone: bool

    def scores(self, groups: Sequence[TrajectoryGroup]) -> Sequence[Sequence[float | Score]]:
        """A score for each episode, [P][G]; a `Score` has metrics as well, or no reward where the
        judge failed on this one.
        """
        ...


class RewardModel:
    """A model with a value head: an episode's score is the value at its answer's end mark; of one
    cut off, at its last token.

    `renderer`: what it was trained with. An answer is read as `renderer.judged` gives it, token for
    token as in training. `shares_vocabulary`: whether the policy's token ids mean the same to it;
    else it reads texts alone.
    `policy_renderer`: the renderer of the policy's episodes; None: only their prompts tell.
    """

    scores_alone = True

    def __init__(
        self,
        client: TrainingClient,
        name: str,
        renderer: Renderer,
        *,
        shares_vocabulary: bool = True,
        policy_renderer: Renderer | None = None,
    ):
        self.client, self.name, self.renderer, self.shares_vocabulary = (
            client,
            name,
            renderer,
            shares_vocabulary,
        )
        self.shares_format = (
            shares_vocabulary
            and policy_renderer is not None
            and _same_format(renderer, policy_renderer)
        )

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        whole = [one for group in groups for one in self._read(group)]
        limit = self.client.info["max_context"]
        longest = max((one.length for one in whole), default=0)
        if limit is not None and longest > limit:
            raise UserError(
                f"the reward model {self.name} reads at most {limit} tokens, an episode has {longest}: lower max_tokens, or take "
                "a reward model of a longer context"
            )
        found = scores_of(self.client, whole)
        if not all(math.isfinite(score) for score in found):
            raise UserError(
                f"the reward model {self.name} gave {sum(not math.isfinite(s) for s in found)} scores that are not finite"
            )
        scores = iter(found)
        return [[next(scores) for _ in group.trajectories_G] for group in groups]

    def _read(self, group: TrajectoryGroup) -> list[ModelInput]:
        """What it reads of each episode: all that was read and said, where the policy's prompt is
        what it would see itself.

        Of a policy with another renderer or vocabulary it reads the conversation and the answer's
        text in its own.
        """
        found: list[ModelInput] = []
        prompts: dict[int, ModelInput] = {}  # by conversation, which a group's episodes share
        told: list[Sequence[Message]] = []  # alive, so that no two have one id
        for trajectory in group.trajectories_G:
            last = trajectory.transitions[-1]
            prompt, answer = last.ob, last.ac.tokens
            own_texts = not self.shares_vocabulary or (
                "told" in last.logs and not self.shares_format
            )
            messages = (
                episode_of(trajectory).messages[:-1] if own_texts else last.logs.get("messages")
            )
            if messages is not None:
                told.append(messages)
                if id(messages) not in prompts:
                    prompts[id(messages)] = self.renderer.build_generation_prompt(messages)
                own = prompts[id(messages)]
                if not self.shares_vocabulary or (prompt.flat(), prompt.placed()) != (
                    own.flat(),
                    own.placed(),
                ):
                    prompt, answer = (
                        own,
                        self._said(
                            messages, str(last.logs["response"]), last.ac.stop_reason == "stop"
                        ),
                    )
            found.append(
                ModelInput.of(self.renderer.judged(prompt.flat(), answer).flat(), prompt.placed())
            )
        return found

    def _said(self, messages: Sequence[Message], response: str, ended: bool) -> list[int]:
        """The text of an answer in this model's own tokens; without the end mark where it was cut
        off.
        """
        message = {"role": "assistant", "content": response}
        example, weights = self.renderer.build_supervised_example([*messages, message])
        answer = [token for token, weight in zip(example.flat(), weights, strict=True) if weight]
        return answer if ended else self.renderer.unfinished(answer)


def _same_format(one: Renderer, other: Renderer) -> bool:
    """Return whether two renderers of one vocabulary write a conversation of several turns alike."""
    roles = ("user", "assistant", "user", "assistant")
    turns: list[Message] = [{"role": role, "content": ""} for role in roles]  # of any vocabulary
    prompts = [r.build_generation_prompt(turns[:-1]).flat() for r in (one, other)]
    examples = [r.build_supervised_example(turns)[0].flat() for r in (one, other)]
    return prompts[0] == prompts[1] and examples[0] == examples[1]


class ComparedInGroup:
    """A judge: an episode's score is the share of its group that it is preferred to, a tie being
    half: 0 to 1, mean 1/2.

    An episode of several turns is compared as a whole, from where it parts from the other. Equal
    episodes tie without being shown. An answer alone in its group scores 1/2.
    """

    scores_alone = False

    def __init__(self, judge: ComparisonModel):
        self.judge = judge

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        asked: list[tuple[int, int, int]] = []
        comparisons: list[Comparison] = []
        for g, group in enumerate(groups):
            whole = [episode_of(trajectory).messages for trajectory in group.trajectories_G]
            for i, j in combinations(range(len(whole)), 2):
                if whole[i] != whole[j]:
                    asked.append((g, i, j))
                    comparisons.append(comparison_of(whole[i], whole[j]))
        # win[g][i]: how many others i is preferred to; equal answers share the point
        wins = [
            [(len(group.trajectories_G) - 1) / 2] * len(group.trajectories_G) for group in groups
        ]
        for start in range(0, len(comparisons), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            for (g, i, j), verdict in zip(
                asked[part], self.judge.verdicts(comparisons[part]), strict=True
            ):
                ahead = (verdict.first - verdict.second) / 2
                wins[g][i] += ahead
                wins[g][j] -= ahead
        return [
            [win / (len(of_group) - 1) if len(of_group) > 1 else 0.5 for win in of_group]
            for of_group in wins
        ]


class LearnedRewards:
    """Puts a scorer's scores into groups. `other_weight`: of the rewards that the environments
    gave; 0 measures them alone.

    Metrics of each episode: `reward/learned` and `reward/given`.
    """

    def __init__(self, scorer: GroupScorer, other_weight: float):
        self.scorer, self.other_weight = scorer, other_weight
        self.seconds = 0.0

    def take_seconds(self) -> dict[str, float]:
        """Seconds that judging took since this was last asked."""
        taken, self.seconds = {"learned": self.seconds}, 0.0
        return taken

    @property
    def scores_alone(self) -> bool:
        return self.scorer.scores_alone

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The same groups, rewarded: each episode's score on its end, each step's own reward times
        `other_weight`.
        """
        return self.judge(groups)[0]

    def judge(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[str]]:
        """The groups, rewarded, without the episodes on which the judge failed, and a text for each
        of these.
        """
        begin, found, errors = time.perf_counter(), [], []
        scores_P_G = self.scorer.scores(groups)
        self.seconds += time.perf_counter() - begin
        for group, scores in zip(groups, scores_P_G, strict=True):
            scores_G = [one if isinstance(one, Score) else Score(float(one)) for one in scores]
            errors += [
                f"{one.error} (problem {group.problem_index})"
                for one in scores_G
                if one.reward is None
            ]
            members = [i for i, one in enumerate(scores_G) if one.reward is not None]
            if members:
                found.append(self._rewarded(group, members, scores_G))
        return found, errors

    def _rewarded(
        self, group: TrajectoryGroup, members: Sequence[int], scores_G: Sequence[Score]
    ) -> TrajectoryGroup:
        given_G = group.get_total_rewards()
        trajectories, finals, metrics = [], [], []
        for i in members:
            one, score = group.trajectories_G[i], scores_G[i]
            assert score.reward is not None  # so they were chosen
            turns = [replace(t, reward=t.reward * self.other_weight) for t in one.transitions]
            trajectories.append(replace(one, transitions=turns))
            finals.append(group.final_rewards_G[i] * self.other_weight + score.reward)
            metrics.append(
                {
                    **group.metrics_G[i],
                    **score.metrics,
                    "reward/learned": score.reward,
                    "reward/given": given_G[i],
                }
            )
        return replace(
            group, trajectories_G=trajectories, final_rewards_G=finals, metrics_G=metrics
        )


def judged(rollouts: Rollouts, rewards: LearnedRewards | None, *, alone: bool = False) -> Rollouts:
    """The rollouts with a model's judgement as their reward; as they are without one. `alone`:
    answers stand in no group.
    """
    if rewards is None or not rollouts.groups or (alone and not rewards.scores_alone):
        return rollouts
    start = time.perf_counter()
    groups, errors = rewards.judge(rollouts.groups)
    seconds = rollouts.score_seconds + time.perf_counter() - start
    return replace(
        rollouts, groups=groups, errors=[*rollouts.errors, *errors], score_seconds=seconds
    )
