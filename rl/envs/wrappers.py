"""Name the new place of the adapters, which scripts imported from here."""

raise ImportError(
    "rl.envs.wrappers is now rl.integrations: from rl.integrations import McpServer, TinkerGroup"
)
