"""The methods by name: settings, a line of summary, and where the hooks are."""

from __future__ import annotations

from rl.methods import best_of_n, distill, dpo, grpo, kto, offline, online_dpo, ppo, reward_model, rlhf, without_reference
from rl.methods.distill_settings import DistillSettings, named_teachers, reads
from rl.methods.grpo import PolicyGradient
from rl.methods.grpo_settings import VARIANTS, GrpoSettings
from rl.methods.offline_settings import OfflineSettings
from rl.methods.own import Methods
from rl.methods.ppo_settings import PpoSettings
from rl.methods.reinforce import ReinforceSettings
from rl.methods.sft import Sft, SftSettings
from rl.methods.spec import MethodSpec

METHODS: dict[str, MethodSpec] = Methods({
    "grpo": MethodSpec(
        GrpoSettings,
        "RL: a group of answers to each problem, each credited against its group",
        PolicyGradient,
        clients=grpo.clients,
        weights=grpo.weights,
        keeps_beginning=grpo.keeps_beginning,
        variants=VARIANTS,
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
        PpoSettings,
        "RL: several clipped epochs a batch, each token credited against a learned value",
        ppo.Ppo,
        clients=ppo.clients,
        weights=ppo.weights,
        value_head=ppo.has_value_head,
        critic=lambda settings: settings.ppo.critic_model,
        keeps_beginning=ppo.keeps_beginning,
    ),
    "online_dpo": MethodSpec(
        online_dpo.OnlineDpoSettings,
        "RL: the better of one's own answers against the worse, by DPO's loss",
        online_dpo.OnlineDpo,
        clients=online_dpo.clients,
        weights=online_dpo.weights,
        keeps_beginning=dpo.keeps_beginning,
    ),
    "best_of_n": MethodSpec(
        best_of_n.BestOfNSettings,
        "RL: fine-tune on the best of several answers to each problem (rejection sampling)",
        best_of_n.BestOfN,
        clients=best_of_n.clients,
        weights=lambda settings: settings.learned.named,
    ),
    "sft": MethodSpec(
        SftSettings,
        "supervised fine-tuning on worked responses, conversations or plain texts",
        Sft,
        reads=lambda settings: ("response",),
        needs_reward=False,
        ranks_held_out=True,
        ranks_where_there=True,
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
    "orpo": MethodSpec(
        without_reference.OrpoSettings,
        "preferences: the preferred answer's likelihood and the odds against the other, without a reference",
        without_reference.WithoutReference,
        reads=lambda settings: ("response", "rejected"),
        needs_reward=False,
        ranks_held_out=True,
    ),
    "simpo": MethodSpec(
        without_reference.SimpoSettings,
        "preferences: by mean logprobs and a margin, without a reference",
        without_reference.WithoutReference,
        reads=lambda settings: ("response", "rejected"),
        needs_reward=False,
        ranks_held_out=True,
    ),
    "kto": MethodSpec(
        kto.KtoSettings,
        "answers that are good or bad, without pairs",
        kto.Kto,
        reads=lambda settings: ("response",),
        needs_reward=False,
        ranks_held_out=True,
        clients=kto.clients,
        keeps_beginning=lambda settings: True,
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
        OfflineSettings,
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
        DistillSettings,
        "learn to answer as a teacher does, from one's own answers or the teacher's",
        distill.Distill,
        reads=reads,
        needs_reward=False,
        clients=distill.clients,
        weights=lambda settings: list(named_teachers(settings).values()),
    ),
})
