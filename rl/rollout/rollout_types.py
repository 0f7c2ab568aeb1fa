"""Define environments and the trajectories that a policy produces in them: turns, episodes, groups
of episodes.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from rl.rewards import ScoringTask
from rl.types import Datum, ModelInput, SampledSequence, merge_counters

Stop: TypeAlias = Sequence[str] | Sequence[int] | None
Observation: TypeAlias = tuple[ModelInput, Stop]
Metrics: TypeAlias = dict[str, float]  # by name
Result = TypeVar("Result", covariant=True)


@dataclass(slots=True)
class StepResult:
    """Hold the result of an environment step.

    `next_stop_condition`: stop condition of the next action (None: the stop condition of the
    sampling parameters). `truncated` (extension), with `episode_done`: a limit such as the number
    of turns ended the episode before its natural end, and further reward was possible. `rewards`
    (extension): rewards that the action earns for other seats than the acting seat; each is added
    to the reward of that seat's last action. `metrics_of`, `logs_of`: metrics and logs of other
    seats, likewise.
    """

    # a finite float (any other value fails the episode), a Score, or a pending score with
    # .result() -> Score, which the rollout waits for
    reward: Any
    episode_done: bool
    next_observation: ModelInput = field(default_factory=ModelInput.empty)
    next_stop_condition: Sequence[str] | Sequence[int] | None = None
    metrics: Metrics = field(default_factory=dict)
    logs: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    rewards: Mapping[int, float] = field(default_factory=dict)
    metrics_of: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    logs_of: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class EpisodeFailed(Exception):
    """Signal that an environment broke (raised, hung, died, returned an invalid result). Its
    episode is left out of training; the message is the reason.
    """


class Pending(Protocol[Result]):
    """Represent a step or a first observation in progress. `result` waits for it and raises
    EpisodeFailed if it failed.
    """

    def result(self) -> Result: ...


@dataclass(slots=True)
class Transition:
    """Hold a turn: the observation, the sampled action and the result. `truncated`: as in
    StepResult. `seat`: the seat that acted.
    """

    ob: ModelInput
    ac: SampledSequence
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=dict)
    logs: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    seat: int = 0


@dataclass(slots=True)
class Trajectory:
    """Hold the episode of a seat. `advantage`: the advantage of its actions, after the method has
    assigned it. `advantages_N`: the advantage of each turn, if the method assigns advantages by
    turn. `datums`: the datums that were last made of the trajectory, each with the turns whose
    actions it holds; a datum of an update has the same `model_input` object.
    """

    transitions: list[Transition]
    final_ob: ModelInput = field(default_factory=ModelInput.empty)
    advantage: float | None = None
    advantages_N: list[float] | None = None
    datums: list[tuple[Datum, list[int]]] = field(default_factory=list, repr=False, compare=False)


@dataclass(slots=True)
class TrajectoryGroup:
    """Hold the episodes of a problem. The total reward of an episode is the sum of its step rewards
    plus its group reward. `shaped_rewards_G_N`: the rewards that a method has shaped (its
    `shape_rewards`), which take their place: of each step, or a single reward of the episode.
    `meta`: the columns of the problem's row, None if it has no row.
    """

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    metrics_G: list[Metrics]
    tag: str = "problem"
    problem_index: int = 0
    shaped_rewards_G_N: list[list[float]] | None = None
    meta: Mapping[str, Any] | None = None

    def get_step_rewards(self) -> list[list[float]]:
        """Return the rewards of each episode's steps [G][N], the last step's with the group reward.
        Shaped rewards may be a single number of the episode.
        """
        if self.shaped_rewards_G_N is not None:
            return self.shaped_rewards_G_N
        rewards_G_N = [[t.reward for t in member.transitions] for member in self.trajectories_G]
        for steps, final in zip(rewards_G_N, self.final_rewards_G, strict=True):
            steps[-1] += final
        return rewards_G_N

    def get_total_rewards(self) -> list[float]:
        """Return the total reward of each episode, of length G."""
        if self.shaped_rewards_G_N is not None:
            return [sum(steps) for steps in self.shaped_rewards_G_N]
        return [
            sum(t.reward for t in trajectory.transitions) + final
            for trajectory, final in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]

    def get_final_metrics(self) -> list[Metrics]:
        """Return the metrics of each episode, of length G: those of its last turn, and those of the
        episode as a whole.
        """
        return [
            {**trajectory.transitions[-1].metrics, **metrics}
            for trajectory, metrics in zip(self.trajectories_G, self.metrics_G, strict=True)
        ]


@dataclass(slots=True)
class RolloutBatch:
    """Hold groups without their failed members, and statistics of the rollout.

    `errors`: a message for each sample whose environment or reward failed. `counters`: the
    engine's. `sample_seconds`, `score_seconds`: seconds of sampling and of scoring.
    """

    groups: list[TrajectoryGroup]
    errors: list[str]
    counters: dict[str, int]
    sample_seconds: float
    score_seconds: float
    # groups that were sampled but are not trained on (dynamic sampling)
    untrained_groups: list[TrajectoryGroup] = field(default_factory=list)

    @property
    def all_groups(self) -> list[TrajectoryGroup]:
        """Return all sampled groups, which the metrics describe."""
        return [*self.groups, *self.untrained_groups]

    def merge(self, other: RolloutBatch) -> RolloutBatch:
        """Return these rollouts together with `other`, which were sampled later."""
        return RolloutBatch(
            [*self.groups, *other.groups],
            [*self.errors, *other.errors],
            merge_counters([self.counters, other.counters]),
            self.sample_seconds + other.sample_seconds,
            self.score_seconds + other.score_seconds,
            [*self.untrained_groups, *other.untrained_groups],
        )


class Env(abc.ABC):
    """Run a single episode; an environment is used once and never reset.

    An environment with several models (a game, a debate) has a seat for each model. `players` names
    the player of each seat: None for the policy, otherwise a key of the samplers that `rollout`
    received as `players`. Only the policy's trajectories are trained on: a trajectory for each of
    its seats, made of that seat's turns. `seat` is the seat whose turn it is; `rollout` reads it
    after each observation, which is that seat's observation. `StepResult.reward` goes to the seat
    that acted, `StepResult.rewards` to other seats.
    """

    players: Sequence[str | None] = (None,)
    seat: int = 0
    # maximum number of tokens of the next action; read after each observation. None: the
    # max_tokens of the sampling parameters.
    max_action_tokens: int | None = None
    # whether its methods may take long: a separate thread then calls them, unless all episodes
    # advance in lockstep without a timeout
    blocks: bool = True
    several_turns: bool = True  # whether an episode may have more than 1 turn
    # whether its episode has failed and is missing from its group's trajectories
    left_out: bool = False
    # how the rank that samples an action scores it, for an environment of 1 turn that a reward
    # scores; the action then has a `score` unless that rank could not score it
    scoring: ScoringTask | None = None

    @abc.abstractmethod
    def initial_observation(
        self,
    ) -> Observation | Pending[Observation]:
        """Return the first observation and the stop condition of the first action; or a pending
        observation, to let other environments start meanwhile.
        """

    @abc.abstractmethod
    def step(self, action: SampledSequence) -> StepResult | Pending[StepResult]:
        """Apply the sampled action. Return the reward and the next observation; or a pending
        step.
        """

    def on_context_overflow(self) -> StepResult | Pending[StepResult] | None:
        """Return the final result of an episode that ends because its last observation and an
        action would exceed the context, the KV cache or `max_tokens`. Called like `step`.

        The reward and metrics of the result are added to the last turn's. None: no result.
        """
        return None

    def close(self) -> None:  # noqa: B027  (nothing, by default)
        """Release resources. The rollout calls this once, after the episode has ended for any
        reason. If an episode is discarded, or a call exceeds its time limit, a thread may still be
        in that call. An error of `close` is a warning.
        """


class EnvGroupBuilder(abc.ABC):
    """Build the environments of a group (a problem, G episodes) and optionally score them together.

    `max_turns`: maximum number of actions of an episode. `max_tokens`: maximum tokens of an
    episode's observation and answer together (None: the model's context). A longer episode is
    truncated. `meta`: the columns of the problem's row.
    """

    tag: str = "problem"
    problem_index: int = 0
    meta: Mapping[str, Any] | None = None
    max_turns: int = 100
    max_tokens: int | None = None

    @abc.abstractmethod
    def make_envs(self) -> Sequence[Env]: ...

    def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory]
    ) -> list[tuple[float, Metrics]]:
        """Return a reward in addition to the step rewards, and metrics, for each episode (of a
        seat). Default: reward 0, no metrics. The group is left out, with an error, if a reward is
        no finite number or if their count is not that of the episodes.
        """
        return [(0.0, {}) for _ in trajectories_G]

    def on_discard(self) -> None:  # noqa: B027  (nothing, by default)
        """Handle a rescheduled group. The rollout calls this instead of scoring if the episodes are
        discarded as if they had not started (tokens too old, end of the run).
        """


def list_turns(groups: Sequence[TrajectoryGroup]) -> list[Transition]:
    """Return the turns of all episodes of the groups."""
    return [turn for g in groups for t in g.trajectories_G for turn in t.transitions]


def has_signal(rewards_G: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ: exact inequality, over the whole group."""
    return any(r != rewards_G[0] for r in rewards_G[1:])


def is_mixed(group: TrajectoryGroup) -> bool:
    """Return whether the group's members earned different rewards."""
    return has_signal(group.get_total_rewards())
