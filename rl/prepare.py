"""What the stages of a run need, made and checked before the run's folder is touched and before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.curriculum import Curriculum
from rl.data import load_problems
from rl.data.problem_set import ProblemSet, joined
from rl.errors import UserError
from rl.fields import nearest
from rl.learner import LearnerSettings
from rl.methods import METHODS
from rl.methods.offline import RolloutDataSettings, check_answers
from rl.renderers import Renderer
from rl.reopen import open_weights
from rl.rewards import Reward, Scorer, resolve_reward
from rl.run_plan import StagePlan
from rl.settings import DataSettings, ModelSettings, PreferenceDataSettings
from rl.stored import stored_answers, written_by
from rl.training_client import TrainingClient
from rl.types import Problem
from rl.worker import SamplerSettings, WorkerSettings


@dataclass
class Prepared:
    """A stage's data and reward, loaded. `scorer`: None where answers are not scored. `curriculum`: of `problems`, if there is one.

    `rows`: to train on; None as long as the earlier stage that `awaits` numbers has not written them.
    """

    plan: StagePlan
    rows: ProblemSet | None
    test_problems: ProblemSet | None
    scorer: Scorer | None
    curriculum: Curriculum | None = None
    awaits: int | None = None

    @property
    def problems(self) -> ProblemSet:
        if self.rows is None:
            raise RuntimeError(f"stage {self.plan.name} has no data before stage number {self.awaits} is done")
        return self.rows


def worker_settings(stages: Sequence[StagePlan]) -> WorkerSettings:
    """The device side, one for the whole run. Raises UserError where stages ask for different ones."""
    found = []
    for plan in stages:
        model, optim, sampling = plan.settings.model, plan.settings.optim, plan.settings.sampling
        learner = LearnerSettings(optim.token_budget, optim.layout, model.fused_logprobs, model.gradient_checkpointing)
        sampler = SamplerSettings(sampling.kv_cache_tokens, sampling.max_rows, sampling.sampler)
        found.append(WorkerSettings(dtype=model.precision, learner=learner, sampler=sampler))
    if any(settings != found[0] for settings in found):
        raise UserError(
            "precision, token_budget, layout, fused_logprobs, gradient_checkpointing, kv_cache_tokens, max_rows and sampler "
            "hold for the whole run: set them at the recipe's top level or on the line"
        )
    return found[0]


def prepare(plan: StagePlan, earlier: Sequence[StagePlan] = ()) -> Prepared:
    """Loads a stage's data and starts its reward. Raises UserError or ValueError naming what is wrong.

    earlier: the stages before it, of which one may be to write its data first.
    """
    data, held_out = plan.settings.data, plan.settings.loop.eval_every > 0
    awaits = written_by(plan, earlier)
    rows: ProblemSet | None = None
    if isinstance(data, RolloutDataSettings):
        rows = stored_answers(plan) if awaits is None else None
        test_problems = held_out_problems(data) if held_out else None
    else:
        rows, test_problems = _problems(data, held_out)
    curriculum = None if data.curriculum == "off" or rows is None else Curriculum(rows, data)
    scorer = None
    reward = reward_of(data)
    if reward is not None:
        scorer = Scorer(reward, timeout=data.reward_timeout, workers=data.reward_workers)
    elif METHODS[plan.method].needs_reward and not plan.settings.learned.named:
        raise UserError(f"{plan.method} learns from a reward: name one with --reward (exact_match, gsm8k, module:function, ...)")
    return Prepared(plan, rows, test_problems, scorer, curriculum, awaits)


def reward_of(data: DataSettings) -> str | Reward | None:
    """What scores answers: one reward, or the weighted sum of several."""
    return resolve_reward("composite", weights=dict(data.rewards)) if data.rewards else data.reward


def _columns(data: DataSettings) -> dict[str, Any]:
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
    }


def _problems(data: DataSettings, held_out: bool) -> tuple[ProblemSet, ProblemSet | None]:
    """Training and held-out problems of all data sets."""
    parts = [_of_one(source, held_out and (i == 0 or data.eval_dataset is None)) for i, source in enumerate(_sources(data))]
    tests = [test for _, test in parts if test is not None]
    return joined([train for train, _ in parts]), joined(tests) if tests else None


def _sources(data: DataSettings) -> list[DataSettings]:
    """The settings of each data set alone."""
    own = [replace(data, more_datasets=())]
    return own + [replace(data, dataset=source, eval_dataset=None, more_datasets=()) for source in data.more_datasets]


def _of_one(data: DataSettings, held_out: bool) -> tuple[ProblemSet, ProblemSet | None]:
    train = load_problems(data.dataset, split="train", limit=data.train_limit, **_columns(data))
    if not held_out:
        return train, None
    if data.eval_dataset is None and Path(data.dataset).is_file():
        return _held_out(train, data.eval_limit)
    return train, held_out_problems(data)


def held_out_problems(data: DataSettings) -> ProblemSet | None:
    """The problems that evaluation asks; None for a file too short to hold any out, and for stored answers alone."""
    if isinstance(data, RolloutDataSettings):
        if data.eval_dataset is None:
            return None
        columns = _columns(data) | {"prompt_column": "prompt", "response_column": None}
        return load_problems(data.eval_dataset, split="test", limit=data.eval_limit, **columns)
    if data.more_datasets or (data.eval_dataset is None and Path(data.dataset).is_file()):
        return _problems(data, True)[1]
    return load_problems(data.eval_dataset or data.dataset, split="test", limit=data.eval_limit, **_columns(data))


def _held_out(problems: ProblemSet, limit: int) -> tuple[ProblemSet, ProblemSet | None]:
    """A single file has no test split: its last tenth (at most `limit` rows) is held out and never trained on."""
    count = min(limit, len(problems) // 10)
    if count == 0:
        return problems, None
    rows = list(problems)
    return ProblemSet(rows[:-count], name=problems.name), ProblemSet(rows[-count:], name=f"{problems.name}, held out")


def names_its_model(stages: Sequence[StagePlan], index: int) -> bool:
    """Whether a stage begins from a base model of its own: the first, and one that names another than those before it.

    A model named for all stages (at a recipe's top level, on the line) is the one that the first begins from. The name of an
    earlier stage is no base model: see `begins_after`.
    """
    default, earlier = ModelSettings().base_model, [stage.name for stage in stages[:index]]
    asked, before = stages[index].settings.model.base_model, [stages[i].settings.model.base_model for i in _leads_to(stages, index)]
    named = [base for base in before if base != default and base not in earlier]
    return not before or asked not in (default, *named[-1:], *earlier)


def _leads_to(stages: Sequence[StagePlan], index: int) -> list[int]:
    """The stages from which one may go on: a policy not from a reward model, which is a judge and answers nothing."""
    judge = stages[index].method == "reward_model"
    return [i for i, stage in enumerate(stages[:index]) if judge or stage.method != "reward_model"]


def begins_after(stages: Sequence[StagePlan], index: int) -> int | None:
    """The stage whose final weights a stage begins from: the one it names as its base_model, else the one before.

    A policy passes over reward models. None where a stage begins from a base model.
    """
    earlier = [stage.name for stage in stages[:index]]
    asked = stages[index].settings.model.base_model
    if asked in earlier:
        return earlier.index(asked)
    return None if names_its_model(stages, index) else _leads_to(stages, index)[-1]


def check_weights(stages: Sequence[StagePlan]) -> None:
    """Raises UserError where weights that a stage's method needs (a teacher, a reference) are neither an earlier stage's nor there."""
    for i, plan in enumerate(stages):
        base, default = plan.settings.model.base_model, ModelSettings().base_model
        if i and not _leads_to(stages, i) and base == default != stages[i - 1].settings.model.base_model:
            raise UserError(
                f"the stage {plan.name} comes after a reward model, which is a judge and no policy: name the model that it is to begin "
                f"from, base_model: {stages[i - 1].settings.model.base_model} for the one that the reward model began from"
            )
        earlier = [stage.name for stage in stages[:i]]
        _check_stage_name(base, plan, earlier)
        for target in METHODS[plan.method].weights(plan.settings):
            if target not in earlier:
                _check_stage_name(target, plan, earlier)
                open_weights(target)


def _check_stage_name(target: str, plan: StagePlan, earlier: Sequence[str]) -> None:
    """Raises UserError for a single word that is nearly an earlier stage's name: found late, as a hub name that is not there."""
    if target in earlier or target.startswith("tiny:") or "/" in target or Path(target).expanduser().exists():
        return
    if (near := nearest(target, earlier)) is not None:
        raise UserError(f"stage {plan.name}: no earlier stage is called {target}, and no folder is; did you mean {near}?")


def check_rows(prepared: Prepared, policy: TrainingClient, renderer: Renderer) -> None:
    """Raises UserError naming the first row that could not be trained on or evaluated, before anything is.

    Where rows are sampled (online, and held-out rows that a reward scores) every prompt leaves room for max_tokens in the
    context. Where their responses are learnt, every row has them, and the whole fits. A text of so few bytes that it must
    fit is not tokenised: every token is at least one.
    """
    plan = prepared.plan
    wanted = plan.settings.sampling.max_tokens
    method = METHODS[plan.method]
    reads = method.reads(plan.settings)
    if "answers" in reads:
        check_answers(plan.settings, prepared.problems, policy.info, renderer)
    for problem in () if "answers" in reads else prepared.problems:
        _check_row(problem, prepared.problems.name, reads, 0 if reads else wanted, policy, renderer)
    if prepared.test_problems is None:
        return
    asked = wanted if prepared.scorer is not None else 0
    for problem in prepared.test_problems:
        _check_row(problem, prepared.test_problems.name, reads if method.ranks_held_out else (), asked, policy, renderer)


_HOW = {
    "response": "no response to learn: name its column with --response-column",
    "rejected": "no pair of answers: name their columns with --chosen-column and --rejected-column, or set --data-format",
}


def _check_row(
    problem: Problem, name: str, reads: Sequence[str], sampled: int, policy: TrainingClient, renderer: Renderer
) -> None:
    """`reads`: the answers (fields of Problem) that are learnt or ranked. `sampled`: tokens that its own answer may take, or 0."""
    limit = policy.info["max_context"]
    answers = {field: getattr(problem, field) for field in reads}
    for field, answer in answers.items():
        if answer is None:
            raise UserError(f"row {problem.index} of {name} has {_HOW[field]}")
    size = _TEMPLATE + sum(len(str(m.get("content") or "").encode()) for m in problem.messages)
    size += max([sampled, *(len(answer.encode()) for answer in answers.values())])
    if limit is None or size <= limit:
        return
    for answer in [*answers.values(), *([None] if sampled else [])]:
        length = _length(problem, renderer, answer) + (sampled if answer is None else 0)
        if length > limit:
            what = f"its prompt and max_tokens {sampled}" if answer is None else "its prompt and response"
            raise UserError(
                f"row {problem.index} of {name} does not fit: {what} take {length} tokens, the model's context holds "
                f"{limit}; shorten or leave out the row" + (", or lower --max-tokens" if answer is None else "")
            )


_TEMPLATE = 256  # tokens that a chat template may add around the messages


def _length(problem: Problem, renderer: Renderer, response: str | None) -> int:
    if response is None:
        return renderer.build_generation_prompt(problem.messages).length
    return renderer.build_supervised_example([*problem.messages, {"role": "assistant", "content": response}])[0].length
