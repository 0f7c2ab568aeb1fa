"""Load and check what the stages of a run need, before the run's folder is touched and any work is
done: problems, held-out problems or stored answers, the environment, and the reward.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS, RolloutDataSettings, RowEvaluator, check_stored_answer
from rl.client import TrainingClient
from rl.config import (
    DataSettings,
    EnvironmentSettings,
    PreferenceDataSettings,
    RolloutSettings,
    StageConfig,
)
from rl.data import (
    GENERATED_REWARDS,
    ContaminationResult,
    Curriculum,
    FaultyRows,
    LengthLimits,
    MissingSplit,
    Mixture,
    ProblemSet,
    RowCheck,
    StreamedProblemSet,
    concatenate_sets,
    filter_answers,
    find_contamination,
    has_row_splits,
    load_problems,
    load_rollouts,
    make_answers_check,
    select_good_rows,
    split_named_file,
)
from rl.envs import (
    EnvironmentGroup,
    EnvironmentSpec,
    EpisodeLimits,
    apply_isolation,
    parse_environment,
)
from rl.errors import UserError, warn_on_rank_zero
from rl.renderers import Renderer
from rl.rewards import Reward, Scorer, code, get_reward_machines, resolve_reward
from rl.rollout import EnvGroupBuilder, EpisodeFailed
from rl.sanitize import describe_error
from rl.seed import derive_seed
from rl.trainer.reward_probe import check_reward
from rl.types import Problem


def _column_settings(data: DataSettings) -> dict[str, Any]:
    pair = {}
    if isinstance(data, PreferenceDataSettings):
        pair = {"chosen_column": data.chosen_column, "rejected_column": data.rejected_column}
    return {
        **pair,
        "format": data.data_format,
        "config": data.dataset_config,
        "prompt_column": data.prompt_column,
        "answer_column": data.answer_column,
        "response_column": data.response_column,
        "system_prompt": data.system_prompt,
        "on_bad_row": data.on_bad_row,
        "prompt_template": data.prompt_template,
        "prompt_suffix": data.prompt_suffix,
        "image_column": data.image_column,
    }


def load_training_problems(
    data: DataSettings, held_out: bool
) -> tuple[ProblemSet, ProblemSet | None]:
    """Load training and held-out problems of all data sets. Raises FaultyRows naming the faults of
    all sets together.
    """
    if data.stream and data.more_datasets:
        raise UserError(
            "stream reads a single data set (a folder of several files counts as a single "
            "set): leave out more_datasets, or stream"
        )
    sets: list[ProblemSet] = []
    tests: list[ProblemSet] = []
    faults: list[FaultyRows] = []
    for i, source in enumerate(_split_sources(data)):
        try:
            train, test = _load_source(source, held_out and (i == 0 or data.eval_dataset is None))
        except FaultyRows as error:
            faults.append(error)
        else:
            sets.append(train)
            tests += [] if test is None else [test]
    try:
        tests += _load_more_held_out(data) if held_out else []
    except FaultyRows as error:
        faults.append(FaultyRows(error.faults, error.good))
    if faults:
        raise FaultyRows.merge_all(faults)
    mixed = Mixture(sets, data.dataset_weights) if data.dataset_weights else concatenate_sets(sets)
    return mixed, concatenate_sets(tests) if tests else None


def _split_sources(data: DataSettings) -> list[DataSettings]:
    """Return the settings of each data set separately."""
    single: dict[str, Any] = {"more_datasets": (), "dataset_weights": (), "more_eval_datasets": ()}
    settings = [replace(data, **single)]
    return settings + [
        replace(data, **single, dataset=source, eval_dataset=None) for source in data.more_datasets
    ]


def _load_source(data: DataSettings, held_out: bool) -> tuple[ProblemSet, ProblemSet | None]:
    try:
        train = _load_split(data, data.dataset, "train", data.train_limit, stream=data.stream)
    except FaultyRows as error:
        if held_out and data.eval_dataset is not None:  # report the faults of both sets together
            try:
                _load_test_split(data)
            except FaultyRows as more:
                raise FaultyRows.merge_all([error, FaultyRows(more.faults, more.good)]) from more
        raise
    if not held_out:
        return train, None
    if data.eval_dataset is None and _is_single_file(data):
        return _split_off_held_out(train, data.eval_limit)
    try:
        return train, _load_test_split(data)
    except MissingSplit:
        if data.eval_dataset is not None:
            raise
        return _split_off_held_out(train, data.eval_limit)


def _load_split(
    data: DataSettings, source: str, split: str, limit: int | None, *, stream: bool = False
) -> ProblemSet:
    return load_problems(source, split=split, limit=limit, stream=stream, **_column_settings(data))


def _load_test_split(data: DataSettings) -> ProblemSet:
    """Load the test split of the evaluation set, or of the data set itself; the only split if a set
    has no test split.
    """
    source = data.dataset if data.eval_dataset is None else data.eval_dataset
    try:
        return _load_split(data, source, "test", data.eval_limit)
    except MissingSplit:
        if data.eval_dataset is None:
            raise
        return _load_split(data, source, "train", data.eval_limit)


def _load_more_held_out(data: DataSettings) -> list[ProblemSet]:
    return [
        _load_test_split(replace(data, eval_dataset=source)) for source in data.more_eval_datasets
    ]


def load_held_out_problems(data: DataSettings) -> ProblemSet | None:
    """Return the problems of an evaluation. None for a file too short to hold out any problem, and
    for stored answers without an evaluation set.
    """
    if isinstance(data, RolloutDataSettings):
        columns = _column_settings(data) | {"prompt_column": "prompt", "response_column": None}
        sets = [
            load_problems(source, split="test", limit=data.eval_limit, **columns)
            for source in (data.eval_dataset, *data.more_eval_datasets)
            if source is not None
        ]
        return concatenate_sets(sets) if sets else None
    if data.eval_dataset is not None and not data.more_datasets:
        return concatenate_sets([_load_test_split(data), *_load_more_held_out(data)])
    return load_training_problems(data, True)[1]


def _is_single_file(data: DataSettings) -> bool:
    """Return whether the data set is a file without named splits."""
    named_file = split_named_file(data.dataset)
    file = data.dataset if named_file is None else named_file[1]
    return Path(file).expanduser().is_file() and not has_row_splits(
        data.dataset, **_column_settings(data)
    )


LAST_ROWS_SUFFIX = ", held out"  # of the name of rows that were split off


def _split_off_held_out(problems: ProblemSet, limit: int) -> tuple[ProblemSet, ProblemSet | None]:
    """Split off the last tenth (at most `limit` rows) of a file without a test split. It is held
    out and never trained on.
    """
    count = min(limit, len(problems) // 10)
    if count == 0:
        return problems, None
    if isinstance(problems, StreamedProblemSet):
        return problems.first(len(problems) - count), problems.last(count)
    rows = list(problems)
    return ProblemSet(rows[:-count], name=problems.name), ProblemSet(
        rows[-count:], name=f"{problems.name}{LAST_ROWS_SUFFIX}"
    )


def find_writing_stage(plan: StageConfig, earlier: Sequence[StageConfig]) -> int | None:
    """Return the number of the earlier stage whose rollouts a stage names as its `dataset`; None if
    its data exists already.

    Raises UserError if that stage writes no rollouts, or rollouts that this stage cannot learn
    from, or if the word is neither a path nor a stage.
    """
    data, names = plan.settings.data, [stage.name for stage in earlier]
    if not isinstance(data, RolloutDataSettings):
        return None
    if data.dataset not in names:
        if data.dataset and earlier and not Path(data.dataset).expanduser().exists():
            sampling = [stage.name for stage in earlier if METHODS.create(stage).online]
            raise UserError(
                f"stage {plan.name}: stored rollouts {data.dataset} do not exist (seen from "
                f"{Path.cwd()}), and no earlier stage has that name; earlier stages that sample: "
                f"{', '.join(sampling) or 'none'}"
            )
        return None
    index = names.index(data.dataset)
    source, settings = earlier[index], earlier[index].settings
    relation = f"stage {plan.name} learns from the rollouts of stage {source.name}"
    if not METHODS.create(source).online:
        raise UserError(
            f"{relation}, but {source.method} samples no answers: name a stage that does"
        )
    if settings.loop.rollouts_every == 0:
        raise UserError(
            f"{relation}, which stores none: set its rollouts_every (1 stores every step's)"
        )
    behavior, learner = settings.sampling.temperature, plan.settings.sampling.temperature
    if plan.settings.offline.needs_behavior_logprobs and behavior != learner:
        raise UserError(
            f"{relation}, sampled at temperature {behavior:g}, which their logprobs "
            f"belong to, and would score them at {learner:g}: give stage "
            f"{plan.name} temperature: {behavior:g}"
        )
    return index


def load_stored_answers(
    plan: StageConfig, folder: Path | None = None, steps: range | None = None
) -> ProblemSet:
    """Return what a stage learns from: its `dataset`, or what the run in `folder` wrote in `steps`;
    for `bc` only the best answers.
    """
    data, offline = plan.settings.data, plan.settings.offline
    if folder is None and not data.dataset:
        raise UserError(
            "offline needs stored answers: --dataset with a run's folder, a file of answers "
            "and rewards, or in a recipe the name of an earlier stage"
        )
    problems = load_rollouts(
        data.dataset if folder is None else folder,
        steps=steps,
        prompt_column=None if data.prompt_column == "auto" else data.prompt_column,
        response_column=data.response_column,
        reward_column=data.reward_column,
        system_prompt=data.system_prompt,
        limit=data.train_limit,
        on_bad_row=data.on_bad_row,
    )
    return (
        filter_answers(problems, offline.top_fraction, offline.reward_threshold)
        if offline.loss_spec.selects_answers
        else problems
    )


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
    """Return `count` rows of a split, each with a seed. Raises UserError if the split is empty, or
    if the environment does not return rows.
    """
    try:
        rows = [dict(row) for row in spec.make().rows(split, count)]
    except UserError:
        raise
    except Exception as error:  # boundary: the user's code
        raise UserError(
            f"the environment {spec.name} makes no rows of the split {split} "
            f"({describe_error(error, 300)}): rows(split, count) returns a list of mappings"
        ) from error
    seeds = [derive_seed("environment", spec.seed_stream, split, i) for i in range(len(rows))]
    problems = [
        Problem((), {"seed": seeds[i], **row}, tag=spec.name, index=i) for i, row in enumerate(rows)
    ]
    if not problems:
        raise UserError(f"the environment {spec.name} has no rows of the split {split}")
    return ProblemSet(problems, name=f"{spec.name}/{split}")


def resolve_episode_reward(spec: EnvironmentSpec, data: DataSettings) -> Reward | None:
    """Return the reward of whole episodes that the settings add to those of an environment; None if
    they name none.

    Raises UserError if they name another reward: an environment rewards its episodes itself.
    """
    if data.rewards:
        reward = resolve_reward("composite", weights=dict(data.rewards))
    elif data.reward is None or data.reward == _DEFAULT_REWARD:
        return None
    else:
        reward = resolve_reward(data.reward)
    if not reward.episode:
        reward_names = ", ".join(name for name, _ in data.rewards) or data.reward
        raise UserError(
            f"the environment {spec.name} computes its rewards itself, so {reward_names} would "
            "have no effect: remove reward, or register it with episode=True, so that it scores "
            "whole episodes and is added to their rewards"
        )
    return reward


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
    env = settings.env
    limits = EpisodeLimits(
        turns=env.max_turns, tokens=env.episode_tokens, seconds=env.episode_seconds
    )
    if (make_group := spec.make_token_level_group) is not None:
        return [
            make_group(problem, group_size, renderer, limits=limits, system_prompt=prompt)
            for problem in problems
        ]
    shared: dict[str, Any] = {"limits": limits, "system_prompt": prompt, "renderers": renderers}
    return [EnvironmentGroup(spec, problem, group_size, renderer, **shared) for problem in problems]


def check_environment(
    spec: EnvironmentSpec, settings: Any, problem: Problem, renderer: Renderer
) -> None:
    """Begin a single episode as a check before training. Raises UserError if that fails."""
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


@dataclass
class PreparedStage:
    """Hold a stage's loaded data and reward.

    rows: to train on; None until the earlier stage with number `source_stage` has written them

    scorer: None if answers are not scored

    curriculum: of `problems`, if any

    sandbox: the kind that programs run in, if answers are programs

    overlap: what held-out rows share with training rows

    remarks: messages to print before the first step

    trial_seconds: time to start the reward and to score a few rows
    """

    plan: StageConfig
    rows: ProblemSet | None
    test_problems: ProblemSet | None
    scorer: Scorer | None
    curriculum: Curriculum | None = None
    source_stage: int | None = None
    environment: EnvironmentSpec | None = None
    sandbox: str | None = None
    overlap: ContaminationResult | None = None
    remarks: list[str] = field(default_factory=list)
    trial_seconds: float = 0.0
    # the model that the rows were checked for, as far as it affects them
    checked_model: Any = None

    @property
    def problems(self) -> ProblemSet:
        assert self.rows is not None, "the stage that writes the rows has not ended"
        return self.rows


def check_sandboxes(stages: Sequence[StageConfig]) -> None:
    """Raise UserError if a stage runs programs and this host has no sandbox of the requested kind.
    Nothing is loaded.
    """
    for plan in stages:
        if (reward := resolve_stage_reward(plan.settings.data)) is not None:
            find_sandbox_kind(reward, plan.settings.data)


def prepare_stage(plan: StageConfig, earlier: Sequence[StageConfig] = ()) -> PreparedStage:
    """Load a stage's data and start its reward. Raises UserError or ValueError naming what is
    wrong.

    earlier: the stages before it; a stage among them may have to write its data first.
    """
    data, held_out = plan.settings.data, plan.settings.loop.eval_every > 0
    method = METHODS.create(plan)
    environment = resolve_environment(plan.settings)
    reward: str | Reward | None
    if environment is not None:
        flow = getattr(plan.settings, "flow", RolloutSettings())
        if flow.steps_off_policy and environment.make().models:
            raise UserError(
                f"stage {plan.name}: max_steps_off_policy is for environments in which the policy "
                f"plays alone, and {environment.name} has other players: remove "
                "max_steps_off_policy"
            )
        reward = resolve_episode_reward(environment, data)
    else:
        reward = resolve_stage_reward(data)
    sandbox = None if reward is None else find_sandbox_kind(reward, data)
    source_stage = find_writing_stage(plan, earlier)
    rows: ProblemSet | None = None
    if environment is not None and not environment.needs_rows:
        rows, test_problems = make_environment_rows(environment, data, plan.settings.env, held_out)
    elif isinstance(data, RolloutDataSettings):
        rows = load_stored_answers(plan) if source_stage is None else None
        test_problems = load_held_out_problems(data) if held_out else None
    else:
        rows, test_problems = load_training_problems(data, held_out)
    if reward is None and method.needs_reward and environment is None and not method.judge_names:
        raise UserError(
            f"{plan.method} learns from a reward: name one with --reward (exact_match, gsm8k, "
            "module:function, ...)"
        )
    # their splits share nothing
    disjoint = (environment is not None and not environment.needs_rows) or _is_generated(data)
    overlap = None
    if rows is not None and test_problems is not None and not disjoint:
        overlap = find_contamination(rows, test_problems)
    curriculum = None if data.curriculum == "off" or rows is None else Curriculum(rows, data)
    prepared = PreparedStage(
        plan, rows, test_problems, None, curriculum, source_stage, environment, sandbox, overlap
    )
    if reward is None:
        return prepared
    begin = time.monotonic()
    prepared.scorer = make_scorer(reward, data)
    trial_rows = rows if method.needs_reward or test_problems is None else test_problems
    if trial_rows is not None and environment is None:
        try:
            prepared.remarks = check_reward(prepared.scorer, trial_rows)
        except BaseException:
            prepared.scorer.close()
            raise
    prepared.trial_seconds = time.monotonic() - begin
    return prepared


def make_scorer(reward: str | Reward, data: DataSettings) -> Scorer:
    """Return the workers that run a stage's reward, on the machines of `data.reward_machines`."""
    return Scorer(
        resolve_reward(reward),
        timeout=data.reward_timeout,
        workers=data.reward_workers,
        environment=data.reward_env,
        machines=get_reward_machines() if spreads_rewards(data) else None,
    )


