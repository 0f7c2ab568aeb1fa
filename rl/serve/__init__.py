"""Serve training and sampling over HTTP: Tinker's protocol and OpenAI-style routes."""

from rl.serve.app import make_app
from rl.serve.http_errors import HttpError
from rl.serve.serve_settings import ServedBaseModel, ServeLimits, ServeSettings, compute_owner_id
from rl.serve.server import ModelServer, main
from rl.serve.serving_engine import ServingEngine

__all__ = [
    "ServingEngine",
    "ServeLimits",
    "HttpError",
    "ServeSettings",
    "ModelServer",
    "ServedBaseModel",
    "main",
    "make_app",
    "compute_owner_id",
]
