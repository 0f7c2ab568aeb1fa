"""Later stages, gone through before the first step: models, tokenizers, adapters, critics,
teachers, renderers and rows that would not do.

No weights are loaded: a model is its config, its tokenizer and, in a folder, the names of its
tensors. What a method asks of its other models is asked of such outlines, by the method itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rl.data import FaultyRows, ProblemSet
from rl.errors import UserError
from rl.learner import saving
from rl.methods import METHODS
from rl.models import (
    PARTS,
    add_lora,
    check_model_folder,
    check_whole_folder,
    classifier_tokenizer,
    is_adapter,
    load_skeleton,
    load_tokenizer,
    made_from,
    root_of,
)
from rl.run.beginnings import begins_after
from rl.run.hosts import is_published, make_renderer, rubric_of, stage_renderer
from rl.run.origins import weights_folder
from rl.run.prepare import Prepared, check_rows, prepare
from rl.run.reopen import open_weights
from rl.settings import LearnedRewardSettings, ModelSettings, StagePlan
from rl.types import LoraConfig, Problem

if TYPE_CHECKING:
    from rl.clients import SamplingClient, TrainingClient


class Outline:
    """What a client tells of its model, of a model that is not loaded."""

    def __init__(
        self,
        base_model: str,
        tokenizer: str | None,
        lora_rank: int = 0,
        *,
        value_head: bool = False,
    ):
        size, context, found = _skeleton(base_model, tokenizer)
        self.info: dict[str, Any] = {
            "base_model": base_model,
            "tokenizer": found,
            "vocab_size": size,
            "max_context": context,
        }
        self.info |= {"lora_rank": lora_rank or None, "value_head": value_head}

    def get_tokenizer(self) -> Any:
        return self.info["tokenizer"]

    def release(self) -> None:
        """Holds nothing."""


@cache
def _skeleton(base_model: str, tokenizer: str | None) -> tuple[int, int | None, Any]:
    """(rows of the embedding, context, tokenizer) of a base model. UserError where it cannot be
    had, or is not whole.
    """
    folder = Path(base_model).expanduser()
    if is_adapter(folder):
        return _skeleton(root_of(base_model)[0].name, tokenizer or made_from(folder).tokenizer)
    if folder.is_dir():
        check_model_folder(folder)
        check_whole_folder(folder)
    with torch.device("meta"):
        loaded = load_skeleton(base_model, tokenizer=tokenizer)
    found = loaded.tokenizer
    if not base_model.startswith("tiny:"):
        found = load_tokenizer(tokenizer or base_model, required=tokenizer is not None)
    if found is not None and len(found) > loaded.vocab_size:
        raise UserError(
            f"the tokenizer has {len(found)} tokens, the model {base_model!r} only {loaded.vocab_size} rows: they do not belong together"
        )
    config = loaded.model.config.get_text_config().to_dict()
    return (
        loaded.vocab_size,
        config.get("max_position_embeddings") or config.get("n_positions"),
        found,
    )


def _check_adapter(model: ModelSettings, base_model: str) -> None:
    """UserError where the adapter asked for cannot be put on the model."""
    if model.lora_rank:
        with torch.device("meta"):
            loaded = load_skeleton(
                base_model, tokenizer=model.tokenizer if base_model.startswith("tiny:") else None
            )
            parts = {part: getattr(model, part) for part in PARTS}
            add_lora(loaded, LoraConfig(model.lora_rank, 0, alpha=model.lora_alpha, **parts))


def _root(stages: Sequence[StagePlan], index: int) -> tuple[str, str | None]:
    """(base model, tokenizer) that a stage's policy comes down to. UserError where a stage on the
    way cannot go on with what it gets.
    """
    model, before = stages[index].settings.model, begins_after(stages, index)
    if before is None:
        return model.base_model, model.tokenizer
    base, tokenizer = _root(stages, before)
    earlier = stages[before].settings.model
    if earlier.lora_rank:
        return base, tokenizer
    return base, model.tokenizer or tokenizer


def outline_of(stages: Sequence[StagePlan], index: int, value_head: bool) -> Outline:
    """What a stage's policy tells of itself. UserError where the stage could not begin."""
    base, tokenizer = _root(stages, index)
    return Outline(base, tokenizer, stages[index].settings.model.lora_rank, value_head=value_head)


