"""Detect held-out problems in the training data by shared 13-grams of words (Brown et al. 2020,
appendix C).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.types import Problem

WORDS_IN_A_ROW = 13
# An n-gram in more training problems than these is boilerplate (an instruction), as in the same
# appendix.
_COMMON = 10
_WORD = re.compile(r"\w+")
_SHOWN = 5


@dataclass(frozen=True)
class ContaminationResult:
    """Hold the result of a comparison of `held_out` problems with `trained` problems (counts).

    shared: (place of a held-out problem, place of the first training problem that it overlaps).
    """

    held_out: int
    trained: int
    shared: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, Any]:
        """Return the counts and the first pairs as JSON."""
        record = {
            "held_out": self.held_out,
            "trained": self.trained,
            "words_in_a_row": WORDS_IN_A_ROW,
            "shared": len(self.shared),
        }
        return {**record, "first": [list(pair) for pair in self.shared[:_SHOWN]]}

    def __str__(self) -> str:
        text = (
            f"{len(self.shared)} of {self.held_out} held-out problems share {WORDS_IN_A_ROW} words "
            f"in a row (or the whole text) with some of {self.trained} training problems"
        )
        if not self.shared:
            return text
        more = "; ..." if len(self.shared) > _SHOWN else ""
        first = "; ".join(f"{a} and {b}" for a, b in self.shared[:_SHOWN])
        return f"{text}: {first}{more}. Results on these may be memorized"


def find_contamination(train: ProblemSet, held_out: ProblemSet) -> ContaminationResult:
    """Find the held-out problems that overlap training problems.

    Words are runs of letters and digits in lower case. Complete texts are compared too, including
    punctuation. An n-gram that more than 10 training problems share (or more than half of a small
    set) counts as boilerplate and is ignored. Time is linear in the number of words: about 1 s for
    2 million.
    """
    owners: dict[Any, list[int]] = {}
    for place, problem in enumerate(held_out):
        for key in _ngram_keys(problem):
            owners.setdefault(key, []).append(place)
    matches: dict[Any, list[int]] = {}
    for place, problem in enumerate(train):
        for key in owners.keys() & _ngram_keys(problem):
            places_of_key = matches.setdefault(key, [])
            if len(places_of_key) <= _COMMON:
                places_of_key.append(place)
    most = min(_COMMON, len(train) // 2)
    first: dict[int, int] = {}
    for key, places in matches.items():
        if len(places) > max(1, most) and isinstance(key, tuple):
            continue
        for place in owners[key]:
            first[place] = min(places[0], first.get(place, places[0]))
    pairs = [
        (_describe_place(held_out, test), _describe_place(train, trained))
        for test, trained in sorted(first.items())
    ]
    return ContaminationResult(len(held_out), len(train), tuple(pairs))


def _ngram_keys(problem: Problem) -> set[Any]:
    """Return the 13-grams within paragraphs of a problem's user messages, and their complete text
    without spaces.

    Instructions are separate paragraphs.
    """
    texts = [_text(m.get("content")) for m in problem.messages if m["role"] == "user"]
    text = "\n\n".join(texts)
    keys: set[Any] = {"".join(text.split())}
    for paragraph in text.lower().split("\n\n"):
        words = _WORD.findall(paragraph)
        keys.update(zip(*(words[i:] for i in range(WORDS_IN_A_ROW)), strict=False))
    return keys


def _text(content: Any) -> str:
    """Return a content's text. Bytes or paths of images distinguish problems of the same words."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part.get("text", "")) or f"[{part.get('image')!r}]" for part in content)


def _describe_place(problems: Sequence[Problem], index: int) -> str:
    """Return the file and line of a problem, or its tag and index."""
    problem = problems[index]
    return problem.place or f"{problem.tag} {index}"
