"""Test batches where a correction removes every token: no weight changes."""

import numpy as np
import pytest
from algorithm_helpers import make_method, target_logprobs
from helpers import random_datums

from rl.algorithms import Models, Progress, StreamedStep
from rl.client import ServiceClient
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=3) as service:
        yield service


def make_episode(rng, turns, reward, gap):
    """Return an episode with a datum per turn, sampled with noise of scale `gap` around uniform."""
    made = []
    for _ in range(turns):
        tokens = rng.integers(0, 14, rng.integers(1, 5)).tolist()
        logprobs = (-np.log(14.0) + gap * rng.normal(size=len(tokens))).tolist()
        read = ModelInput.from_ints(rng.integers(0, 14, 3).tolist())
        drawn = SampledSequence(tokens, logprobs, stop_reason="stop", version=0, temperature=1.0)
        made.append(Transition(read, drawn, 0.0, False))
    made[-1].reward = reward
    return Trajectory(made)


def groups_of(seed=0, count=4, size=3, gap=0.7):
    rng = np.random.default_rng(seed)
    results = []
    for p in range(count):
        # the second group has no signal
        rewards = [1.0] * size if p == 1 else [float(g % 2) for g in range(size)]
        members = [make_episode(rng, int(rng.integers(1, 4)), reward, gap) for reward in rewards]
        results.append(TrajectoryGroup(members, [0.0] * size, [{}] * size, "t", p))
    return results


# A gap that the learner of `tiny:addition` never reaches: every ratio is far below the bound.
FAR = 40.0


def shift_logprobs(groups):
    for group in groups:
        for trajectory in group.trajectories_G:
            for turn in trajectory.transitions:
                turn.ac.logprobs = [lp + FAR for lp in turn.ac.logprobs]
    return groups


ALL = {"correction": "mask", "correction_low": 0.9, "correction_high": 1.1}
SMALL = {"group_size": 3, "learning_rate": 1e-3, "steps": 3, "batch_size": 4}
PROBE = random_datums(4)


@pytest.mark.parametrize(("name", "critic"), [("ppo", False), ("rlhf", True)])
def test_ppo_goes_on_where_a_correction_removes_every_token(service, name, critic):
    """AdamW has state from an earlier update; the batch counts as having no signal."""
    flat = SMALL | {"critic_model": "policy" if critic else None, "kl_coef": 0.0}
    first, method = make_method(name, **flat), make_method(name, **flat, **ALL, num_substeps=2)
    policy = service.create_full_training_client("tiny:addition", seed=2, value_head=not critic)
    others = {}
    if critic:
        options = {"seed": 5, "value_head": True}
        others["critic"] = service.create_full_training_client("tiny:addition", **options)
    models = Models(policy, others)
    datums = first.compute_advantages(groups_of(), models)
    assert "optim/skipped_no_signal" not in first.update(models, datums, Progress(0, 3))
    before = np.concatenate(target_logprobs(policy, PROBE))
    datums = method.compute_advantages(shift_logprobs(groups_of()), models)
    metrics = method.update(models, datums, Progress(1, 3))
    np.testing.assert_array_equal(np.concatenate(target_logprobs(policy, PROBE)), before)
    assert metrics["optim/skipped_no_signal"] == metrics["optim/substeps"] == 2
    assert metrics["optim/epochs"] == metrics["optim/correction_low"] == 1
    assert metrics["optim/tokens"] == 0 and "optim/approx_kl_k3" not in metrics
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize(("parts", "inputs"), [(1, {"entropy_coef": 0.1}), (2, {})])
def test_grpo_goes_on_where_a_correction_removes_every_token(service, parts, inputs):
    policy = service.create_full_training_client("tiny:addition", seed=2)
    models, flat = Models(policy), SMALL | {"loss": "importance_sampling"}
    first = make_method(**flat, normalise="tokens")
    first.update(models, first.compute_advantages(groups_of(), models), Progress(0, 3))
    before = np.concatenate(target_logprobs(policy, PROBE))
    method, groups = make_method(**flat, **ALL, **inputs), shift_logprobs(groups_of())
    if parts == 1:
        metrics = method.update(models, method.compute_advantages(groups, models), Progress(1, 3))
    else:
        step = StreamedStep(method, models, Progress(1, 3))
        for start in (0, 2):
            step.add(groups[start : start + 2])
        metrics = step.finish()
    np.testing.assert_array_equal(np.concatenate(target_logprobs(policy, PROBE)), before)
    assert metrics["optim/skipped_no_signal"] == 1 and metrics["optim/correction_low"] == 1.0
