"""Resolve settings that replace each other across sources: reward and rewards."""

from __future__ import annotations

from collections.abc import Mapping

from rl.config.fields import RawValue

_ALTERNATIVES = {"reward": "rewards", "rewards": "reward"}


def drop_replaced(
    below: Mapping[str, RawValue], above: Mapping[str, RawValue]
) -> dict[str, RawValue]:
    """Return `below` without the settings that a setting in `above` replaces. A source of higher
    priority sets reward or rewards, not both.
    """
    return {key: value for key, value in below.items() if _ALTERNATIVES.get(key) not in above}


def check_two_rewards(line: Mapping[str, RawValue]) -> list[str]:
    """Return a problem if the line sets both rewards and reward to its default value. The settings
    class cannot detect this case, because the default looks like no value.
    """
    if line.keys() >= _ALTERNATIVES.keys() and line["reward"].words == ("exact_match",):
        return [
            "--reward exact_match has no effect: --rewards replaces it; add it to rewards with its "
            "weight"
        ]
    return []
