"""Define the interface of an environment: an episode, as a conversation in messages."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl.types import Message

OPPONENT_POOL = "pool"  # name of the player that is an older version of the policy


@dataclass(slots=True)
class TurnResult:
    """Hold the result of an environment step.

    messages    for the seat that acts next: messages, or a text, which becomes a user message. Not
                needed if the episode is done
    reward      of the answer that was just processed
    done        True if the episode has ended by itself. With `truncated` it was cut short: more
                reward could have followed
    metrics     figures by name, averaged over the turns that have them. Accuracy is the mean of
                "correct"
    logs        any JSON, shown with the turn in the rollouts
    seat        seat that acts next, in an environment with several seats
    rewards     rewards of other seats for this answer, by seat
    metrics_of  metrics of other seats for their last turn, by seat
    logs_of     logs of other seats for their last turn, by seat
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
    """Define one episode, of a row of a data set or of a seed. An instance is used once.

    A subclass returns the first messages in `start` and the result of each answer in `step`. Both
    may be `async`. Each episode has a separate thread and event loop, so both may block. Settings
    are the fields of a dataclass, or the arguments of `__init__`; on the command line they are
    --environment.NAME. These attributes are set when `start` is called:

      row     the episode's row: columns of the data set ("messages" and "prompt" hold the
              prompt), or a row made by `rows`
      seed    equal for all members of a group, so that all of them get the same task
      rng     random numbers generated from `seed`
      member  index of the episode within its group
      shared  the object that `share` made for the group
      calls   calls of tools until now, oldest first

    `tools`: functions (see `rl.envs.tool`) that the model may call. Their calls are run,
    and the results are added to the conversation, before `step` is called: `step` receives answers
    without calls. `tools` may be set in `__init__` or `start`.

    Several seats (a game): `seats` holds the player of each seat, None for the policy, else a name
    of `Environment.models`. `start` may return a TurnResult, and its `seat` acts first. Each
    TurnResult names the `seat` that acts next. Only that seat receives the messages of the
    TurnResult. Each seat has a separate conversation, which begins with the first messages it
    receives. See `Env` in rl.rollout for the part that is trained.
    """

    # Makes a group of token-level environments (`Env`) in the place of episodes in messages:
    # (problem, group_size, renderer, *, limits, system_prompt) -> EnvGroupBuilder.
    make_token_level_group: ClassVar[Callable[..., Any] | None] = None
    # The setting that follows a colon after the environment's name: "endpoint:python agent.py".
    colon_setting: ClassVar[str | None] = None
    # True: an episode uses a row of --dataset. False: it uses a seed, or a row made by `rows`.
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
        """Return the players that are not the policy: names of models, or OPPONENT_POOL for an
        older version of the policy.
        """
        return [player for player in self.seats if player is not None]

    def rows(self, split: str, count: int) -> Sequence[Mapping[str, Any]]:
        """Return the rows of an environment that makes rows itself; by default `count` empty rows.

        `split` is "train" or "test"; the two do not overlap. Called on an instance that plays no
        episode. A "level" in a row is used by --curriculum, an "answer" is shown in evaluations.
        """
        return [{} for _ in range(count)]

    def share(self) -> Any | Awaitable[Any]:
        """Make the object that a group's episodes share. Called once for each group, on an instance
        with `row`, `seed` and `rng` that plays no episode.
        """
        return None

    def start(
        self,
    ) -> Sequence[Message] | str | TurnResult | Awaitable[Sequence[Message] | str | TurnResult]:
        """Return the conversation at the start, such as a system and a user message. A text becomes
        a user message.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no start(): it returns the first messages"
        )

    def step(self, answer: Message) -> TurnResult | Awaitable[TurnResult]:
        """Return the result of an answer.

        The answer is {"role": "assistant", "content": ...}, with "cut_off": True if a token limit
        cut it off.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no step(answer), which returns a TurnResult"
        )

    def close(self) -> None | Awaitable[None]:
        """Release resources. Called once, when the episode has ended for any reason."""
        return None
