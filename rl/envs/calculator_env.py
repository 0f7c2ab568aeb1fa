"""Ask for arithmetic with large numbers, with a calculator tool."""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass
from typing import Any

from rl.envs.question_env import QuestionEnv, find_last_number

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
# Largest size of a number. Python refuses to print much larger numbers.
_MAX_BITS = 6000


def calculator(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, such as (12 + 3) * 4
    """
    if len(expression) > 500:
        raise ValueError("the expression is longer than 500 characters")
    try:
        result = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return (
        str(int(result))
        if isinstance(result, float) and result.is_integer() and abs(result) < 2**53
        else str(result)
    )


def _evaluate(node: ast.expr) -> int | float:
    """Return the value of a node. Raises ValueError for anything but arithmetic, and for numbers
    that are too large.
    """
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _check_size(_OPERATORS[type(node.op)](_evaluate(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        base, operand = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and (abs(operand) > 1000 or abs(base) > 10**9):
            raise ValueError("the power is too large")
        try:
            return _check_size(_OPERATORS[type(node.op)](base, operand))
        except ZeroDivisionError as error:
            raise ValueError("division by zero") from error
        except OverflowError as error:
            raise ValueError("the number is too large") from error
    raise ValueError("only numbers, + - * / // % ** and brackets are allowed")


def _check_size(value: Any) -> int | float:
    """Return a number. Raises ValueError if it is too large, complex or not finite."""
    too_large = (
        value.bit_length() > _MAX_BITS
        if isinstance(value, int)
        else isinstance(value, complex) or not math.isfinite(value)
    )
    if too_large:
        raise ValueError("the number is too large")
    return value


@dataclass
class CalculatorEnv(QuestionEnv):
    """Ask for a product, sum or difference; the answer is the number. The model may use the tool
    `calculator`.
    """

    digits: int = 3
    """Most digits of each number."""
    operations: str = "+-*"
    """Operations that are used, some of + - *."""
    without_tool: bool = False
    """Offer no tool."""
    grader: str | None = None
    """Use the rows of --dataset, and score answers with this reward (gsm8k, ...)."""

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 100 or not self.operations or set(self.operations) - set("+-*"):
            raise ValueError(
                f"digits must be from 1 to 100 and operations some of + - *, got {self.digits} and"
                f" {self.operations!r}"
            )
        self.tools = () if self.without_tool else (calculator,)

    def make_question(self) -> tuple[str, str]:
        """Return a random expression and its value."""
        a, b = (self.rng.randrange(10**self.digits) for _ in range(2))
        operation = self.rng.choice(self.operations)
        return f"{a}{operation}{b}=", str({"+": a + b, "-": a - b, "*": a * b}[operation])

    def extract_answer(self, response: str) -> str | None:
        """Return the last number in an answer."""
        return find_last_number(response)
