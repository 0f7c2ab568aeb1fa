"""What a stage's environment is, the rows it is played on, and the groups made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.data import ProblemSet
from rl.environments import (
    EnvironmentGroup,
    EnvironmentSpec,
    Limits,
    environment_from_words,
    with_isolation,
)
from rl.episodes import EnvGroupBuilder
from rl.errors import UserError, remark
from rl.renderers import Renderer
from rl.rewards import Reward, resolve_reward
from rl.seeds import derive_seed
from rl.settings import DataSettings, EnvironmentSettings
from rl.types import Problem

_REWARD = DataSettings().reward
_DATASET = DataSettings().dataset


def environment_of(settings: Any) -> EnvironmentSpec | None:
    """The environment that a stage's settings name. UserError where it is not to be found or has no
    such settings.
    """
    env: EnvironmentSettings | None = getattr(settings, "env", None)
    if env is None or env.environment is None:
        return None
    spec = environment_from_words(env.environment, env.environment_settings)
    if spec.can_make_rows and not _names_data(settings.data):
        spec = replace(spec, own_rows=True)
    return with_isolation(spec, env.environment_isolation)


def own_rows(
    spec: EnvironmentSpec, data: DataSettings, env: EnvironmentSettings, held_out: bool
) -> tuple[ProblemSet, ProblemSet | None]:
    """Training and held-out rows of an environment that is not of a data set: its own, or seeds
    alone.
    """
    if _names_data(data):
        raise UserError(
            f"the environment {spec.name} makes its own episodes and reads no data set: leave out dataset {data.dataset}"
        )
    if spec.can_make_rows:
        remark(
            f"no data set is named, so {spec.name} makes its own episodes and gets no rows: name the one that it reads with --dataset "
            f"({_DATASET}, the default, counts as none)"
        )
    train = _rows(spec, "train", env.environment_rows)
    return train, _rows(spec, "test", data.eval_limit) if held_out else None


def _names_data(data: DataSettings) -> bool:
    return data.dataset != _DATASET or bool(data.more_datasets) or data.eval_dataset is not None


def _rows(spec: EnvironmentSpec, split: str, count: int) -> ProblemSet:
    rows = spec.make().rows(split, count)
    seeds = [derive_seed("environment", spec.stream, split, i) for i in range(len(rows))]
    problems = [
        Problem((), {"seed": seeds[i], **row}, tag=spec.name, index=i) for i, row in enumerate(rows)
    ]
    if not problems:
        raise UserError(f"the environment {spec.name} has no rows of the split {split}")
    return ProblemSet(problems, name=f"{spec.name}/{split}")


def check_scoring(spec: EnvironmentSpec, data: DataSettings) -> None:
    """UserError where a reward is named beside an environment, which rewards its episodes itself."""
    if (reward := episode_reward(data)) is not None and reward.episode:
        return
    if data.rewards or data.reward not in (_REWARD, None):
        named = ", ".join(name for name, _ in data.rewards) or data.reward
        raise UserError(
            f"the environment {spec.name} gives rewards itself, and {named} would have no effect: leave out reward, or register it with "
            "episode=True, to see whole episodes and be added to what they earned"
        )


def episode_reward(data: DataSettings) -> Reward | None:
    """A reward that is named beside an environment; None where none is."""
    if data.rewards:
        return resolve_reward("composite", weights=dict(data.rewards))
    return None if data.reward in (_REWARD, None) else resolve_reward(data.reward)


def limits_of(env: EnvironmentSettings) -> Limits:
    return Limits(turns=env.max_turns, tokens=env.episode_tokens, seconds=env.episode_seconds)


def episode_groups(
    spec: EnvironmentSpec,
    settings: Any,
    problems: Sequence[Problem],
    group_size: int,
    renderer: Renderer,
    renderers: Mapping[str, Renderer] | None = None,
) -> list[EnvGroupBuilder]:
    """The groups of these rows. `settings`: the stage's, or what has its `data` and `env`;
    `renderers`: of other models that play.
    """
    # rows of data sets begin with it already
    prompt = settings.data.system_prompt if not spec.needs_rows else None
    limits = limits_of(settings.env)
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
    """Begins one episode. UserError where that fails: nothing has been trained yet."""
    from rl.episodes import EpisodeFailed

    (group,) = episode_groups(spec, settings, [problem], 1, renderer)
    envs = group.make_envs()  # of a group whose size is its own there may be several
    try:
        begun: Any = envs[0].initial_observation()
        if hasattr(begun, "result"):
            begun.result()
    except EpisodeFailed as error:
        raise UserError(f"the first episode cannot begin: {error}") from error
    finally:
        for env in envs:
            env.close()
