"""A debate of two: motions with points for either side, and a judge that counts the points made."""

from __future__ import annotations

import re
from dataclasses import dataclass

SIDES = ("for", "against")


@dataclass(frozen=True, slots=True)
class Motion:
    """What is debated, and the words that make a point for either side."""

    text: str
    points: dict[str, tuple[str, ...]]


MOTIONS = (
    Motion(
        "cats are better than dogs",
        {
            "for": ("clean", "quiet", "small", "calm"),
            "against": ("loyal", "guard", "walk", "train"),
        },
    ),
    Motion(
        "tea is better than coffee",
        {"for": ("mild", "calm", "leaf", "cheap"), "against": ("strong", "awake", "bean", "taste")},
    ),
    Motion(
        "towns are better than farms",
        {"for": ("jobs", "shops", "near", "music"), "against": ("air", "space", "food", "peace")},
    ),
    Motion(
        "trains are better than cars",
        {"for": ("fast", "read", "safe", "clean"), "against": ("door", "free", "near", "load")},
    ),
)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def points_made(
    motion: Motion, side: str, speech: str, said_before: frozenset[str] = frozenset()
) -> frozenset[str]:
    """The side's points that a speech is the first to make."""
    return frozenset(motion.points[side]) & frozenset(words_of(speech)) - said_before


def counts(motion: Motion, speeches: list[tuple[str, str]]) -> dict[str, int]:
    """Points of either side after these (side, speech), each point counted once."""
    made: dict[str, frozenset[str]] = {side: frozenset() for side in SIDES}
    for side, speech in speeches:
        made[side] |= points_made(motion, side, speech)
    return {side: len(points) for side, points in made.items()}


def rule_verdict(motion: Motion, speeches: list[tuple[str, str]]) -> float:
    """1 where "for" made more points, -1 where "against" did, 0 where both made as many."""
    score = counts(motion, speeches)
    return float((score["for"] > score["against"]) - (score["for"] < score["against"]))
