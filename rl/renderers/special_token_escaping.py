"""Escape special tokens in messages, so that only the renderer writes control tokens.

A tokenizer encodes "<|im_start|>" as the control token at any position, so a user's text, a tool's
result or a row of data could imitate another turn. This module escapes texts before a template sees
them (each special token becomes a private character) and encodes the escaped words of the rendered
text with ordinary tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cached_property, partial
from typing import Any

from rl.errors import UserError

_FIRST_PRIVATE = 0xF0000  # first private character; each special token has a separate character
_ESCAPE, _WRAP = "\U0010fffd", "\U0010fffc"


class SpecialTokenEscaper:
    """Escape special tokens for a tokenizer of transformers; a tokenizer without added tokens needs
    no escaping.

    control  tokens that are special to the tokenizer or have the form <|...|>: text in all messages
    markup   other added tokens that look like markup and occur in the source of the template, such
             as <think> and <tool_call>: text in all messages except the assistant's, which may
             contain them as tokens

    Added tokens of neither kind (runs of spaces, HTML tags) are ordinary vocabulary.
    """

    def __init__(self, tokenizer: Any, template_source: str = ""):
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
            if re.fullmatch(r"[<\[]\S+[>\]]", word) and word in template_source
        }
        # a special token that does not change the encoding of the text after it, or None
        self.neutral_token = next(
            (str(t.content) for t in tokens if t.special and not (t.rstrip or t.single_word)), None
        )
        self._words = sorted(self.control | self.markup)
        self._private_chars = {word: chr(_FIRST_PRIVATE + i) for i, word in enumerate(self._words)}
        self._special_pattern, self._control_pattern = (
            _compile_words(self._words),
            _compile_words(self.control),
        )
        self._escaped_pattern = re.compile(
            f"({_ESCAPE}.|[{''.join(self._private_chars.values())}])" if self._words else "(?!)",
            re.DOTALL,
        )
        self._private_pattern = re.compile(
            f"[{_ESCAPE}{''.join(self._private_chars.values())}]" if self._words else "(?!)"
        )

    def escape(self, value: Any, *, may_write_markup: bool = False) -> Any:
        """Return a text, or lists and dicts of texts including keys, with special tokens escaped.
        Other values are returned unchanged.
        """
        if isinstance(value, str):
            escaped = self._private_pattern.sub(lambda match: _ESCAPE + match.group(), value)
            return (self._control_pattern if may_write_markup else self._special_pattern).sub(
                lambda match: self._private_chars[match.group()], escaped
            )
        escape_item = partial(self.escape, may_write_markup=may_write_markup)
        if isinstance(value, dict):
            return {escape_item(key): escape_item(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [escape_item(item) for item in value]
        return value

    def unescape(self, text: str) -> str:
        """Return the original text of an escaped text."""
        return self._escaped_pattern.sub(lambda match: self._unescape_word(match[0]), text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with escaped special tokens, without BOS and EOS.

        Without escaped words the result is the tokenizer's. Raises UserError if the tokenizer can
        encode an escaped word only as the control token.
        """
        parts = self._escaped_pattern.split(text)  # template text and escaped words in turn
        if len(parts) == 1:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        parts[1::2] = map(self._unescape_word, parts[1::2])
        control_count = sum(len(self._special_pattern.findall(part)) for part in parts[::2])
        tokens = self._encode_escaped(parts)
        if sum(token in self._ids for token in tokens) != control_count:
            words = ", ".join(sorted({part for part in parts[1::2]})[:3])
            raise UserError(
                f"the tokenizer encodes {words} only as a special token and cannot spell it as "
                "text: remove it from the data"
            )
        return tokens

    def _unescape_word(self, escaped: str) -> str:
        """Return the word of an escape sequence."""
        if escaped[0] == _ESCAPE:
            return escaped[1:]
        return self._words[ord(escaped) - _FIRST_PRIVATE]

    @cached_property
    def _ids(self) -> dict[int, str]:
        """Return the escaped words by token id."""
        return {int(self.tokenizer.convert_tokens_to_ids(word)): word for word in self._words}

    def _encode_escaped(self, parts: list[str]) -> list[int]:
        """Return the tokens of `parts`, which alternate between template text and escaped words."""
        if self._renamed_tokenizer is None:
            return self._encode_segments(parts)
        ids, known = (
            self._renamed_tokenizer.encode(
                self._rename_special(parts), add_special_tokens=False
            ).ids,
            self._renamed_ids,
        )
        return [known.get(token, token) for token in ids]

    def _rename_special(self, parts: list[str]) -> str:
        """Return the joined text, with the special tokens of the template renamed."""
        return "".join(
            part
            if i % 2
            else self._special_pattern.sub(lambda match: _rename_word(match.group()), part)
            for i, part in enumerate(parts)
        )

    @cached_property
    def _renamed_tokenizer(self) -> Any | None:
        """Return a copy of the tokenizer with renamed special tokens, which encodes the usual names
        as text.

        The copy is made for the first text that needs it, which takes seconds for a large
        vocabulary. The result is None for a tokenizer without a fast backend.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer

        def rename(word: str) -> str:
            return _rename_word(word) if word in self._private_chars else word

        spec = json.loads(backend.to_str())
        for token in spec["added_tokens"]:
            token["content"] = rename(token["content"])
        model = spec["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {rename(word): i for word, i in vocabulary.items()}
        elif isinstance(vocabulary, list):  # unigram model: [piece, score]
            model["vocab"] = [[rename(word), *rest] for word, *rest in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = rename(model["unk_token"])
        return Tokenizer.from_str(json.dumps(spec))

    @cached_property
    def _renamed_ids(self) -> dict[int, int]:
        """Return the original token id for each id of a renamed special token."""
        assert self._renamed_tokenizer is not None
        return {
            self._renamed_tokenizer.token_to_id(_rename_word(word)): i
            for i, word in self._ids.items()
        }

    def _encode_segments(self, parts: list[str]) -> list[int]:
        """Return the tokens for a tokenizer without a fast backend: each text between special
        tokens of the template is encoded separately.
        """
        tokens: list[int] = []
        for i, segment in enumerate(self._rename_special(parts).split(_WRAP)):
            if i % 2:
                tokens.append(int(self.tokenizer.convert_tokens_to_ids(segment)))
            elif segment:
                tokens += self.tokenizer.encode(
                    segment, add_special_tokens=False, split_special_tokens=True
                )
        return tokens


def _rename_word(word: str) -> str:
    """Return the new name of a special token."""
    return f"{_WRAP}{word}{_WRAP}"


def _compile_words(words: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `words`, longest first."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
