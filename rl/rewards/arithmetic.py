"""Arithmetic on whole numbers as an answer writes it: its exact value, and the numbers that it
uses.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction

# so short that neither parsing nor the numbers can grow
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


def evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    """(exact value, the numbers used) of an expression, which may end in "= value"; None for what
    is none, or divides by 0.
    """
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
