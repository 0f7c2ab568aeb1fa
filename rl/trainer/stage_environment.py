"""Resolve a stage's environment, its rows, and the episode groups made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.config import DataSettings, EnvironmentSettings
from rl.data import ProblemSet
from rl.envs import (
    EnvironmentGroup,
    EnvironmentSpec,
    EpisodeLimits,
    apply_isolation,
    parse_environment,
)
from rl.errors import UserError, warn_on_rank_zero
from rl.renderers import Renderer
from rl.rewards import Reward, resolve_reward
from rl.rollout import EnvGroupBuilder
from rl.seed import derive_seed
from rl.types import Problem

_DEFAULT_REWARD = DataSettings().reward
_DEFAULT_DATASET = DataSettings().dataset


def resolve_environment(settings: Any) -> EnvironmentSpec | None:
    """Return the environment that a stage's settings name; None if they name none.

    Raises UserError if the environment does not exist or does not have the settings.
    """
    env: EnvironmentSettings | None = getattr(settings, "env", None)
    if env is None or env.environment is None:
        return None
    spec = parse_environment(env.environment, env.environment_settings)
    if spec.can_make_rows and not _names_data(settings.data):
        spec = replace(spec, own_rows=True)
    return apply_isolation(spec, env.environment_isolation)


def make_environment_rows(
    spec: EnvironmentSpec, data: DataSettings, env: EnvironmentSettings, held_out: bool
) -> tuple[ProblemSet, ProblemSet | None]:
    """Return training and held-out rows that an environment makes itself, or rows of seeds only.

    Raises UserError if the settings name a data set, which such an environment does not read.
    """
    if _names_data(data):
        raise UserError(
            f"the environment {spec.name} generates its episodes and reads no data set: remove "
            f"dataset {data.dataset}"
        )
    if spec.can_make_rows:
        warn_on_rank_zero(
            f"no data set is named, so {spec.name} generates its episodes and gets no rows: name "
            f"the data set to read with --dataset ({_DEFAULT_DATASET}, the default, counts as none)"
        )
    train = _make_rows(spec, "train", env.environment_rows)
    return train, _make_rows(spec, "test", data.eval_limit) if held_out else None


def _names_data(data: DataSettings) -> bool:
    """Return whether the settings name a data set other than the default."""
    return (
        data.dataset != _DEFAULT_DATASET
        or bool(data.more_datasets)
        or data.eval_dataset is not None
    )


def _make_rows(spec: EnvironmentSpec, split: str, count: int) -> ProblemSet:
    """Return `count` rows of a split, each with a seed. Raises UserError if the split is empty."""
    rows = spec.make().rows(split, count)
    seeds = [derive_seed("environment", spec.seed_stream, split, i) for i in range(len(rows))]
    problems = [
        Problem((), {"seed": seeds[i], **row}, tag=spec.name, index=i) for i, row in enumerate(rows)
    ]
    if not problems:
        raise UserError(f"the environment {spec.name} has no rows of the split {split}")
    return ProblemSet(problems, name=f"{spec.name}/{split}")


def check_scoring(spec: EnvironmentSpec, data: DataSettings) -> None:
    """Raise UserError if the settings name a reward that an environment does not use.

    An environment rewards its episodes itself; only a reward of whole episodes may be added.
    """
    if (reward := resolve_episode_reward(data)) is not None and reward.episode:
        return
    if data.rewards or data.reward not in (_DEFAULT_REWARD, None):
        reward_names = ", ".join(name for name, _ in data.rewards) or data.reward
        raise UserError(
            f"the environment {spec.name} computes its rewards itself, so {reward_names} would "
            "have no effect: remove reward, or register it with episode=True, so that it scores "
            "whole episodes and is added to their rewards"
        )


def resolve_episode_reward(data: DataSettings) -> Reward | None:
    """Return the reward that the settings name in addition to an environment; None if none."""
    if data.rewards:
        return resolve_reward("composite", weights=dict(data.rewards))
    return None if data.reward in (_DEFAULT_REWARD, None) else resolve_reward(data.reward)


def make_episode_limits(env: EnvironmentSettings) -> EpisodeLimits:
    """Return the limits of an episode: turns, tokens, seconds."""
    return EpisodeLimits(
        turns=env.max_turns, tokens=env.episode_tokens, seconds=env.episode_seconds
    )


def build_episode_groups(
    spec: EnvironmentSpec,
    settings: Any,
    problems: Sequence[Problem],
    group_size: int,
    renderer: Renderer,
    renderers: Mapping[str, Renderer] | None = None,
) -> list[EnvGroupBuilder]:
    """Return an episode group for each row.

    `settings` are a stage's, or an object with its `data` and `env`. `renderers` are those of the
    other models that play.
    """
    # rows of data sets contain the system prompt already
    prompt = settings.data.system_prompt if not spec.needs_rows else None
    limits = make_episode_limits(settings.env)
    if (groups := spec.token_level) is not None:
        return [
            groups(problem, group_size, renderer, limits=limits, system_prompt=prompt)
            for problem in problems
        ]
    shared: dict[str, Any] = {"limits": limits, "system_prompt": prompt, "renderers": renderers}
    return [EnvironmentGroup(spec, problem, group_size, renderer, **shared) for problem in problems]


def check_environment(
    spec: EnvironmentSpec, settings: Any, problem: Problem, renderer: Renderer
) -> None:
    """Begin a single episode as a check before training. Raises UserError if that fails."""
    from rl.rollout import EpisodeFailed

    (group,) = build_episode_groups(spec, settings, [problem], 1, renderer)
    envs = group.make_envs()  # a group with a fixed size may have several
    try:
        observation: Any = envs[0].initial_observation()
        if hasattr(observation, "result"):
            observation.result()
    except EpisodeFailed as error:
        raise UserError(f"the first episode cannot begin: {error}") from error
    finally:
        for env in envs:
            env.close()
