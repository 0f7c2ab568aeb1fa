"""Test that GRPO's losses and gradients equal those of TRL's GRPOTrainer, for every loss type that
both have, and with a KL term.

    make campaign ARGS="--only grpo_losses_vs_trl"

TRL runs `GRPOTrainer.train()` from a folder of random weights (tiny:addition), fp32 on a CPU: it
samples a single batch and takes two optimizer steps on it. Whetstone gets the same weights and the
same completions, scores them itself (rewards, advantages, logprobs) and takes two steps by the
hooks of `grpo`. In the first step all ratios are 1. In the second step each side continues from its
first step, so that ratios differ from 1. `outside` is the share of tokens whose ratio lies outside
the clipping bounds. Both use AdamW (0.9, 0.95, eps 1e-8), no norm clipping and a single micro-batch
(over which TRL's bnpo takes its mean). Each row compares the loss, as TRL's `compute_loss` returns
it, and the gradient of all weights before each step.

Both sides center advantages by the group's mean and do not divide them by the standard deviation.
Both could divide: TRL by the sample's (n - 1) with 1e-4 added, Whetstone's `mean_std` by the
population's with 1e-6. The KL to the reference model is the loss term that both have: k3,
differentiated directly (Whetstone's `k3_pathwise`; TRL's with `use_bias_correction_kl` off).

A loss (relative, where above 1) and a gradient (the norm of the difference over TRL's norm) may
differ by at most 1e-4. With WHETSTONE_TABLES, a folder, each loss replaces its rows of
grpo_losses_vs_trl_cpu.csv there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.grpo_vs_trl import TRL_SETTINGS
from bench.harness import describe_machine, replace_rows

TOLERANCE = 1e-4
PROBLEMS, SAMPLES, MAX_TOKENS, STEPS, SEED = 8, 8, 6, 2, 0
LEARNING_RATE = 1e-3  # at which the second step clips
# TRL's settings, and Whetstone's settings of the same loss. TRL's epsilons are distances from 1,
# except for cispo, where epsilon_high is the largest ratio.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"normalise": "sequence_means"}),
    "grpo with KL": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
        {"normalise": "sequence_means", "kl_coef": 0.1},
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"normalise": "constant"}),
    "bnpo": ({"loss_type": "bnpo"}, {"normalise": "tokens"}),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"normalise": "tokens", "clip_high": 1.28},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        | {"epsilon": 0.1, "epsilon_high": 0.1},
        {"loss": "gspo", "normalise": "sequence_means", "clip_low": 0.9, "clip_high": 1.1},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"loss": "cispo", "normalise": "tokens", "clip_low": 0.0, "clip_high": 1.2},
    ),
}


@dataclass
class Steps:
    """Hold the loss, the gradient by parameter name and the share of ratios outside the bounds for
    each step of a side.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)

    def keep_gradients(self, parameters: Iterable[tuple[str, Any]]) -> None:
        self.gradients.append({name: p.grad.detach().clone() for name, p in parameters})


Completion = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a prompt and its response


def reward_of(text: str) -> float:
    """Return the share of even digits: random weights earn a reward between 0 and 1."""
    return sum(character in "02468" for character in text) / MAX_TOKENS


