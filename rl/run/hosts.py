"""The models of a stage: its policy, and those that its method needs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rl.clients import SamplingClient, ServiceClient, TrainingClient
from rl.errors import UserError
from rl.judges import (
    BaseScorer,
    ComparedInGroup,
    ComparisonModel,
    FrozenScorer,
    LearnedRewards,
    PublishedRewardModel,
    RewardModel,
    Rubric,
    RubricJudge,
    TokenScorer,
    WeightedRewardModels,
    shares_vocabulary,
)
from rl.models import PARTS, classifier_config, is_adapter
from rl.ranks import checkpoint
from rl.renderers import Renderer, StopsAt, get_renderer
from rl.run.origins import origin_of, weights_folder
from rl.run.reopen import Weights, open_weights
from rl.seeds import derive_seed
from rl.settings import LearnedRewardSettings, ModelSettings


def make_policy(
    service: ServiceClient,
    model: ModelSettings,
    previous: str | None,
    resume_from: str | None,
    seed: int,
    *,
    value_head: bool = False,
) -> TrainingClient:
    """The learner of a stage: resumed, from `previous` (the final checkpoint of the stage before),
    or from its base model.
    """
    if resume_from is not None:
        return service.create_training_client_from_state_with_optimizer(resume_from)
    origin = origin_of(model, previous)
    if origin.continued is not None:
        return service.create_training_client_from_state(
            origin.continued, value_head=value_head, base_dtype=model.base_dtype
        )
    base = origin.base
    weights_seed = derive_seed(seed, "weights") % 2**31
    if model.lora_rank == 0:
        return service.create_full_training_client(
            base, tokenizer=model.tokenizer, seed=weights_seed, value_head=value_head
        )
    return service.create_lora_training_client(
        base,
        rank=model.lora_rank,
        seed=derive_seed(seed, "adapter") % 2**31,
        **{part: getattr(model, part) for part in PARTS},
        alpha=model.lora_alpha,
        tokenizer=model.tokenizer,
        model_seed=weights_seed,
        value_head=value_head,
        base_dtype=model.base_dtype,
    )


class StageHosts:
    """See rl.methods.base.Hosts. `previous`: the checkpoint that the stage began from; `earlier`:
    final checkpoints by stage.
    """

    def __init__(
        self,
        service: ServiceClient,
        policy: TrainingClient,
        model: ModelSettings,
        previous: str | None,
        earlier: Mapping[str, str],
        seed: int,
        resume_from: str | None = None,
        tags: Sequence[str] = (),
    ):
        self.service, self.policy, self.model, self.previous, self.earlier, self.seed = (
            service,
            policy,
            model,
            previous,
            earlier,
            seed,
        )
        self.resume_from, self.tags = resume_from, tags

    def beginning(self) -> TokenScorer:
        """The same whether the stage begins or is resumed: the policy itself is not asked, but what
        it was made from.
        """
        origin, model = origin_of(self.model, self.previous), self.model
        if origin.continued is not None:
            return FrozenScorer(self.service.create_sampling_client(model_path=origin.continued))
        if model.lora_rank:
            return BaseScorer(self.policy)
        if self.previous is not None and not is_adapter(origin.base):
            return FrozenScorer(self.service.create_sampling_client(model_path=self.previous))
        seed = derive_seed(self.seed, "weights") % 2**31
        return FrozenScorer(
            self.service.create_sampling_client(
                base_model=origin.base, tokenizer=model.tokenizer, seed=seed
            )
        )

    def load(self, target: str) -> SamplingClient:
        if target in self.earlier:
            return self.service.create_sampling_client(model_path=self.earlier[target])
        if self.policy.info["lora_rank"] and self.policy.info["base_model"] == target:
            return self.policy.get_base_sampling_client()  # it is there already, under the adapter
        return open_weights(target).sampler(self.service)

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, LearnedRewards]:
        if learned.comparison_model is not None:
            judge = self.load(learned.comparison_model)
            renderer = make_renderer(judge, *self.renderer_of(learned.comparison_model))
            scorer: Any = ComparedInGroup(ComparisonModel(judge, renderer))
        elif learned.rubric_model is not None:
            judge = self.load(learned.rubric_model)
            named, template = self.renderer_of(learned.rubric_model)
            renderer = make_renderer(
                judge, learned.rubric_renderer or named, () if learned.rubric_renderer else template
            )
            scorer = RubricJudge(
                judge, renderer, rubric_of(learned), derive_seed(self.seed, "rubric")
            )
        elif learned.reward_models:
            scorer = WeightedRewardModels(
                [(name, self._reward_model(name), weight) for name, weight in learned.reward_models]
            )
        elif learned.reward_model is not None:
            scorer = self._reward_model(learned.reward_model)
        else:
            return {}
        return {"rewards": LearnedRewards(scorer, learned.other_reward_weight)}

    def _reward_model(self, target: str) -> RewardModel | PublishedRewardModel:
        found = None if target in self.earlier else open_weights(target)
        if found is not None and is_published(found):
            return PublishedRewardModel(self.service.create_classifier_client(target), target)
        if found is not None and found.stage is not None and found.stage.method != "reward_model":
            made = found.stage.method
            raise UserError(
                f"{target} is no reward model: {made} trained it, whose value head foretells its own policy's rewards"
            )
        path = Path(self.earlier[target]) if found is None else found.path
        if (
            path is None
            or not (path / "state.json").is_file()
            or not checkpoint.read_state(path)["spec"].get("value_head")
        ):
            raise UserError(
                f"{target} is no reward model: it is no ...ForSequenceClassification with one output, and has no value head that "
                "train.py reward_model trained. Train one so, or take a published one; a language model can judge as well, with "
                "--comparison-model"
            )
        client = self.service.create_training_client_from_state(str(path))
        same = shares_vocabulary(self.policy, client, f"reward model {target}")
        return RewardModel(
            client, target, make_renderer(client, *self.renderer_of(target)), shares_vocabulary=same
        )

    def renderer_of(self, target: str) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        """The renderer (None: the default) and template settings that a stage was trained with, so
        that its model reads what it learnt.
        """
        found = open_weights(self.earlier.get(target, target))
        return (
            (None, ())
            if found.stage is None
            else (found.stage.settings.data.renderer, found.stage.settings.data.template)
        )

    def critic(self, base_model: str) -> TrainingClient:
        if self.resume_from is not None:
            return self.service.create_training_client_from_state_with_optimizer(
                str(Path(self.resume_from) / "critic")
            )
        if base_model == "policy":
            return make_policy(
                self.service, self.model, self.previous, None, self.seed, value_head=True
            )
        return make_policy(
            self.service,
            replace(self.model, base_model=weights_folder(base_model)),
            None,
            None,
            self.seed,
            value_head=True,
        )


def is_published(weights: Weights) -> bool:
    """Return whether these are a published reward model: not of a run here, and a sequence
    classifier. Raises UserError as it does.
    """
    if weights.path is not None and (weights.path / "state.json").is_file():
        return False
    return (
        classifier_config(weights.name if weights.path is None else str(weights.path)) is not None
    )


def rubric_of(learned: LearnedRewardSettings) -> Rubric:
    """The rubric that the settings say."""
    return Rubric.of(
        learned.rubric,
        learned.rubric_reading,
        scale=learned.rubric_scale,
        max_tokens=learned.rubric_max_tokens,
    )


def make_renderer(
    client: TrainingClient | SamplingClient,
    asked: str | None,
    template: Sequence[tuple[str, str]] = (),
    stop: Sequence[str] = (),
) -> Renderer:
    """The renderer asked for by name; else the model's own chat template, or plain text where its
    tokenizer has none.

    `template`: settings of that template, as they were written. `stop`: texts that end an answer.
    """
    tokenizer = client.get_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{client.info['base_model']} has no tokenizer: name one with --tokenizer, or put it into the folder"
        )
    settings: dict[str, Any] = {
        name: yaml.safe_load(value) if value.strip() else value for name, value in template
    }
    renderer = get_renderer(
        asked or ("chat_template" if tokenizer.chat_template else "plain"), tokenizer, **settings
    )
    return StopsAt(renderer, stop) if stop else renderer


def stage_renderer(client: TrainingClient | SamplingClient, settings: Any) -> Renderer:
    """The renderer of a stage, by its settings."""
    return make_renderer(
        client, settings.data.renderer, settings.data.template, settings.sampling.stop
    )
