"""Run an episode's environment code, in this process or in a separate process. The rollout uses
both in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rl.envs.environment import Environment, TurnResult
from rl.envs.environment_registry import EnvironmentSpec
from rl.envs.tools import Tool, ToolCall, index_tools, run_calls
from rl.rollout import await_value
from rl.types import Message

MAX_CHARACTERS = 1_000_000  # in the messages of a TurnResult
# fields of a TurnResult that are for other seats
PER_SEAT_FIELDS = ("rewards", "metrics_of", "logs_of")


@dataclass(frozen=True)
class EpisodeTask:
    """Hold the inputs of an episode: the environment's row, seed, and index in the group."""

    row: Mapping[str, Any]
    seed: int
    member: int = 0


@dataclass(frozen=True)
class EpisodeStart:
    """Describe a started episode: the first messages or TurnResult (unchecked), the tools' schemas
    by name, and the player of each seat.
    """

    first_turn: Any
    tools: Mapping[str, Mapping[str, Any]]
    seats: Sequence[str | None]


def make_environment(spec: EnvironmentSpec, task: EpisodeTask) -> Environment:
    """Return an environment for this task, with its random generator, that has not started."""
    environment = spec.make()
    environment.row, environment.calls = dict(task.row), []
    environment.seed, environment.member = task.seed, task.member
    environment.rng = random.Random(task.seed)
    return environment


class InProcessRunner:
    """Run the environment in this process. `shared`: returns the object that the group shares.

    Methods are called sequentially; each may raise anything, or hang, and may return an awaitable.
    """

    def __init__(
        self, spec: EnvironmentSpec, task: EpisodeTask, shared: Any, *, forks: bool = False
    ):
        self.environment, self._shared, self._forks = make_environment(spec, task), shared, forks
        self.tools: dict[str, Tool] = {}

    async def start(self) -> EpisodeStart:
        """Start the environment and return its first messages, tools and seats."""
        self.environment.shared = self._shared()
        first = await await_value(self.environment.start())
        self.tools = index_tools(self.environment.tools)
        return EpisodeStart(
            first,
            {name: tool.schema for name, tool in self.tools.items()},
            tuple(self.environment.seats),
        )

    def process_answer(self, message: Message) -> Any:
        """Run and return the tool calls of an answer. Without calls, return the result of the
        environment's `step`.
        """
        if self.tools and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
            calls: list[ToolCall] = run_calls(message, self.tools, forks=self._forks)
            self.environment.calls += calls
            return calls
        return self.environment.step(message)

    def close(self) -> Any:
        """Close the environment."""
        return self.environment.close()

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""


def count_characters(messages: Any) -> int:
    """Return the number of characters in messages; 0 if the value is not messages."""
    if isinstance(messages, str):
        return len(messages)
    if not isinstance(messages, Sequence):
        return 0
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return sum(len(text) for text in (*contents, *texts) if isinstance(text, str))


def encode_result(result: Any) -> dict[str, Any]:
    """Convert a result of an `InProcessRunner` method to JSON-serializable data.

    Raises ValueError if the messages have more than MAX_CHARACTERS characters.
    """
    size = count_characters(result.messages if isinstance(result, TurnResult) else result)
    if size > MAX_CHARACTERS:
        raise ValueError(
            f"the messages of a turn have {size} characters; at most {MAX_CHARACTERS} are allowed"
        )
    if isinstance(result, list) and all(isinstance(call, ToolCall) for call in result):
        return {
            "calls": [
                [c.name, dict(c.arguments), c.answer, c.error, c.malformed, c.seconds]
                for c in result
            ]
        }
    if isinstance(result, EpisodeStart):
        return {
            "begun": encode_result(result.first_turn),
            "tools": dict(result.tools),
            "seats": list(result.seats),
        }
    if isinstance(result, TurnResult):
        turn = {item.name: getattr(result, item.name) for item in fields(result)}
        for name in PER_SEAT_FIELDS:
            # pairs, because JSON has no integer keys; validation rejects any other value's text
            of_seats = turn[name]
            pairs = isinstance(of_seats, Mapping)
            turn[name] = list(of_seats.items()) if pairs else str(of_seats)
        return {"turn": turn}
    return {"value": result}


def decode_result(encoded: Mapping[str, Any]) -> Any:
    """Convert the result of `encode_result` back."""
    if "calls" in encoded:
        return [ToolCall(*fields) for fields in encoded["calls"]]
    if "begun" in encoded:
        return EpisodeStart(
            decode_result(encoded["begun"]), encoded["tools"], tuple(encoded["seats"])
        )
    if "turn" in encoded:
        turn = dict(encoded["turn"])
        for name in PER_SEAT_FIELDS:
            turn[name] = dict(turn[name]) if isinstance(turn[name], list) else turn[name]
        return TurnResult(**turn)
    return encoded["value"]
