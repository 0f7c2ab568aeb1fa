"""Evaluate whole-number arithmetic written in an answer: exact value, and the numbers used."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

# At most 200 characters, which bounds both the parsing time and the size of the numbers.
_ALLOWED = re.compile(r"[\d\s+\-*/()]{1,200}")
_LATEX = (
    (r"\times", "*"),
    (r"\cdot", "*"),
    (r"\div", "/"),
    (r"\left", ""),
    (r"\right", ""),
    ("×", "*"),
    ("÷", "/"),
    ("−", "-"),
)


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """Return (exact value, numbers used) of an expression, which may end in "= value".

    Return None if the text is no arithmetic expression or divides by 0.
    """
    for latex, sign in _LATEX:
        text = text.replace(latex, sign)
    text = text.partition("=")[0].strip()
    if not _ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        return None
    used: list[int] = []
    try:
        return _evaluate_node(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate_node(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_node(node.operand, used)
    if isinstance(node, ast.BinOp):
        lhs, rhs = _evaluate_node(node.left, used), _evaluate_node(node.right, used)
        if isinstance(node.op, ast.Add):
            return lhs + rhs
        if isinstance(node.op, ast.Sub):
            return lhs - rhs
        if isinstance(node.op, ast.Mult):
            return lhs * rhs
        if isinstance(node.op, ast.Div):
            return lhs / rhs
    raise ValueError(f"not an arithmetic expression: {ast.dump(node)[:60]}")