def spreads_rewards(data: DataSettings) -> bool:
    """Return whether all machines of a launch score answers, as far as they can load the reward."""
    return data.reward_machines != "first"


def resolve_stage_reward(data: DataSettings) -> str | Reward | None:
    """Return what scores answers: a single reward, or the weighted sum of several. Rewards that run
    programs get their settings.
    """
    programs = {
        "block": data.code_block,
        "sandbox": data.sandbox,
        "seconds": 0.8 * data.reward_timeout,
        "packages": data.sandbox_packages,
    }
    settings = {"code_tests": {**programs, "score": data.code_score}, "code_output": programs}
    if data.rewards:
        weights = dict(data.rewards)
        settings = {name: settings[name] for name in settings if name in weights}
        return resolve_reward("composite", weights=weights, settings=settings)
    if data.reward in settings:
        return resolve_reward(data.reward, **settings[data.reward])
    return data.reward


def find_sandbox_kind(reward: str | Reward, data: DataSettings) -> str | None:
    """Return the kind of sandbox that programs run in, or None if the reward runs none. Raises
    UserError if this host has no such sandbox.
    """
    if not resolve_reward(reward).runs_programs:
        return None
    return _probe_sandbox_kind(data.sandbox, data.sandbox_packages)


@cache
def _probe_sandbox_kind(mode: str, packages: tuple[str, ...]) -> str:
    with code.make_sandbox(mode, 1.0, packages) as sandbox:
        return sandbox.kind


