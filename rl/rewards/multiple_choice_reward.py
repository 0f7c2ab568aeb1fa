"""Define the reward `multiple_choice`: the letter that an answer chooses."""

from __future__ import annotations

import re

from rl.errors import UserError
from rl.rewards.math_reward import extract_boxed_answer
from rl.rewards.math_text import TEXT_COMMAND
from rl.rewards.reward_calls import Meta, RewardResult
from rl.rewards.reward_registry import register_reward
from rl.rewards.text import expected_answer

# "answer is" may also be prose; the other marks are not.
_MARK = re.compile(
    r"(?P<prose>\banswer\s+is\b(?!\s*:))|\banswer(?:\s+is)?[*_]*\s*:|<answer>"
    r"|(?P<box>\\(?:boxed|fbox)\s*\{)|####",
    re.IGNORECASE,
)
_FORMULA_MARK = re.compile(r"\\[()\[\]]")  # \(B\) and \[B\] are read as $B$
_CHOICE = re.compile(r"[(\[]?([A-Za-z])[)\].:]*")
_LABELLED = re.compile(r"(?:\(([A-Z])\)|\[([A-Z])\]|([A-Z])[).:])\s*(\S.*)")
_OTHER_CHOICE = re.compile(r"(?:^|\b(?:or|and)\b|[,/&])\s*[(\[]?[A-Z](?:[)\].:]|$)")
_NOUN = re.compile(r"(?:option|choice)\s+", re.IGNORECASE)
# A letter that ends with a mark, and then other words: "B (12 m)", "B - 12 m", "B, because".
_EXPLAINED = re.compile(
    r"[(\[]?([A-Z])[)\]]?[*_`$\"']*"
    r"(?:[.:;,](?=\s)|\s+\(|\s+-+(?=\s)|\s*[\u2013\u2014]|\s+(?=because\b|since\b))\s*(.*)"
)
_CAPITAL = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z'])")
_SMALL_CHOICE = re.compile(
    r"(?:^|\b(?:or|and|not)\b|[,/&])\s*[(\[]?[a-z]\s*(?:[)\].:,;]|$)", re.ASCII
)
_MAX_TEXT = 2000  # characters of a marked answer that are read
_MAX_MARKS = 100  # marks, from the last, that are read


def parse_choice(text: str, choices: int, *, is_marked: bool = False) -> str | None:
    """Return the letter that a text names, in upper case; None unless it is a single letter of the
    first `choices`.

    The text is the letter, or the letter with a bracket, full stop or colon and then the text of
    the choice: "B", "(b)", "B) 12 m". "A or B" and "A, B" name no single letter. A marked text may
    also be "option B", "B (12 m)", "B - 12 m" or "B, because ...", if it names no other letter.
    """
    text = re.sub(TEXT_COMMAND, r"\1", _FORMULA_MARK.sub("$", text[:_MAX_TEXT]))
    text = text.strip().strip("$*_`\"' ").strip()
    text = text.removesuffix(".").strip("$*_`\"' ")
    if is_marked and (noun := _NOUN.match(text)) is not None:
        text = text[noun.end() :].lstrip("$*_`\"' ")
    match = _CHOICE.fullmatch(text)
    letter = match.group(1).upper() if match is not None else ""
    if match is None and (labelled := _LABELLED.fullmatch(text)) is not None:
        letter = next(filter(None, labelled.groups()[:3]))
        if _OTHER_CHOICE.search(labelled.group(4)):
            return None
    elif match is None and is_marked and (explained := _EXPLAINED.fullmatch(text)) is not None:
        letter, others = explained.group(1), explained.group(2)
        last = chr(ord("A") + choices - 1)
        if _SMALL_CHOICE.search(others) or any(
            capital != letter and capital <= last for capital in _CAPITAL.findall(others)
        ):
            return None
    return letter if letter and ord(letter) - ord("A") < choices else None


def extract_choice(response: str, choices: int) -> str | None:
    """Return the letter of the last marked answer of a response; None if it names none.

    Marks are "Answer: B", "the answer is B", <answer>B</answer>, \\boxed{B} and "#### B". A
    response that is a letter alone needs no mark.
    """
    matches = list(_MARK.finditer(response))
    if not matches:
        return parse_choice(response, choices)
    for match in matches[: -_MAX_MARKS - 1 : -1]:
        if match.group("box"):
            marked = extract_boxed_answer(response[match.start() :]) or ""
        else:
            after = response[match.end() : match.end() + _MAX_TEXT].partition("</answer>")[0]
            marked = after.lstrip(" \t*_\n").partition("\n")[0]
        letter = parse_choice(marked, choices, is_marked=True)
        if letter is not None or not match.group("prose"):
            return letter
    return None


@register_reward("multiple_choice", bounded=True, reports=("correct", "format"))
def multiple_choice(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return 1 if the last marked answer names the letter meta["answer"] and no other, else 0.

    meta["choices"] has the texts of the choices; without it there are four. `format`: the response
    names a single letter.
    """
    expected = expected_answer(meta).upper()
    choices = (meta or {}).get("choices")
    count = len(choices) if isinstance(choices, (list, tuple)) else 4
    if not (len(expected) == 1 and 0 <= ord(expected) - ord("A") < count):
        raise UserError(
            f"the expected answer of a multiple choice is a letter from A to "
            f"{chr(ord('A') + count - 1)}, this is {expected!r}"
        )
    letter = extract_choice(response, count)
    correct = float(letter == expected)
    return RewardResult(correct, {"correct": correct, "format": float(letter is not None)})
