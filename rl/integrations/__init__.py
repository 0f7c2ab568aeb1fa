"""Adapt environments and tools of other libraries.

Each adapter needs the package of its library, which no other part of the project needs. The
registry of environments imports the adapters by name (`rl.envs.environment_registry.BUILT_IN`).
"""

from rl.integrations.mcp_tools import McpServer
from rl.integrations.tinker_cookbook_env import TinkerGroup

__all__ = ["McpServer", "TinkerGroup"]
