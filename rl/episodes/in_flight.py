"""Save running episodes as JSON, and restore them: the recorded actions are replayed to new
environments.

A partially sampled action is saved with its logprobs, its experts and its weight versions.
Therefore no token is sampled twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.episodes.episode import EnvGroupBuilder
from rl.episodes.flow import Flow
from rl.episodes.playing import Playing
from rl.types import SampledSequence


def flow_state(flow: Flow) -> dict[str, Any]:
    """Return the state of all running groups. The sampler then prefills its partial samples again,
    as a run that resumes from this state does.
    """
    stream = flow.seats[None].stream
    acting = {ticket: episode for (_, ticket), episode in flow._acting.items()}
    order = []
    for ticket, request in stream.unfinished().items():
        episode = acting[ticket]
        order.append(
            [
                episode.group,
                episode.index,
                None if request.begun is None else request.begun.as_json(),
            ]
        )
    stream.renew()
    waiting = [(episode, action) for episode, action, _ in flow._waiting.values()]
    return {
        "groups": [
            {
                "number": group.number,
                "seed": group.seed,
                "problem": group.problem,
                "since": group.since,
                "episodes": [_episode(episode) for episode in group.episodes],
            }
            for group in flow.groups.values()
        ],
        "counters": dict(flow.counters),
        "acting": order,
        "asked": [
            [e.group, e.index, None if action is None else action.as_json()]
            for e, action in (*waiting, *flow._to_step)
        ],
    }


def _episode(episode: Playing) -> dict[str, Any]:
    """Return the state of an episode."""
    turns = episode.transitions
    return {
        "actions": [turn.ac.as_json() for turn in turns],
        "seen": [[turn.ob.length, turn.seat] for turn in turns],
        "ended": bool(turns and turns[-1].episode_done),
        "error": episode.error,
    }


def restore(
    flow: Flow, state: Mapping[str, Any], builder_of: Callable[[int], EnvGroupBuilder]
) -> list[int]:
    """Restore the groups of `flow_state` in a new flow. Return the numbers of the groups whose
    replay differs from the saved state; these groups must start again.
    """
    requested = {(group, member): action for group, member, action in state["asked"]}
    flow.parked, flow.counters = {}, dict(state["counters"])
    for saved in state["groups"]:
        number = saved["number"]
        group = flow.begin(
            number,
            builder_of(number),
            seed=saved["seed"],
            problem=saved["problem"],
            since=saved["since"],
        )
        for episode, saved_episode in zip(group.episodes, saved["episodes"], strict=True):
            key = (number, episode.index)
            flow.scripts[key] = [
                SampledSequence.from_json(action) for action in saved_episode["actions"]
            ]
            unbegun = key in requested and requested[key] is None
            if saved_episode["error"] is not None or unbegun:
                flow.hold_back(episode)
                episode.error = saved_episode["error"]
            if saved_episode["error"] is not None:
                flow.finish(episode)
    flow.play_scripts()
    lost_groups = [saved["number"] for saved in state["groups"] if not _as_they_were(flow, saved)]
    for number in lost_groups:
        flow.give_back(number)
    parked, flow.parked = flow.parked, None
    for group_number, member, begun in state["acting"]:
        if group_number not in lost_groups:
            flow.ask_for_turn(
                parked[group_number, member],
                None if begun is None else SampledSequence.from_json(begun),
            )
    for group_number, member, action in state["asked"]:
        if group_number not in lost_groups:
            episode = flow.groups[group_number].episodes[member]
            flow.ask_environment(
                episode, None if action is None else SampledSequence.from_json(action)
            )
    return lost_groups


def _as_they_were(flow: Flow, saved: Mapping[str, Any]) -> bool:
    """Return whether every episode has read the same observations as before."""
    episodes: Sequence[Playing] = flow.groups[saved["number"]].episodes
    same = ("seen", "ended", "error")
    return all(
        saved_episode["error"] is not None
        or all(_episode(episode)[key] == saved_episode[key] for key in same)
        for episode, saved_episode in zip(episodes, saved["episodes"], strict=True)
    )
