"""The reward of countdown: an expression of the given numbers, each at most once, that comes out at the target."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rl.rewards.maths import marked_answer
from rl.rewards.registry import RewardResult, register_reward

_TAG = re.compile(r"<answer>([^<]{1,1000})</answer>")
_ALLOWED = re.compile(r"[\d\s+\-*/()]{1,200}")  # so short that neither parsing nor the numbers can grow
_LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), ("×", "*"), ("÷", "/"), ("−", "-"))


@register_reward("countdown", bounded=True)
def countdown(prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> RewardResult:
    """correct + 0.1 (format - 1): `format` where an expression of + - * / and brackets stands in \\boxed{}, after "####" or in
    <answer></answer>, `correct` where it also uses only meta["numbers"], each at most once, and equals meta["target"]. Best 1, worst -0.1.
    """
    if meta is None or "numbers" not in meta or "target" not in meta:
        raise ValueError(f"countdown needs meta['numbers'] and meta['target'], it has {sorted(meta or {})}")
    tagged = _TAG.findall(response)
    marked = marked_answer(response) or (tagged[-1] if tagged else None)
    found = None if marked is None else evaluated(marked)
    correct = False
    if found is not None:
        value, used = found
        correct = value == Fraction(meta["target"]) and not Counter(used) - Counter(int(number) for number in meta["numbers"])
    has_format = float(found is not None)
    return RewardResult(float(correct) + 0.1 * (has_format - 1.0), {"correct": float(correct), "format": has_format})


def evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    """(exact value, the numbers used) of an expression, which may end in "= value"; None for what is none, or divides by 0."""
    for latex, sign in _LATEX:
        text = text.replace(latex, sign)
    text = text.partition("=")[0].strip()
    if not _ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        return None
    used: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, used), _value(node.right, used)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError(f"no arithmetic: {ast.dump(node)[:60]}")
