"""Hold the state of a running episode: record the result of an action, decide when the episode
ends, and build the groups. RolloutEngine advances the episodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl.rewards import PendingScore, Score
from rl.rollout.env_executor import EpisodeKey
from rl.rollout.rollout_types import (
    Env,
    EnvGroupBuilder,
    EpisodeFailed,
    Metrics,
    StepResult,
    Stop,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from rl.types import ModelInput, SampledSequence, SamplingParams, find_length_limit


@dataclass(slots=True)
class EpisodeState:
    """Hold the state of a running episode: member `index` of group `group`. `pending_rewards`:
    rewards of seats that have not acted yet. `awaits_final_result`: the result of
    `Env.on_context_overflow` is due.
    """

    group: int
    index: int
    env: Env
    observation: ModelInput = field(default_factory=ModelInput.empty)
    stop: Stop = None
    transitions: list[Transition] = field(default_factory=list)
    error: str | None = None
    pending_rewards: dict[int, float] = field(default_factory=dict)
    awaits_final_result: bool = False

    @property
    def key(self) -> EpisodeKey:
        """Return what identifies the episode."""
        return self.group, self.index

    @property
    def conversation(self) -> str:
        """Return the conversation id that the sampler uses for the episode."""
        return f"{self.group}/{self.index}"

    @property
    def player(self) -> str | None:
        """Return the player of the next turn: None for the policy."""
        return self.env.players[self.env.seat]

    @property
    def has_ended(self) -> bool:
        """Return whether the episode has failed or its last turn ended it."""
        return self.error is not None or bool(
            self.transitions and self.transitions[-1].episode_done
        )

    def last_turn_of(self, seat: int) -> Transition | None:
        """Return the last turn of a seat; None if the seat has not acted."""
        return next((turn for turn in reversed(self.transitions) if turn.seat == seat), None)

    def end(self, *, truncated: bool = False, **metrics: float) -> None:
        """End the episode for every seat: mark the last turn of each seat as done."""
        for seat in range(len(self.env.players)):
            turn = self.last_turn_of(seat)
            if turn is not None:
                turn.episode_done, turn.truncated = True, turn.truncated or truncated
                turn.metrics = {**turn.metrics, **metrics}


def name_episode(builder: EnvGroupBuilder, index: int) -> str:
    """Return the name of an episode for errors."""
    return f"the environment {builder.tag}, episode {index} of row {builder.problem_index},"


def check_turns(episode: EpisodeState, max_turns: int) -> bool:
    """Return whether the episode may have another turn; end the episode if it may not."""
    if len(episode.transitions) < max_turns:
        return True
    episode.end(truncated=True)
    return False


def check_player(
    episode: EpisodeState, builder: EnvGroupBuilder, players: Collection[str | None]
) -> bool:
    """Return whether the player of the next turn is available. If not, the environment is at fault:
    set the episode's error, which leaves the episode out.
    """
    if not _check_seats(episode, builder, {episode.env.seat}):
        return False
    if episode.player in players:
        return True
    available = ", ".join(sorted(player for player in players if player is not None)) or "none"
    episode.error = (
        f"{name_episode(builder, episode.index)} assigned seat {episode.env.seat} to "
        f"{episode.player!r:.100}, which is no available player (available: {available}): list "
        "the players of a new environment object in its `models`"
    )
    return False


def _check_seats(episode: EpisodeState, builder: EnvGroupBuilder, seats: set[int]) -> bool:
    """Return whether the episode has these seats; set its error if it does not."""
    count = len(episode.env.players)
    if unknown := seats.difference(range(count)):
        episode.error = (
            f"{name_episode(builder, episode.index)} named the seat {next(iter(unknown))!r:.100}; "
            f"seats are numbered from 0 and their count is {count}"
        )
    return not unknown


def check_context(
    episode: EpisodeState, builder: EnvGroupBuilder, params: SamplingParams, info: Mapping[str, Any]
) -> bool:
    """Return whether the next action fits into the context of the client with these details. End
    the episode if it does not; the result of `Env.on_context_overflow` is then due.
    """
    length = episode.observation.length
    max_tokens = get_sampling_params(episode, params, builder, info).max_tokens or 1
    most, limit_name = _find_token_limit(length, builder, info)
    if length + max_tokens <= most:
        return True
    if episode.transitions:
        episode.end(truncated=True, context_overflow=1.0)
        episode.awaits_final_result = True
    else:
        episode.error = (
            f"the first observation of problem {builder.problem_index} has {length} tokens, which "
            f"with max_tokens={max_tokens} "
            f"exceed the {limit_name}: shorten the prompt or lower max_tokens"
        )
    return False


def _find_token_limit(
    length: int, builder: EnvGroupBuilder, info: Mapping[str, Any]
) -> tuple[int, str]:
    """Return (maximum number of tokens of an observation of `length` tokens and its action
    together, name of this limit). The last token of the action is never fed to the model, hence
    limit + 1.
    """
    limit, name = find_length_limit(info, length)
    if builder.max_tokens is not None and builder.max_tokens <= limit + 1:
        return builder.max_tokens, f"episode's limit of {builder.max_tokens}"
    return limit + 1, f"{name} of {limit}"


def add_final_result(
    episode: EpisodeState, builder: EnvGroupBuilder, result: StepResult | None
) -> None:
    """Add the result of `Env.on_context_overflow` to the episode's last turn."""
    if result is not None:
        reward, metrics, episode.error = resolve_reward(result, episode, builder)
        last = episode.transitions[-1]
        last.reward, last.metrics = last.reward + reward, {**last.metrics, **metrics}


