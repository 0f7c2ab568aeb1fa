"""Rewards that see a whole episode, beside what its environment gave: scored when all of a batch
have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.episodes import Rollouts, Trajectory, TrajectoryGroup
from rl.rewards import Episode, Scorer, Turn
from rl.types import Message


def episode_of(trajectory: Trajectory, tag: str = "problem") -> Episode:
    """A trajectory as a reward sees it: what was said to the model and what it answered, in order."""
    messages: list[Message] = []
    turns = []
    for number, turn in enumerate(trajectory.transitions):
        logs = turn.logs
        told = logs.get(
            "told",
            logs.get(
                "messages",
                [{"role": "user", "content": logs["prompt"]}] if logs.get("prompt") else (),
            ),
        )
        if number and "told" not in logs and "messages" in logs:
            messages = []  # the whole conversation so far stands in this turn's log
        messages += [dict(message) for message in told]
        messages.append({"role": "assistant", "content": str(logs.get("response", ""))})
        turns.append(
            Turn(
                str(logs.get("response", "")),
                turn.reward,
                len(turn.ac.tokens),
                turn.ac.stop_reason,
                dict(turn.metrics),
            )
        )
    return Episode(messages, turns, tag)


def with_episode_rewards(
    rollouts: Rollouts, scorer: Scorer | None, metas: Mapping[int, Mapping[str, Any]] | None = None
) -> Rollouts:
    """The rollouts with the scorer's reward added on each episode's end. One that fails costs its
    episode, and is among the errors.

    `metas`: by the problem's index, what the reward gets as meta.
    """
    if scorer is None:
        return rollouts
    pending = [
        [_submit(scorer, one, group, metas or {}) for one in group.trajectories_G]
        for group in rollouts.groups
    ]
    groups, errors = [], list(rollouts.errors)
    for group, waiting in zip(rollouts.groups, pending, strict=True):
        scores = [one.result() for one in waiting]
        errors += [score.error for score in scores if score.error is not None]
        kept = [i for i, score in enumerate(scores) if score.reward is not None]
        if kept:
            groups.append(_rewarded(group, kept, scores))
    return replace(rollouts, groups=groups, errors=errors)


def _submit(
    scorer: Scorer, one: Trajectory, group: TrajectoryGroup, metas: Mapping[int, Mapping[str, Any]]
) -> Any:
    episode = episode_of(one, group.tag)
    asked = next((str(m["content"]) for m in reversed(episode.messages) if m["role"] == "user"), "")
    return scorer.submit(asked, episode.turns[-1].response, metas.get(group.problem_index), episode)


def _rewarded(
    group: TrajectoryGroup, kept: Sequence[int], scores: Sequence[Any]
) -> TrajectoryGroup:
    return replace(
        group,
        trajectories_G=[group.trajectories_G[i] for i in kept],
        final_rewards_G=[group.final_rewards_G[i] + scores[i].reward for i in kept],
        metrics_G=[
            {**group.metrics_G[i], **scores[i].metrics, "reward/episode": scores[i].reward}
            for i in kept
        ],
    )
