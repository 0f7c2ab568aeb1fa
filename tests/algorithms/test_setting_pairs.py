"""Test pairs of settings: updates for each row of a table, each against float64 formulas.

The table is correction x normalisation x arrival of the batch x loss and baseline. The reference
uses none of the project's code for credit, corrections, losses and divisors: it reads the groups,
takes logprobs from a float64 copy of the weights that were saved before the update, and computes
loss and gradient with autograd.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from algorithm_helpers import make_method, off_the_policy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl import ServiceClient
from rl.algorithms import Models, Progress, StreamedStep
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence

MAX_TOKENS, GROUPS, MEMBERS, TEMPERATURE = 6, 4, 3, 0.8
CORRECTIONS = {
    "none": ("none", "token", 0.0, 2.0), "truncate-token": ("truncate", "token", 0.8, 1.2),
    "truncate-sequence": ("truncate", "sequence", 0.0, 1.5),
    "icepop-token": ("icepop", "token", 0.75, 1.35),
    "icepop-sequence": ("icepop", "sequence", 0.3, 3.0),
    "mask-token": ("mask", "token", 0.75, 1.35), "mask-sequence": ("mask", "sequence", 0.5, 2.0),
    "mask-geometric": ("mask", "geometric", 0.85, 1.2),
}  # fmt: skip
NORMALISATIONS = ("tokens", "sequences", "sequence_means", "constant", "sum")
# "late": tokens of older versions, ratios by their age or against the learner
ROLLOUTS = ("whole", "parts", "late", "late-learner")
LOSSES = {
    "ppo-mean": ("ppo", "mean"),
    "ppo-mean_std": ("ppo", "mean_std"),
    "importance_sampling-leave_one_out": ("importance_sampling", "leave_one_out"),
    "importance_sampling-running_mean": ("importance_sampling", "running_mean"),
    "cispo-batch": ("cispo", "batch"),
    "gspo-mean": ("gspo", "mean"),
}
OF_THE_WHOLE_BATCH = ("running_mean", "batch")
Row = tuple[str, str, str, str]


def valid(row: Row) -> bool:
    correction, _, rollouts, loss = row
    if rollouts == "parts" and LOSSES[loss][1] in OF_THE_WHOLE_BATCH:
        return False
    # the age of tokens replaces a correction
    return not (rollouts == "late" and correction != "none")


TABLE = [
    row for row in itertools.product(CORRECTIONS, NORMALISATIONS, ROLLOUTS, LOSSES) if valid(row)
]


def cover_pairs(table: list[Row], seed: int = 0) -> list[Row]:
    """Return rows that cover every pair of values of two columns, chosen greedily."""

    def pairs(row: Row) -> set:
        return {((i, row[i]), (j, row[j])) for i, j in itertools.combinations(range(len(row)), 2)}

    shuffled = {row: pairs(row) for row in random.Random(seed).sample(table, len(table))}
    missing, chosen = set().union(*shuffled.values()), []
    while missing:
        best = max(shuffled, key=lambda row: len(shuffled[row] & missing))
        chosen.append(best)
        missing -= shuffled[best]
    return chosen


def method_of(row: Row):
    correction, normalise, rollouts, loss = row
    kind, level, low, high = CORRECTIONS[correction]
    flat = {
        "loss": LOSSES[loss][0], "advantage": LOSSES[loss][1], "normalise": normalise,
        "group_size": MEMBERS, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE,
        "batch_size": GROUPS, "steps": 2, "learning_rate": 1e-3, "adam_eps": 1e-3, "kl_coef": 0.0,
    }  # fmt: skip
    if kind != "none":
        flat |= {
            "correction": kind, "correction_level": level, "correction_low": low,
            "correction_high": high,
        }  # fmt: skip
    flat |= {"stream_minibatches": 2} if rollouts == "parts" else {}
    flat |= {"max_steps_off_policy": 2} if rollouts.startswith("late") else {}
    proximal = {"late": "interpolated", "late-learner": "learner"}
    flat |= {"proximal": proximal[rollouts]} if rollouts in proximal else {}
    return make_method(**flat)


def groups_of(rng: np.random.Generator, version: int, late: bool) -> list[TrajectoryGroup]:
    """Return episodes of 1 to 3 turns; all members of the second group have equal rewards."""
    groups = []
    for problem in range(GROUPS):
        members = []
        for _ in range(MEMBERS):
            seen, turns = rng.integers(0, 12, 2).tolist(), []
            for _ in range(int(rng.integers(1, 4))):
                tokens = rng.integers(0, 12, int(rng.integers(1, MAX_TOKENS + 1))).tolist()
                drew = [version] * len(tokens)
                if late:
                    oldest = max(0, version - 2)
                    drew = np.sort(rng.integers(oldest, version + 1, len(tokens))).tolist()
                options = {"temperature": TEMPERATURE, "version": min(drew), "versions": drew}
                action = SampledSequence(tokens, [0.0] * len(tokens), "stop", **options)
                turns.append(Transition(ModelInput.from_ints(list(seen)), action, 0.0, False))
                goes_on = rng.random() < 0.6
                seen = [*seen, *tokens, 12] if goes_on else rng.integers(0, 12, 3).tolist()
            turns[-1].episode_done = True
            turns[-1].reward = 1.0 if problem == 1 else float(rng.integers(0, 4))
            members.append(Trajectory(turns))
        final = [0.0] * MEMBERS
        groups.append(TrajectoryGroup(members, final, [{}] * MEMBERS, problem_index=problem))
    return groups


# ------------------------------------------------------------------------------------ the reference


@dataclass
class Text:
    """A training text. Lists hold a number per action, in the order of the text."""

    tokens: list[int] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)  # positions in `tokens`
    columns: dict[str, list] = field(default_factory=lambda: {"q": [], "versions": []})

    def tensor(self, name: str) -> torch.Tensor:
        return torch.tensor(self.columns[name], dtype=torch.float64)


def texts_of(trajectory: Trajectory) -> tuple[list[Text], list[tuple[int, int]]]:
    """Return the texts of an episode, and (text, index) of each action by turns."""
    texts: list[Text] = []
    order = []
    for turn in trajectory.transitions:
        observation = turn.ob.to_ints()
        fitting = [i for i, s in enumerate(texts) if observation[: len(s.tokens)] == s.tokens]
        index = max(fitting, key=lambda i: len(texts[i].tokens), default=len(texts))
        if index == len(texts):
            texts.append(Text())
        text = texts[index]
        order += [(index, len(text.actions) + k) for k in range(len(turn.ac.tokens))]
        text.actions += range(len(observation), len(observation) + len(turn.ac.tokens))
        text.tokens = [*observation, *turn.ac.tokens]
        text.columns["q"] += np.float32(turn.ac.logprobs).astype(np.float64).tolist()
        text.columns["versions"] += turn.ac.versions or []
    return texts, order


class Baseline:
    """The reference's advantages; the running mean carries over between batches."""

    def __init__(self, kind: str):
        self.kind, self.mean = kind, None

    def __call__(self, rewards_P_G: np.ndarray) -> np.ndarray:
        centred = rewards_P_G - rewards_P_G.mean(1, keepdims=True)
        match self.kind:
            case "mean":
                return centred
            case "mean_std":
                return centred / (rewards_P_G.std(1, keepdims=True) + 1e-6)
            case "leave_one_out":
                return centred * MEMBERS / (MEMBERS - 1)
            case "batch":
                return (rewards_P_G - rewards_P_G.mean()) / (rewards_P_G.std() + 1e-8)
        before = rewards_P_G.mean() if self.mean is None else self.mean
        self.mean = 0.9 * before + 0.1 * rewards_P_G.mean()
        return rewards_P_G - before


