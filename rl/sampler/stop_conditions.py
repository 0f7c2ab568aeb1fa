"""Decide when a response ends: EOS tokens, stop ids, stop strings.

`stop=None` keeps the model's EOS tokens; `[]` disables every stop; strings and ids stop in addition
to EOS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# sets of stop strings whose completing tokens are kept
_MAX_STRING_SETS = 256


@dataclass(frozen=True, slots=True)
class StopCondition:
    """Hold the stop token ids and stop strings of a request."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]


def build_stop_condition(
    stop: str | Sequence[str] | Sequence[int] | None, eos_token_ids: Sequence[int]
) -> StopCondition:
    """Combine the request's `stop` with the model's EOS tokens. Raises ValueError for an empty
    string.
    """
    if stop is None:
        return StopCondition(frozenset(eos_token_ids), ())
    entries: list[Any] = [stop] if isinstance(stop, (str, int)) else list(stop)
    if not entries:
        return StopCondition(frozenset(), ())
    strings = tuple(entry for entry in entries if isinstance(entry, str))
    ids = frozenset(int(entry) for entry in entries if not isinstance(entry, str))
    if "" in strings:
        raise ValueError(
            f"stop={stop!r} holds an empty string, which would stop immediately: leave it "
            "out, or pass [] for no stop"
        )
    return StopCondition(ids | frozenset(eos_token_ids), strings)


class StopTable:
    """Hold sets of stop ids as rows of a [sets, V] table, to look up a whole batch of tokens at
    once.

    `table` is replaced by a new array whenever a row changes.
    """

    def __init__(self, vocab: int):
        self.vocab = vocab
        self.table = np.zeros((0, vocab), np.bool_)
        self._token_ids: list[frozenset[int]] = []  # of each row

    def row_of(
        self, token_ids: frozenset[int], list_used_rows: Callable[[], Collection[int]]
    ) -> int:
        """Return the table's row of a set of ids. A new set replaces a row that is not in
        `list_used_rows()`; without such a row the table grows.
        """
        if token_ids in self._token_ids:
            return self._token_ids.index(token_ids)
        size = len(self._token_ids)
        used_rows = list_used_rows()
        row = next((row for row in range(size) if row not in used_rows), size)
        table = np.zeros((max(size, row + 1), self.vocab), np.bool_)
        table[:size] = self.table
        table[row] = False
        table[row, [token for token in token_ids if 0 <= token < self.vocab]] = True
        self._token_ids[row : row + 1] = [token_ids]
        self.table = table
        return row


class StopStringMatcher:
    """Search stop strings in the decoded text of growing responses.

    A response is checked only if its newest token can complete a stop string, and then only its
    tail is decoded: the cost does not grow with the length of the response.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._completing: dict[tuple[str, ...], dict[int, bool]] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including special tokens."""
        return self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def matches(self, strings: tuple[str, ...], tokens: np.ndarray) -> bool:
        """Return whether the text of `tokens` (the response so far, [T]) holds a stop string.

        It must not have held a stop string before the newest token.
        """
        newest = int(tokens[-1])
        if len(self._completing) >= _MAX_STRING_SETS and strings not in self._completing:
            self._completing.clear()
        known = self._completing.setdefault(strings, {})
        if newest not in known:
            known[newest] = self._may_complete(strings, newest)
        return known[newest] and any(string in self._tail(strings, tokens) for string in strings)

    def find_match(
        self, strings: tuple[str, ...], tokens: np.ndarray, stopped: np.ndarray
    ) -> np.ndarray:
        """Return which of the newest S of `tokens` (see `matches`) completes the first stop string,
        [S]: at most one, before the first that is `stopped` [S] anyway.
        """
        completes = np.zeros(len(stopped), np.bool_)
        for i in range(int(stopped.argmax()) if stopped.any() else len(stopped)):
            completes[i] = self.matches(strings, tokens[: len(tokens) - len(stopped) + i + 1])
            if completes[i]:
                break
        return completes

    def _may_complete(self, strings: tuple[str, ...], token: int) -> bool:
        """Return whether a stop string can end in this token.

        Uncertain cases count as yes: parts of characters, and spaces, which decoders drop.
        """
        text = self.decode([token])
        last_characters = {string[-1] for string in strings}
        return (
            not text or "\ufffd" in text or any(c in text or c.isspace() for c in last_characters)
        )

    def _tail(self, strings: tuple[str, ...], tokens: np.ndarray) -> str:
        """Return the end of the text; it includes every occurrence that ends in the newest token.

        The tail is long enough for the longest string before the newest token's text, plus 1
        character as a tokenizer may drop a leading space. The number of tokens is doubled until it
        is (a character may take several tokens).
        """
        longest = max(len(string) for string in strings)
        count = longest + 2
        while True:
            text = self.decode(tokens[-count:].tolist())
            if (
                count >= len(tokens)
                or len(text) > longest + len(self.decode(tokens[-1:].tolist())) + 1
            ):
                return text
            count *= 2
