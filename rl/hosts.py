"""The models of a stage: its policy, and those that its method needs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl import checkpoint
from rl.comparison import ComparisonModel
from rl.errors import UserError
from rl.learned_rewards import ComparedInGroup, LearnedRewards, RewardModel
from rl.renderers import Renderer, get_renderer
from rl.reopen import open_weights
from rl.sampling_client import SamplingClient
from rl.scoring import BaseScorer, FrozenScorer, TokenScorer, check_vocabulary
from rl.seeds import derive_seed
from rl.service import ServiceClient
from rl.settings import LearnedRewardSettings, ModelSettings
from rl.training_client import TrainingClient


def make_policy(
    service: ServiceClient, model: ModelSettings, previous: str | None, resume_from: str | None, seed: int, *, value_head: bool = False
) -> TrainingClient:
    """The learner of a stage: resumed, from `previous` (the final checkpoint of the stage before), or from its base model."""
    if resume_from is not None:
        return service.create_training_client_from_state_with_optimizer(resume_from)
    base = model.base_model
    if previous is not None:
        base = str(Path(previous) / "model")
        if (Path(base) / "adapter_config.json").is_file():
            _check_adapter(previous, model)
            return service.create_training_client_from_state(previous, value_head=value_head)  # an adapter: go on with it
    weights_seed = derive_seed(seed, "weights") % 2**31
    if model.lora_rank == 0:
        return service.create_full_training_client(base, tokenizer=model.tokenizer, seed=weights_seed, value_head=value_head)
    return service.create_lora_training_client(
        base,
        rank=model.lora_rank,
        seed=derive_seed(seed, "adapter") % 2**31,
        train_mlp=model.train_mlp,
        train_attn=model.train_attn,
        train_unembed=model.train_unembed,
        alpha=model.lora_alpha,
        tokenizer=model.tokenizer,
        model_seed=weights_seed,
        value_head=value_head,
    )


def _check_adapter(previous: str, model: ModelSettings) -> None:
    """A stage goes on with the adapter of the stage before; one that asks for another shape must not be told nothing."""
    saved = checkpoint.read_state(Path(previous))["spec"]["lora"]
    asked = {"rank": model.lora_rank, "alpha": model.lora_alpha}
    asked |= {name: getattr(model, name) for name in ("train_attn", "train_mlp", "train_unembed")}
    changed = [f"{name} {saved[name]} -> {value}" for name, value in asked.items() if saved[name] != value]
    if changed:
        raise UserError(
            f"the stage before trained a LoRA adapter, which this stage goes on with, but it asks for another: {', '.join(changed)}. "
            "Set the lora settings at the recipe's top level, for all stages"
        )


class StageHosts:
    """See rl.methods.base.Hosts. `previous`: the checkpoint that the stage began from; `earlier`: final checkpoints by stage."""

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
        self.service, self.policy, self.model, self.previous, self.earlier, self.seed = service, policy, model, previous, earlier, seed
        self.resume_from, self.tags = resume_from, tags

    def beginning(self) -> TokenScorer:
        """The same whether the stage begins or is resumed: the policy itself is not asked, but what it was made from."""
        adapter_before = self.previous is not None and (Path(self.previous) / "model" / "adapter_config.json").is_file()
        if self.model.lora_rank and not adapter_before:
            return BaseScorer(self.policy)
        if self.previous is not None:
            return FrozenScorer(self.service.create_sampling_client(model_path=self.previous))
        model = self.model
        seed = derive_seed(self.seed, "weights") % 2**31
        return FrozenScorer(self.service.create_sampling_client(base_model=model.base_model, tokenizer=model.tokenizer, seed=seed))

    def load(self, target: str) -> SamplingClient:
        if target in self.earlier:
            return self.service.create_sampling_client(model_path=self.earlier[target])
        if self.policy.info["lora_rank"] and self.policy.info["base_model"] == target:
            return self.policy.get_base_sampling_client()  # it is there already, under the adapter
        return open_weights(target).sampler(self.service)

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, LearnedRewards]:
        if learned.comparison_model is not None:
            judge = self.load(learned.comparison_model)
            scorer: Any = ComparedInGroup(ComparisonModel(judge, make_renderer(judge, None)))
        elif learned.reward_model is not None:
            scorer = self._reward_model(learned.reward_model)
        else:
            return {}
        return {"rewards": LearnedRewards(scorer, learned.other_reward_weight)}

    def _reward_model(self, target: str) -> RewardModel:
        found = None if target in self.earlier else open_weights(target)
        if found is not None and found.stage is not None and found.stage.method != "reward_model":
            made = found.stage.method
            raise UserError(f"{target} is no reward model: {made} trained it, whose value head foretells its own policy's rewards")
        path = Path(self.earlier[target]) if found is None else found.path
        if path is None or not (path / "state.json").is_file() or not checkpoint.read_state(path)["spec"].get("value_head"):
            raise UserError(
                f"{target} is no reward model: it was saved without a value head. Train one with train.py reward_model; a language "
                "model can judge as well, with --comparison-model"
            )
        client = self.service.create_training_client_from_state(str(path))
        check_vocabulary(self.policy, client, f"reward model {target}")
        return RewardModel(client, target)

    def critic(self, base_model: str) -> TrainingClient:
        if self.resume_from is not None:
            return self.service.create_training_client_from_state_with_optimizer(str(Path(self.resume_from) / "critic"))
        if base_model == "policy":
            return make_policy(self.service, self.model, self.previous, None, self.seed, value_head=True)
        return make_policy(self.service, replace(self.model, base_model=base_model), None, None, self.seed, value_head=True)


def make_renderer(client: TrainingClient | SamplingClient, asked: str | None) -> Renderer:
    """The renderer asked for by name; else the model's own chat template, or plain text where its tokenizer has none."""
    tokenizer = client.get_tokenizer()
    if tokenizer is None:
        raise UserError(f"{client.info['base_model']} has no tokenizer: name one with --tokenizer, or put it into the folder")
    return get_renderer(asked or ("chat_template" if tokenizer.chat_template else "plain"), tokenizer)
