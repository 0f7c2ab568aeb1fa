"""Objects written for TRL's `environment_factory`: `reset(**row)` and public methods, which are the
tools.

As there a factory is a class, anything else that can be called and gives such an object, or a
dictionary of factories by name.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rl.environments.environment import Environment, Turn
from rl.errors import UserError
from rl.types import Message

_NO_TOOLS = ("reset", "get_reward", "close")


class TrlEnvironment(Environment):
    """One such object, for one episode: `reset` gets the row's columns and may return what goes on
    the row's last message.

    The episode ends with the first answer that calls no tool. Its reward is `get_reward()`; of an
    object that has none its attribute `reward`, where such objects keep what a reward function
    reads; else 0. Where no data set is named, the object makes its own episodes: `reset` gets an
    empty prompt, and the episode's `seed` if it takes one.
    """

    needs_rows = True

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        if not callable(getattr(type(wrapped), "reset", None)):
            raise UserError(
                f"{type(wrapped).__name__} is neither an Environment nor has it a reset(**row), as TRL's have"
            )
        self.tools = tuple(getattr(wrapped, name) for name in _methods(type(wrapped)))

    async def start(self) -> list[Message]:
        messages = [dict(message) for message in self.row.get("messages", ())]
        row = (
            {key: value for key, value in self.row.items() if key != "messages"}
            if messages
            else self._no_row()
        )
        said = self.wrapped.reset(**row)
        if inspect.isawaitable(said):
            said = await said
        if said is None:
            return messages
        if not isinstance(said, (str, list)):
            raise TypeError(
                f"reset() returned {said!r:.100}; a text, a list of parts or None is expected"
            )
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = _joined(messages[-1]["content"], said)
            return messages
        return [*messages, {"role": "user", "content": said}]

    def _no_row(self) -> dict[str, Any]:
        """What `reset` gets where no data set is named."""
        taken = inspect.signature(self.wrapped.reset).parameters
        given = {"prompt": [{"role": "user", "content": ""}], "seed": self.seed}
        any_name = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        return {key: value for key, value in given.items() if any_name or key in taken}

    async def step(self, answer: Message) -> Turn:
        if not hasattr(self.wrapped, "get_reward"):
            kept = getattr(self.wrapped, "reward", None)
            return Turn(reward=float(kept) if isinstance(kept, numbers.Real) else 0.0, done=True)
        reward = self.wrapped.get_reward()
        if inspect.isawaitable(reward):
            reward = await reward
        return Turn(reward=math.nan if reward is None else reward, done=True)

    def close(self) -> Any:
        return self.wrapped.close() if hasattr(self.wrapped, "close") else None


class TrlEnvironments(Environment):
    """Several of them side by side: the row's column `environment` says which is played, and its
    own tools alone are offered.
    """

    needs_rows = True
    factories: ClassVar[Mapping[str, Callable[[], Any]]]

    async def start(self) -> list[Message]:
        given = self.row.get("environment")
        named = str(given)
        if named not in self.factories:
            raise ValueError(
                f"the row's column 'environment' is {given!r}; the dictionary has {', '.join(map(repr, self.factories))}"
            )
        self.played = TrlEnvironment(self.factories[named]())
        self.played.row = {key: value for key, value in self.row.items() if key != "environment"}
        self.played.seed = self.seed
        self.tools = self.played.tools
        return await self.played.start()

    async def step(self, answer: Message) -> Turn:
        return await self.played.step(answer)

    def close(self) -> Any:
        return self.played.close() if hasattr(self, "played") else None


def class_of(factory: Any, name: str) -> type | None:
    """What stands for a factory that is no class where a class of environments is expected; None if
    it is none.
    """
    if isinstance(factory, Mapping):
        named = bool(factory) and all(
            isinstance(key, str) and callable(value) for key, value in factory.items()
        )
        return type(name, (TrlEnvironments,), {"factories": dict(factory)}) if named else None
    if not callable(factory) or isinstance(factory, type):
        return None
    made: dict[str, Any] = {"__new__": lambda cls, **settings: factory(**settings)}
    with contextlib.suppress(ValueError):  # of what is written in C there may be none to be had
        made["__signature__"] = inspect.signature(factory)
    return type(name, (), made)


def _methods(cls: type) -> list[str]:
    """Names of what are tools: public methods. They are looked for in the class: a property of the
    object may need what reset makes.
    """
    found: list[tuple[str, Callable[..., Any]]] = inspect.getmembers(cls, inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_") and name not in _NO_TOOLS]


def _joined(content: Any, more: Any) -> Any:
    """Two contents of a message as one: texts put together, or lists of parts where either is one."""
    if isinstance(content, str) and isinstance(more, str):
        return content + more
    return [
        part
        for one in (content, more)
        for part in ([{"type": "text", "text": one}] if isinstance(one, str) else one)
    ]
