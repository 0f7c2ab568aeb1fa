"""Twenty questions: things with attributes, an answerer that follows a rule, and the questioner
that needs the fewest.

The words of a question decide its answer: a thing's name (or another word for it) is a guess, an
attribute's word asks for that attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

# Each thing and what holds of it. Every attribute splits its half again, so that four questions
# tell sixteen things apart.
THINGS: dict[str, frozenset[str]] = {
    "dog": frozenset({"alive", "big"}),
    "horse": frozenset({"alive", "big", "plants"}),
    "cat": frozenset({"alive"}),
    "rabbit": frozenset({"alive", "plants"}),
    "eagle": frozenset({"alive", "flies", "big"}),
    "goose": frozenset({"alive", "flies", "big", "plants"}),
    "bat": frozenset({"alive", "flies"}),
    "bee": frozenset({"alive", "flies", "plants"}),
    "car": frozenset({"big", "metal"}),
    "house": frozenset({"big"}),
    "spoon": frozenset({"metal"}),
    "book": frozenset(),
    "plane": frozenset({"flies", "big", "metal"}),
    "balloon": frozenset({"flies", "big"}),
    "drone": frozenset({"flies", "metal"}),
    "kite": frozenset({"flies"}),
}
# Words that ask for an attribute; the attribute's own name is one of them.
WORDS: dict[str, tuple[str, ...]] = {
    "alive": ("alive", "living", "live", "lives", "animal", "creature"),
    "flies": ("flies", "fly", "flying", "wings", "air"),
    "big": ("big", "large", "bigger", "larger", "huge"),
    "plants": ("plants", "plant", "grass", "herbivore", "vegetarian"),
    "metal": ("metal", "iron", "steel"),
}
YES, NO, RIGHT, UNKNOWN = "yes", "no", "right", "unclear"


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def read_question(text: str, things: Iterable[str]) -> tuple[str, str] | None:
    """("guess", thing) or ("ask", attribute); None where the words name nothing known, or several
    different things.
    """
    words = words_of(text)
    named = {thing for thing in things if thing in words}
    if named:
        return ("guess", named.pop()) if len(named) == 1 else None
    asked = {
        attribute for attribute, known in WORDS.items() if any(word in known for word in words)
    }
    return ("ask", asked.pop()) if len(asked) == 1 else None


def rule_answer(thing: str, text: str, things: Iterable[str]) -> str:
    """YES or NO to a question about `thing`, RIGHT or NO to a guess, UNKNOWN to anything else."""
    asked = read_question(text, things)
    if asked is None:
        return UNKNOWN
    kind, what = asked
    if kind == "guess":
        return RIGHT if what == thing else NO
    return YES if what in THINGS[thing] else NO


def holding(attribute: str, things: Iterable[str]) -> frozenset[str]:
    return frozenset(thing for thing in things if attribute in THINGS[thing])


def left_after(things: Iterable[str], text: str, answer: str) -> frozenset[str]:
    """The things of which the question would have been answered so."""
    things = frozenset(things)
    return frozenset(thing for thing in things if rule_answer(thing, text, THINGS) == answer)


@cache
def best_attribute(things: frozenset[str]) -> str | None:
    """The attribute that splits the things most evenly (the first by name of equals); None where
    none splits them.
    """
    halves = {attribute: len(holding(attribute, things)) for attribute in sorted(WORDS)}
    splitting = [attribute for attribute, held in halves.items() if 0 < held < len(things)]
    return min(
        splitting, key=lambda attribute: abs(2 * halves[attribute] - len(things)), default=None
    )


def splitting(left: Sequence[str] | frozenset[str]) -> str:
    """The text that the splitting questioner says next: an attribute, or once nothing splits what
    is left, a thing.
    """
    attribute = best_attribute(frozenset(left)) if len(left) > 1 else None
    return attribute if attribute is not None else sorted(left)[0]


def questions_needed(things: Iterable[str]) -> int:
    """What the splitting questioner asks at most, its last guess included."""
    return max(questions_for(thing, things) for thing in things)


def questions_for(thing: str, things: Iterable[str]) -> int:
    left, count = frozenset(things), 0
    while True:
        text = splitting(left)
        count += 1
        answer = rule_answer(thing, text, THINGS)
        if answer == RIGHT:
            return count
        left = left_after(left, text, answer)
