"""Load and check what the stages of a run need, before the run's folder is touched and any work is
done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from rl.algorithms import METHODS, RolloutDataSettings, RowEvaluator, check_stored_answer
from rl.client import TrainingClient
from rl.config import DataSettings, StageConfig
from rl.data import (
    GENERATED_REWARDS,
    ContaminationResult,
    Curriculum,
    FaultyRows,
    LengthLimits,
    ProblemSet,
    RowCheck,
    find_contamination,
    make_answers_check,
    select_good_rows,
)
from rl.envs import EnvironmentSpec
from rl.errors import UserError
from rl.renderers import Renderer
from rl.rewards import Reward, Scorer, code, resolve_reward
from rl.trainer.data_source import (
    find_writing_stage,
    load_held_out_problems,
    load_stored_answers,
    load_training_problems,
)
from rl.trainer.reward_probe import check_reward
from rl.trainer.stage_environment import (
    check_environment,
    check_scoring,
    make_environment_rows,
    resolve_environment,
    resolve_episode_reward,
)


@dataclass
class PreparedStage:
    """Hold a stage's loaded data and reward.

    rows: to train on; None until the earlier stage with number `awaited_stage` has written them

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
    awaited_stage: int | None = None
    environment: EnvironmentSpec | None = None
    sandbox: str | None = None
    overlap: ContaminationResult | None = None
    remarks: list[str] = field(default_factory=list)
    trial_seconds: float = 0.0
    # the model that the rows were checked for, as far as it affects them
    checked_model: Any = None

    @property
    def problems(self) -> ProblemSet:
        if self.rows is None:
            raise RuntimeError(
                f"stage {self.plan.name} has no data before stage number {self.awaited_stage} is "
                "done"
            )
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
    method = METHODS[plan.method](plan.settings)
    environment = resolve_environment(plan.settings)
    if environment is not None:
        check_scoring(environment, data)
    reward = resolve_episode_reward(data) if environment is not None else resolve_stage_reward(data)
    sandbox = None if reward is None else find_sandbox_kind(reward, data)
    awaits = find_writing_stage(plan, earlier)
    rows: ProblemSet | None = None
    if environment is not None and not environment.needs_rows:
        rows, test_problems = make_environment_rows(environment, data, plan.settings.env, held_out)
    elif isinstance(data, RolloutDataSettings):
        rows = load_stored_answers(plan) if awaits is None else None
        test_problems = load_held_out_problems(data) if held_out else None
    else:
        rows, test_problems = load_training_problems(data, held_out)
    curriculum = None if data.curriculum == "off" or rows is None else Curriculum(rows, data)
    scorer = None
    begin, trial_seconds = time.monotonic(), 0.0
    if reward is not None:
        scorer = Scorer(
            reward,
            timeout=data.reward_timeout,
            workers=data.reward_workers,
            environment=data.reward_env,
        )
        trial_seconds += time.monotonic() - begin
    elif method.needs_reward and environment is None and not method.judge_names:
        raise UserError(
            f"{plan.method} learns from a reward: name one with --reward (exact_match, gsm8k, "
            "module:function, ...)"
        )
    # their splits share nothing
    disjoint = (environment is not None and not environment.needs_rows) or _is_generated(data)
    shared = (
        find_contamination(rows, test_problems)
        if rows is not None and test_problems is not None and not disjoint
        else None
    )
    remarks: list[str] = []
    trial_rows = rows if method.needs_reward or test_problems is None else test_problems
    if scorer is not None and trial_rows is not None and environment is None:
        begin = time.monotonic()
        try:
            remarks = check_reward(scorer, trial_rows)
        except ValueError:
            scorer.close()
            raise
        trial_seconds += time.monotonic() - begin
    return PreparedStage(
        plan,
        rows,
        test_problems,
        scorer,
        curriculum,
        awaits,
        environment,
        sandbox,
        shared,
        remarks,
        trial_seconds,
    )


