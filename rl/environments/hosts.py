"""Run an episode's environment code, in this process or in a separate process. The rollout uses
both in the same way.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl.environments.environment import Environment, Turn
from rl.environments.registry import EnvironmentSpec
from rl.environments.tools import Call, Tool, as_tool, run_calls
from rl.types import Message

MOST_CHARACTERS = 1_000_000  # in the messages of a Turn
BY_SEAT = ("rewards", "metrics_of", "logs_of")  # fields of a Turn that are for other seats


@dataclass(frozen=True)
class Task:
    """Hold the inputs of an episode: the environment's row, seed, and index in the group."""

    row: Mapping[str, Any]
    seed: int
    member: int = 0


@dataclass(frozen=True)
class Begun:
    """Describe a started episode: the first messages or Turn (unchecked), the tools' schemas by
    name, and the player of each seat.
    """

    said: Any
    tools: Mapping[str, Mapping[str, Any]]
    seats: Sequence[str | None]


class Host(Protocol):
    """Define the interface through which the rollout runs an episode's environment. Methods are
    called sequentially; each may raise anything, or hang.
    """

    def start(self) -> Any:
        """Return a Begun, or an awaitable of a Begun."""
        ...

    def answer(self, message: Message) -> Any:
        """Return the tool calls that were run, else the result of the environment's `step` (or an
        awaitable of it).
        """
        ...

    def close(self) -> Any: ...

    def abandon(self) -> None:
        """End a hanging environment as far as possible."""
        ...


def prepared(spec: EnvironmentSpec, task: Task) -> Environment:
    """Return an environment for this task, with its random generator, that has not started."""
    environment = spec.make()
    environment.row, environment.seed, environment.member, environment.calls = (
        dict(task.row),
        task.seed,
        task.member,
        [],
    )
    environment.rng = random.Random(task.seed)
    return environment


class LocalHost:
    """Run the environment in this process. `shared`: returns the object that the group shares."""

    def __init__(self, spec: EnvironmentSpec, task: Task, shared: Any, *, forks: bool = False):
        self.environment, self._shared, self._forks = prepared(spec, task), shared, forks
        self.tools: dict[str, Tool] = {}

    async def start(self) -> Begun:
        """Start the environment and return its first messages, tools and seats."""
        self.environment.shared = self._shared()
        first = self.environment.start()
        if inspect.isawaitable(first):
            first = await first
        self.tools = {tool.name: tool for tool in map(as_tool, self.environment.tools)}
        return Begun(
            first,
            {name: tool.schema for name, tool in self.tools.items()},
            tuple(self.environment.seats),
        )

    def answer(self, message: Message) -> Any:
        """Run and return the tool calls of an answer. Pass an answer without calls to `step`."""
        if self.tools and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
            calls: list[Call] = run_calls(message, self.tools, forks=self._forks)
            self.environment.calls += calls
            return calls
        return self.environment.step(message)

    def close(self) -> Any:
        """Close the environment."""
        return self.environment.close()

    def abandon(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""


def characters(messages: Any) -> int:
    """Return the number of characters in messages; 0 if the value is not messages."""
    if isinstance(messages, str):
        return len(messages)
    contents = (
        [m.get("content") for m in messages if isinstance(m, Mapping)]
        if isinstance(messages, Sequence)
        else []
    )
    parts = [
        part.get("text")
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, Mapping)
    ]
    return sum(len(text) for text in (*contents, *parts) if isinstance(text, str))


def as_json(found: Any) -> dict[str, Any]:
    """Convert a result of a Host method to JSON-serializable data.

    Raises ValueError if the messages have more than MOST_CHARACTERS characters.
    """
    size = characters(found.messages if isinstance(found, Turn) else found)
    if size > MOST_CHARACTERS:
        raise ValueError(
            f"the messages of a turn have {size} characters; at most {MOST_CHARACTERS} are allowed"
        )
    if isinstance(found, list) and all(isinstance(call, Call) for call in found):
        return {
            "calls": [
                [c.name, dict(c.arguments), c.answer, c.error, c.malformed, c.seconds]
                for c in found
            ]
        }
    if isinstance(found, Begun):
        return {
            "begun": as_json(found.said),
            "tools": dict(found.tools),
            "seats": list(found.seats),
        }
    if isinstance(found, Turn):
        names = ("reward", "done", "truncated", "metrics", "logs", "seat")
        by_seat = {name: _by_seat(getattr(found, name)) for name in BY_SEAT}
        return {
            "turn": {name: getattr(found, name) for name in names},
            "said": found.messages,
            "by_seat": by_seat,
        }
    return {"value": found}


def from_json(found: Mapping[str, Any]) -> Any:
    """Convert the result of `as_json` back."""
    if "calls" in found:
        return [Call(*fields) for fields in found["calls"]]
    if "begun" in found:
        return Begun(from_json(found["begun"]), found["tools"], tuple(found["seats"]))
    if "turn" in found:
        by_seat: dict[str, Any] = {
            name: dict(pairs) if isinstance(pairs, list) else pairs
            for name, pairs in found["by_seat"].items()
        }
        return Turn(messages=found["said"], **by_seat, **found["turn"])
    return found["value"]


def _by_seat(given: Any) -> Any:
    """Convert a mapping by seat to pairs, because JSON has no integer keys. Any other value becomes
    a text, which is rejected later, in validation.
    """
    return (
        [[seat, of_seat] for seat, of_seat in given.items()]
        if isinstance(given, Mapping)
        else str(given)
    )