def _is_generated(data: DataSettings) -> bool:
    """Return whether training and held-out rows come from the same generators, whose splits do not
    overlap.
    """
    sources = (data.dataset, *data.more_datasets)
    return data.eval_dataset is None and all(
        source.partition(":")[0] in GENERATED_REWARDS for source in sources
    )


def describe_prepared(stages: Sequence[PreparedStage]) -> dict[str, Any]:
    """Return what the run's config records besides the requested settings: the sandbox of programs,
    and the overlap of held-out rows with training rows.
    """
    kinds = sorted({prepared.sandbox for prepared in stages if prepared.sandbox is not None})
    shared = {
        prepared.plan.name: prepared.overlap.as_json()
        for prepared in stages
        if prepared.overlap is not None
    }
    record = {"sandbox": ", ".join(kinds), "overlap": shared}
    return {key: value for key, value in record.items() if value}


def load_held_out_rows(environment: EnvironmentSpec | None, settings: Any) -> ProblemSet | None:
    """Return the held-out rows of an evaluation, from a stage's settings (or an object with their
    `data` and `env`). None as in `load_held_out_problems`.
    """
    if environment is None or environment.needs_rows:
        return load_held_out_problems(settings.data)
    return make_environment_rows(environment, settings.data, settings.env, True)[1]