def expected(model, groups, row: Row, baseline: Baseline, version: int) -> dict[str, float]:
    """Return loss and gradient norm of the whole batch, in float64."""
    correction, normalise, rollouts, loss_name = row
    kind, level, low, high = CORRECTIONS[correction]
    loss = LOSSES[loss_name][0]
    rewards = [[sum(t.reward for t in m.transitions) for m in g.trajectories_G] for g in groups]
    advantages = baseline(np.array(rewards))
    compares = baseline.kind not in OF_THE_WHOLE_BATCH
    total, kept_tokens, kept_episodes = torch.zeros((), dtype=torch.float64), 0, 0.0
    for group, advantages_G in zip(groups, advantages, strict=True):
        if compares and not advantages_G.any():
            continue
        for member, advantage in zip(group.trajectories_G, advantages_G, strict=True):
            parts, _ = texts_of(member)
            lp, q = [], [part.tensor("q") for part in parts]
            for part in parts:
                read = torch.tensor([part.tokens[:-1]])
                logits = model(input_ids=read, use_cache=False).logits[0] / TEMPERATURE
                at = torch.tensor(part.actions) - 1
                lp.append(logits.log_softmax(-1)[at, torch.tensor(part.tokens)[at + 1]])
            gaps = [(a.detach() - b) for a, b in zip(lp, q, strict=True)]
            whole = torch.cat(gaps)
            level_gap = {"token": None, "sequence": whole.sum(), "geometric": whole.mean()}[level]
            at_level = [gap if level_gap is None else level_gap.expand_as(gap) for gap in gaps]
            ratios = [gap.exp() for gap in at_level]
            inside = [(ratio >= low) & (ratio <= high) for ratio in ratios]
            weights = [torch.ones_like(gap) for gap in gaps]
            keeps = [torch.ones_like(gap, dtype=torch.bool) for gap in gaps]
            if kind == "truncate":
                weights = [ratio.clamp(low, high) for ratio in ratios]
            if kind == "icepop":
                weights = [ratio * ok for ratio, ok in zip(ratios, inside, strict=True)]
            if kind == "mask":
                keeps = inside
            tokens = int(sum(keep.sum() for keep in keeps))
            kept_tokens, kept_episodes = kept_tokens + tokens, kept_episodes + (tokens > 0)
            loss_sum = torch.zeros((), dtype=torch.float64)
            for part, a, b, weight, keep in zip(parts, lp, q, weights, keeps, strict=True):
                is_learner = kind in ("truncate", "icepop") or rollouts == "late-learner"
                against = a.detach() if is_learner else b
                if rollouts == "late":
                    age = version - part.tensor("versions")
                    against = b + age / (age + 1) * (a.detach() - b)
                a, against, weight = a[keep], against[keep], weight[keep]
                credit = advantage * weight
                ratio = (a - against).exp()
                if loss == "gspo" and len(a):
                    ratio = (a - against).mean().exp().detach() * (a - a.detach()).exp()
                clipped = ratio.clamp(0.8, 1.2)
                if loss in ("ppo", "gspo"):
                    loss_sum = loss_sum - torch.minimum(ratio * credit, clipped * credit).sum()
                elif loss == "cispo":
                    loss_sum = loss_sum - (clipped.detach() * a * credit).sum()
                else:
                    loss_sum = loss_sum - (ratio * credit).sum()
            total = total + loss_sum / (max(1, tokens) if normalise == "sequence_means" else 1)
    divisor = {
        "tokens": kept_tokens, "sum": 1, "sequences": kept_episodes,
        "sequence_means": kept_episodes, "constant": kept_episodes * MAX_TOKENS,
    }[normalise]  # fmt: skip
    model.zero_grad()
    (total / divisor).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    shown = kept_episodes if normalise == "sequence_means" else kept_tokens
    return {
        "optim/grad_norm": float(norm),
        "optim/policy_loss": float(total.detach()) / shown,
        "optim/tokens": kept_tokens,
    }


