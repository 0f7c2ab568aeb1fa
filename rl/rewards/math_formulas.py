"""Decide whether two formulas are equal, with math-verify and sympy.

The size of all values in a formula's tree is bounded before anything is evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

from rl.rewards.math_text import FormulaTooLargeError, compute_bracket_depths

COMPARE_SECONDS = 4.0  # time limit of a single comparison, enforced by a signal
_MAX_CHARACTERS = 500
_MAX_DEPTH = 25  # of brackets: the parser's time grows quickly with it
_MAX_NODES = 400
_MAX_DIGITS = 2000.0  # of any intermediate value
_MAX_EXPANDED = 60  # power of a sum
_MAX_POWER = 10_000  # power of a symbol
_MAX_ARGUMENT = 1000  # of a factorial and of a binomial
_MAX_TERMS = 1000  # of a sum or a product
_EAGERLY_EVALUATED = re.compile(r"\\[dt]?binom|\\(?:gcd|lcm|operatorname)|choose|[dt]?binom")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}|\([^()]*\))\s*°")
_PRODUCTS = (  # (2)(5) and 2(5) would be parsed as mixed numbers
    (re.compile(r"\)\s*(?=\(|\d|\\frac)"), r")\\cdot "),
    (re.compile(r"(?<![_^\d.])(\d+(?:\.\d+)?)\s*\("), r"\1\\cdot("),
    (re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*([0-9a-zA-Z])"), r"\\sqrt\1{\2}"),
)
_BARE_LOG = re.compile(r"\\log(?![a-zA-Z])(?!\s*_)")


class _TimeLimitReached(BaseException):
    """Raised at the time limit. Not an Exception, since sympy catches these."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise FormulaTooLargeError in the body after `seconds` of CPU time of this process.

    It works on the main thread; on other threads there is no limit.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    ):
        yield
        return

    def raise_timeout(*_: object) -> None:
        raise _TimeLimitReached

    previous_handler = signal.signal(signal.SIGVTALRM, raise_timeout)
    try:
        try:
            # Repeat the signal, in case the first is swallowed.
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    except _TimeLimitReached:
        raise FormulaTooLargeError(f"not compared within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous_handler)


def formulas_equal(answer: str, expected: str) -> bool:
    """Return whether two formulas in LaTeX are equal.

    A log without a base is decimal or natural, the same in both formulas. Raises
    FormulaTooLargeError if the comparison may not end in reasonable time.
    """
    if _equal_trees(answer, expected):
        return True
    logs = [_BARE_LOG.sub(r"\\ln", text) for text in (answer, expected)]
    return logs != [answer, expected] and _equal_trees(*logs)


def _equal_trees(answer: str, expected: str) -> bool:
    answer_tree, expected_tree = parse_formula(answer), parse_formula(expected)
    if answer_tree is None or expected_tree is None:
        return False
    return bool(
        load_math_verify().verify(
            [expected_tree], [answer_tree], numeric_precision=30, timeout_seconds=None
        )
    )


@functools.lru_cache(maxsize=4096)
def parse_formula(text: str) -> Any:
    """Return the tree of a formula, with decimals as exact fractions; None if it cannot be parsed.

    Raises FormulaTooLargeError if the formula exceeds a bound.
    """
    _check_text(text)
    math_verify = load_math_verify()
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    for pattern, product in _PRODUCTS:
        text = pattern.sub(product, text)
    trees = math_verify.parse(
        f"\\boxed{{{text.replace('°', '')}}}",
        [math_verify.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not trees:
        return None
    bound_tree_digits(trees[0])
    return _use_exact_fractions(trees[0])


def load_math_verify() -> Any:
    """Import and return math_verify; the first import takes seconds."""
    import math_verify

    # It warns that its time limits are off, which is intended here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _check_text(text: str) -> None:
    """Raise FormulaTooLargeError for text that the parser reads slowly or would evaluate."""
    if len(text) > _MAX_CHARACTERS:
        raise FormulaTooLargeError(f"a formula of {len(text)} characters")
    if (deepest := max(compute_bracket_depths(text), default=0)) > _MAX_DEPTH:
        raise FormulaTooLargeError(f"brackets {deepest} deep")
    if _EAGERLY_EVALUATED.search(text) and re.search(r"\d{5}", text):
        raise FormulaTooLargeError("a binomial of large numbers")


def _use_exact_fractions(tree: Any) -> Any:
    """Return the tree with each decimal as the fraction of its written digits: 0.333 is not 1/3."""
    import sympy

    if not isinstance(tree, sympy.Basic):
        return tree.applyfunc(_use_exact_fractions) if isinstance(tree, sympy.MatrixBase) else tree
    return tree.xreplace(
        {number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)}
    )


def bound_tree_digits(tree: Any) -> float:
    """Return an upper bound on the number of decimal digits of a tree's value (numerator and
    denominator).

    Raises FormulaTooLargeError if the value or the tree exceeds a bound.
    """
    import sympy

    nodes = list(tree.flat()) if isinstance(tree, sympy.MatrixBase) else [tree]
    if sum(1 for node in nodes for _ in sympy.preorder_traversal(node)) > _MAX_NODES:
        raise FormulaTooLargeError("a formula of too many parts")
    for node in nodes:
        _count_terms(node)
    return max((_bound_digits(node) for node in nodes), default=0.0)


def _count_terms(node: Any) -> int:
    """Return an upper bound on the number of terms of a multiplied-out formula.

    Raises FormulaTooLargeError above _MAX_TERMS.
    """
    import sympy

    if not isinstance(node, sympy.Expr) or not node.args or not node.free_symbols:
        return 1
    child_counts = [_count_terms(child) for child in node.args]
    count = 1
    if isinstance(node, sympy.Add):
        count = sum(child_counts)
    elif isinstance(node, sympy.Mul):
        count = math.prod(child_counts)
    elif isinstance(node, sympy.Pow) and node.exp.is_Integer and child_counts[0] > 1:
        power = min(abs(int(node.exp)), _MAX_EXPANDED)
        count = math.comb(power + child_counts[0] - 1, power)
    if count > _MAX_TERMS:
        raise FormulaTooLargeError("a formula of too many terms")
    return count


def _bound_digits(node: Any) -> float:
    import sympy

    if isinstance(node, sympy.Rational):
        return _check_digits(
            _count_decimal_digits(node.p) + (_count_decimal_digits(node.q) if node.q != 1 else 0.0)
        )
    if isinstance(node, sympy.Float):
        return _check_digits(abs(float(node._mpf_[2])) * 0.302 + 20)  # of its binary exponent
    if isinstance(node, (sympy.Integral, sympy.Derivative, sympy.Limit)):
        raise FormulaTooLargeError(f"a {type(node).__name__.lower()} is not an answer")
    if isinstance(node, (sympy.Sum, sympy.Product)):
        return _check_digits(_count_summands(node) * max(1.0, _bound_digits(node.function)))
    child_digits = [_bound_digits(child) for child in getattr(node, "args", ())]
    if isinstance(node, sympy.Pow):
        return _bound_power_digits(node.base, node.exp, child_digits[0], child_digits[1])
    if isinstance(node, (sympy.exp, sympy.sinh, sympy.cosh, sympy.tanh)):
        return _bound_power_digits(sympy.E, node.args[0], 1.0, child_digits[0])
    if isinstance(
        node, (sympy.factorial, sympy.binomial, sympy.gamma, sympy.factorial2, sympy.subfactorial)
    ):
        largest = max(
            _bound_magnitude(child, digits)
            for child, digits in zip(node.args, child_digits, strict=True)
        )
        if largest > _MAX_ARGUMENT:
            raise FormulaTooLargeError(f"a {type(node).__name__} of a large number")
        return _check_digits(largest * 3.0)
    return _check_digits(max(1.0, sum(child_digits)))


def _bound_power_digits(
    base: Any, exponent: Any, digits: float, digits_of_exponent: float
) -> float:
    largest = _bound_magnitude(exponent, digits_of_exponent)
    if base.free_symbols and largest > (_MAX_POWER if base.is_Symbol else _MAX_EXPANDED):
        raise FormulaTooLargeError("a power of a formula that is too large to multiply out")
    return _check_digits(max(1.0, digits) * (1.0 if base.is_Symbol else max(1.0, largest)))


def _bound_magnitude(node: Any, digits: float) -> float:
    """Return an upper bound on the absolute value of a number; for a formula with symbols, at least
    1.
    """
    import sympy

    if node.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return math.inf
    if isinstance(node, (sympy.Rational, sympy.Float)):
        return abs(float(node)) if digits < 300 else math.inf
    if node.free_symbols:
        return max([1.0, *(_bound_magnitude(child, _bound_digits(child)) for child in node.args)])
    return 10.0 ** min(digits, 300.0)


def _count_summands(node: Any) -> float:
    count = 1.0
    for limit in node.limits:
        sizes = [_bound_magnitude(bound, _bound_digits(bound)) for bound in limit[1:]]
        count *= sum(sizes) + 1
        if not count <= _MAX_TERMS:
            raise FormulaTooLargeError("a sum or product of too many terms")
    return count


def _count_decimal_digits(number: int) -> float:
    return abs(int(number)).bit_length() * 0.30103


def _check_digits(digits: float) -> float:
    if not digits <= _MAX_DIGITS:
        raise FormulaTooLargeError("a number of too many digits")
    return digits
