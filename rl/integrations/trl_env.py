"""Adapt objects written for TRL's `environment_factory`: `reset(**row)` and public methods, which
are the tools.

As in TRL, a factory is a class, any other callable that returns such an object, or a dictionary of
factories by name.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rl.envs import Environment, TurnResult
from rl.errors import UserError
from rl.rollout import await_value
from rl.types import Message

_RESERVED_METHODS = ("reset", "get_reward", "close")


class TrlEnvironment(Environment):
    """Play an episode of such an object. `reset` receives the row's columns and may return content
    that is appended to the row's last message.

    The episode ends with the first answer that calls no tool. Its reward is `get_reward()`. For an
    object without `get_reward` it is the attribute `reward`, which reward functions of TRL read;
    else 0. If no data set is named, the object makes episodes itself: `reset` receives an empty
    prompt, and the episode's `seed` if it takes a seed.
    """

    needs_rows = True

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        if not callable(getattr(type(wrapped), "reset", None)):
            raise UserError(
                f"{type(wrapped).__name__} is neither an Environment nor an object with"
                " reset(**row), as in TRL"
            )
        self.tools = tuple(getattr(wrapped, name) for name in _public_methods(type(wrapped)))

    async def start(self) -> list[Message]:
        """Reset the object and return the first messages.

        Raises TypeError if `reset` returns neither a text, a list of parts nor None.
        """
        messages = [dict(message) for message in self.row.get("messages", ())]
        row = (
            {key: value for key, value in self.row.items() if key != "messages"}
            if messages
            else self._default_arguments()
        )
        observation = await await_value(self.wrapped.reset(**row))
        if observation is None:
            return messages
        if not isinstance(observation, (str, list)):
            raise TypeError(
                f"reset() returned {observation!r:.100}; a text, a list of parts or None is"
                " expected"
            )
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = _join_contents(messages[-1]["content"], observation)
            return messages
        return [*messages, {"role": "user", "content": observation}]

    def _default_arguments(self) -> dict[str, Any]:
        """Return the arguments of `reset` if no data set is named."""
        taken = inspect.signature(self.wrapped.reset).parameters
        defaults = {"prompt": [{"role": "user", "content": ""}], "seed": self.seed}
        any_name = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        return {key: value for key, value in defaults.items() if any_name or key in taken}

    async def step(self, answer: Message) -> TurnResult:
        """Return the reward of the finished episode."""
        if not hasattr(self.wrapped, "get_reward"):
            attribute = getattr(self.wrapped, "reward", None)
            if attribute is None or callable(attribute):  # no reward, or a tool of this name
                return TurnResult(reward=0.0, done=True)
            return TurnResult(reward=float(attribute), done=True)  # a tensor or array is a number
        reward = await await_value(self.wrapped.get_reward())
        return TurnResult(reward=math.nan if reward is None else reward, done=True)

    def close(self) -> Any:
        """Close the object, if it has `close`."""
        return self.wrapped.close() if hasattr(self.wrapped, "close") else None


class MultiTrlEnvironment(Environment):
    """Play an object of several factories: the row's column `environment` names its factory. Only
    the tools of the played object are offered.
    """

    needs_rows = True
    factories: ClassVar[Mapping[str, Callable[[], Any]]]

    async def start(self) -> list[Message]:
        """Make the object that the row names and start it. Raises ValueError if the name is
        unknown.
        """
        requested = self.row.get("environment")
        name = str(requested)
        if name not in self.factories:
            raise ValueError(
                f"the row's column 'environment' is {requested!r}; the dictionary has"
                f" {', '.join(map(repr, self.factories))}"
            )
        self.played = TrlEnvironment(self.factories[name]())
        self.played.row = {key: value for key, value in self.row.items() if key != "environment"}
        self.played.seed = self.seed
        self.tools = self.played.tools
        return await self.played.start()

    async def step(self, answer: Message) -> TurnResult:
        """Pass the answer to the played object."""
        return await self.played.step(answer)

    def close(self) -> Any:
        """Close the played object."""
        return self.played.close() if hasattr(self, "played") else None


def wrap_factory(factory: Any, name: str) -> type | None:
    """Return a class that wraps a factory which is not a class; None if the object is not a
    factory.
    """
    if isinstance(factory, Mapping):
        named = bool(factory) and all(
            isinstance(key, str) and callable(value) for key, value in factory.items()
        )
        return type(name, (MultiTrlEnvironment,), {"factories": dict(factory)}) if named else None
    if not callable(factory) or isinstance(factory, type):
        return None
    namespace: dict[str, Any] = {"__new__": lambda cls, **settings: factory(**settings)}
    with contextlib.suppress(ValueError):  # a function written in C may have no signature
        namespace["__signature__"] = inspect.signature(factory)
    return type(name, (), namespace)


def _public_methods(cls: type) -> list[str]:
    """Return the names of the tools: public methods. They are read from the class, because a
    property of the object may need state that `reset` makes.
    """
    members: list[tuple[str, Callable[..., Any]]] = inspect.getmembers(cls, inspect.isfunction)
    return [
        name for name, _ in members if not name.startswith("_") and name not in _RESERVED_METHODS
    ]


def _join_contents(content: Any, addition: Any) -> Any:
    """Concatenate two contents of a message: as a text if both are texts, else as a list of
    parts.
    """
    if isinstance(content, str) and isinstance(addition, str):
        return content + addition
    return [
        part
        for content_item in (content, addition)
        for part in (
            [{"type": "text", "text": content_item}]
            if isinstance(content_item, str)
            else content_item
        )
    ]
