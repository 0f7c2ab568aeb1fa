"""Check a run before its first step: what its later stages need, and what its rewards pay for."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rl.algorithms import METHODS
from rl.config import RowLoopSettings, RunConfig, StageConfig, is_api_address
from rl.data import FaultyRows, ProblemSet
from rl.errors import UserError
from rl.jsonl import replace_nonfinite, write_atomically
from rl.judges import OpenAIClient
from rl.layers import find_max_context
from rl.learner import learner_checkpoint
from rl.models import (
    add_lora,
    check_model_folder,
    check_weight_names_and_shapes,
    find_adapter_base,
    is_adapter,
    load_classifier_tokenizer,
    load_skeleton,
    load_tokenizer,
    resolve_adapter_chain,
)
from rl.reporting import REWARD_CHECK, Console
from rl.sanitize import describe_error
from rl.trainer.initial_weights import find_base_model
from rl.trainer.reward_probe import RewardProbeResult, format_probe_table, probe_reward
from rl.trainer.stage_data import (
    PreparedStage,
    check_rows,
    load_training_problems,
    make_scorer,
    prepare_stage,
)
from rl.trainer.stage_models import StageModelFactory, make_api_judge, stage_renderer
from rl.types import LoraConfig, Problem

if TYPE_CHECKING:
    from rl.client import ServiceClient, TrainingClient


class ModelOutline:
    """Stand in for a client of a model that is not loaded. `info`: what is known of the model."""

    def __init__(self, **info: Any):
        self.info = info

    @classmethod
    def load(cls, base_model: str, tokenizer: str | None, **info: Any) -> ModelOutline:
        """Return the outline of a base model, with further `info`."""
        size, context, model_tokenizer = _load_outline(base_model, tokenizer)
        sizes = {"vocab_size": size, "max_context": context, "tokenizer": model_tokenizer}
        return cls(**{"base_model": base_model, **sizes, "lora_rank": None, **info})

    def get_tokenizer(self) -> Any:
        return self.info["tokenizer"]

    def get_base_sampling_client(self) -> ModelOutline:
        return self

    def release(self) -> None:
        """Do nothing: an outline holds no resources."""


class OutlineService:
    """Stand in for a ServiceClient: its clients are outlines. `stages`: those of the run, whose
    final checkpoints `checkpoint_of` names before they exist.
    """

    def __init__(self, stages: Sequence[StageConfig]):
        self._stages = stages
        self._indices = {str(self.checkpoint_of(stage.name)): i for i, stage in enumerate(stages)}

    @staticmethod
    def checkpoint_of(stage: str) -> Path:
        """Return the path that stands for the final checkpoint of a stage."""
        return Path(f"stage:{stage}")

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        *,
        tokenizer: str | None = None,
        **settings: Any,
    ) -> ModelOutline:
        return ModelOutline.load(*self._find_base(str(model_path or base_model), tokenizer))

    create_training_client_from_state = create_full_training_client = create_sampling_client

    def create_lora_training_client(
        self,
        base_model: str,
        *,
        tokenizer: str | None,
        model_seed: int,
        value_head: bool,
        base_dtype: str,
        **lora: Any,
    ) -> ModelOutline:
        """Return an outline. Raises UserError if the adapter cannot be put on the model."""
        base, tokenizer = self._find_base(base_model, tokenizer)
        with torch.device("meta"):
            tiny_tokenizer = tokenizer if base.startswith("tiny:") else None
            add_lora(load_skeleton(base, tokenizer=tiny_tokenizer), LoraConfig(**lora))
        return ModelOutline.load(base, tokenizer, lora_rank=lora["rank"])

    def create_classifier_client(self, base_model: str) -> ModelOutline:
        tokenizer = load_classifier_tokenizer(base_model)
        return ModelOutline(base_model=base_model, tokenizer=tokenizer)

    def _find_base(self, source: str, tokenizer: str | None) -> tuple[str, str | None]:
        """Return (base model, tokenizer) of weights."""
        index = self._indices.get(source.removesuffix("/model"))
        if index is not None:
            base, stage_tokenizer = find_base_model(self._stages, index)
            return base, tokenizer or stage_tokenizer
        path = Path(source).expanduser()
        if not (path / "state.json").is_file():
            return source, tokenizer
        return learner_checkpoint.resolve_base_model(learner_checkpoint.read_spec(path), source)


@cache
def _load_outline(base_model: str, tokenizer: str | None) -> tuple[int, int | None, Any]:
    """Return (rows of the embedding, context, tokenizer) of a base model. Raises UserError if the
    model is not available or incomplete.
    """
    folder = Path(base_model).expanduser()
    if is_adapter(folder):
        return _load_outline(
            resolve_adapter_chain(base_model)[0].name,
            tokenizer or find_adapter_base(folder).tokenizer,
        )
    if folder.is_dir():
        check_model_folder(folder)
        check_weight_names_and_shapes(folder)
    with torch.device("meta"):
        loaded = load_skeleton(base_model, tokenizer=tokenizer)
    model_tokenizer = loaded.tokenizer
    if not base_model.startswith("tiny:"):
        model_tokenizer = load_tokenizer(tokenizer or base_model, required=tokenizer is not None)
    if model_tokenizer is not None and len(model_tokenizer) > loaded.vocab_size:
        raise UserError(
            f"the tokenizer has {len(model_tokenizer)} tokens, the model {base_model!r} only "
            f"{loaded.vocab_size} rows: they do not belong together"
        )
    return loaded.vocab_size, find_max_context(loaded.model), model_tokenizer


def _check_rows_of_outline(
    stages: Sequence[StageConfig], index: int, rows: ProblemSet
) -> PreparedStage:
    """Return the stage with the rows that its policy, which is not loaded, can be trained on.

    Raises UserError if its base model is not available, or if rows are bad.
    """
    prepared = PreparedStage(stages[index], rows, None, None)
    outline = ModelOutline.load(*find_base_model(stages, index))
    policy = cast("TrainingClient", outline)
    check_rows(prepared, policy, stage_renderer(policy, stages[index].settings))
    return prepared


def prepare_stages(stages: Sequence[StageConfig], stack: ExitStack) -> list[PreparedStage]:
    """Prepare each stage, and let `stack` close its scorer. If some rows of a stage cannot be read,
    check its readable rows too, and report all faults together.
    """
    prepared = []
    for i, plan in enumerate(stages):
        try:
            prepared.append(prepare_stage(plan, stages[:i]))
        except FaultyRows as error:
            more = _find_faulty_rows(stages, i, error.rows)
            raise error if more is None else error.merge(more) from error
        if (scorer := prepared[-1].scorer) is not None:
            stack.callback(scorer.close)
    return prepared


def _find_faulty_rows(
    stages: Sequence[StageConfig], index: int, rows: Sequence[Problem]
) -> FaultyRows | None:
    """Return the rows of a stage that cannot be trained on, as far as this is known before anything
    is loaded.
    """
    env = getattr(stages[index].settings, "env", None)
    if not rows or getattr(env, "environment", None) is not None:
        return None
    try:
        _check_rows_of_outline(stages, index, ProblemSet(rows))
    except FaultyRows as error:
        return error
    except (ValueError, OSError):
        return None  # another fault besides these, reported once the rows are corrected
    return None


def check_api_models(stages: Sequence[StageConfig]) -> None:
    """Raise UserError, with the name of the stage, if its judge or teacher is behind an API that
    cannot be used.
    """
    for stage in stages:
        learned = getattr(stage.settings, "learned", None)
        distillation = getattr(stage.settings, "distillation", None)
        try:
            if learned is not None and is_api_address(learned.rubric_model or ""):
                make_api_judge(learned, 0).probe()
            for target in () if distillation is None else distillation.teacher_names:
                if is_api_address(target):
                    OpenAIClient(target).score_many([[0, 1]])
        except UserError as error:
            raise UserError(f"stage {stage.name}, before any training: {error}") from error


def dry_run(stages: Sequence[StageConfig], prepared: Sequence[PreparedStage], current: int) -> None:
    """Raise UserError with the name of a stage after `current` that could not begin."""
    for index in range(current + 1, len(stages)):
        plan, ready = stages[index], prepared[index]
        try:
            outlines = OutlineService(stages)
            service = cast("ServiceClient", outlines)
            factory = StageModelFactory.open_stage(
                service, stages, index, outlines.checkpoint_of, seed=0
            )
            factory.tags = ready.rows.tags if ready.rows is not None else []
            METHODS.create(plan).make_models(factory)
            assert factory.renderer is not None
            check_rows(ready, factory.policy, factory.renderer)
        except ValueError as error:
            raise UserError(f"stage {plan.name}, before any training: {error}") from error


def convert_epochs_to_steps(run: RunConfig) -> RunConfig:
    """Return the run with `epochs` replaced by `steps`.

    The steps take every training row `epochs` times, with the last batch filled up. The result is
    the same at the start and when the run is resumed, since it depends only on data and settings.
    Raises UserError if rows are bad, or if their number cannot be known in advance.
    """
    stages = list(run.stages)
    for index, plan in enumerate(stages):
        loop = plan.settings.loop
        if isinstance(loop, RowLoopSettings) and loop.epochs is not None:
            rows = _count_rows(stages, index)
            steps = max(1, math.ceil(round(loop.epochs * rows / loop.batch_size, 6)))
            stages[index] = plan.with_section("loop", steps=steps)
    return replace(run, stages=tuple(stages))


def _count_rows(stages: Sequence[StageConfig], index: int) -> int:
    """Return the number of rows that a stage trains on, without those it would skip."""
    plan = stages[index]
    data = plan.settings.data
    rows, _ = load_training_problems(data, plan.settings.loop.eval_every > 0)
    if rows.is_lazy:
        return len(rows)
    drops_rows = (
        data.on_bad_row == "skip"
        or data.on_too_long == "skip"
        or data.max_prompt_tokens
        or data.max_row_tokens
    )
    if not drops_rows:
        return len(rows)
    try:
        return len(_check_rows_of_outline(stages, index, rows).problems)
    except ValueError as error:
        raise UserError(f"stage {plan.name}: {error}") from error


STARTUP_SECONDS = 2.0  # budget of the check of a reward
_SLOW_TRIAL_SECONDS = 1.5  # a reward that took longer to start and to score 8 rows is not checked


def check_rewards_at_start(
    stages: Sequence[PreparedStage], folder: Path, console: Console, command: str
) -> None:
    """Check the reward of each stage that trains on one. Print a line, or a table and warnings if a
    trick pays, and write the results to reward_check.json in the run's `folder`.

    `command`: what checks a skipped reward at length, unless it is a function of this process.
    """
    entries = []
    checked: list[tuple[object, ...]] = []
    for prepared in stages:
        plan, data = prepared.plan, prepared.plan.settings.data
        if not METHODS.create(plan).needs_reward or prepared.environment is not None:
            continue
        if prepared.scorer is None or prepared.rows is None:
            continue
        key = (data.dataset, data.reward, data.rewards)
        if key in checked:
            continue
        checked.append(key)
        try:
            result = probe_prepared(prepared)
        except Exception as error:  # boundary: a check of user code and data never ends a run
            reason = f"the check failed: {describe_error(error)}"
            result = RewardProbeResult(prepared.scorer.reward.name, skipped=reason)
        # another process cannot import a function that was passed to rl.train
        is_importable = prepared.scorer.place != "thread"
        print_startup_result(result, console, command if is_importable else None)
        entry = {"stage": prepared.plan.name, "dataset": data.dataset}
        entries.append({**entry, **asdict(result)})
    if entries:
        text = json.dumps(replace_nonfinite({"rewards": entries}), indent=1, allow_nan=False)
        write_atomically(folder / REWARD_CHECK, text + "\n")


def probe_prepared(prepared: PreparedStage) -> RewardProbeResult:
    """Return the result for the reward of a stage, within about STARTUP_SECONDS.

    A built-in reward has no state, and is checked in the run's workers. A reward that is slow, runs
    programs or runs in this process is skipped.
    """
    scorer = prepared.scorer
    assert scorer is not None and prepared.rows is not None
    reward = scorer.reward
    builtin = all(part.builtin for part in reward.parts())
    reason = None
    if reward.runs_programs:
        reason = "it runs programs"
    elif scorer.place == "thread":
        reason = (
            "it is a function of this process, whose state the check could change (a reward in a "
            "file runs in processes of its own)"
        )
    elif not builtin and prepared.trial_seconds > _SLOW_TRIAL_SECONDS:
        reason = f"starting it and scoring a few rows took {prepared.trial_seconds:.1f} s"
    if reason is not None:
        return RewardProbeResult(reward.name, skipped=reason)
    if builtin:
        result = probe_reward(scorer, prepared.rows, budget=STARTUP_SECONDS, tried=True)
        scorer.take_seconds()  # the run's metrics count its own answers only
        return result
    begin, data = time.monotonic(), prepared.plan.settings.data
    with make_scorer(reward, data) as isolated:
        budget = max(0.0, STARTUP_SECONDS - (time.monotonic() - begin))
        return probe_reward(isolated, prepared.rows, budget=budget, tried=True)


def print_startup_result(result: RewardProbeResult, console: Console, command: str | None) -> None:
    """Print a line if nothing is wrong, else the table and a warning for each fault."""
    if result.skipped is not None:
        console.note(
            f"reward {result.reward} was not checked for tricks, because {result.skipped}"
            + (f": {command} checks it" if command else "")
        )
        return
    if result.warnings:
        heading = f"what reward {result.reward} pays for, right answers as {result.form}"
        console.warn("\n".join([heading, *format_probe_table(result)]))
        for warning in result.warnings:
            console.warn(f"reward {result.reward}: {warning}")
        return
    rows = f"{result.rows} rows ({result.seconds:.1f} s)"
    line = f"reward {result.reward} passed the mutant check on {rows}"
    console.note("; ".join([line, *result.notes]))