def resolve_stage_reward(data: DataSettings) -> str | Reward | None:
    """Return what scores answers: a single reward, or the weighted sum of several. Rewards that run
    programs get their settings.
    """
    seconds = 0.8 * data.reward_timeout
    programs = {
        "block": data.code_block,
        "sandbox": data.sandbox,
        "seconds": seconds,
        "packages": data.sandbox_packages,
    }
    reward_settings = {
        "code_tests": {**programs, "score": data.code_score},
        "code_output": programs,
    }
    if data.rewards:
        weights = dict(data.rewards)
        return resolve_reward(
            "composite",
            weights=weights,
            settings={name: reward_settings[name] for name in reward_settings if name in weights},
        )
    return (
        resolve_reward(data.reward, **reward_settings[data.reward])
        if data.reward in reward_settings
        else data.reward
    )


def find_sandbox_kind(reward: str | Reward, data: DataSettings) -> str | None:
    """Return the kind of sandbox that programs run in, or None if the reward runs none. Raises
    UserError if this host has no such sandbox.
    """
    return (
        _probe_sandbox_kind(data.sandbox, data.sandbox_packages)
        if resolve_reward(reward).runs_programs
        else None
    )


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
    return {
        **({"sandbox": ", ".join(kinds)} if kinds else {}),
        **({"overlap": shared} if shared else {}),
    }


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
    cache_key = (
        None if prepared.rows is None else (prepared.rows, *_tokenization_key(policy, renderer))
    )
    if cache_key is not None and cache_key == prepared.checked_model:
        return
    settings = prepared.plan.settings
    method = METHODS[prepared.plan.method](settings)
    max_tokens, skip, reads = (
        settings.sampling.max_tokens,
        settings.data.on_bad_row,
        method.reads,
    )
    if prepared.environment is not None:
        check_environment(prepared.environment, settings, prepared.problems[0], renderer)
        return
    rows, test_problems = prepared.rows, prepared.test_problems
    longest, limits = (
        method.longest if isinstance(method, RowEvaluator) else None,
        LengthLimits.from_settings(settings.data),
    )
    faults: list[FaultyRows] = []

    def checked(problems: ProblemSet, check: Any) -> ProblemSet:
        try:
            return select_good_rows(problems, check, skip)
        except FaultyRows as error:
            faults.append(error)
            return problems

    if rows is not None:  # otherwise an earlier stage writes them
        check: Any = RowCheck(
            policy.info,
            renderer,
            rows.name,
            reads,
            0 if reads else max_tokens,
            longest,
            limits=limits,
        )
        if "answers" in reads:
            check = make_answers_check(
                partial(check_stored_answer, settings, policy.info, renderer), skip
            )
        prepared.rows = checked(rows, check)
        if prepared.rows is not rows and prepared.curriculum is not None:
            prepared.curriculum = Curriculum(prepared.rows, settings.data)
    if test_problems is not None:
        ranked, held_out_max_tokens = (
            reads if method.reads_held_out_answers else (),
            max_tokens if prepared.scorer is not None else 0,
        )
        lenient = method.reads_optional_answers
        check = RowCheck(
            policy.info,
            renderer,
            test_problems.name,
            ranked,
            held_out_max_tokens,
            longest,
            limits=limits,
            skip_missing=lenient,
        )
        prepared.test_problems = checked(test_problems, check)
    if faults:
        # if no row is good, the rows have another shape
        raise faults[0] if not faults[0].good else FaultyRows.merge_all(faults)
    prepared.checked_model = (
        None if prepared.rows is None else (prepared.rows, *_tokenization_key(policy, renderer))
    )


def _tokenization_key(policy: TrainingClient, renderer: Renderer) -> tuple[Any, ...]:
    """Return the properties of a model and its renderer that a row's tokens and their room depend
    on.
    """
    info, tokenizer = policy.info, renderer.tokenizer
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    # the inner renderer of a renderer with additional stop texts
    written = getattr(renderer, "inner", renderer)
    template = (
        getattr(tokenizer, "chat_template", None),
        getattr(written, "template_settings", None),
    )
    return (
        type(written),
        info["vocab_size"],
        info["max_context"],
        vocabulary,
        template,
        renderer.end_tokens,
    )
