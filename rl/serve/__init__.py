"""Serve training and sampling over HTTP: Tinker's protocol and OpenAI-style routes."""

from rl.serve.app import make_app
from rl.serve.desk import Desk
from rl.serve.main import Served, main
from rl.serve.refusals import Refused
from rl.serve.settings import Limits, ServedBase, ServeSettings, owner_of

__all__ = [
    "Desk",
    "Limits",
    "Refused",
    "ServeSettings",
    "Served",
    "ServedBase",
    "main",
    "make_app",
    "owner_of",
]
