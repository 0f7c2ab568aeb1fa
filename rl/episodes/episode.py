"""Environments and what a policy did in them: turns, episodes, groups of episodes."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl.types import ModelInput, SampledSequence


@dataclass(slots=True)
class StepResult:
    """What an environment answers to an action.

    `next_stop_condition`: when the next action ends (None: as the sampling parameters say).
    `truncated` (extension), with `episode_done`: a limit ended the episode, such as a number of
    turns, and not its own end: more reward could have come. `rewards` (extension): what seats other
    than the one that acted earn by it, added to the reward of their own last action; `metrics_of`,
    `logs_of`: of other seats, likewise.
    """

    reward: Any  # float, or a pending score with .result() -> Score; the rollout waits for it
    episode_done: bool
    next_observation: ModelInput = field(default_factory=ModelInput.empty)
    next_stop_condition: Sequence[str] | Sequence[int] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    rewards: Mapping[int, float] = field(default_factory=dict)
    metrics_of: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    logs_of: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class EpisodeFailed(Exception):
    """An environment broke (raised, hung, died, answered nonsense): its episode is left out of
    training, and this says why.
    """


class PendingStep(Protocol):
    """A step that is being worked out. `result` waits for it; raises EpisodeFailed."""

    def result(self) -> StepResult: ...


class PendingObservation(Protocol):
    """A first observation that is being worked out. `result` waits for it; raises EpisodeFailed."""

    def result(self) -> tuple[ModelInput, Sequence[str] | Sequence[int] | None]: ...


@dataclass(slots=True)
class Transition:
    """One turn: the observation, the sampled action, and what came of it. `truncated`: as in
    StepResult. `seat`: who acted.
    """

    ob: ModelInput
    ac: SampledSequence
    reward: float
    episode_done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    seat: int = 0


@dataclass(slots=True)
class Trajectory:
    """An episode, of one seat. `advantage`: what the method credited its actions with, once it has;
    `advantages_N`: each turn's, if so.
    """

    transitions: list[Transition]
    final_ob: ModelInput = field(default_factory=ModelInput.empty)
    advantage: float | None = None
    advantages_N: list[float] | None = None


@dataclass(slots=True)
class TrajectoryGroup:
    """The episodes of one problem. Total reward of each: the sum of its step rewards plus its group
    reward.
    """

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    metrics_G: list[dict[str, float]]
    tag: str = "problem"
    problem_index: int = 0

    def get_total_rewards(self) -> list[float]:
        return [
            sum(t.reward for t in trajectory.transitions) + final
            for trajectory, final in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]


class Env(abc.ABC):
    """One episode; used once, never reset.

    With one model in it that is all. With several (a game, a debate) each has a seat: `players`
    names who plays each of them, None for the policy (whose trajectories alone are trained on: one
    for each of its seats, made of that seat's own turns), else a key of the samplers that `rollout`
    got as `players`. `seat` is whose turn it is, read after each observation: the observation is
    that seat's own. `StepResult.reward` goes to the seat that acted, `StepResult.rewards` to
    others.
    """

    players: Sequence[str | None] = (None,)
    seat: int = 0
    # that the next action may have; read after each observation, None: as the sampling parameters
    # say
    most_tokens: int | None = None
    # whether its methods may take long: continuous rollouts call those in a thread of a pool then
    blocks: bool = True
    several_turns: bool = True  # whether an episode may have more than one
    # whether its episode has failed, so that it is not among its group's trajectories
    left_out: bool = False

    @abc.abstractmethod
    def initial_observation(
        self,
    ) -> tuple[ModelInput, Sequence[str] | Sequence[int] | None] | PendingObservation:
        """The first observation and when the first action stops; or a promise of it, so that others
        can begin meanwhile.
        """

    @abc.abstractmethod
    def step(self, action: SampledSequence) -> StepResult | PendingStep:
        """Take the sampled tokens, answer with the reward and the next observation; or with a
        promise of them.
        """

    def no_room(self) -> StepResult | PendingStep | None:
        """The last observation and an action would exceed the context (or `max_tokens`), which ends
        the episode. What comes of that.

        Its reward and metrics are added to the last turn's. None: nothing.
        """
        return None

    def close(self) -> None:  # noqa: B027  (nothing, by default)
        """Called once, when the episode has ended, whichever way."""


class EnvGroupBuilder(abc.ABC):
    """Makes the environments of one group (one problem, G episodes) and may score them together.

    `max_turns`: actions of an episode after which the rollout gives up (an environment that ends by
    itself never gets there). `max_tokens`: what an episode's observation and answer may take
    together (None: the model's context); longer, and it is truncated.
    """

    tag: str = "problem"
    problem_index: int = 0
    max_turns: int = 100
    max_tokens: int | None = None

    @abc.abstractmethod
    def make_envs(self) -> Sequence[Env]: ...

    def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory]
    ) -> list[tuple[float, dict[str, float]]]:
        """A reward on top of the step rewards, and metrics, for each episode (of one seat).
        Default: none.
        """
        return [(0.0, {}) for _ in trajectories_G]

    def given_back(self) -> None:  # noqa: B027  (nothing, by default)
        """Called, in place of being scored, where its episodes are as if they had not begun (tokens
        too old, the end of a run).
        """


def has_signal(rewards_G: Sequence[float]) -> bool:
    """Whether the group tells its members apart: exact inequality, on the whole group."""
    return any(r != rewards_G[0] for r in rewards_G[1:])