# ---------------------------------------------------------------------------------------- the table


@pytest.fixture(scope="module")
def policy_at(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=1) as service:
        policy = service.create_full_training_client("tiny:addition-small", seed=1)
        groups = groups_of(np.random.default_rng(99), 0, False)
        off_the_policy(policy, groups, np.random.default_rng(98))
        method = method_of(("none", "tokens", "whole", "ppo-mean"))
        for batch in range(3):  # versions 0 to 2 precede it
            datums = method.compute_advantages(groups, Models(policy))
            method.update(Models(policy), datums, Progress(batch, 2))
        path = policy.save_state("beginning").result().path
        model = AutoModelForCausalLM.from_pretrained(f"{path}/model", dtype=torch.float32)
        yield policy, path, model.double()


def update_batches(policy_at, row: Row, folder, batches: int, seed: int = 5) -> None:
    policy, path, model = policy_at
    policy.load_state_with_optimizer(path).result()
    method, models, baseline = method_of(row), Models(policy), Baseline(LOSSES[row[3]][1])
    weights = f"{path}/model"
    for batch in range(batches):
        version, rng = policy.version, np.random.default_rng([seed, batch])
        groups = groups_of(rng, version, row[2].startswith("late"))
        off_the_policy(policy, groups, rng)
        if batch:
            future = policy.save_weights_for_sampler(f"{folder.name}-{batch}", ttl_seconds=600)
            weights = future.result().path
        model.load_state_dict(load_file(f"{weights}/model.safetensors"), strict=False)
        model.tie_weights()
        if row[2] == "parts":
            step = StreamedStep(method, models, Progress(0, 1))
            step.add(groups[: GROUPS // 2])
            step.add(groups[GROUPS // 2 :])
            metrics = step.finish()
        else:
            datums = method.compute_advantages(groups, models)
            metrics = method.update(models, datums, Progress(0, 1))
        target = expected(model, groups, row, baseline, version)
        results = {name: metrics[name] for name in target}
        assert results == pytest.approx(target, rel=3e-4, abs=1e-6), (row, batch)


@pytest.mark.parametrize("row", cover_pairs(TABLE), ids="/".join)
def test_an_update_of_every_pair_of_settings(policy_at, row, tmp_path):
    # the running mean carries over to the second batch
    update_batches(policy_at, row, tmp_path, 2 if "running_mean" in row[3] else 1)


@pytest.mark.campaign
@pytest.mark.parametrize("row", TABLE, ids="/".join)
def test_two_updates_of_the_whole_table(policy_at, row, tmp_path):
    update_batches(policy_at, row, tmp_path, 2, seed=6)
