"""Built-in rewards for answers that are mathematics: `gsm8k` (numbers, plain string work) and `math_correctness`.

Where the answer stands in a response: the last whole \\boxed{...} or the text after the last "####", whichever is later.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

from rl.rewards.calls import RewardResult
from rl.rewards.registry import register_reward
from rl.rewards.text import expected_answer

_BOXED = ("\\boxed", "\\fbox")
_BARE = re.compile(r"\\(?:boxed|fbox) *([^\s{}$\\.,;]+)")  # \boxed 5, \boxed5: so some of MATH's solutions have it
_NUMBER = re.compile(r"(?<![\w)}.])[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")  # no sign after an operand: x-1
_OPERATORS = ("+", "-", "*", "/", "^", "_")
_FORMULA = re.compile(r"\\(?:d?frac|sqrt|times|cdot|div|pi)")
_HASHES = re.compile(r"(?<!#)####(?!#)")  # GSM8K's mark; a longer run of # is a rule or noise
_MAX_TAIL = 500  # characters of a response without a marked answer that are searched: parsing is slow and grows with length


def _last_boxed(text: str) -> tuple[int, str] | None:
    """Position and content of the last \\boxed{...} whose braces close (or \\boxed 5), or None. Time goes with the length."""
    open_braces: list[tuple[int, bool]] = []  # position, whether \\boxed stands before it
    best: tuple[int, int] | None = None
    for match in re.finditer(r"[{}]", text):
        position = match.start()
        if match.group() == "{":
            before = text[max(0, position - 9) : position].rstrip(" ")  # \boxed {5} as well
            open_braces.append((position, before.endswith(_BOXED)))
        elif open_braces:
            start, boxed = open_braces.pop()
            if boxed and (best is None or start > best[0]):
                best = start, position
    bare = next(iter([*_BARE.finditer(text)][-1:]), None)
    if bare is not None and (best is None or bare.start() > best[0]):
        return bare.start(), bare.group(1)
    return None if best is None else (best[0], text[best[0] + 1 : best[1]].strip())


def boxed_answer(text: str) -> str | None:
    """The content of the last whole \\boxed{...} (or \\fbox), braces within it included, or of \\boxed 5; None where it is empty."""
    boxed = _last_boxed(text)
    return (boxed[1] or None) if boxed is not None else None


def marked_answer(response: str) -> str | None:
    """The answer that the response marks with \\boxed{} or "####"; None where it marks none (an empty one is none)."""
    boxed = _last_boxed(response)
    hashes = max((match.end() for match in _HASHES.finditer(response)), default=-1)
    if boxed is not None and boxed[0] > hashes:
        return boxed[1] or None
    if hashes < 0:
        return None
    lines = response[hashes:].strip().splitlines()
    return lines[0].strip() if lines else None


def parse_number(text: str) -> str | None:
    """The one number in `text`, spelled canonically ("1,200.50 dollars" -> "1200.5"); None where there is none or several."""
    text = re.sub(r"\\[,!]|\\?\$", "", text.replace("{,}", ",").rpartition("=")[2])
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or _FORMULA.search(text):
        return None
    number = numbers[0].group()
    before, after = text[: numbers[0].start()].rstrip(), text[numbers[0].end() :].lstrip()
    if before.endswith(_OPERATORS) or after.startswith(("*", "^", "_")):
        return None
    whole, _, fraction = number.lstrip("+-").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    canonical = f"{whole}.{fraction}" if fraction else whole
    return f"-{canonical}" if number.startswith("-") and canonical != "0" else canonical


@register_reward("gsm8k", bounded=True)
def gsm8k(prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> RewardResult:
    """correct + 0.1 (format - 1): `format` where a number is given in \\boxed{} or after "####", `correct` where it is also
    meta["answer"]. A number that is not marked so is not looked for. Best 1, worst -0.1."""
    expected = parse_number(expected_answer(meta))
    if expected is None:
        raise ValueError(f"the expected answer {expected_answer(meta)!r} is no number: 'math_correctness' compares formulas")
    marked = marked_answer(response)
    number = parse_number(marked) if marked is not None else None
    has_format, correct = float(number is not None), float(number == expected)
    return RewardResult(correct + 0.1 * (has_format - 1.0), {"correct": correct, "format": has_format})


def _normal(text: str) -> str:
    """Text with white space, dollar signs and \\text{} wrappers removed, for answers that are words."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s$]|\\[,!;]", "", text).rstrip(".")


def _math_verify() -> Any:
    import math_verify

    # It warns that its time limits are off; they are off on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


@functools.lru_cache(maxsize=4096)
def _parse_expected(answer: str) -> list[Any]:
    """The expected answer as math-verify reads it; cached, since each of a group's samples is compared with the same one."""
    answer = marked_answer(answer) or answer
    return _math_verify().parse(f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)


@register_reward("math_correctness", needs=("math_verify",))
def math_correctness(prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> RewardResult:
    """1 where the answer equals meta["answer"] (or meta["expected_answer"]) as mathematics: 1/2 = 0.5 = \\frac{1}{2}.

    Read is the marked answer (\\boxed{} or "####"), else the last expression of the response. `format`: it was marked.
    Uses math-verify without its own time limits (they need signals, which work on a main thread alone): a comparison
    may take for ever, so it belongs into a worker that can be killed, where `Scorer` puts it.
    """
    expected = expected_answer(meta)
    marked = marked_answer(response)
    if marked is not None and _normal(marked) == _normal(marked_answer(expected) or expected):
        return RewardResult(1.0, {"correct": 1.0, "format": 1.0})
    text = f"\\boxed{{{marked}}}" if marked is not None else response[-_MAX_TAIL:]
    gold = _parse_expected(expected)
    # What the response breaks in the parser or the comparison is a wrong answer, so errors there count as "not equal".
    given = _math_verify().parse(text, parsing_timeout=None)
    correct = float(_math_verify().verify(gold, given, timeout_seconds=None))
    return RewardResult(correct, {"correct": correct, "format": float(marked is not None)})