class _Hosts:
    """rl.methods.base.Hosts, of outlines."""

    def __init__(
        self, stages: Sequence[StagePlan], index: int, policy: Outline, tags: Sequence[str]
    ):
        self.stages, self.index, self.tags = stages, index, tags
        self.policy = cast("TrainingClient", policy)
        self.model = stages[index].settings.model

    def beginning(self) -> Any:
        return self.policy

    def load(self, target: str) -> SamplingClient:
        return cast("SamplingClient", self._outline(target))

    def _outline(self, target: str) -> Outline:
        names = [stage.name for stage in self.stages[: self.index]]
        if target in names:
            return Outline(*_root(self.stages, names.index(target)))
        found = open_weights(target)
        if found.path is None:
            return Outline(target, None)
        folder = saving.model_folder(found.path)
        spec = saving.read_spec(found.path) if (found.path / "state.json").is_file() else None
        if not (folder / "adapter_config.json").is_file():
            return Outline(str(folder), None)
        if spec is not None:
            return Outline(*saving.base_of(spec, str(found.path)))
        return Outline(saving.adapter_base(folder), None)

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, Any]:
        if learned.comparison_model is not None:
            make_renderer(self.load(learned.comparison_model), None)
        elif learned.rubric_model is not None:
            rubric_of(learned)
            make_renderer(self.load(learned.rubric_model), learned.rubric_renderer)
        for target, _ in learned.scoring:
            self._check_reward_model(target)
        return {}

    def _check_reward_model(self, target: str) -> None:
        from rl.judges import shares_vocabulary

        names = [stage.name for stage in self.stages[: self.index]]
        if target in names:
            source = self.stages[names.index(target)]
            scores = source.method == "reward_model" and METHODS[source.method].value_head(
                source.settings
            )
            if not scores:
                raise UserError(
                    f"{source.name} is no reward model: {source.method} without a value head of its own trains it. Name a stage of "
                    "reward_model; a language model can judge as well, with comparison_model"
                )
        elif is_published(open_weights(target)):
            classifier_tokenizer(target)
            return
        shares_vocabulary(self.policy, self.load(target), f"reward model {target}")

    def critic(self, base_model: str) -> TrainingClient:
        if base_model == "policy":
            return self.policy
        base_model = weights_folder(base_model)
        _check_adapter(replace(self.model, base_model=base_model), base_model)
        return cast("TrainingClient", Outline(base_model, self.model.tokenizer, value_head=True))


def prepared_stages(stages: Sequence[StagePlan]) -> list[Prepared]:
    """`prepare` of each. Of a stage whose rows cannot all be read, those that can are looked
    through too, and all faults told at once.
    """
    found = []
    for i, plan in enumerate(stages):
        try:
            found.append(prepare(plan, stages[:i]))
        except FaultyRows as error:
            more = _unfit(stages, i, error.rows)
            raise error if more is None else error.and_more(more) from error
    return found


def _unfit(stages: Sequence[StagePlan], index: int, rows: Sequence[Problem]) -> FaultyRows | None:
    """Which of a stage's rows could not be trained on, as far as that can be known before anything
    is loaded.
    """
    plan = stages[index]
    if not rows or getattr(getattr(plan.settings, "env", None), "environment", None) is not None:
        return None
    try:
        policy = cast("TrainingClient", outline_of(stages, index, False))
        check_rows(
            Prepared(plan, ProblemSet(rows), None, None),
            policy,
            stage_renderer(policy, plan.settings),
        )
    except FaultyRows as error:
        return error
    except (
        ValueError,
        OSError,
    ):  # something else is wrong besides, which is told when the rows are mended
        return None
    return None


def rehearse(stages: Sequence[StagePlan], prepared: Sequence[Prepared], after: int) -> None:
    """UserError, naming the stage, where one after stage number `after` could not begin."""
    for index in range(after + 1, len(stages)):
        plan, ready = stages[index], prepared[index]
        try:
            policy = outline_of(stages, index, METHODS[plan.method].value_head(plan.settings))
            _check_adapter(plan.settings.model, _root(stages, index)[0])
            renderer = stage_renderer(cast("TrainingClient", policy), plan.settings)
            tags = ready.rows.tags if ready.rows is not None else []
            METHODS[plan.method].other_models(plan.settings, _Hosts(stages, index, policy, tags))
            check_rows(ready, cast("TrainingClient", policy), renderer)
        except ValueError as error:
            raise UserError(f"stage {plan.name}, before anything was trained: {error}") from error