def get_sampling_params(
    episode: EpisodeState, params: SamplingParams, builder: EnvGroupBuilder, info: Mapping[str, Any]
) -> SamplingParams:
    """Return the sampling parameters of the episode's next action, with the stop condition and
    length that the environment and `builder.max_tokens` set, if any.
    """
    if episode.stop is not None:
        params = replace(params, stop=episode.stop)
    most = episode.env.max_action_tokens
    if most is not None and (params.max_tokens is None or most < params.max_tokens):
        params = replace(params, max_tokens=most)
    if params.max_tokens is None and builder.max_tokens is not None:
        length = episode.observation.length
        longest, _ = _find_token_limit(length, builder, info)
        params = replace(params, max_tokens=max(1, longest - length))
    return params


def record_step(
    episode: EpisodeState,
    builder: EnvGroupBuilder,
    action: SampledSequence,
    seat: int,
    result: StepResult,
) -> None:
    """Record the result of an action. Waits for the reward if it is pending. A reward that is no
    finite number, of any seat, fails the episode, and so does a seat that it does not have.
    """
    reward, metrics, episode.error = resolve_reward(result, episode, builder)
    _check_seats(episode, builder, {*result.rewards, *result.metrics_of, *result.logs_of})
    reward += episode.pending_rewards.pop(seat, 0.0)
    episode.transitions.append(
        Transition(
            episode.observation,
            action,
            reward,
            result.episode_done,
            metrics,
            result.logs,
            result.truncated,
            seat,
        )
    )
    for other, value in result.rewards.items():
        if (earned := _to_finite(value)) is None:
            episode.error = _describe_invalid_reward(value, episode, builder)
            continue
        turn = episode.last_turn_of(other)
        if turn is None:
            episode.pending_rewards[other] = episode.pending_rewards.get(other, 0.0) + earned
        else:
            turn.reward += earned
    for other in {*result.metrics_of, *result.logs_of}:
        turn = episode.last_turn_of(other)
        if turn is not None:
            turn.metrics = {**turn.metrics, **result.metrics_of.get(other, {})}
            turn.logs = {**turn.logs, **result.logs_of.get(other, {})}
    if result.episode_done:
        episode.end(truncated=result.truncated)
    episode.observation, episode.stop = result.next_observation, result.next_stop_condition


