"""Connect to servers of the Model Context Protocol, and offer their tools to a model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar

from rl.envs import Environment, Tool, TurnResult, grade_answer, last_user_text
from rl.errors import UserError
from rl.integrations.client_session import ClientSession
from rl.integrations.optional_packages import import_package, parse_json_options
from rl.rewards import resolve_reward
from rl.types import Message


class McpServer:
    """Hold a connection to a server. `server` is a URL (streamable HTTP) or a command that
    communicates over its standard input and output.

    `tools()` returns the Tools for an environment. `names`: only these tools. Close the connection
    when the episode has ended.
    """

    def __init__(self, server: str, *, seconds: float = 30.0, names: tuple[str, ...] = ()):
        if not server.strip():
            raise UserError(
                "server is empty: set the URL of an MCP server, or a command such as"
                ' "python server.py"'
            )
        mcp = import_package("mcp", "mcp")
        self.server, self.names, self.seconds = server, names, seconds
        target: Any = server
        if not server.startswith(("http://", "https://")):
            command, *words = shlex.split(server)
            target = mcp.StdioServerParameters(command=command, args=words)
        self.session = ClientSession(
            lambda: mcp.Client(target, read_timeout_seconds=seconds), seconds
        )

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools from all pages of the server's list. Raises UserError if a requested
        name is missing.
        """
        listed: list[Any] = []
        cursor = None
        for _ in range(1000):
            page = self.session.call(methodcaller("list_tools", cursor=cursor))
            listed += page.tools
            cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
            if not cursor:
                break
        missing = sorted(set(self.names) - {item.name for item in listed})
        if missing:
            raise UserError(
                f"the server {self.server} has no tool {', '.join(missing)}; it has"
                f" {', '.join(item.name for item in listed)}"
            )
        return tuple(
            self._make_tool(item) for item in listed if not self.names or item.name in self.names
        )

    def _make_tool(self, listed: Any) -> Tool:
        """Return a tool of the server's list as a Tool."""
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
        function = partial(self._call_tool, listed.name)
        return Tool(function, seconds=self.seconds, name=listed.name, schema=schema)

    def _call_tool(self, name: str, /, **arguments: Any) -> str:
        """Return the answer of a tool of the server. Raises RuntimeError if the tool fails."""
        answer = self.session.call(methodcaller("call_tool", name, arguments))
        text = "\n".join(_part_text(part) for part in answer.content)
        if getattr(answer, "is_error", None) or getattr(answer, "isError", None):
            raise RuntimeError(text or "the tool failed without a reason")
        return text

    def close(self) -> None:
        """Close the connection."""
        self.session.close()


def _part_text(part: Any) -> str:
    """Return a content part as a text, or a placeholder for other types."""
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    return f"[{getattr(part, 'type', 'content')} that is not text]"


@dataclass
class McpTools(Environment):
    """Offer the tools of an MCP server on the rows of a data set. A reward scores the first answer
    without tool calls.
    """

    needs_rows: ClassVar[bool] = True
    server: str = ""
    """A URL, or a command that is run for each episode: "python server.py"."""
    only: str = ""
    """Names of the tools to offer, separated by spaces; by default all."""
    score: str = "exact_match"
    """Reward of the last answer: a registered name, module:function or file.py:function, in a
    worker process.
    """
    score_config: str = "{}"
    """Settings of the reward as JSON."""
    call_seconds: float = 30.0
    """Time limit in seconds of a call, and of the connection."""

    def __post_init__(self) -> None:
        options = parse_json_options(self.score_config, "score_config")
        resolve_reward(self.score, **options)  # raises before an episode

    def start(self) -> list[Message]:
        """Connect to the server and return the row's messages."""
        self.connection = McpServer(
            self.server, seconds=self.call_seconds, names=tuple(self.only.split())
        )
        self.tools = self.connection.tools()
        return [dict(message) for message in self.row.get("messages", ())]

    def step(self, answer: Message) -> TurnResult:
        """Return the score of the final answer."""
        question = last_user_text(self.row["messages"])
        reward, metrics = grade_answer(
            self.score, question, str(answer["content"]), self.row, self.score_config
        )
        return TurnResult(
            reward=reward,
            done=True,
            metrics={**metrics, "used_tool": float(bool(self.calls))},
        )

    def close(self) -> None:
        """Close the connection, if it was opened."""
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close()
