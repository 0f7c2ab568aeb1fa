"""Add rewards that score whole episodes to the environment's rewards, after all episodes of a batch
have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.rewards import Episode, EpisodeTurn, Scorer
from rl.rollout import RolloutBatch, Trajectory, TrajectoryGroup
from rl.types import Message


def make_episode(trajectory: Trajectory, tag: str = "problem") -> Episode:
    """Return a trajectory as a reward receives it: the messages to the model and its answers, in
    order.
    """
    messages: list[Message] = []
    turns = []
    for number, transition in enumerate(trajectory.transitions):
        logs = transition.logs
        new_messages = logs.get(
            "told",
            logs.get(
                "messages",
                [{"role": "user", "content": logs["prompt"]}] if logs.get("prompt") else (),
            ),
        )
        if number and "told" not in logs and "messages" in logs:
            messages = []  # this turn's log holds the whole conversation so far
        messages += [dict(message) for message in new_messages]
        messages.append({"role": "assistant", "content": str(logs.get("response", ""))})
        turns.append(
            EpisodeTurn(
                str(logs.get("response", "")),
                transition.reward,
                len(transition.ac.tokens),
                transition.ac.stop_reason,
                dict(transition.metrics),
            )
        )
    return Episode(messages, turns, tag)


def add_episode_rewards(
    rollouts: RolloutBatch,
    scorer: Scorer | None,
    metas: Mapping[int, Mapping[str, Any]] | None = None,
) -> RolloutBatch:
    """Return the rollouts with the scorer's reward added at each episode's end.

    An episode for which the scorer fails is removed and its error reported. `metas` maps a
    problem's index to the reward's meta.
    """
    if scorer is None:
        return rollouts
    pending = [
        [_submit_episode(scorer, member, group, metas or {}) for member in group.trajectories_G]
        for group in rollouts.groups
    ]
    groups, errors = [], list(rollouts.errors)
    for group, futures in zip(rollouts.groups, pending, strict=True):
        scores = [member.result() for member in futures]
        errors += [score.error for score in scores if score.error is not None]
        kept = [i for i, score in enumerate(scores) if score.reward is not None]
        if kept:
            groups.append(_add_episode_scores(group, kept, scores))
    return replace(rollouts, groups=groups, errors=errors)


def _submit_episode(
    scorer: Scorer,
    trajectory: Trajectory,
    group: TrajectoryGroup,
    metas: Mapping[int, Mapping[str, Any]],
) -> Any:
    """Submit an episode to the scorer. Returns a future."""
    episode = make_episode(trajectory, group.tag)
    prompt = next(
        (str(m["content"]) for m in reversed(episode.messages) if m["role"] == "user"), ""
    )
    return scorer.submit(
        prompt, episode.turns[-1].response, metas.get(group.problem_index), episode
    )


def _add_episode_scores(
    group: TrajectoryGroup, kept: Sequence[int], scores: Sequence[Any]
) -> TrajectoryGroup:
    """Return a group's kept episodes with their scores added."""
    return replace(
        group,
        trajectories_G=[group.trajectories_G[i] for i in kept],
        final_rewards_G=[group.final_rewards_G[i] + scores[i].reward for i in kept],
        metrics_G=[
            {**group.metrics_G[i], **scores[i].metrics, "reward/episode": scores[i].reward}
            for i in kept
        ],
    )
