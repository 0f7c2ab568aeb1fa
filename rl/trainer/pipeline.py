"""Check later stages before the first step: models, tokenizers, adapters, critics, teachers,
renderers and rows.

No weights are loaded. An outline of a model is its config, its tokenizer and, for a folder, the
names of its tensors. Each method checks its other models on such outlines itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rl.algorithms import METHODS, ModelFactory
from rl.config import LearnedRewardSettings, ModelSettings, StageConfig, is_api_address
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
from rl.trainer.initial_weights import find_base_model, find_weights_folder
from rl.trainer.saved_weights import open_weights
from rl.trainer.stage_data import PreparedStage, check_rows, prepare_stage
from rl.trainer.stage_models import (
    is_published_reward_model,
    make_api_judge,
    make_renderer,
    make_rubric,
    stage_renderer,
)
from rl.types import Problem

if TYPE_CHECKING:
    from rl.client import SamplingClient, TrainingClient


class ModelOutline:
    """Provide a client's information about a model that is not loaded."""

    def __init__(
        self,
        base_model: str,
        tokenizer: str | None,
        lora_rank: int = 0,
        *,
        value_head: bool = False,
    ):
        size, context, model_tokenizer = _load_outline(base_model, tokenizer)
        self.info: dict[str, Any] = {
            "base_model": base_model,
            "tokenizer": model_tokenizer,
            "vocab_size": size,
            "max_context": context,
        }
        self.info |= {"lora_rank": lora_rank or None, "value_head": value_head}

    def get_tokenizer(self) -> Any:
        return self.info["tokenizer"]

    def release(self) -> None:
        """Do nothing: an outline holds no resources."""


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


def _check_adapter(model: ModelSettings, base_model: str) -> None:
    """Raise UserError if the requested adapter cannot be put on the model."""
    if (lora := model.make_lora(0)) is not None:
        with torch.device("meta"):
            loaded = load_skeleton(
                base_model, tokenizer=model.tokenizer if base_model.startswith("tiny:") else None
            )
            add_lora(loaded, lora)


def outline_policy(stages: Sequence[StageConfig], index: int, value_head: bool) -> ModelOutline:
    """Return the outline of a stage's policy. Raises UserError if the stage could not begin."""
    base, tokenizer = find_base_model(stages, index)
    return ModelOutline(
        base, tokenizer, stages[index].settings.model.lora_rank, value_head=value_head
    )


class _OutlineFactory(ModelFactory):
    """Implement rl.algorithms.method_interface.ModelFactory with outlines."""

    def __init__(
        self, stages: Sequence[StageConfig], index: int, policy: ModelOutline, tags: Sequence[str]
    ):
        self.stages, self.index, self.tags = stages, index, tags
        self.policy = cast("TrainingClient", policy)
        self.model = stages[index].settings.model

    def initial_policy(self) -> Any:
        return self.policy

    def load(self, target: str) -> SamplingClient:
        return cast("SamplingClient", self._outline_model(target))

    def _outline_model(self, target: str) -> ModelOutline:
        names = [stage.name for stage in self.stages[: self.index]]
        if target in names:
            return ModelOutline(*find_base_model(self.stages, names.index(target)))
        weights = open_weights(target)
        if weights.path is None:
            return ModelOutline(target, None)
        folder = learner_checkpoint.model_folder(weights.path)
        spec = (
            learner_checkpoint.read_spec(weights.path)
            if (weights.path / "state.json").is_file()
            else None
        )
        if not (folder / "adapter_config.json").is_file():
            return ModelOutline(str(folder), None)
        if spec is not None:
            return ModelOutline(*learner_checkpoint.resolve_base_model(spec, str(weights.path)))
        return ModelOutline(learner_checkpoint.read_base_name(folder), None)

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, Any]:
        if learned.comparison_model is not None:
            make_renderer(self.load(learned.comparison_model), None)
        elif learned.rubric_model is not None and not is_api_address(learned.rubric_model):
            make_rubric(learned)
            make_renderer(self.load(learned.rubric_model), learned.rubric_renderer)
        for target, _ in learned.weighted_reward_models:
            self._check_reward_model(target)
        return {}

    def _check_reward_model(self, target: str) -> None:
        from rl.judges import shares_vocabulary

        names = [stage.name for stage in self.stages[: self.index]]
        if target in names:
            source = self.stages[names.index(target)]
            scores = (
                source.method == "reward_model"
                and METHODS[source.method].hooks(source.settings).value_head
            )
            if not scores:
                raise UserError(
                    f"{source.name} is no reward model: {source.method} without a value head "
                    "trains it. Name a stage of reward_model; a language model can judge as "
                    "well, with comparison_model"
                )
        elif is_published_reward_model(open_weights(target)):
            load_classifier_tokenizer(target)
            return
        shares_vocabulary(self.policy, self.load(target), f"reward model {target}")

    def create_critic(self, base_model: str) -> TrainingClient:
        if base_model == "policy":
            return self.policy
        base_model = find_weights_folder(base_model)
        _check_adapter(replace(self.model, base_model=base_model), base_model)
        return cast(
            "TrainingClient", ModelOutline(base_model, self.model.tokenizer, value_head=True)
        )


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
        policy = cast("TrainingClient", outline_policy(stages, index, False))
        check_rows(
            PreparedStage(plan, ProblemSet(rows), None, None),
            policy,
            stage_renderer(policy, plan.settings),
        )
    except FaultyRows as error:
        return error
    except (
        ValueError,
        OSError,
    ):  # another fault besides these, which is reported once the rows are corrected
        return None
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
            method = METHODS[plan.method].hooks(plan.settings)
            policy = outline_policy(stages, index, method.value_head)
            _check_adapter(plan.settings.model, find_base_model(stages, index)[0])
            renderer = stage_renderer(cast("TrainingClient", policy), plan.settings)
            tags = ready.rows.tags if ready.rows is not None else []
            method.make_models(_OutlineFactory(stages, index, policy, tags))
            check_rows(ready, cast("TrainingClient", policy), renderer)
        except ValueError as error:
            raise UserError(f"stage {plan.name}, before any training: {error}") from error
