"""Define debate motions with points for both sides, and a judge that counts the points made."""

from __future__ import annotations

import re
from dataclasses import dataclass

SIDES = ("for", "against")


@dataclass(frozen=True, slots=True)
class Motion:
    """Hold a motion, and the words that count as points for each side."""

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


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words."""
    return re.findall(r"[a-z]+", text.lower())


def find_points(
    motion: Motion, side: str, speech: str, previous: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the side's points that appear in a speech and not in `previous`."""
    return frozenset(motion.points[side]) & frozenset(split_words(speech)) - previous


def count_points(motion: Motion, speeches: list[tuple[str, str]]) -> dict[str, int]:
    """Return the points of each side after these (side, speech) pairs; each point counts once."""
    made: dict[str, frozenset[str]] = {side: frozenset() for side in SIDES}
    for side, speech in speeches:
        made[side] |= find_points(motion, side, speech)
    return {side: len(points) for side, points in made.items()}


def judge_by_points(motion: Motion, speeches: list[tuple[str, str]]) -> float:
    """Return 1 if "for" made more points, -1 if "against" did, 0 if both made equally many."""
    score = count_points(motion, speeches)
    return float((score["for"] > score["against"]) - (score["for"] < score["against"]))
