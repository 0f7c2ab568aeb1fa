"""Data: rows to problems, in an order that the seed and the step determine."""

from rl.data.addition import addition
from rl.data.load import load_problems
from rl.data.problem_set import ProblemSet
from rl.data.rows import BadRow

__all__ = ["BadRow", "ProblemSet", "addition", "load_problems"]
