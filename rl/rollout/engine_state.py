"""Save running episodes as JSON, and restore them: the recorded actions are replayed to new
environments.

A partially sampled action is saved with its logprobs, its experts and its weight versions.
Therefore no token is sampled twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.rollout.episode_state import EpisodeState
from rl.rollout.rollout_engine import RolloutEngine
from rl.rollout.rollout_types import EnvGroupBuilder
from rl.types import SampledSequence


def save_engine_state(engine: RolloutEngine) -> dict[str, Any]:
    """Return the state of all running groups. The samplers then prefill their partial samples
    again, as a run that resumes from this state does.
    """
    order = []
    for player, player_stream in engine.player_streams.items():
        for ticket, request in player_stream.stream.unfinished().items():
            episode = engine._sampling[player, ticket]
            begun = None if request.resume_from is None else request.resume_from.as_json()
            order.append([episode.group, episode.index, begun])
        player_stream.stream.recompute_cache()
    waiting = [(episode, action) for episode, action, *_ in engine._running_calls.values()]
    return {
        "groups": [
            {
                "number": group.number,
                "seed": group.seed,
                "problem": group.random_stream,
                "since": group.start_version,
                "episodes": [_episode_to_json(episode) for episode in group.episodes],
            }
            for group in engine.groups.values()
        ],
        "counters": dict(engine.counters),
        "acting": order,
        "asked": [
            [e.group, e.index, None if action is None else action.as_json()]
            for e, action in (*waiting, *engine.due_calls)
        ],
    }


def _episode_to_json(episode: EpisodeState) -> dict[str, Any]:
    """Return the state of an episode."""
    turns = episode.transitions
    return {
        "actions": [turn.ac.as_json() for turn in turns],
        "seen": [[turn.ob.length, turn.seat] for turn in turns],
        "ended": bool(turns and turns[-1].episode_done),
        "error": episode.error,
    }


def restore_engine_state(
    engine: RolloutEngine, state: Mapping[str, Any], get_builder: Callable[[int], EnvGroupBuilder]
) -> list[int]:
    """Restore the groups of `save_engine_state` in a new engine. Return the numbers of the groups
    whose replay differs from the saved state; these groups must start again.
    """
    requested = {(group, member): action for group, member, action in state["asked"]}
    engine.replayed_episodes, engine.counters = {}, dict(state["counters"])
    for saved in state["groups"]:
        number = saved["number"]
        group = engine.start_group(
            number,
            get_builder(number),
            seed=saved["seed"],
            problem=saved["problem"],
            start_version=saved["since"],
        )
        for episode, saved_episode in zip(group.episodes, saved["episodes"], strict=True):
            key = (number, episode.index)
            engine.recorded_actions[key] = [
                SampledSequence.from_json(action) for action in saved_episode["actions"]
            ]
            unbegun = key in requested and requested[key] is None
            if saved_episode["error"] is not None or unbegun:
                engine.due_calls.remove((episode, None))
                episode.error = saved_episode["error"]
            if saved_episode["error"] is not None:
                engine.finish_episode(episode)
    engine.replay_actions()
    lost_groups = [
        saved["number"] for saved in state["groups"] if not _replay_matches(engine, saved)
    ]
    for number in lost_groups:
        engine.discard_group(number)
    parked, engine.replayed_episodes = engine.replayed_episodes, None
    for group_number, member, begun in state["acting"]:
        if group_number not in lost_groups:
            engine.request_action(
                parked[group_number, member],
                None if begun is None else SampledSequence.from_json(begun),
            )
    for group_number, member, action in state["asked"]:
        if group_number not in lost_groups:
            episode = engine.groups[group_number].episodes[member]
            sequence = None if action is None else SampledSequence.from_json(action)
            engine.due_calls.append((episode, sequence))
    return lost_groups


def _replay_matches(engine: RolloutEngine, saved: Mapping[str, Any]) -> bool:
    """Return whether every episode has read the same observations as before."""
    episodes: Sequence[EpisodeState] = engine.groups[saved["number"]].episodes
    same = ("seen", "ended", "error")
    return all(
        saved_episode["error"] is not None
        or all(_episode_to_json(episode)[key] == saved_episode[key] for key in same)
        for episode, saved_episode in zip(episodes, saved["episodes"], strict=True)
    )
