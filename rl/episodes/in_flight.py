"""Episodes under way as JSON, and under way again: their environments are played anew with the
answers that were given.

What an answer has got of its tokens goes along, with its logprobs, its experts and the versions
that drew them, so none is drawn twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.episodes.episode import EnvGroupBuilder
from rl.episodes.flow import Flow
from rl.episodes.playing import Playing
from rl.types import SampledSequence


def flow_state(flow: Flow) -> dict[str, Any]:
    """Everything under way. The sampler reads anew what it has drawn so far, as one that goes on
    from this does.
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
    """Puts what `flow_state` gave under way in a new flow. Numbers of groups that did not come back
    as they were, which begin anew.
    """
    asked = {(group, member): action for group, member, action in state["asked"]}
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
        for episode, was in zip(group.episodes, saved["episodes"], strict=True):
            key = (number, episode.index)
            flow.scripts[key] = [SampledSequence.from_json(action) for action in was["actions"]]
            unbegun = key in asked and asked[key] is None
            if was["error"] is not None or unbegun:
                flow.hold_back(episode)
                episode.error = was["error"]
            if was["error"] is not None:
                flow.finish(episode)
    flow.play_scripts()
    lost = [saved["number"] for saved in state["groups"] if not _as_they_were(flow, saved)]
    for number in lost:
        flow.give_back(number)
    parked, flow.parked = flow.parked, None
    for group_number, member, begun in state["acting"]:
        if group_number not in lost:
            flow.ask_for_turn(
                parked[group_number, member],
                None if begun is None else SampledSequence.from_json(begun),
            )
    for group_number, member, action in state["asked"]:
        if group_number not in lost:
            episode = flow.groups[group_number].episodes[member]
            flow.ask_environment(
                episode, None if action is None else SampledSequence.from_json(action)
            )
    return lost


def _as_they_were(flow: Flow, saved: Mapping[str, Any]) -> bool:
    """Whether every episode has read what it had read before."""
    episodes: Sequence[Playing] = flow.groups[saved["number"]].episodes
    same = ("seen", "ended", "error")
    return all(
        was["error"] is not None or all(_episode(now)[key] == was[key] for key in same)
        for now, was in zip(episodes, saved["episodes"], strict=True)
    )
