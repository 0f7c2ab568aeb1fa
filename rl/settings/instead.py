"""Settings of which one stands in the place of the other: reward and rewards."""

from __future__ import annotations

from collections.abc import Mapping

from rl.settings.fields import Given

_INSTEAD = {"reward": "rewards", "rewards": "reward"}


def either(below: Mapping[str, Given], above: Mapping[str, Given]) -> dict[str, Given]:
    """What is given lower down, less what stands in the place of something given above it: reward
    or rewards, not both.
    """
    return {key: given for key, given in below.items() if _INSTEAD.get(key) not in above}


def two_rewards(line: Mapping[str, Given]) -> list[str]:
    """What settings cannot tell themselves: reward's default, typed beside rewards, looks like no
    reward typed.
    """
    if line.keys() >= _INSTEAD.keys() and line["reward"].words == ("exact_match",):
        return [
            "--reward exact_match has no effect: --rewards stands in its place; add it to rewards with its weight"
        ]
    return []
