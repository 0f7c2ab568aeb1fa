"""Special tokens that stand in somebody's text are text: control tokens are those that a renderer
writes, and no others.

A tokenizer takes "<|im_start|>" for the control token wherever it stands, so that a user's text, a
tool's answer or a row of data could open a turn in another's name. Here texts are covered before a
template sees them (each such word becomes one private character), and when the rendered text is
tokenised, what is covered is spelt out in ordinary tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cached_property, partial
from typing import Any

from rl.errors import UserError

_FIRST = 0xF0000  # private characters, one for each special token
_ESCAPE, _WRAP = "\U0010fffd", "\U0010fffc"


class Shield:
    """For one tokenizer (any of transformers'; one without added tokens needs no shield and gets
    none).

    control  tokens that are special to the tokenizer, or look it (<|...|>): text, whoever writes
    them markup   the other added tokens that look like markup and that `written` (a template's
    source) writes, such as <think> and
             <tool_call>: text in everybody's messages but the assistant's, who may write them
    Added tokens that are neither (runs of spaces, HTML tags) are vocabulary like any other.
    """

    def __init__(self, tokenizer: Any, written: str = ""):
        self.tokenizer = tokenizer
        tokens = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        added = {str(token.content): token.special for token in tokens}
        named = set(getattr(tokenizer, "all_special_tokens", ()))
        self.control = {
            word
            for word, special in added.items()
            if special or word in named or re.fullmatch(r"<\|.+\|>", word)
        }
        self.markup = {
            word
            for word in added.keys() - self.control
            if re.fullmatch(r"[<\[]\S+[>\]]", word) and word in written
        }
        # a token after which a text goes on as it is; None where there is none
        self.wall = next(
            (str(t.content) for t in tokens if t.special and not (t.rstrip or t.single_word)), None
        )
        self._words = sorted(self.control | self.markup)
        self._character = {word: chr(_FIRST + i) for i, word in enumerate(self._words)}
        self._any, self._own = _finder(self._words), _finder(self.control)
        self._covered = re.compile(
            f"{_ESCAPE}.|[{''.join(self._character.values())}]" if self._words else "(?!)",
            re.DOTALL,
        )
        self._private = re.compile(
            f"[{_ESCAPE}{''.join(self._character.values())}]" if self._words else "(?!)"
        )

    def cover(self, value: Any, *, may_write_markup: bool = False) -> Any:
        """A text (or lists and dicts of texts, keys included) with its special tokens covered;
        anything else as it is.
        """
        if isinstance(value, str):
            escaped = self._private.sub(lambda found: _ESCAPE + found.group(), value)
            return (self._own if may_write_markup else self._any).sub(
                lambda found: self._character[found.group()], escaped
            )
        cover = partial(self.cover, may_write_markup=may_write_markup)
        if isinstance(value, dict):
            return {cover(key): cover(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [cover(item) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """The text that was covered."""
        return self._covered.sub(self._word, text)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text in which other people's special tokens are covered, without the
        tokenizer's own BOS and EOS.

        Where nothing is covered it is what the tokenizer makes of the text. Raises UserError for a
        tokenizer that has no other spelling for a covered word than the control token.
        """
        if not self._covered.search(text):
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        parts, at = [], 0  # template text and covered words by turns
        for found in self._covered.finditer(text):
            parts += [text[at : found.start()], self._word(found)]
            at = found.end()
        parts.append(text[at:])
        own = sum(len(self._any.findall(part)) for part in parts[::2])
        tokens = self._spelt_out(parts)
        if sum(token in self._ids for token in tokens) != own:
            words = ", ".join(sorted({part for part in parts[1::2]})[:3])
            raise UserError(
                f"the tokenizer knows {words} as a special token alone and cannot spell it as text: take it out of the data"
            )
        return tokens

    def _word(self, found: re.Match[str]) -> str:
        return (
            found.group()[1:]
            if found.group()[0] == _ESCAPE
            else self._words[ord(found.group()) - _FIRST]
        )

    @cached_property
    def _ids(self) -> dict[int, str]:
        return {int(self.tokenizer.convert_tokens_to_ids(word)): word for word in self._words}

    def _spelt_out(self, parts: list[str]) -> list[int]:
        """Tokens of template text and covered words by turns."""
        if self._renamed is None:
            return self._in_segments(parts)
        ids, known = (
            self._renamed.encode(self._marked(parts), add_special_tokens=False).ids,
            self._id_of_renamed,
        )
        return [known.get(token, token) for token in ids]

    def _marked(self, parts: list[str]) -> str:
        """The text, with the template's own tokens under their other names."""
        return "".join(
            part if i % 2 else self._any.sub(lambda found: _wrapped(found.group()), part)
            for i, part in enumerate(parts)
        )

    @cached_property
    def _renamed(self) -> Any | None:
        """The tokenizer with other names for its special tokens, which no text has: it takes their
        usual ones for text.

        It is made at the first text that needs it: seconds, for a large vocabulary. None where
        there is no such tokenizer to copy.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer

        spec = json.loads(backend.to_str())
        for token in spec["added_tokens"]:
            if token["content"] in self._character:
                token["content"] = _wrapped(token["content"])
        vocabulary = spec["model"].get("vocab")
        if isinstance(vocabulary, dict):
            spec["model"]["vocab"] = {
                _wrapped(word) if word in self._character else word: i
                for word, i in vocabulary.items()
            }
        elif isinstance(vocabulary, list):  # of a unigram model: [piece, score]
            spec["model"]["vocab"] = [
                [_wrapped(word) if word in self._character else word, *rest]
                for word, *rest in vocabulary
            ]
        if spec["model"].get("unk_token") in self._character:
            spec["model"]["unk_token"] = _wrapped(spec["model"]["unk_token"])
        return Tokenizer.from_str(json.dumps(spec))

    @cached_property
    def _id_of_renamed(self) -> dict[int, int]:
        assert self._renamed is not None
        return {self._renamed.token_to_id(_wrapped(word)): i for i, word in self._ids.items()}

    def _in_segments(self, parts: list[str]) -> list[int]:
        """For tokenizers without a fast backend: the text between the template's own tokens, each
        stretch alone.
        """
        tokens: list[int] = []
        for i, segment in enumerate(self._marked(parts).split(_WRAP)):
            if i % 2:
                tokens.append(int(self.tokenizer.convert_tokens_to_ids(segment)))
            elif segment:
                tokens += self.tokenizer.encode(
                    segment, add_special_tokens=False, split_special_tokens=True
                )
        return tokens


def _wrapped(word: str) -> str:
    return f"{_WRAP}{word}{_WRAP}"


def _finder(words: Collection[str]) -> re.Pattern[str]:
    """Finds each of `words`, the longest first."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
