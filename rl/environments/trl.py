"""Objects written for TRL's `environment_factory`: `reset(**row)` and public methods, which are the tools."""

from __future__ import annotations

import inspect
import math
from typing import Any

from rl.environments.environment import Environment, Turn
from rl.errors import UserError
from rl.types import Message


class TrlEnvironment(Environment):
    """One such object, for one episode: `reset` gets the row's columns and may return a text, which goes on the last message of the row.

    The episode ends with the first answer that calls no tool; its reward is `get_reward()`, 0 where the object has none.
    """

    needs_rows = True

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        if not callable(getattr(wrapped, "reset", None)):
            raise UserError(f"{type(wrapped).__name__} is neither an Environment nor has it a reset(**row), as TRL's have")
        self.tools = tuple(
            method
            for name, method in inspect.getmembers(wrapped, inspect.ismethod)
            if not name.startswith("_") and name not in ("reset", "get_reward", "close")
        )

    async def start(self) -> list[Message]:
        messages = [dict(message) for message in self.row.get("messages", ())]
        row = {key: value for key, value in self.row.items() if key != "messages"}
        said = self.wrapped.reset(**row)
        if inspect.isawaitable(said):
            said = await said
        if said is None:
            return messages
        if not isinstance(said, str):
            raise TypeError(f"reset() returned {said!r:.100}; a text or None is expected")
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = f"{messages[-1]['content']}{said}"
            return messages
        return [*messages, {"role": "user", "content": said}]

    async def step(self, answer: Message) -> Turn:
        if not hasattr(self.wrapped, "get_reward"):
            return Turn(done=True)
        reward = self.wrapped.get_reward()
        if inspect.isawaitable(reward):
            reward = await reward
        return Turn(reward=math.nan if reward is None else reward, done=True)

    def close(self) -> Any:
        return self.wrapped.close() if hasattr(self.wrapped, "close") else None
