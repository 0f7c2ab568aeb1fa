"""Environments and what a policy did in them: turns, episodes, groups of episodes."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.types import ModelInput, SampledSequence


@dataclass(slots=True)
class StepResult:
    """What an environment answers to an action.

    `next_stop_condition`: when the next action ends (None: as the sampling parameters say). `truncated` (extension), with
    `episode_done`: a limit ended the episode, such as a number of turns, and not its own end: more reward could have come.
    """

    reward: Any  # float, or a pending score with .result() -> Score; the rollout waits for it
    episode_done: bool
    next_observation: ModelInput = field(default_factory=ModelInput.empty)
    next_stop_condition: Sequence[str] | Sequence[int] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False


@dataclass(slots=True)
class Transition:
    """One turn: the observation, the sampled action, and what came of it. `truncated`: as in StepResult."""

    ob: ModelInput
    ac: SampledSequence
    reward: float
    episode_done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False


@dataclass(slots=True)
class Trajectory:
    """One episode. `advantage`: what the method credited its actions with, once it has; `advantages_N`: each turn's own, if so."""

    transitions: list[Transition]
    final_ob: ModelInput = field(default_factory=ModelInput.empty)
    advantage: float | None = None
    advantages_N: list[float] | None = None


@dataclass(slots=True)
class TrajectoryGroup:
    """The episodes of one problem. Total reward of each: the sum of its step rewards plus its group reward."""

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
    """One episode for one model; used once, never reset."""

    @abc.abstractmethod
    def initial_observation(self) -> tuple[ModelInput, Sequence[str] | Sequence[int] | None]:
        """The first observation and when the first action stops."""

    @abc.abstractmethod
    def step(self, action: SampledSequence) -> StepResult:
        """Take the sampled tokens, answer with the reward and the next observation."""


class EnvGroupBuilder(abc.ABC):
    """Makes the environments of one group (one problem, G episodes) and may score them together."""

    tag: str = "problem"
    problem_index: int = 0

    @abc.abstractmethod
    def make_envs(self) -> Sequence[Env]: ...

    def compute_group_rewards(self, trajectories_G: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        """A reward on top of the step rewards, and metrics, for each episode. Default: none."""
        return [(0.0, {}) for _ in trajectories_G]
