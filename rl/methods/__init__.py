"""The methods by name: settings, a line of summary, and where the hooks are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.methods import distill, dpo, grpo, offline, ppo, reward_model, rlhf
from rl.methods.base import Hosts
from rl.methods.grpo import GrpoSettings, PolicyGradient
from rl.methods.reinforce import ReinforceSettings
from rl.methods.sft import Sft, SftSettings


def _samples(settings: Any) -> tuple[str, ...]:
    return ()


def _no_clients(settings: Any, hosts: Hosts) -> dict[str, Any]:
    return {}


def _no_weights(settings: Any) -> list[str]:
    return []


def _never(settings: Any) -> bool:
    return False


def _no_remark(settings: Any, problems: Any) -> str | None:
    return None


def _no_critic(settings: Any) -> str | None:
    return None


@dataclass(frozen=True)
class MethodSpec:
    """settings: the dataclass the command line reads. summary: one line. hooks: makes the method from its settings.

    reads: which answers of a row (fields of Problem) it learns from under given settings; none where it samples its own.
    needs_reward: whether it cannot learn without. ranks_held_out: whether it reads those answers of held-out rows, too.
    clients: makes the other models it needs, `Models.others`. weights: names of weights that these are loaded from.
    value_head: whether the policy has a value head under given settings. critic: what `Hosts.critic` is asked for, None for nothing.
    keeps_beginning: whether it scores with the policy as it was before the stage (`Hosts.beginning`).
    remark: what its reader should know of the training data that was found.
    variants: by the value of its setting `variant`, the flat settings that this stands for where they are not given.
    """

    settings: type
    summary: str
    hooks: Callable[[Any], Any]
    reads: Callable[[Any], tuple[str, ...]] = _samples
    needs_reward: bool = True
    ranks_held_out: bool = False
    clients: Callable[[Any, Hosts], dict[str, Any]] = _no_clients
    weights: Callable[[Any], list[str]] = _no_weights
    value_head: Callable[[Any], bool] = _never
    critic: Callable[[Any], str | None] = _no_critic
    keeps_beginning: Callable[[Any], bool] = _never
    remark: Callable[[Any, Any], str | None] = _no_remark
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


METHODS: dict[str, MethodSpec] = {
    "grpo": MethodSpec(
        GrpoSettings,
        "RL: a group of answers to each problem, each credited against its group",
        PolicyGradient,
        clients=grpo.clients,
        weights=grpo.weights,
        keeps_beginning=grpo.keeps_beginning,
        variants=grpo.VARIANTS,
    ),
    "reinforce": MethodSpec(
        ReinforceSettings,
        "RL: one answer to each problem, credited against a running mean",
        PolicyGradient,
        clients=grpo.clients,
        weights=grpo.weights,
        keeps_beginning=grpo.keeps_beginning,
    ),
    "ppo": MethodSpec(
        ppo.PpoSettings,
        "RL: several clipped epochs a batch, each token credited against a learned value",
        ppo.Ppo,
        clients=ppo.clients,
        weights=ppo.weights,
        value_head=ppo.has_value_head,
        critic=lambda settings: settings.ppo.critic_model,
        keeps_beginning=ppo.keeps_beginning,
    ),
    "sft": MethodSpec(
        SftSettings, "supervised fine-tuning on worked responses", Sft, reads=lambda settings: ("response",), needs_reward=False
    ),
    "dpo": MethodSpec(
        dpo.DpoSettings,
        "preferences: learn which of two answers is preferred, without a reward",
        dpo.Dpo,
        reads=lambda settings: ("response", "rejected"),
        needs_reward=False,
        ranks_held_out=True,
        clients=dpo.clients,
        weights=dpo.weights,
        keeps_beginning=dpo.keeps_beginning,
    ),
    "reward_model": MethodSpec(
        reward_model.RewardModelSettings,
        "preferences: train a model that tells which of two answers is preferred",
        reward_model.BradleyTerry,
        reads=lambda settings: ("response", "rejected"),
        needs_reward=False,
        ranks_held_out=True,
        value_head=reward_model.has_value_head,
    ),
    "rlhf": MethodSpec(
        rlhf.RlhfSettings,
        "RL: ppo on the scores of a reward model",
        ppo.Ppo,
        needs_reward=False,
        clients=ppo.clients,
        weights=rlhf.weights,
        value_head=ppo.has_value_head,
        critic=lambda settings: settings.ppo.critic_model,
        keeps_beginning=ppo.keeps_beginning,
    ),
    "offline": MethodSpec(
        offline.OfflineSettings,
        "learn from stored answers and their rewards, without sampling",
        offline.Offline,
        reads=lambda settings: ("answers",),
        needs_reward=False,
        clients=offline.clients,
        value_head=offline.has_value_head,
        keeps_beginning=lambda settings: settings.offline.needs_behaviour,
        remark=offline.remark,
    ),
    "distill": MethodSpec(
        distill.DistillSettings,
        "learn to answer as a teacher does, from one's own answers or the teacher's",
        distill.Distill,
        reads=distill.reads,
        needs_reward=False,
        clients=distill.clients,
        weights=lambda settings: list(distill.named_teachers(settings).values()),
    ),
}
