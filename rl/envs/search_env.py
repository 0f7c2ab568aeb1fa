"""Ask questions that a corpus answers, with a search tool over it: BM25 (Robertson and Zaragoza
2009), by the library bm25s.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rl.envs.locked_cache import cache_once
from rl.envs.question_env import QuestionEnv
from rl.envs.tools import Tool
from rl.errors import UserError, install_command

_SYLLABLES = "ba cor dil fen gor hal jin kel lum mir nor pel quo ris sul tam vor zen".split()
_PLACES = 100  # invented, each with a fact of each kind
_FACTS = {
    "capital": "The capital of {} is {}.",
    "river": "The longest river of {} is the {}.",
    "food": "In {} people eat {} at feasts.",
}
_QUESTIONS = {
    "capital": "What is the capital of {}?",
    "river": "What is the longest river of {}?",
    "food": "What do people eat at feasts in {}?",
}


class BM25Index:
    """Index documents for search."""

    def __init__(self, documents: list[str]):
        try:
            import bm25s
        except ImportError as error:
            raise UserError(
                f"search needs the library bm25s: {install_command('search')}"
            ) from error
        self.documents = documents
        self._library: Any = bm25s
        self._index = bm25s.BM25()
        self._index.index(
            bm25s.tokenize(documents, stopwords=[], show_progress=False), show_progress=False
        )

    def search(self, query: str, count: int) -> list[str]:
        """Return at most `count` documents that contain words of the query, the best first."""
        words = self._library.tokenize([query], stopwords=[], show_progress=False, return_ids=False)
        if not words[0]:
            return []
        indices, scores = self._index.retrieve(
            words, k=min(count, len(self.documents)), show_progress=False
        )
        return [
            self.documents[int(i)]
            for i, score in zip(indices[0], scores[0], strict=True)
            if score > 0
        ]


@cache_once
def _get_index(corpus: str) -> BM25Index:
    """Return the index of a corpus file, or of invented facts if `corpus` is "".

    A file has a document a line, as text or as JSON with "text" (and optionally "title"). Raises
    UserError if the file is missing, empty or malformed.
    """
    if not corpus:
        return BM25Index(
            [
                _FACTS[kind].format(place, value)
                for place, kinds in _make_facts().items()
                for kind, value in kinds.items()
            ]
        )
    path = Path(corpus).expanduser()
    if not path.is_file():
        raise UserError(
            f"the corpus {corpus} is not a file: expected a file with a document on each line, as"
            " text or as JSON with a text"
        )
    documents = []
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                documents.append(
                    _parse_document(line, f"{path} line {number}")
                    if path.suffix in (".jsonl", ".json")
                    else line.strip()
                )
    if not documents:
        raise UserError(f"the corpus {corpus} is empty")
    return BM25Index(documents)


def _parse_document(line: str, location: str) -> str:
    """Return the text of a JSON line, preceded by its title if it has a title."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{location} is not JSON: {error}") from error
    text = row.get("text", row.get("contents")) if isinstance(row, dict) else row
    if not isinstance(text, str):
        raise UserError(f'{location} has no text: {{"text": ...}} is expected, got {line[:80]!r}')
    return (
        f"{row['title']}: {text}"
        if isinstance(row, dict) and isinstance(row.get("title"), str)
        else text
    )


@cache
def _make_facts() -> dict[str, dict[str, str]]:
    """Return invented places and facts about each; equal on every machine."""
    rng = random.Random(0)
    names = sorted(
        {"".join(rng.choice(_SYLLABLES) for _ in range(3)).capitalize() for _ in range(_PLACES * 8)}
    )
    rng.shuffle(names)
    unused = iter(names)
    return {
        next(unused): {"capital": next(unused), "river": next(unused), "food": next(unused).lower()}
        for _ in range(_PLACES)
    }


@dataclass
class Search(QuestionEnv):
    """Ask a question that a document of a corpus answers. The tool `search` searches the corpus."""

    corpus: str = ""
    """File with a document a line (text, or JSON with "text" and "title"); default: invented facts.
    """
    results: int = 3
    """Number of documents that a search returns."""
    grader: str | None = None
    """Use the rows of --dataset, and score answers with this reward. Required with a corpus file.
    """

    def __post_init__(self) -> None:
        if self.corpus and self.grader is None:
            raise ValueError(
                "a corpus file needs questions and a score: name a --dataset, and set grader to a"
                " reward"
            )
        if self.results < 1:
            raise ValueError(f"results is at least 1, got {self.results}")
        self.tools = (Tool(self.search),)

    def share(self) -> None:
        """Build the index before episodes begin, once for the process."""
        _get_index(self.corpus)

    def make_question(self) -> tuple[str, str]:
        """Return a random question about an invented place, and its answer."""
        place, kind = self.rng.choice(sorted(_make_facts())), self.rng.choice(sorted(_QUESTIONS))
        return _QUESTIONS[kind].format(place), _make_facts()[place][kind]

    def search(self, query: str) -> str:
        """Searches a corpus of documents and returns those that fit best.

        Args:
            query: words that the document should hold
        """
        documents = _get_index(self.corpus).search(query, self.results)
        return (
            "\n".join(f"[{number}] {text}" for number, text in enumerate(documents, 1))
            or "no document holds any of these words"
        )

    def extract_answer(self, response: str) -> str:
        """Return the last word of an answer; only this word is compared."""
        words = response.strip().rstrip(".!").split()
        return words[-1] if words else ""
