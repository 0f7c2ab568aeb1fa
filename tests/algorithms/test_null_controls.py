"""What learns must be the reward."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import learning
import numpy as np
import pytest
from test_default_recipe import RECIPE, taught_model

from rl.algorithms import GRPO, METHODS
from rl.client import ServiceClient
from rl.config import RunSettings, parse_run
from rl.data import addition
from rl.envs import ProblemGroupBuilder
from rl.rewards import Scorer
from rl.rollout import Trajectory, TrajectoryGroup, Transition, compute_group_metrics, rollout
from rl.trainer import make_renderer
from rl.trainer.execute import execute
from rl.types import ModelInput, SampledSequence, SamplingParams

STEPS = 40
SAMPLES = 8  # answers to each held-out problem: with 800 problems, a standard error of about 0.01

Edit = Callable[[list[float]], Sequence[float]]


def with_rewards(groups: Sequence[TrajectoryGroup], edit: Edit) -> list[TrajectoryGroup]:
    """The groups with all their total rewards, as one list, replaced by `edit` of them."""
    old = [reward for group in groups for reward in group.get_total_rewards()]
    change = iter(float(b - a) for a, b in zip(old, edit(old), strict=True))
    return [
        dataclasses.replace(
            g, final_rewards_G=[final + next(change) for final in g.final_rewards_G]
        )
        for g in groups
    ]


@cache
def accuracy(model: Path, folder: Path) -> float:
    """Sampled accuracy on all held-out problems, the same random streams for every model."""
    with ServiceClient(output_dir=folder) as service, Scorer("exact_match") as scorer:
        sampler = service.create_sampling_client(model_path=str(model))
        renderer = make_renderer(sampler, None)
        builders = [
            ProblemGroupBuilder(problem, SAMPLES, renderer, scorer) for problem in addition("test")
        ]
        groups = rollout(builders, sampler, SamplingParams(max_tokens=4), seed=7).groups
    return compute_group_metrics(groups)["env/all/correct"]


def gain(taught: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit | None) -> float:
    """Return the rise of held-out accuracy over GRPO steps with edited rewards."""

    class Edited(GRPO):
        def shape_rewards(self, groups):
            return super().shape_rewards(with_rewards(groups, edit) if edit else groups)

    monkeypatch.setitem(METHODS, "grpo", Edited)
    # The second stage of recipes/addition.yaml at a low learning rate: at 3e-4 the noise of permuted
    # rewards alone breaks the model, which would hide a small leak.
    words = f"""grpo --base-model {taught} --dataset addition --reward exact_match --max-tokens 4 --temperature 1.0 --batch-size 64
        --group-size 8 --advantage mean_std --learning-rate 5e-5 --steps {STEPS} --eval-every 0 --save-every 0 --rollouts-every 0
        --seed {learning.seed()} --output-dir {folder / "run"} --quiet""".split()
    execute(parse_run(words, METHODS, RECIPE, options=RunSettings))
    # once for all
    return accuracy(folder / "run" / "checkpoints" / "grpo-final" / "model", folder) - accuracy(
        taught, taught.parent
    )


def test_edited_rewards_are_those_that_credit_sees():
    """By hand: two groups of two, rewards reversed over the batch."""

    def group(step: float, final: float) -> TrajectoryGroup:
        turns = [
            Transition(ModelInput.from_ints([1]), SampledSequence([2], [-0.5], "stop"), r, True)
            for r in (step, 0.0)
        ]
        return TrajectoryGroup([Trajectory([turn]) for turn in turns], [0.0, final], [{}, {}])

    groups = [group(1.0, 0.0), group(2.0, 0.5)]
    edited = with_rewards(groups, lambda rewards: rewards[::-1])
    assert [g.get_total_rewards() for g in groups] == [[1.0, 0.0], [2.0, 0.5]]
    assert [g.get_total_rewards() for g in edited] == [[0.5, 2.0], [0.0, 1.0]]
    datums = GRPO(METHODS["grpo"].Settings()).compute_advantages(edited, None)  # type: ignore[arg-type]  # it needs no models
    assert [float(d.loss_fn_inputs["advantages"].array[-1]) for d in datums] == [
        -0.75, 0.75, -0.5, 0.5,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "rewards", ["true", "permuted", pytest.param("negated", marks=pytest.mark.campaign)]
)
def test_only_true_rewards_raise_accuracy(rewards, tmp_path, tmp_path_factory, monkeypatch):
    taught = taught_model(tmp_path_factory.getbasetemp())
    # over the whole batch, so that a group's mean says nothing of its problem
    shuffle = np.random.default_rng(0).permutation
    edits: dict[str, Edit | None] = {
        "true": None,
        "permuted": shuffle,
        "negated": lambda old: [-r for r in old],
    }
    rise = gain(taught, tmp_path, monkeypatch, edits[rewards])
    match rewards:
        case "true":
            # the setting the controls are compared with must learn
            learning.clears("rise of accuracy", rise, above=0.15)
        case "permuted":
            learning.clears("rise of accuracy", rise, below=0.03)
        case "negated":
            learning.clears("rise of accuracy", rise, below=-0.05)
