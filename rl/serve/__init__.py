"""Serve training and sampling over HTTP: Tinker's protocol and OpenAI-style routes."""

from rl.serve.agent_sessions import (
    AgentSession,
    AgentSessions,
    SampledTurn,
    SamplingBackend,
    make_turn_logs,
)
from rl.serve.http_errors import HttpError
from rl.serve.openai_routes import make_openai_routes
from rl.serve.serve_settings import ServedBaseModel, ServeLimits, ServeSettings
from rl.serve.served_models import ServedModel
from rl.serve.server import ModelServer, main

__all__ = [
    "AgentSession",
    "AgentSessions",
    "HttpError",
    "ModelServer",
    "SampledTurn",
    "SamplingBackend",
    "ServeLimits",
    "ServeSettings",
    "ServedBaseModel",
    "ServedModel",
    "main",
    "make_openai_routes",
    "make_turn_logs",
]