def run_trl(settings: dict[str, Any], model: Path, folder: Path) -> tuple[Steps, list[Completion]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps, drawn = Steps(), []

    class KeptTrainer(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            if not drawn:
                drawn.extend(_completions(inputs))
            loss = super()._compute_loss(model, inputs)
            steps.losses.append(float(loss.detach()))
            return loss

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **kwargs: Any) -> None:
            steps.keep_gradients(model.named_parameters())

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [reward_of(text) for text in completions]

    rows = [{"prompt": f"{10 + 9 * i}+{35 + 7 * i}="} for i in range(PROBLEMS)]
    config = GRPOConfig(
        **TRL_SETTINGS, output_dir=str(folder), max_steps=STEPS, seed=SEED,
        learning_rate=LEARNING_RATE, max_grad_norm=0.0,
        per_device_train_batch_size=PROBLEMS * SAMPLES, num_generations=SAMPLES,
        num_iterations=STEPS, max_completion_length=MAX_TOKENS,
        scale_rewards="none", **{"beta": 0.0, **settings},
    )  # fmt: skip
    trainer = KeptTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Gradients()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return steps, drawn


def _completions(inputs: dict[str, Any]) -> list[Completion]:
    """Convert TRL's padded batch to token ids."""
    sides = []
    for side in ("prompt", "completion"):
        pairs = zip(inputs[f"{side}_ids"], inputs[f"{side}_mask"], strict=True)
        sides.append([tuple(ids[mask.bool()].tolist()) for ids, mask in pairs])
    return list(zip(*sides, strict=True))


def run_whetstone(
    settings: dict[str, Any], model: Path, folder: Path, drawn: list[Completion]
) -> Steps:
    """Run the hooks of `grpo` on a real client and record what its worker computes."""
    from rl.algorithms import GRPO, GrpoSettings, Models, PolicyGradientSettings, Progress
    from rl.client import ServiceClient
    from rl.config import KlSettings, OptimSettings, SamplingSettings
    from rl.judges import FrozenScorer
    from rl.runtime import worker_group

    steps, execute = Steps(), worker_group._execute

    def noting(worker: Any, verb: str, arguments: Any) -> Any:
        if verb == "optim_step":
            steps.keep_gradients(worker.learners[0].trainable.items())
        result = execute(worker, verb, arguments)
        if verb == "forward_backward" and arguments[4]["backward"]:
            sums, options = result[1], arguments[4]
            steps.losses.append(sums["loss:sum"] / options["divisor"])
            clipped = sums["clipped_low:sum"] + sums["clipped_high:sum"]
            steps.outside.append(clipped / sums["active_tokens:sum"])
        return result

    loss = {"group_size": SAMPLES, "advantage": "mean", **settings}
    kl = {"kl_coef": loss.pop("kl_coef", 0.0), "kl_placement": "loss", "kl_kind": "k3_pathwise"}
    method = GRPO(
        GrpoSettings(
            sampling=SamplingSettings(temperature=1.0, max_tokens=MAX_TOKENS),
            policy_gradient=PolicyGradientSettings(**loss),
            kl=KlSettings(**kl),
            optim=OptimSettings(learning_rate=LEARNING_RATE, grad_clip_norm=0.0),
        )
    )
    worker_group._execute = noting
    try:
        with ServiceClient(output_dir=folder, seed=SEED) as service:
            reference = FrozenScorer(service.create_sampling_client(base_model=str(model)))
            policy = service.create_full_training_client(str(model))
            models = Models(policy, {"reference": reference})
            groups = method.shape_rewards(_groups(models.policy, drawn))
            datums = method.compute_advantages(groups, models)
            for step in range(STEPS):
                method.update(models, datums, Progress(step, STEPS))
    finally:
        worker_group._execute = execute
    return steps


def _groups(policy: Any, drawn: list[Completion]) -> list[Any]:
    """Build trajectory groups from the completions, scored and rewarded by Whetstone. Raises
    ValueError if a group is incomplete or has no signal.
    """
    from rl.rollout import Trajectory, TrajectoryGroup, Transition, is_mixed
    from rl.types import ModelInput, SampledSequence

    tokenizer, sampler = policy.get_tokenizer(), policy.save_weights_and_get_sampling_client()
    texts = [ModelInput.from_ints([*prompt, *response]) for prompt, response in drawn]
    logprobs = sampler.compute_logprobs_many(texts).result()
    members: dict[tuple[int, ...], list[Trajectory]] = {}
    for (prompt, response), scores in zip(drawn, logprobs, strict=True):
        action = SampledSequence(list(response), scores[len(prompt) :])
        reward = reward_of(tokenizer.decode(response, skip_special_tokens=True))
        transition = Transition(ModelInput.from_ints(list(prompt)), action, reward, True)
        members.setdefault(prompt, []).append(Trajectory([transition]))
    groups = [TrajectoryGroup(g, [0.0] * len(g), [{} for _ in g]) for g in members.values()]
    sizes = [len(group.trajectories_G) for group in groups]
    if sizes != [SAMPLES] * PROBLEMS or not all(map(is_mixed, groups)):
        raise ValueError("a group is not whole, or all members earn the same: take another SEED")
    return groups


def compare(name: str, ours: Steps, theirs: Steps) -> list[dict[str, Any]]:
    """Return a row for each step. Raises ValueError if the gradients are of different weights."""
    import torch

    rows = []
    for step in range(STEPS):
        mine, other = ours.gradients[step], theirs.gradients[step]
        if mine.keys() != other.keys():
            raise ValueError(f"gradients of other weights: {sorted(mine.keys() ^ other.keys())}")
        a, b = (torch.cat([side[key].double().flatten() for key in mine]) for side in (mine, other))
        loss, trl_loss = ours.losses[step], theirs.losses[step]
        row = {"loss_type": name, "step": step}
        row |= {"whetstone_loss": round(loss, 7) + 0.0, "trl_loss": round(trl_loss, 7) + 0.0}
        row |= {"loss_difference": f"{abs(loss - trl_loss) / max(1.0, abs(trl_loss)):.1e}"}
        row |= {"gradient_norm": f"{float(b.norm()):.6g}"}
        row |= {"gradient_difference": f"{float((a - b).norm() / b.norm()):.1e}"}
        rows.append({**row, "outside": round(ours.outside[step], 3)})
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of random weights and its tokenizer."""
    from rl.models import load_model

    folder = tmp_path_factory.mktemp("model")
    loaded = load_model("tiny:addition", seed=SEED)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.campaign
@pytest.mark.extras
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_equal_those_of_trl(loss: str, model: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    trl_settings, own_settings = LOSSES[loss]
    theirs, drawn = run_trl(trl_settings, model, tmp_path / "trl")
    ours = run_whetstone(own_settings, model, tmp_path / "whetstone", drawn)
    about = {"trl": trl.__version__, "torch": torch.__version__, "machine": describe_machine()}
    about["command"] = 'make campaign ARGS="--only grpo_losses_vs_trl"'
    rows = [{**row, **about} for row in compare(loss, ours, theirs)]
    if folder := os.environ.get("WHETSTONE_TABLES"):
        table, order = Path(folder) / "grpo_losses_vs_trl_cpu.csv", list(LOSSES).index
        replace_rows(table, rows, ("loss_type", "step"), lambda row: order(row["loss_type"]))
    names = "loss_difference", "gradient_difference"
    assert max(float(row[name]) for row in rows for name in names) <= TOLERANCE, rows
