"""What answers a policy: single-turn problems."""

from rl.environments.problem import ProblemEnv, ProblemGroupBuilder

__all__ = ["ProblemEnv", "ProblemGroupBuilder"]
