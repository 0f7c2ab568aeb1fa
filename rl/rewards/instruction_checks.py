"""Check the verifiable instructions of IFEval: Zhou et al. 2023, arXiv 2311.07911, table 1.

The reward `ifeval` checks all instructions of a prompt.

Each check takes a response and the parameters of its instruction, under the names that the data
set's column `kwargs` uses. A word is a run of letters, digits and underscores.
"""

from __future__ import annotations

import inspect
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.errors import UserError
from rl.rewards.reward_calls import Meta, RewardResult
from rl.rewards.reward_registry import register_reward
from rl.rewards.text import parse_json
from rl.rewards.text_quality import rank_languages

_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
}
# A full stop after these does not end a sentence.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs etc e.g i.e inc ltd co no vol fig approx a.m p.m u.s u.k".split()
)
# Linear in the length: a match begins only at the first mark of a run, and nothing is given back.
_SENTENCE_END = re.compile(
    r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s|\Z)|[。！？]++"  # the latter need no space
)
_FINAL_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_TITLE = re.compile(r"<<((?:[^\n<>]|<(?!<)|>(?!>))+)>>")
_HIGHLIGHT = re.compile(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*")


def _count_phrase(response: str, phrase: str) -> int:
    return response.lower().count(phrase.lower())


def _has_language(response: str, language: str) -> bool:
    """Return whether `language`, an ISO 639-1 code, is the most probable language of the text.

    A text without letters has no language.
    """
    if not any(map(str.isalpha, response)):
        return False
    return rank_languages(response.lower())[0][0] == language.lower().partition("-")[0]


def count_sentences(text: str) -> int:
    """Return the number of sentences: they end at . ! ? or an ellipsis before white space, and at
    empty lines. Abbreviations, initials and the number of a list item do not end a sentence.
    """
    count = 0
    for block in re.split(r"\n\s*\n", text):
        start = 0
        for match in _SENTENCE_END.finditer(block):
            if _is_abbreviated(block, match) or not _has_word(block[start : match.start()]):
                continue
            count += 1
            start = match.end()
        count += _has_word(block[start:])
    return count


def _has_word(text: str) -> bool:
    return re.search(r"\w", text) is not None


def _is_abbreviated(block: str, match: re.Match[str]) -> bool:
    """Return whether a full stop belongs to the word or the number before it."""
    if not match.group().startswith(".") or match.group().startswith(".."):
        return False
    before = block[max(0, match.start() - 20) : match.start()]
    words = before.split()
    word = words[-1].lstrip("(\"'“‘[*_") if words and not before[-1].isspace() else ""
    if word.isdigit():  # the number of a list item, which begins its line
        return not block[: match.start() - len(word)].rpartition("\n")[2].strip()
    initial = len(word) == 1 and word.isupper() and word != "I"
    return initial or word.lower() in _ABBREVIATIONS


def _strip_ends(parts: Sequence[str]) -> list[str]:
    """Return the parts without white space, and without a first and a last one that are empty."""
    texts = [part.strip() for part in parts]
    return texts[(not texts[0]) : len(texts) - (not texts[-1])]


def _has_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Return whether dividers *** separate exactly `num_paragraphs` paragraphs.

    A divider may also begin or end the response. No paragraph between dividers is empty.
    """
    inner = _strip_ends(re.split(r"\s?\*\*\*\s?", response))
    return all(inner) and len(inner) == num_paragraphs


def _has_first_word(
    response: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Return whether the response has `num_paragraphs` paragraphs, separated by empty lines, and
    paragraph `nth_paragraph` (from 1) begins with `first_word`, in any letter case.
    """
    paragraphs = [part.strip() for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = paragraphs[nth_paragraph - 1].split()[0].lstrip("\"'“‘*_")
    return re.split(r"[.,?!;:\"'”’*_]", first)[0].lower() == first_word.lower()


def _has_postscript(response: str, postscript_marker: str) -> bool:
    """Return whether the response has a postscript that begins with the marker.

    P.S. and P.P.S may have spaces between their letters, and a full stop at the end or none.
    """
    letters = re.findall(r"[a-z]", postscript_marker.lower())
    if letters in (["p", "s"], ["p", "p", "s"]):
        # the first letter begins a word: P.P.S. is no P.S.
        pattern = r"(?<![\w.])" + r"\.\s?".join(letters) + r"\b"
        return re.search(pattern, response.lower()) is not None
    return postscript_marker.strip().lower() in response.lower()


def _is_two_responses(response: str) -> bool:
    """Return whether ****** separates two different responses."""
    inner = _strip_ends(response.split("******"))
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _is_quoted(response: str) -> bool:
    """Return whether double quotation marks surround the whole response."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


# The check of each instruction: whether a text follows it. The other parameters are those of the
# instruction. Phrases and words match in any letter case.
INSTRUCTIONS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(
        _count_phrase(text, keyword) for keyword in keywords
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: _RELATIONS[relation](
        _count_phrase(text, keyword), frequency
    ),
    # whole words
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(
            re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
            for word in forbidden_words
        )
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _RELATIONS[
        let_relation
    ](_count_phrase(text, letter), let_frequency),
    "language:response_language": _has_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _RELATIONS[
        relation
    ](count_sentences(text), num_sentences),
    "length_constraints:number_paragraphs": _has_paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _RELATIONS[relation](
        len(re.findall(r"\w+", text)), num_words
    ),
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    # in square brackets, such as [address]
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        sum(map(_has_word, re.findall(r"\[([^\[\]\n]*)\]", text))) >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    # lines that begin with * or -; ** begins bold text, and three or more - are a rule
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!--))[ \t]*\S", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(
        answer in text for answer in _FINAL_ANSWERS
    ),
    # *text* or **text**
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        sum(bool(part.strip("* \t")) for part in re.findall(_HIGHLIGHT, text)) >= num_highlights
    ),
    # the splitter and a number
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    # a code fence may surround the whole
    "detectable_format:json_format": lambda text: (
        parse_json(text, r"[Jj](?:son|SON)\b") is not None
    ),
    # in double angle brackets, such as <<poem of joy>>
    "detectable_format:title": lambda text: any(
        title.strip(" \t<>") for title in _TITLE.findall(text)
    ),
    "combination:two_responses": _is_two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    # a quotation mark may follow
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').strip().lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _is_quoted,
    # parts of a word that a hyphen or apostrophe joins count as a single word
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: (
        _RELATIONS[capital_relation](
            sum(map(str.isupper, re.findall(r"\w+(?:[-'’]\w+)*", text))), capital_frequency
        )
    ),
    "change_case:english_capital": lambda text: text.isupper() and _has_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _has_language(text, "en"),
    # of any script
    "punctuation:no_comma": lambda text: (
        not any(unicodedata.name(sign, "").endswith("COMMA") for sign in set(text))
    ),
}
# The instructions whose checks detect the language of the response.
LANGUAGE_INSTRUCTIONS = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)


def bind_instructions(ids: Any, kwargs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the instructions of a row, each with its parameters.

    `ids`, `kwargs`: the columns instruction_id_list and kwargs. Parameters that are null are left
    out, as tables have every parameter in every row. Raises ValueError, which names the
    instruction, if one is unknown or lacks a parameter, or if a parameter is invalid.
    """
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise ValueError(
            f"'instruction_id_list' is a list of at least 1 instruction, this is {ids!r}"
        )
    if not isinstance(kwargs, Sequence) or len(kwargs) != len(ids):
        raise ValueError(
            f"'kwargs' has an entry for each of {len(ids)} instructions, this is "
            f"{str(kwargs)[:60]!r}"
        )
    return [
        (name, _bind_parameters(name, {} if values is None else values))
        for name, values in zip(ids, kwargs, strict=True)
    ]


def _bind_parameters(instruction: Any, values: Any) -> dict[str, Any]:
    if not isinstance(instruction, str) or instruction not in INSTRUCTIONS:
        raise ValueError(
            f"unknown instruction {instruction!r}; known are {', '.join(sorted(INSTRUCTIONS))}"
        )
    if not isinstance(values, Mapping):
        raise ValueError(
            f"the parameters of {instruction} are an object, this is {str(values)[:60]!r}"
        )
    parameters = {name: value for name, value in values.items() if value is not None}
    _, *expected = inspect.signature(INSTRUCTIONS[instruction]).parameters
    if set(parameters) != set(expected):
        raise ValueError(
            f"{instruction} has the parameters {', '.join(expected) or '(none)'}; this row has "
            f"{', '.join(parameters) or '(none)'}"
        )
    for name, value in parameters.items():
        if (expectation := _find_parameter_fault(name, value)) is not None:
            raise ValueError(f"{name} of {instruction} is {expectation}, this is {value!r}")
    # a table may hold a whole number as a float
    return {n: int(value) if isinstance(value, float) else value for n, value in parameters.items()}


_COUNTS = frozenset(
    "frequency let_frequency num_sentences num_paragraphs num_words nth_paragraph num_placeholders "
    "num_bullets num_highlights num_sections capital_frequency".split()
)


def _find_parameter_fault(name: str, value: Any) -> str | None:
    """Return what a parameter is expected to be; None if it is that."""
    if name in _COUNTS:
        whole = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if whole and value >= 0 and value % 1 == 0 else "a whole number"
    if name.endswith("relation"):  # a list: the value may be unhashable
        return None if value in list(_RELATIONS) else f"one of {', '.join(_RELATIONS)}"
    if name in ("keywords", "forbidden_words"):
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        good = listed and value and all(isinstance(word, str) and word.strip() for word in value)
        return None if good else "a list of texts"
    return None if isinstance(value, str) and value.strip() else "a text"


def list_loose_variants(response: str) -> list[str]:
    """Return the texts of which one has to follow an instruction in the loose accuracy.

    They are the response as it is and without its first line, its last line, both; each also
    without the * of Markdown (arXiv 2311.07911, section 2.2).
    """
    lines = response.split("\n")
    texts = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*texts, *(text.replace("*", "") for text in texts)]


def follow_instructions(
    instructions: Sequence[tuple[str, Mapping[str, Any]]], response: str, *, loose: bool = False
) -> list[bool]:
    """Return whether the response follows each instruction; an empty response follows none."""
    texts = list_loose_variants(response) if loose else [response]
    return [
        any(text.strip() and INSTRUCTIONS[name](text, **values) for text in texts)
        for name, values in instructions
    ]


_METRICS = ("correct", "loose", "instructions", "instructions_strict", "instructions_loose")


@register_reward("ifeval", reports=_METRICS)
def ifeval(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return 1 if the response follows all instructions of meta["instruction_id_list"], whose
    parameters are meta["kwargs"], else 0 (Zhou et al. 2023, arXiv 2311.07911).

    Metrics: `correct` (strict) and `loose`: all instructions are followed. `instructions`,
    `instructions_strict`, `instructions_loose`: how many there are, and are followed.
    """
    row = meta or {}
    try:
        instructions = bind_instructions(row.get("instruction_id_list"), row.get("kwargs"))
    except ValueError as error:
        raise UserError(f"the problem has no valid instructions: {error}") from error
    strict = follow_instructions(instructions, response)
    loose = follow_instructions(instructions, response, loose=True)
    values = (all(strict), all(loose), len(instructions), sum(strict), sum(loose))
    return RewardResult(float(all(strict)), dict(zip(_METRICS, map(float, values), strict=True)))
