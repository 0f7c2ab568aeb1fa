"""An episode in messages: what one writes to make an environment."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl.types import Message

POOL = "pool"  # the player that is an older version of the policy


@dataclass(slots=True)
class Turn:
    """What an environment answers to an answer.

    messages   said to whoever acts next: messages, or a text, which is the user's. None are needed
    where the episode is done reward     of the answer that was just given
    done       the episode has ended by itself; with `truncated` it was cut short instead (more
    reward could have come) metrics    figures by name, averaged over the turns that have them
    ("correct" is what accuracy is made of) logs       anything as JSON, shown with the turn in the
    rollouts
    seat       who acts next, in an environment of several seats
    rewards    what other seats earn by this answer, by seat; metrics_of, logs_of: of other seats,
    for their own last turn
    """

    messages: Sequence[Message] | str = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, Any] = field(default_factory=dict)
    seat: int = 0
    rewards: Mapping[int, float] = field(default_factory=dict)
    metrics_of: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    logs_of: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class Environment:
    """One episode, for one row of a data set or one seed; used once.

    A subclass says in `start` what the model is asked, and in `step` what its answer comes to. Both
    may be `async`; each episode has a thread (and an event loop) of its own, so they may wait.
    Settings are the fields of a dataclass, or the arguments of `__init__`; on the line they are
    --environment.NAME. When `start` is called there are

    row     the episode's row: columns of the data set ("messages" and "prompt" are the prompt's),
    or what `rows` made seed    the same for every member of a group, which so meets the same task;
    rng: random numbers drawn from it member  the number of the episode within its group
    shared  what `share` made for the group, once
    calls   calls of tools so far, oldest first

    `tools`: functions (see `rl.environments.tool`) that the model may call. They are called, and
    the model is told, before `step` is asked: `step` gets answers that call none. They may be set
    in `__init__` or `start`.

    Several seats (a game): `seats` names who plays each, None for the policy, else a name of
    `Play.players`. `start` may return a Turn, whose `seat` acts first; each Turn names the `seat`
    that acts next and its messages are said to that seat alone, whose conversation is its own: it
    begins with the first messages that it is given. See `Env` in rl.episodes for what is trained.
    """

    # whether an episode is of a row of --dataset; else of a seed, or of what `rows` makes
    needs_rows: ClassVar[bool] = False
    row: Mapping[str, Any] = {}
    seed: int = 0
    member: int = 0
    shared: Any = None
    rng: random.Random
    calls: list[Any]
    tools: Sequence[Any] = ()
    seats: Sequence[str | None] = (None,)

    @property
    def models(self) -> Sequence[str]:
        """Who plays seats and is not the policy: names of models, or POOL for an older version of
        the policy.
        """
        return [who for who in self.seats if who is not None]

    def rows(self, split: str, count: int) -> Sequence[Mapping[str, Any]]:
        """The rows of an environment that brings its own ("train" or "test", which do not overlap);
        by default `count` empty ones.

        Called on an instance that plays no episode. A "level" in a row is one for --curriculum, an
        "answer" is shown in evaluations.
        """
        return [{} for _ in range(count)]

    def share(self) -> Any | Awaitable[Any]:
        """Makes what a group's episodes share, once: on an instance with `row`, `seed` and `rng`
        that plays no episode.
        """
        return None

    def start(self) -> Sequence[Message] | str | Turn | Awaitable[Sequence[Message] | str | Turn]:
        """The conversation so far, such as a system message and a user's; a text is a user's
        message.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no start(): it returns the first messages"
        )

    def step(self, answer: Message) -> Turn | Awaitable[Turn]:
        """What comes of an answer: {"role": "assistant", "content": ...}, with "cut_off": True
        where a limit of tokens cut it off.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(answer): it returns a Turn")

    def close(self) -> None | Awaitable[None]:
        """Called once, when the episode has ended, whichever way."""
        return None
