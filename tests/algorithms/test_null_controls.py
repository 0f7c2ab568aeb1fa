"""Test that training learns from the reward and from nothing else."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import learning
import numpy as np
import pytest
import yaml
from whole_runs import train

from rl.algorithms import GRPO, METHODS
from rl.client import ServiceClient
from rl.data import load_problems
from rl.envs import ProblemGroupBuilder
from rl.rewards import Scorer
from rl.rollout import TrajectoryGroup, compute_group_metrics, rollout
from rl.trainer import make_renderer
from rl.types import SamplingParams

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "sorting.yaml"
STEPS = 35
SAMPLES = 2  # answers to each of 1,000 held-out problems: a standard error of 0.011

Edit = Callable[[list[float]], Sequence[float]]


def with_rewards(groups: Sequence[TrajectoryGroup], edit: Edit) -> list[TrajectoryGroup]:
    """Return the groups with all their total rewards, as one list, replaced by `edit` of them."""
    old = [reward for group in groups for reward in group.get_total_rewards()]
    change = iter(float(b - a) for a, b in zip(old, edit(old), strict=True))
    finals = [[final + next(change) for final in g.final_rewards_G] for g in groups]
    return [dataclasses.replace(g, final_rewards_G=f) for g, f in zip(groups, finals, strict=True)]


@cache
def accuracy(model: Path, folder: Path) -> float:
    """Return sampled accuracy on all held-out problems, with fixed random streams."""
    with ServiceClient(output_dir=folder) as service, Scorer("exact_match") as scorer:
        sampler = service.create_sampling_client(model_path=str(model))
        renderer = make_renderer(sampler, None)
        problems = load_problems("sorting", split="test")
        builders = [ProblemGroupBuilder(p, SAMPLES, renderer, scorer) for p in problems]
        groups = rollout(builders, sampler, SamplingParams(max_tokens=6), seed=7).groups
    return compute_group_metrics(groups)["env/all/correct"]


def measure_gain(
    trained_weights: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit | None
) -> float:
    """Return the rise of held-out accuracy over GRPO steps with edited rewards."""

    class EditedRewardGRPO(GRPO):
        def shape_rewards(self, groups):
            return super().shape_rewards(with_rewards(groups, edit) if edit else groups)

    monkeypatch.setitem(METHODS, "grpo", EditedRewardGRPO)
    # The second stage of the recipe at a low learning rate. At a high rate the noise of permuted
    # rewards breaks the model, which would hide a small leak.
    train(
        f"grpo --base-model {trained_weights} --dataset sorting --reward exact_match --max-tokens 6 "
        "--temperature 1.0 --batch-size 64 --group-size 8 --advantage mean_std --learning-rate "
        f"1e-4 --steps {STEPS} --eval-every 0 --save-every 0 --rollouts-every 0",
        folder / "run",
    )
    # the initial accuracy is cached across cases
    before = accuracy(trained_weights, trained_weights.parent)
    return accuracy(folder / "run" / "checkpoints" / "grpo-final" / "model", folder) - before


@pytest.fixture(scope="module")
def trained_weights(tmp_path_factory) -> Path:
    """Train weights that sort some rows: the recipe's first stage and a tenth of its second."""
    folder = tmp_path_factory.mktemp("taught")
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["stages"][1] |= {"steps": 20, "eval_every": 0}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(str(folder / "recipe.yaml"), folder / "run")
    return folder / "run" / "checkpoints" / "grpo-final" / "model"


@pytest.mark.slow
@pytest.mark.parametrize(
    "rewards", ["true", "permuted", pytest.param("negated", marks=pytest.mark.campaign)]
)
def test_only_true_rewards_raise_accuracy(rewards, trained_weights, tmp_path, monkeypatch):
    # permute over the whole batch, so that a group's mean is independent of its problem
    shuffle = np.random.default_rng(0).permutation
    edit, bar = {
        "true": (None, {"above": 0.15}),  # the baseline of the controls must learn
        "permuted": (shuffle, {"below": 0.03}),
        "negated": (lambda old: [-r for r in old], {"below": -0.05}),
    }[rewards]
    rise = measure_gain(trained_weights, tmp_path, monkeypatch, edit)
    learning.check_figure("rise of accuracy", rise, **bar)