def check_rows(prepared: PreparedStage, policy: TrainingClient, renderer: Renderer) -> None:
    """Raise UserError naming rows that cannot be trained on or evaluated, before the first step; or
    leave such rows out (`on_bad_row`).

    If rows are sampled (online, and held-out rows that a reward scores), every prompt leaves room
    for max_tokens in the context. If responses are learned, every row has a response, and the whole
    fits. Rows that were checked for an equal model before (of a later stage, before the first step)
    are not checked again.
    """
    settings, method = prepared.plan.settings, METHODS.create(prepared.plan)
    if prepared.environment is not None:
        check_environment(prepared.environment, settings, prepared.problems[0], renderer)
        return
    model = _tokenization_key(policy, renderer)
    if prepared.rows is not None and prepared.checked_model == (prepared.rows, *model):
        return
    rows, test_problems = prepared.rows, prepared.test_problems
    max_tokens, skip = settings.sampling.max_tokens, settings.data.on_bad_row
    make_check = partial(
        RowCheck,
        policy.info,
        renderer,
        longest=method.longest if isinstance(method, RowEvaluator) else None,
        limits=LengthLimits.from_settings(settings.data),
        train_on=method.train_on,
    )
    faults: list[FaultyRows] = []

    def select(problems: ProblemSet, check: Any) -> ProblemSet:
        try:
            return select_good_rows(problems, check, skip)
        except FaultyRows as error:
            faults.append(error)
            return problems

    if rows is not None:  # otherwise an earlier stage writes them
        reads = method.reads
        check: Any = make_check(rows.name, reads, 0 if reads else max_tokens)
        if "answers" in reads:
            check_answer = partial(check_stored_answer, settings, policy.info, renderer)
            check = make_answers_check(check_answer, skip)
        prepared.rows = select(rows, check)
        if prepared.rows is not rows and prepared.curriculum is not None:
            prepared.curriculum = Curriculum(prepared.rows, settings.data)
    if test_problems is not None:
        check = make_check(
            test_problems.name,
            method.reads if method.reads_held_out_answers else (),
            max_tokens if prepared.scorer is not None else 0,
            skip_missing=method.reads_optional_answers,
        )
        prepared.test_problems = select(test_problems, check)
    if faults:
        # if no row is good, the rows have another shape
        raise faults[0] if not faults[0].good else FaultyRows.merge_all(faults)
    prepared.checked_model = None if prepared.rows is None else (prepared.rows, *model)


def _tokenization_key(policy: TrainingClient, renderer: Renderer) -> tuple[Any, ...]:
    """Return the properties of a model and its renderer that a row's tokens and their room depend
    on.
    """
    info, tokenizer = policy.info, renderer.tokenizer
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    template = (
        getattr(tokenizer, "chat_template", None),
        getattr(renderer, "template_settings", None),
    )
    return (
        type(renderer),
        info["vocab_size"],
        info["max_context"],
        vocabulary,
        template,
        renderer.end_tokens,
    )
