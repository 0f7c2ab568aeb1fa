"""Answers that may make a grader hang, crash or raise: the family "ungraded answers" of the hostile
set.

Every built-in reward returns a number for each of them (tests/rewards/test_ungraded_answers.py).
None of them is the right answer to an entry of GOLD.
"""

from __future__ import annotations

GOLD = (
    "5", r"\sqrt{2}", "x^2+1", "(1,2)", "1,2", "x=5", r"\text{east}",
    r"\begin{pmatrix} 1\\2\end{pmatrix}", r"\{1,2\}",
)  # fmt: skip

_LARGE = (
    r"9^{9^{9^{9}}}", r"9^{9^{9}}", "10**6000", "10^{6000}", r"10^{-6000}", "10^{10^9}",
    "2^{100000000}", "1.5^{100000000}", "1e999999999", "0.1e99999999", "1e-9999", "99999^{99999}",
    r"2^{2^{2^{2^{2}}}}", "9" * 5000, "0." + "0" * 3000 + "1", r"(-1)^{10^{9}+0.5}",
    r"e^{e^{e^{e^{5}}}}", r"\exp(\exp(\exp(\exp 5)))", r"\sin(10^{100000})",
    r"\lfloor 9^{9^9} \rfloor", r"9^{9^9} \mod 7", r"0.\overline{" + "3" * 3000 + "}", "7" * 4301,
    "1/" + "7" * 4400, "9^9^9^9", "9**9**9**9",
)  # fmt: skip
_COMBINATORIAL = (
    r"\binom{10^9}{5\cdot10^8}", r"\binom{1000000000}{500000000}", r"\dbinom{100000000}{50000000}",
    r"\binom{x}{10^9}", "(10^9)!", "100000000!", "5!!!!!!", "3!!!!", "((5!)!)!", r"(10^{9})!!",
    r"\Gamma(10^9)", r"\sum_{i=1}^{10^9} i", r"\prod_{i=1}^{10^9} i", r"\gcd(10^{100},3)",
    r"\sum_{n=1}^{\infty} \frac{1}{n^2}",
)  # fmt: skip
_EXPANDED = (
    "(x+1)^{1000}", r"x^{1000000}-(x+1)^{1000000}", "(1+x+x^2+x^3)^{59}(1+y)^{59}",
    r"\int_0^1 x^{x^x} dx", r"\frac{d}{dx} x^{x}", "a^{b^{c^{d^{e^f}}}}",
    r"\cos(\sin(\cos(\sin(\cos(x)))))", r"\lim_{x\to 0} \frac{1}{x}", r"\sqrt[10^{9}]{7}",
    r"\sqrt[0]{7}",
)  # fmt: skip
_NESTED = (
    "(" * 500 + "1" + ")" * 500, r"\sqrt{" * 100 + "2" + "}" * 100,
    r"\frac{" * 50 + "1" + "}{2}" * 50, "1/" * 300 + "1", "1+" * 240 + "1", "-" * 401 + "1",
    "{" * 600, "}" * 600, r"\pm" * 20 + "7", "7," * 300, "x=1=" * 100, "1 " * 200, r"\cup" * 100,
    "&" * 200, r"\begin{pmatrix}" + "1&" * 100 + r"\end{pmatrix}", "=" * 100, "[" * 100_000,
    "\\" * 1000, "1,111" * 2000, "$" * 999, r"\text{" * 200,
    r"\boxed{" * 100_000,
)  # fmt: skip
_INSIDE = (
    r"\begin{pmatrix}9^{9^9}\\2\end{pmatrix}", r"(1,9^{9^9})", r"\{9^{9^{9}},1\}", r"1,9^{9^{9}}",
    r"x=9^{9^{9}}", r"9^{9^9}=5", r"9^{9^9}\%", r"9^{9^9}\text{ cm}", r"[9^{9^9}, \infty)",
    r"\pm 9^{9^9}",
)  # fmt: skip
_ODD = (
    "", " ", "1/0", r"\frac{0}{0}", r"\infty-\infty", r"\log_{0} 0", "\x00", "\ud800", "5\ud800",
    "٣", "१२", "7\u0301", "²" * 50, "\u202e7", "nan", "inf", "1_000", "0x7", "1j",
    "__import__('os')", "{}", "{0.__class__}", "%s%n", "None", "True", "[1, 2", '{"a": 1e999}',
    "1e400",
)  # fmt: skip

ANSWERS = (*_LARGE, *_COMBINATORIAL, *_EXPANDED, *_NESTED, *_INSIDE, *_ODD)
