"""Run programs as episodes: a rollout answers their requests to an OpenAI-style endpoint."""

from rl.programs.program_env import Endpoint

__all__ = ["Endpoint"]
