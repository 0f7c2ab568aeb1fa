"""Define "twenty questions": objects with attributes, a rule-based answerer, and the questioner
that needs the fewest questions.

The words of a question decide its answer: the name of an object is a guess, a word of an attribute
asks for that attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

# Attributes of each object. Each attribute splits the remaining objects in half, so that four
# questions identify each of sixteen objects.
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
# Words that ask for an attribute, including the name of the attribute.
WORDS: dict[str, tuple[str, ...]] = {
    "alive": ("alive", "living", "live", "lives", "animal", "creature"),
    "flies": ("flies", "fly", "flying", "wings", "air"),
    "big": ("big", "large", "bigger", "larger", "huge"),
    "plants": ("plants", "plant", "grass", "herbivore", "vegetarian"),
    "metal": ("metal", "iron", "steel"),
}
YES, NO, RIGHT, UNKNOWN = "yes", "no", "right", "unclear"


def find_words(text: str) -> list[str]:
    """Split a text into lower-case words."""
    return re.findall(r"[a-z]+", text.lower())


def read_question(text: str, things: Iterable[str]) -> tuple[str, str] | None:
    """Return ("guess", object) or ("ask", attribute); None if the words name nothing known, or
    several different objects.
    """
    words = find_words(text)
    named = {item for item in things if item in words}
    if named:
        return ("guess", named.pop()) if len(named) == 1 else None
    attributes = {
        attribute for attribute, known in WORDS.items() if any(word in known for word in words)
    }
    return ("ask", attributes.pop()) if len(attributes) == 1 else None


def answer_by_rule(secret: str, text: str, things: Iterable[str]) -> str:
    """Return YES or NO to a question about `secret`, RIGHT or NO to a guess, UNKNOWN to any other
    text.
    """
    parsed = read_question(text, things)
    if parsed is None:
        return UNKNOWN
    kind, target = parsed
    if kind == "guess":
        return RIGHT if target == secret else NO
    return YES if target in THINGS[secret] else NO


def filter_by_attribute(attribute: str, things: Iterable[str]) -> frozenset[str]:
    """Return the objects that have an attribute."""
    return frozenset(item for item in things if attribute in THINGS[item])


def filter_by_answer(things: Iterable[str], text: str, answer: str) -> frozenset[str]:
    """Return the objects for which the question has this answer."""
    things = frozenset(things)
    return frozenset(item for item in things if answer_by_rule(item, text, THINGS) == answer)


@cache
def find_best_attribute(things: frozenset[str]) -> str | None:
    """Return the attribute that splits the objects most evenly (the first by name among equals);
    None if no attribute splits them.
    """
    halves = {attribute: len(filter_by_attribute(attribute, things)) for attribute in sorted(WORDS)}
    splitting = [attribute for attribute, count in halves.items() if 0 < count < len(things)]
    return min(
        splitting, key=lambda attribute: abs(2 * halves[attribute] - len(things)), default=None
    )


def choose_question(candidates: Sequence[str] | frozenset[str]) -> str:
    """Return the next question of the optimal questioner: an attribute, or the name of an object if
    no attribute splits the candidates.
    """
    attribute = find_best_attribute(frozenset(candidates)) if len(candidates) > 1 else None
    return attribute if attribute is not None else sorted(candidates)[0]


def count_questions_needed(things: Iterable[str]) -> int:
    """Return the largest number of questions that the optimal questioner needs, including its last
    guess.
    """
    return max(count_questions(item, things) for item in things)


def count_questions(secret: str, things: Iterable[str]) -> int:
    """Return the number of questions that the optimal questioner needs for `secret`."""
    candidates, count = frozenset(things), 0
    while True:
        text = choose_question(candidates)
        count += 1
        answer = answer_by_rule(secret, text, THINGS)
        if answer == RIGHT:
            return count
        candidates = filter_by_answer(candidates, text, answer)
