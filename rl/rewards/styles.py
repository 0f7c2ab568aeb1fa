"""Reward functions as TRL's users write them: lists of completions and of the data's columns, as a
batched reward of ours.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl.errors import UserError
from rl.rewards.calls import Kind, kind_of, mark_kind

# in meta, for functions of lists: the prompt of a row that came as a list of messages
CONVERSATION = "prompt_messages"

_LISTS = ("prompts", "completions")
# TRL's, of its trainer
_NOT_HERE = ("completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric")


def takes_lists(target: Callable[..., Any]) -> bool:
    """Whether a function (or an instance that is called) is one of lists, as TRL's are: it has a
    parameter `completions`.
    """
    return "completions" in _parameters(target)


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C: it says nothing of itself
        return {}


def settings_of_lists(target: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Of a function of lists, the parameters that may be settings: those that have a default."""
    for parameter in _parameters(target).values():
        if (
            parameter.kind is inspect.Parameter.VAR_KEYWORD
            or parameter.default is not inspect.Parameter.empty
        ):
            yield parameter


def adapted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one that is called by its kind. UserError where it can be called neither so nor
    with lists.
    """
    if takes_lists(function):
        return OfLists(name, function)
    kind, parameters = kind_of(function), _parameters(function)
    if parameters:
        given: tuple[Any, ...] = ([], [], []) if kind.batched else ("prompt", "response", {})
        try:
            inspect.signature(function).bind(*given[: kind.leading])
        except TypeError as error:
            raise UserError(
                f"reward {name!r} takes ({', '.join(parameters)}), and a reward is called with "
                f"{'(episode, meta)' if kind.episode else '(prompt, response, meta)'}, or as TRL's are with (completions, ...columns) as "
                f"lists: {error}"
            ) from error
    return function


class OfLists:
    """A function of lists: `completions`, `prompts` if it asks for them, and columns of the data as
    lists under their names.

    It returns a number (or None: not applicable) for each. A row whose prompt was a list of
    messages has its completion as one too, [{"role": "assistant", "content": ...}]. It gets the
    columns that it names, or all where it takes **columns.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self.name, self.function = name, function
        mark_kind(self, Kind(batched=True))
        given = set(function.keywords) if isinstance(function, functools.partial) else set()
        parameters = _parameters(function)
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        named = [
            p
            for p in parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.name not in (*_LISTS, *given)
        ]
        self.columns = tuple(p.name for p in named if p.default is inspect.Parameter.empty)
        self._optional = tuple(p.name for p in named if p.default is not inspect.Parameter.empty)
        self._prompts = "prompts" in parameters or self._takes_all
        if asked := [name for name in self.columns if name in _NOT_HERE]:
            raise UserError(
                f"reward {name!r} asks for {', '.join(asked)}, of TRL's trainer alone: give it a default, or leave it out"
            )

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        metas: Sequence[Mapping[str, Any] | None],
    ) -> Any:
        """What the function returns (a coroutine's is awaited by the caller)."""
        rows = [dict(meta or {}) for meta in metas]
        chats = [row.pop(CONVERSATION, None) for row in rows]
        fields: dict[str, list[Any]] = {
            name: [_column(row, name, self.name) for row in rows] for name in self.columns
        }
        others = (
            dict.fromkeys(key for row in rows for key in row) if self._takes_all else self._optional
        )
        for key in others:
            if key not in fields and key not in _LISTS and any(key in row for row in rows):
                fields[key] = [row.get(key) for row in rows]
        said: list[Any] = [
            response if chat is None else [{"role": "assistant", "content": response}]
            for response, chat in zip(responses, chats, strict=True)
        ]
        if self._prompts:
            fields["prompts"] = [
                prompt if chat is None else chat
                for prompt, chat in zip(prompts, chats, strict=True)
            ]
        found = self.function(completions=said, **fields)
        return found.tolist() if hasattr(found, "tolist") else found


def _column(meta: Mapping[str, Any], name: str, reward: str) -> Any:
    if name not in meta:
        raise KeyError(
            f"the reward {reward} takes the column {name!r}, and the row has {', '.join(map(repr, meta)) or 'none'}"
        )
    return meta[name]
