"""Define what a policy interacts with: single-turn problems, and multi-turn environments with tools
and seats.
"""

from rl.environments.environment import POOL, Environment, Turn
from rl.environments.graders import graded
from rl.environments.isolation import isolated, resolve_environment, with_isolation
from rl.environments.match import Match
from rl.environments.play import EnvironmentGroup, Limits
from rl.environments.played import played
from rl.environments.pool import OpponentPool
from rl.environments.problem import ProblemGroupBuilder, episode_of, prompt_text, reward_meta
from rl.environments.registry import (
    EnvironmentSpec,
    environment_from_words,
    register_environment,
    registered_environments,
    settings_table,
    show_help,
)
from rl.environments.store import KeyValueStore
from rl.environments.tools import Call, Tool, tool
from rl.environments.work import EpisodeThread

__all__ = [
    "Call",
    "Environment",
    "EnvironmentGroup",
    "EnvironmentSpec",
    "EpisodeThread",
    "KeyValueStore",
    "Limits",
    "Match",
    "OpponentPool",
    "POOL",
    "ProblemGroupBuilder",
    "Tool",
    "Turn",
    "environment_from_words",
    "episode_of",
    "graded",
    "isolated",
    "played",
    "prompt_text",
    "register_environment",
    "registered_environments",
    "resolve_environment",
    "reward_meta",
    "settings_table",
    "show_help",
    "tool",
    "with_isolation",
]