def resolve_reward(
    result: StepResult, episode: EpisodeState, builder: EnvGroupBuilder
) -> tuple[float, Metrics, str | None]:
    """Return (reward, metrics, error) of a step; wait for the score if it is pending."""
    score = result.reward.result() if isinstance(result.reward, PendingScore) else result.reward
    if not isinstance(score, Score):
        if (reward := _to_finite(score)) is not None:
            return reward, result.metrics, None
        return 0.0, result.metrics, _describe_invalid_reward(score, episode, builder)
    return (
        score.reward if score.reward is not None else 0.0,
        {**result.metrics, **score.metrics},
        score.error,
    )


def _describe_invalid_reward(value: Any, episode: EpisodeState, builder: EnvGroupBuilder) -> str:
    """Return the error of an episode whose environment gave a reward that is no finite number."""
    return (
        f"{name_episode(builder, episode.index)} gave the reward {value!r:.100}; a finite number "
        "is expected"
    )


def _to_finite(value: Any) -> float | None:
    """Return a value as a finite float; None if it is no number, or text."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _compute_group_rewards(
    builder: EnvGroupBuilder, trajectories: Sequence[Trajectory]
) -> list[tuple[float, Metrics]]:
    """Return the group reward and the metrics of each trajectory. Raises EpisodeFailed if the
    builder returns anything else.
    """
    results = builder.compute_group_rewards(trajectories)
    try:
        rewards = [(_to_finite(reward), dict(metrics)) for reward, metrics in results]
    except (TypeError, ValueError):  # no pairs, or metrics that are no mapping
        rewards = []
    finite = [(reward, metrics) for reward, metrics in rewards if reward is not None]
    if len(finite) != len(trajectories) or len(rewards) != len(trajectories):
        raise EpisodeFailed(
            f"compute_group_rewards of {builder.tag}, row {builder.problem_index}, returned "
            f"{results!r:.200}; a pair (finite reward, metrics) is expected for each of "
            f"{len(trajectories)} episodes"
        )
    return finite


def build_groups(
    groups: Sequence[tuple[EnvGroupBuilder, Sequence[EpisodeState]]],
) -> tuple[list[TrajectoryGroup], list[str]]:
    """Return (groups of the episodes without an error, error messages). A group has the
    trajectories of a single seat of the policy.
    """
    # an unpaired surrogate cannot be encoded as UTF-8
    errors = [
        episode.error.encode("utf-8", "backslashreplace").decode("utf-8")
        for _, episodes in groups
        for episode in episodes
        if episode.error is not None
    ]
    trajectory_groups = []
    for builder, episodes in groups:
        by_seat: dict[int, list[Trajectory]] = {}
        for episode in episodes:
            if episode.error is not None:
                continue
            for seat, player in enumerate(episode.env.players):
                if player is None:
                    trajectories = by_seat.setdefault(seat, [])
                    if turns := [turn for turn in episode.transitions if turn.seat == seat]:
                        trajectories.append(Trajectory(turns, episode.observation))
        # `by_seat` is empty if every member failed: `errors` has the reasons
        for seat, trajectories in sorted(by_seat.items()):
            if not trajectories:
                continue  # the policy had no turn in this seat
            try:
                rewards = _compute_group_rewards(builder, trajectories)
            except EpisodeFailed as failed:
                # The group's scoring failed: the group is left out, with an error for each episode.
                errors += [str(failed)] * len(trajectories)
                continue
            trajectory_groups.append(
                TrajectoryGroup(
                    trajectories,
                    [reward for reward, _ in rewards],
                    [metrics for _, metrics in rewards],
                    builder.tag if len(by_seat) == 1 else f"{builder.tag}/seat{seat}",
                    builder.problem_index,
                    meta=builder.meta,
                )
            )
    return trajectory_groups, errors
