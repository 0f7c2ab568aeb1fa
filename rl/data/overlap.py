"""Whether held-out problems stand among the training ones: words in a row that both have (13-grams:
Brown et al. 2020, appendix C).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.types import Problem

WORDS_IN_A_ROW = 13
# what more training problems than these have in common is a form of words (an instruction), as in
# the same appendix
_COMMON = 10
_WORD = re.compile(r"\w+")
_SHOWN = 5


@dataclass(frozen=True)
class Overlap:
    """`held_out` problems were compared with `trained`; `shared`: (place of the held-out one, of
    the first training one that it meets).
    """

    held_out: int
    trained: int
    shared: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, Any]:
        found = {
            "held_out": self.held_out,
            "trained": self.trained,
            "words_in_a_row": WORDS_IN_A_ROW,
            "shared": len(self.shared),
        }
        return {**found, "first": [list(pair) for pair in self.shared[:_SHOWN]]}

    def __str__(self) -> str:
        first = "; ".join(f"{a} and {b}" for a, b in self.shared[:_SHOWN]) + (
            "; ..." if len(self.shared) > _SHOWN else ""
        )
        count = f"{len(self.shared)} of {self.held_out} held-out problems"
        what = f"share {WORDS_IN_A_ROW} words in a row (or the whole text) with one of {self.trained} training problems"
        return f"{count} {what}" + (
            f": {first}. What is measured on them may be memory" if self.shared else ""
        )


def overlap(train: ProblemSet, held_out: ProblemSet) -> Overlap:
    """What held-out problems share with training ones. Time goes with the number of words: about a
    second for two millions.

    Words are runs of letters and digits in lower case. Texts are compared as a whole as well, signs
    included. What more than ten training problems (and more than half of few) share is taken for a
    form of words, and passed over.
    """
    owners: dict[Any, list[int]] = {}
    for place, problem in enumerate(held_out):
        for key in _keys(problem):
            owners.setdefault(key, []).append(place)
    met: dict[Any, list[int]] = {}
    for place, problem in enumerate(train):
        for key in owners.keys() & _keys(problem):
            found = met.setdefault(key, [])
            if len(found) <= _COMMON:
                found.append(place)
    most = min(_COMMON, len(train) // 2)
    first: dict[int, int] = {}
    for key, places in met.items():
        if len(places) > max(1, most) and isinstance(key, tuple):
            continue
        for place in owners[key]:
            first[place] = min(places[0], first.get(place, places[0]))
    pairs = [
        (_place(held_out, test), _place(train, trained)) for test, trained in sorted(first.items())
    ]
    return Overlap(len(held_out), len(train), tuple(pairs))


def _keys(problem: Problem) -> set[Any]:
    """Its runs of 13 words within a paragraph (instructions are paragraphs of their own), and the
    whole text without spaces.
    """
    text = "\n\n".join(_said(problem))
    found: set[Any] = {"".join(text.split())}
    for paragraph in text.lower().split("\n\n"):
        words = _WORD.findall(paragraph)
        found.update(zip(*(words[i:] for i in range(WORDS_IN_A_ROW)), strict=False))
    return found


def _said(problem: Problem) -> Iterable[str]:
    """What is asked, without a system prompt."""
    return (
        _text(message.get("content")) for message in problem.messages if message["role"] == "user"
    )


def _text(content: Any) -> str:
    """With images, whose bytes (or paths) tell two problems of the same words apart."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part.get("text", "")) or f"[{part.get('image')!r}]" for part in content)


def _place(problems: Sequence[Problem], index: int) -> str:
    problem = problems[index]
    return problem.place or f"{problem.tag} {index}"
