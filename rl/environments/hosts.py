"""Where an episode's own code runs: in this process, or in one of its own. What the rollout hears
of it is the same.
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

MOST_CHARACTERS = 1_000_000  # of what an environment says at once
BY_SEAT = ("rewards", "metrics_of", "logs_of")  # of a Turn: what other seats get of it


@dataclass(frozen=True)
class Task:
    """What an episode is made of: the environment's row, seed, and its number in the group."""

    row: Mapping[str, Any]
    seed: int
    member: int = 0


@dataclass(frozen=True)
class Begun:
    """An episode that has begun: what was said (unchecked), the tools' schemas by name, who plays
    each seat.
    """

    said: Any
    tools: Mapping[str, Mapping[str, Any]]
    seats: Sequence[str | None]


class Host(Protocol):
    """An episode's environment, somewhere. Its methods are called one after the other; they may
    raise anything, and hang.
    """

    def start(self) -> Any:
        """A Begun, or an awaitable of one."""
        ...

    def answer(self, message: Message) -> Any:
        """The calls of tools that were answered; else what the environment's `step` returned (or an
        awaitable of it).
        """
        ...

    def close(self) -> Any: ...

    def abandon(self) -> None:
        """Called where it hangs: whatever can be ended is."""
        ...


def prepared(spec: EnvironmentSpec, task: Task) -> Environment:
    """An environment of this task, with its random numbers, that has not begun."""
    made = spec.make()
    made.row, made.seed, made.member, made.calls = dict(task.row), task.seed, task.member, []
    made.rng = random.Random(task.seed)
    return made


class LocalHost:
    """In this process. `shared`: gives what the group shares."""

    def __init__(self, spec: EnvironmentSpec, task: Task, shared: Any, *, forks: bool = False):
        self.environment, self._shared, self._forks = prepared(spec, task), shared, forks
        self.tools: dict[str, Tool] = {}

    async def start(self) -> Begun:
        self.environment.shared = self._shared()
        said = self.environment.start()
        if inspect.isawaitable(said):
            said = await said
        self.tools = {made.name: made for made in map(as_tool, self.environment.tools)}
        return Begun(
            said,
            {name: made.schema for name, made in self.tools.items()},
            tuple(self.environment.seats),
        )

    def answer(self, message: Message) -> Any:
        if self.tools and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
            calls: list[Call] = run_calls(message, self.tools, forks=self._forks)
            self.environment.calls += calls
            return calls
        return self.environment.step(message)

    def close(self) -> Any:
        return self.environment.close()

    def abandon(self) -> None:
        """A thread cannot be ended from outside."""


def characters(messages: Any) -> int:
    """How many there are in what was said; 0 where it is no messages."""
    if isinstance(messages, str):
        return len(messages)
    said = (
        [m.get("content") for m in messages if isinstance(m, Mapping)]
        if isinstance(messages, Sequence)
        else []
    )
    parts = [
        part.get("text")
        for one in said
        if isinstance(one, list)
        for part in one
        if isinstance(part, Mapping)
    ]
    return sum(len(text) for text in (*said, *parts) if isinstance(text, str))


def as_json(found: Any) -> dict[str, Any]:
    """What a host's method returned, as JSON can say it. Raises ValueError for more than
    MOST_CHARACTERS of messages.
    """
    said = characters(found.messages if isinstance(found, Turn) else found)
    if said > MOST_CHARACTERS:
        raise ValueError(f"said {said} characters at once; at most {MOST_CHARACTERS} are read")
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
    """The inverse of `as_json`."""
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
    """Pairs of a seat and what is its: JSON has no numbers for keys. What is no mapping stays what
    it is: it is looked at elsewhere.
    """
    return (
        [[seat, of_seat] for seat, of_seat in given.items()]
        if isinstance(given, Mapping)
        else str(given)
    )
