"""Arithmetic too large for the head, with a calculator at hand."""

from __future__ import annotations

import ast
import math
import operator
import re
from dataclasses import dataclass
from typing import Any

from rl.environments.asked import Question

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
# of a number: more is no arithmetic that anybody reads, and Python refuses to write it out
_BITS = 6000


def calculator(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, such as (12 + 3) * 4
    """
    if len(expression) > 500:
        raise ValueError("the expression is longer than 500 characters")
    try:
        found = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    return (
        str(int(found))
        if isinstance(found, float) and found.is_integer() and abs(found) < 2**53
        else str(found)
    )


def _value(node: ast.expr) -> int | float:
    """The value of a node. ValueError for anything but arithmetic, and for numbers of which nobody
    wants the digits.
    """
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > 1000 or abs(left) > 10**9):
            raise ValueError("the power is too large")
        try:
            return _bounded(_OPERATORS[type(node.op)](left, right))
        except ZeroDivisionError as error:
            raise ValueError("division by zero") from error
        except OverflowError as error:
            raise ValueError("the number is too large") from error
    raise ValueError("only numbers, + - * / // % ** and brackets are worked out")


def _bounded(value: Any) -> int | float:
    too_large = (
        value.bit_length() > _BITS
        if isinstance(value, int)
        else isinstance(value, complex) or not math.isfinite(value)
    )
    if too_large:
        raise ValueError("the number is too large")
    return value


@dataclass
class Calculator(Question):
    """A product, sum or difference is asked for; the answer is the number, with or without the help
    of the tool `calculator`.
    """

    digits: int = 3
    """Most digits of each number."""
    operations: str = "+-*"
    """Which of + - * are asked."""
    without_tool: bool = False
    """Ask without the tool."""
    grader: str | None = None
    """Ask the rows of --dataset instead, and score answers with this reward (gsm8k, math_correctness, ...)."""

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 100 or not self.operations or set(self.operations) - set("+-*"):
            raise ValueError(
                f"digits lies from 1 to 100 and operations are some of + - *, got {self.digits} and {self.operations!r}"
            )
        self.tools = () if self.without_tool else (calculator,)

    def ask(self) -> tuple[str, str]:
        a, b = (self.rng.randrange(10**self.digits) for _ in range(2))
        operation = self.rng.choice(self.operations)
        return f"{a}{operation}{b}=", str({"+": a + b, "-": a - b, "*": a * b}[operation])

    def found(self, said: str) -> str | None:
        """The last whole number in it."""
        numbers = re.findall(r"-?\d+", said.replace(",", ""))
        return numbers[-1] if numbers else None
