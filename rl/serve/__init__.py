"""Serve training and sampling over HTTP: Tinker's protocol and OpenAI-style routes."""

from rl.serve.agent_sessions import (
    AgentSession,
    AgentSessions,
    SampledTurn,
    SamplingBackend,
    make_turn_logs,
)
from rl.serve.app import make_app
from rl.serve.http_errors import HttpError
from rl.serve.openai_routes import make_openai_routes
from rl.serve.serve_settings import ServedBaseModel, ServeLimits, ServeSettings, compute_owner_id
from rl.serve.served_models import ServedModel
from rl.serve.server import ModelServer, main
from rl.serve.serving_engine import ServingEngine

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
    "ServingEngine",
    "compute_owner_id",
    "main",
    "make_app",
    "make_openai_routes",
    "make_turn_logs",
]
