"""Tokens that a correction removes: in no mean, no divisor and no length; and the same update in
one part or in several.
"""

import itertools

import numpy as np
import pytest
from helpers import random_datums

from rl.algorithms import (
    GRPO,
    PPO,
    GrpoSettings,
    Models,
    PolicyGradientSettings,
    PpoOptions,
    PpoSettings,
    Progress,
    StreamedStep,
)
from rl.algorithms.rlhf import RlhfSettings
from rl.algorithms.update import compute_divisor, count_sequences, weight_by_sequence
from rl.client import ServiceClient
from rl.config import CorrectionSettings, KlSettings, LoopSettings, OptimSettings
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence

RATE = 1e-3


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=3) as service:
        yield service


def episode(rng, turns, reward, gap):
    """Turns of which each begins anew, so that each makes a datum of its own; drawn by a policy
    `gap` away from one that is uniform.
    """
    made = []
    for _ in range(turns):
        tokens = rng.integers(0, 14, rng.integers(1, 5)).tolist()
        logprobs = (-np.log(14.0) + gap * rng.normal(size=len(tokens))).tolist()
        read = ModelInput.from_ints(rng.integers(0, 14, 3).tolist())
        made.append(
            Transition(
                read,
                SampledSequence(tokens, logprobs, stop_reason="stop", version=0, temperature=1.0),
                0.0,
                False,
            )
        )
    made[-1].reward = reward
    return Trajectory(made)


def groups_of(seed=0, count=4, size=3, gap=0.7):
    rng = np.random.default_rng(seed)
    found = []
    for p in range(count):
        # the second group has no signal
        rewards = [1.0] * size if p == 1 else [float(g % 2) for g in range(size)]
        members = [episode(rng, int(rng.integers(1, 4)), reward, gap) for reward in rewards]
        found.append(TrajectoryGroup(members, [0.0] * size, [{}] * size, "t", p))
    return found


def method_of(correction, normalise, loss="importance_sampling", **given):
    return GRPO(
        GrpoSettings(
            policy_gradient=PolicyGradientSettings(
                normalise=normalise, loss=loss, group_size=3, **given
            ),
            correction=correction,
            optim=OptimSettings(learning_rate=RATE),
            loop=LoopSettings(steps=3, batch_size=4),
        )
    )


def learner_of(service):
    return service.create_full_training_client("tiny:addition", seed=2)


MASKS = [
    CorrectionSettings(
        correction="mask", correction_level=level, correction_low=low, correction_high=high
    )
    for level, low, high in (("token", 0.6, 1.5), ("sequence", 0.6, 1.5), ("geometric", 0.8, 1.2))
]


@pytest.mark.parametrize("correction", MASKS, ids=lambda how: how.correction_level)
def test_lengths_and_counts_are_of_what_remains(service, correction):
    """In float64: each remaining token weighs A / (its episode's remaining tokens) / (episodes with
    any), or A / (such episodes).
    """
    method, policy = method_of(correction, "sequences"), learner_of(service)
    groups = groups_of()
    datums = method.compute_advantages(groups, Models(policy))
    config = {"temperature": method.settings.sampling.temperature}
    learner = [
        o["logprobs"].array
        for o in policy.forward(datums, "importance_sampling", config).result().loss_fn_outputs
    ]
    found, _ = method.prepare_datums(datums, Models(policy))
    trained = [t for i, group in enumerate(groups) if i != 1 for t in group.trajectories_G]
    owners = [i for i, trajectory in enumerate(trained) for _ in trajectory.transitions]
    gaps = [
        lp.astype(np.float64) - d.loss_fn_inputs["logprobs"].array
        for lp, d in zip(learner, datums, strict=True)
    ]
    masks = [d.loss_fn_inputs["mask"].array != 0 for d in datums]
    stays = []
    for owner, gap, mask in zip(owners, gaps, masks, strict=True):
        whole = np.concatenate(
            [g[m] for o, g, m in zip(owners, gaps, masks, strict=True) if o == owner]
        )
        judged = {
            "token": gap,
            "sequence": np.full(len(gap), whole.sum()),
            "geometric": np.full(len(gap), whole.mean()),
        }
        ratio = np.exp(judged[correction.correction_level])
        stays.append(
            mask & (ratio >= correction.correction_low) & (ratio <= correction.correction_high)
        )
    lengths = np.zeros(len(trained))
    np.add.at(lengths, owners, [int(kept.sum()) for kept in stays])
    whole = np.bincount(owners, [m.sum() for m in masks])
    live = int((lengths > 0).sum())
    assert (
        ((lengths > 0) & (lengths < whole)).any()
        if correction.correction_level == "token"
        else live < len(trained)
    )
    assert count_sequences(found) == pytest.approx(live)
    assert compute_divisor(found, "constant", 8) == pytest.approx(8 * live)
    assert compute_divisor(found, "tokens") == lengths.sum()
    for d, owner, kept in zip(weight_by_sequence(found), owners, stays, strict=True):
        expected = np.where(kept, trained[owner].advantage / max(1.0, lengths[owner]), 0.0)
        np.testing.assert_allclose(d.loss_fn_inputs["advantages"].array, expected, rtol=1e-6)
        np.testing.assert_allclose(
            d.loss_fn_inputs["mask"].array, kept / max(1.0, lengths[owner]), rtol=1e-6
        )


