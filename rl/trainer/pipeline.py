"""Check later stages before the first step: models, tokenizers, adapters, critics, teachers,
renderers and rows.

No weights are loaded: the stage's own model factory runs on a service whose models are on the meta
device. An outline of a model is its config, its tokenizer and, for a folder, the names of its
tensors. Each method checks its other models on such outlines itself. The epochs of a stage become
steps in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rl.algorithms import METHODS
from rl.config import RowLoopSettings, RunConfig, StageConfig, is_api_address
from rl.data import FaultyRows, ProblemSet
from rl.errors import UserError
from rl.judges import OpenAIClient
from rl.learner import learner_checkpoint
from rl.models import (
    add_lora,
    check_model_folder,
    check_model_weights,
    find_adapter_base,
    is_adapter,
    load_classifier_tokenizer,
    load_skeleton,
    load_tokenizer,
    resolve_adapter_chain,
)
from rl.trainer.data_source import load_training_problems
from rl.trainer.initial_weights import find_base_model, find_previous_stage
from rl.trainer.saved_weights import SavedWeights
from rl.trainer.stage_data import PreparedStage, check_rows, prepare_stage
from rl.trainer.stage_models import (
    StageModelFactory,
    make_api_judge,
    make_policy,
    stage_renderer,
)
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
        self._indices = {self.checkpoint_of(stage.name): i for i, stage in enumerate(stages)}

    @staticmethod
    def checkpoint_of(stage: str) -> str:
        """Return the path that stands for the final checkpoint of a stage."""
        return f"stage:{stage}"

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        *,
        tokenizer: str | None = None,
        seed: int = 0,
        prefers_servers: bool = False,
    ) -> ModelOutline:
        return ModelOutline.load(*self._find_base(str(model_path or base_model), tokenizer))

    def create_training_client_from_state(self, path: str, **settings: Any) -> ModelOutline:
        return ModelOutline.load(*self._find_base(path, None))

    def create_full_training_client(
        self, base_model: str, *, tokenizer: str | None, **settings: Any
    ) -> ModelOutline:
        return ModelOutline.load(*self._find_base(base_model, tokenizer))

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


class _PlannedModelFactory(StageModelFactory):
    """Create a later stage's models before the stages that it takes weights from have run."""

    def __init__(self, stages: Sequence[StageConfig], index: int, tags: Sequence[str]):
        stage, before = stages[index], find_previous_stage(stages, index)
        self._stages = {earlier.name: earlier for earlier in stages[:index]}
        outlines = OutlineService(stages)
        service = cast("ServiceClient", outlines)
        model, earlier = stage.settings.model, {n: outlines.checkpoint_of(n) for n in self._stages}
        previous = None if before is None else earlier[stages[before].name]
        value_head = METHODS[stage.method](stage.settings).value_head
        policy = make_policy(service, model, previous, None, 0, value_head=value_head)
        renderer = stage_renderer(policy, stage.settings)
        super().__init__(service, policy, model, previous, earlier, 0, tags=tags, renderer=renderer)

    def open(self, target: str) -> SavedWeights:
        if target not in self._stages:
            return super().open(target)
        return SavedWeights(target, Path(self.earlier[target]), stage=self._stages[target])

    def has_value_head(self, weights: SavedWeights) -> bool:
        stage = self._stages.get(weights.name)
        if stage is None:
            return super().has_value_head(weights)
        return METHODS[stage.method](stage.settings).value_head


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
        check_model_weights(folder)
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
    config = loaded.model.config.get_text_config().to_dict()
    return (
        loaded.vocab_size,
        config.get("max_position_embeddings") or config.get("n_positions"),
        model_tokenizer,
    )


def outline_policy(stages: Sequence[StageConfig], index: int) -> ModelOutline:
    """Return the outline of a stage's policy. Raises UserError if its base model is not
    available.
    """
    return ModelOutline.load(*find_base_model(stages, index))


def prepare_stages(stages: Sequence[StageConfig]) -> list[PreparedStage]:
    """Prepare each stage. If some rows of a stage cannot be read, check its readable rows too, and
    report all faults together.
    """
    prepared = []
    for i, plan in enumerate(stages):
        try:
            prepared.append(prepare_stage(plan, stages[:i]))
        except FaultyRows as error:
            more = _find_faulty_rows(stages, i, error.rows)
            raise error if more is None else error.merge(more) from error
    return prepared


def _find_faulty_rows(
    stages: Sequence[StageConfig], index: int, rows: Sequence[Problem]
) -> FaultyRows | None:
    """Return the rows of a stage that cannot be trained on, as far as this is known before anything
    is loaded.
    """
    plan = stages[index]
    if not rows or getattr(getattr(plan.settings, "env", None), "environment", None) is not None:
        return None
    try:
        policy = cast("TrainingClient", outline_policy(stages, index))
        check_rows(
            PreparedStage(plan, ProblemSet(rows), None, None),
            policy,
            stage_renderer(policy, plan.settings),
        )
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
            tags = ready.rows.tags if ready.rows is not None else []
            factory = _PlannedModelFactory(stages, index, tags)
            METHODS[plan.method](plan.settings).make_models(factory)
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
            stages[index] = replace(
                plan, settings=replace(plan.settings, loop=replace(loop, steps=steps))
            )
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
    prepared = PreparedStage(plan, rows, None, None)
    try:
        policy = cast("TrainingClient", outline_policy(stages, index))
        check_rows(prepared, policy, stage_renderer(policy, plan.settings))
    except ValueError as error:
        raise UserError(f"stage {plan.name}: {error}") from error
    return len(prepared.problems)
