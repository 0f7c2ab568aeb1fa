"""Servers of the Model Context Protocol: their tools become a model's tools."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rl.environments.environment import Environment, Turn
from rl.environments.tools import Tool
from rl.environments.wrappers.packages import package
from rl.environments.wrappers.sessions import Session
from rl.errors import UserError
from rl.rewards import resolve_reward
from rl.types import Message


class McpServer:
    """A connection to a server: `server` is a URL (streamable HTTP) or a command that speaks over
    its standard input and output.

    `tools()` are Tools for an environment's own `tools`; `names`: only these. Close it when the
    episode has ended.
    """

    def __init__(self, server: str, *, seconds: float = 30.0, names: tuple[str, ...] = ()):
        if not server.strip():
            raise UserError('an MCP server is a URL, or a command such as "python server.py"')
        mcp = package("mcp", "mcp")
        self.server, self.names, self.seconds = server, names, seconds
        target: Any = server
        if not server.startswith(("http://", "https://")):
            command, *words = shlex.split(server)
            target = mcp.StdioServerParameters(command=command, args=words)
        self.session = Session(lambda: mcp.Client(target, read_timeout_seconds=seconds), seconds)

    def tools(self) -> tuple[Tool, ...]:
        """All pages of the server's list. UserError where a name that was asked for is not in it."""
        found: list[Any] = []
        cursor = None
        for _ in range(1000):
            page = self.session.call(partial(_page, cursor=cursor))
            found += page.tools
            cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
            if not cursor:
                break
        missing = sorted(set(self.names) - {one.name for one in found})
        if missing:
            raise UserError(
                f"the server {self.server} has no tool {', '.join(missing)}; it has {', '.join(one.name for one in found)}"
            )
        return tuple(self._tool(one) for one in found if not self.names or one.name in self.names)

    def _tool(self, listed: Any) -> Tool:
        parameters = (
            getattr(listed, "input_schema", None)
            or getattr(listed, "inputSchema", None)
            or {"type": "object", "properties": {}}
        )
        schema = {
            "type": "function",
            "function": {
                "name": listed.name,
                "description": listed.description or "",
                "parameters": parameters,
            },
        }
        return Tool(
            self._caller(listed.name), seconds=self.seconds, name=listed.name, schema=schema
        )

    def _caller(self, name: str) -> Callable[..., str]:
        def call(**arguments: Any) -> str:
            answer = self.session.call(lambda client: client.call_tool(name, arguments))
            text = "\n".join(_text(part) for part in answer.content)
            if getattr(answer, "is_error", None) or getattr(answer, "isError", None):
                raise RuntimeError(text or "the tool failed and did not say why")
            return text

        call.__name__ = name
        return call

    def close(self) -> None:
        self.session.close()


def _page(client: Any, cursor: str | None) -> Awaitable[Any]:
    return client.list_tools(cursor=cursor)


def _text(part: Any) -> str:
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    return f"[{getattr(part, 'type', 'content')} that is no text]"


@dataclass
class McpTools(Environment):
    """The rows of a data set with the tools of an MCP server at hand; the answer that calls none is
    scored by a reward.
    """

    needs_rows: ClassVar[bool] = True
    server: str = ""
    """A URL, or a command that is run for each episode: "python server.py"."""
    only: str = ""
    """Names of the tools to offer, with spaces between; by default all."""
    score: str = "exact_match"
    """The reward of the last answer: a registered name, module:function or file.py:function, called in this process."""
    score_config: str = "{}"
    """The reward's own settings as JSON."""
    call_seconds: float = 30.0
    """Seconds that one call, or the beginning, may take."""

    def __post_init__(self) -> None:
        self.reward = resolve_reward(self.score, **json.loads(self.score_config))

    def start(self) -> list[Message]:
        self.connection = McpServer(
            self.server, seconds=self.call_seconds, names=tuple(self.only.split())
        )
        self.tools = self.connection.tools()
        return [dict(message) for message in self.row.get("messages", ())]

    def step(self, answer: Message) -> Turn:
        asked = [str(m["content"]) for m in self.row.get("messages", ()) if m["role"] == "user"]
        found = self.reward.evaluate(asked[-1] if asked else "", str(answer["content"]), self.row)
        return Turn(
            reward=found.reward,
            done=True,
            metrics={**found.metrics, "used_tool": float(bool(self.calls))},
        )

    def close(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close()
