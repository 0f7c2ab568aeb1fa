"""Adapt reward functions in TRL's form, which take lists of completions and data columns, to
batched rewards.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl.errors import UserError
from rl.rewards.reward_calls import Meta, RewardKind, get_reward_kind, set_reward_kind

# Key of meta for functions in TRL's form: the prompt of a row that came as a list of messages.
CONVERSATION = "prompt_messages"

_LIST_PARAMETERS = ("prompts", "completions")
# arguments that only TRL's trainer provides
_TRAINER_PARAMETERS = (
    "completion_ids",
    "completions_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


def is_trl_style(target: Callable[..., Any]) -> bool:
    """Return whether a function (or callable instance) takes lists, as TRL's reward functions do.

    Such a function has a parameter `completions`.
    """
    return "completions" in get_parameters(target)


def get_parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name; none of a function without a signature."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C: it has no signature
        return {}


def iter_trl_settings(target: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Iterate over the parameters of a TRL-style function that may be settings: those with a
    default.
    """
    for parameter in get_parameters(target).values():
        if (
            parameter.kind is inspect.Parameter.VAR_KEYWORD
            or parameter.default is not inspect.Parameter.empty
        ):
            yield parameter


def adapt_reward(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a TRL-style function in `TRLReward`; return any other function unchanged.

    Raises UserError if the function can be called neither with the arguments of its kind nor with
    TRL's lists.
    """
    if is_trl_style(function):
        return TRLReward(name, function)
    kind, parameters = get_reward_kind(function), get_parameters(function)
    if parameters:
        example_arguments: tuple[Any, ...] = (
            ([], [], []) if kind.batched else ("prompt", "response", {})
        )
        try:
            inspect.signature(function).bind(*example_arguments[: kind.leading_parameters])
        except TypeError as error:
            raise UserError(
                f"reward {name!r} takes ({', '.join(parameters)}), but a reward is called with "
                f"{'(episode, meta)' if kind.episode else '(prompt, response, meta)'}, or in TRL's "
                f"form with (completions, ...columns) as lists: {error}"
            ) from error
    return function


class TRLReward:
    """Call a TRL-style function with lists: `completions`, `prompts` if requested, and data columns
    by name.

    The function returns a number (or None: not applicable) for each row. If a row's prompt was a
    list of messages, its completion is a list too, [{"role": "assistant", "content": ...}]. The
    function receives the columns that its parameters name, or all columns if it takes **columns.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self.name, self.function = name, function
        set_reward_kind(self, RewardKind(batched=True))
        self._bound_settings = (
            set(function.keywords) if isinstance(function, functools.partial) else set()
        )
        parameters = get_parameters(function)
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        columns = [
            p
            for p in parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.name not in {*_LIST_PARAMETERS, *self._bound_settings}
        ]
        self.columns = tuple(p.name for p in columns if p.default is inspect.Parameter.empty)
        self._optional = tuple(p.name for p in columns if p.default is not inspect.Parameter.empty)
        self._takes_prompts = "prompts" in parameters or self._takes_all
        if unavailable := [name for name in self.columns if name in _TRAINER_PARAMETERS]:
            raise UserError(
                f"reward {name!r} requires {', '.join(unavailable)}, which only TRL's "
                "trainer provides: give the parameter a default, or remove it"
            )

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        metas: Sequence[Meta],
    ) -> Any:
        """Return the function's result (the caller awaits a coroutine)."""
        rows = [dict(meta or {}) for meta in metas]
        conversations = [row.pop(CONVERSATION, None) for row in rows]
        for name, row in itertools.product(self.columns, rows):
            if name not in row:
                raise KeyError(
                    f"the reward {self.name} takes the column {name!r}, but the row has "
                    f"{', '.join(map(repr, row)) or 'none'}"
                )
        present = dict.fromkeys(key for row in rows for key in row)
        optional = [key for key in present if self._takes_all or key in self._optional]
        names = dict.fromkeys((*self.columns, *optional))
        fields: dict[str, list[Any]] = {
            name: [row.get(name) for row in rows]
            for name in names
            if name not in (*_LIST_PARAMETERS, *self._bound_settings)
        }
        completions: list[Any] = [
            response if chat is None else [{"role": "assistant", "content": response}]
            for response, chat in zip(responses, conversations, strict=True)
        ]
        if self._takes_prompts:
            fields["prompts"] = [
                prompt if chat is None else chat
                for prompt, chat in zip(prompts, conversations, strict=True)
            ]
        rewards = self.function(completions=completions, **fields)
        return rewards.tolist() if hasattr(rewards, "tolist") else rewards
