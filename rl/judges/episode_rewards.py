"""Add rewards that score whole episodes to the environment's rewards, after all episodes of a batch
have ended.
"""

from __future__ import annotations

from dataclasses import replace

from rl.images import content_to_text, replace_images
from rl.rewards import Episode, EpisodeTurn, PendingScore, Scorer
from rl.rollout import RolloutBatch, Trajectory
from rl.types import Message


def make_episode(trajectory: Trajectory, tag: str = "problem") -> Episode:
    """Return a trajectory as a reward receives it: the messages to the model and its answers, in
    order.
    """
    messages: list[Message] = []
    turns = []
    for number, transition in enumerate(trajectory.transitions):
        logs = transition.logs
        prompt = [{"role": "user", "content": logs["prompt"]}] if logs.get("prompt") else ()
        new_messages = logs.get("new_messages", logs.get("messages", prompt))
        if number and "new_messages" not in logs and "messages" in logs:
            messages = []  # this turn's log holds the whole conversation so far
        messages += [dict(message) for message in new_messages]
        response, action = str(logs.get("response", "")), transition.ac
        messages.append({"role": "assistant", "content": response})
        metrics = dict(transition.metrics)
        turns.append(
            EpisodeTurn(response, transition.reward, action.num_tokens, action.stop_reason, metrics)
        )
    return Episode(messages, turns, tag)


def add_episode_rewards(
    rollouts: RolloutBatch,
    scorer: Scorer | None,
) -> RolloutBatch:
    """Return the rollouts with the scorer's reward added at each episode's end. The reward gets the
    columns of the group's row as meta.

    The reward gets no images, and the prompt as a text. An episode for which the scorer fails is
    removed and its error reported.
    """
    if scorer is None:
        return rollouts
    pending: list[list[PendingScore]] = []
    for group in rollouts.groups:
        episodes = [
            replace(episode, messages=replace_images(episode.messages))
            for trajectory in group.trajectories_G
            for episode in [make_episode(trajectory, group.tag)]
        ]
        pending.append(
            [scorer.submit(_find_prompt(e), e.turns[-1].response, group.meta, e) for e in episodes]
        )
    groups, errors = [], list(rollouts.errors)
    for group, futures in zip(rollouts.groups, pending, strict=True):
        scores = [future.result() for future in futures]
        errors += [score.error for score in scores if score.error is not None]
        rewards = {i: score.reward for i, score in enumerate(scores) if score.reward is not None}
        if rewards:
            groups.append(
                replace(
                    group,
                    trajectories_G=[group.trajectories_G[i] for i in rewards],
                    final_rewards_G=[group.final_rewards_G[i] + rewards[i] for i in rewards],
                    metrics_G=[
                        {**group.metrics_G[i], **scores[i].metrics, "reward/episode": rewards[i]}
                        for i in rewards
                    ],
                )
            )
    return replace(rollouts, groups=groups, errors=errors)


def _find_prompt(episode: Episode) -> str:
    """Return the last message of the user."""
    messages = reversed(episode.messages)
    return next((content_to_text(m["content"]) for m in messages if m["role"] == "user"), "")
