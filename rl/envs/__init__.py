"""Define what a policy interacts with: single-turn problems, and multi-turn environments with tools
and seats.
"""

from rl.envs.answer_score import grade_answer
from rl.envs.demo_generator import generate_demonstrations
from rl.envs.environment import OPPONENT_POOL, Environment, TurnResult
from rl.envs.environment_registry import (
    EnvironmentSpec,
    list_environments,
    load_object,
    parse_environment,
    register_environment,
    show_help,
)
from rl.envs.fork_server import apply_isolation, isolate_environment, resolve_environment
from rl.envs.game_env import Game, check_choice
from rl.envs.key_value_store import KeyValueStore
from rl.envs.message_env import EnvironmentGroup, EpisodeLimits
from rl.envs.opponent_pool import OpponentPool
from rl.envs.problem_env import ProblemGroupBuilder, last_user_text, make_scored_problem
from rl.envs.tools import Tool, ToolCall, tool

__all__ = [
    "ToolCall",
    "Environment",
    "EnvironmentGroup",
    "EnvironmentSpec",
    "KeyValueStore",
    "EpisodeLimits",
    "Game",
    "OpponentPool",
    "OPPONENT_POOL",
    "ProblemGroupBuilder",
    "Tool",
    "TurnResult",
    "parse_environment",
    "grade_answer",
    "isolate_environment",
    "generate_demonstrations",
    "last_user_text",
    "register_environment",
    "list_environments",
    "load_object",
    "resolve_environment",
    "make_scored_problem",
    "show_help",
    "tool",
    "apply_isolation",
    "check_choice",
]