KINDS = {
    "none": CorrectionSettings(),
    "truncate": CorrectionSettings(correction="truncate", correction_high=1.3),
    "icepop": CorrectionSettings(correction="icepop", correction_low=0.7, correction_high=1.3),
    "mask": MASKS[0],
    "mask sequences": MASKS[1],
}


@pytest.mark.parametrize(
    ("kind", "normalise"),
    [*itertools.product(KINDS, ("tokens", "sequence_means")), ("mask", "constant")],
)
def test_a_batch_in_parts_is_the_whole_batch(service, kind, normalise):
    """Every metric and the gradient of one part equal those of four, the second of which has no
    signal.
    """
    seen = []
    for parts in (1, 4):
        method, policy = method_of(KINDS[kind], normalise), learner_of(service)
        step, groups = StreamedStep(method, Models(policy), Progress(0, 3)), groups_of()
        for start in range(0, 4, 4 // parts):
            step.add(groups[start : start + 4 // parts])
        seen.append(step.finish())
    policy, method = learner_of(service), method_of(KINDS[kind], normalise)
    models = Models(policy)
    seen.append(
        method.update(models, method.compute_advantages(groups_of(), models), Progress(0, 3))
    )
    for other in seen[1:]:
        for name in set(seen[0]) - {"optim/minibatches"}:
            assert other[name] == pytest.approx(seen[0][name], rel=2e-5, abs=1e-7), name
    assert seen[0]["optim/grad_norm"] > 0 and ("optim/correction_ess" in seen[0]) == (
        kind != "none"
    )


# What the learner of `tiny:addition` can never agree with: every ratio lies far below the bound.
FAR = 40.0
ALL = CorrectionSettings(correction="mask", correction_low=0.9, correction_high=1.1)


def surprised(groups):
    for group in groups:
        for trajectory in group.trajectories_G:
            for turn in trajectory.transitions:
                turn.ac.logprobs = [lp + FAR for lp in turn.ac.logprobs]
    return groups


PROBE = [
    d.with_inputs({"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in random_datums(4)
]


def weights_of(policy):
    """Logprobs that tell whether a weight has moved."""
    return np.concatenate(
        [
            o["logprobs"].array
            for o in policy.forward(PROBE, "cross_entropy").result().loss_fn_outputs
        ]
    )


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("settings", [PpoSettings, RlhfSettings])
def test_ppo_goes_on_where_a_correction_removes_every_token(service, settings, critic):
    """Weights stay where they were, though AdamW remembers an update before; the batch is counted
    as one without signal.
    """
    how = PpoOptions(critic_model="policy" if critic else None, group_size=3)
    method = PPO(
        settings(
            ppo=how,
            correction=ALL,
            kl=KlSettings(kl_coef=0.0),
            optim=OptimSettings(learning_rate=RATE, num_substeps=2),
            loop=LoopSettings(steps=3, batch_size=4),
        )
    )
    policy = service.create_full_training_client("tiny:addition", seed=2, value_head=not critic)
    others = (
        {"critic": service.create_full_training_client("tiny:addition", seed=5, value_head=True)}
        if critic
        else {}
    )
    models = Models(policy, others)
    first = PPO(
        settings(ppo=how, kl=KlSettings(kl_coef=0.0), optim=OptimSettings(learning_rate=RATE))
    )
    assert "optim/skipped_no_signal" not in first.update(
        models, first.compute_advantages(groups_of(), models), Progress(0, 3)
    )
    before = weights_of(policy)
    metrics = method.update(
        models, method.compute_advantages(surprised(groups_of()), models), Progress(1, 3)
    )
    np.testing.assert_array_equal(weights_of(policy), before)
    assert metrics["optim/skipped_no_signal"] == metrics["optim/substeps"] == 2
    assert metrics["optim/epochs"] == 1
    assert metrics["optim/tokens"] == 0
    assert metrics["optim/correction_low"] == 1.0
    assert "optim/approx_kl_k3" not in metrics
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("given", [{}, {"entropy_coef": 0.1}])
@pytest.mark.parametrize("parts", [1, 2])
def test_grpo_goes_on_where_a_correction_removes_every_token(service, parts, given):
    policy = learner_of(service)
    models = Models(policy)
    first = method_of(CorrectionSettings(), "tokens")
    first.update(models, first.compute_advantages(groups_of(), models), Progress(0, 3))
    before, method = weights_of(policy), method_of(ALL, "sequence_means", **given)
    groups = surprised(groups_of())
    if parts == 1:
        metrics = method.update(models, method.compute_advantages(groups, models), Progress(1, 3))
    else:
        step = StreamedStep(method, models, Progress(1, 3))
        for start in (0, 2):
            step.add(groups[start : start + 2])
        metrics = step.finish()
    np.testing.assert_array_equal(weights_of(policy), before)
    assert metrics["optim/skipped_no_signal"] == 1 and metrics["optim/correction_low"] == 1.0
