"""Test corrections for tokens sampled from other weights against verl's closed forms.

verl 0.9.1, trainer/ppo/rollout_corr_helper and its test test_rollout_corr: tensors [B, T] with a
response mask, log ratio = learner - sampler; token and sequence weights, upper bound (TIS) or both
(IcePop); rejection by k1 = -log ratio, token, sequence sum and sequence mean (verl's bounds are for
sampler / learner, the reciprocals of ours).
"""

import itertools

import numpy as np
import pytest
import torch
from whole_runs import RECIPE

from rl.algorithms import METHODS, ImportanceCorrection, apply_correction, index_episodes
from rl.algorithms.importance_correction import CORRECTION_KINDS, CORRECTION_LEVELS, compute_ratios
from rl.algorithms.update import add_proximal_weight
from rl.config import RunSettings, SettingsError, read_run
from rl.losses import get_loss
from rl.types import Datum, ModelInput

VALID = [
    c
    for c in itertools.product(CORRECTION_KINDS, CORRECTION_LEVELS)
    if not (c[0] in ("truncate", "icepop") and c[1] == "geometric")
]


def verl(log_ratio, mask, kind, level, low, high):
    """Return the weights and response mask of verl's helper, written in torch over a rectangle."""
    log_ratio, mask = torch.tensor(log_ratio), torch.tensor(mask)
    sums = (log_ratio * mask).sum(-1, keepdim=True)
    stat = {"token": log_ratio, "sequence": sums, "geometric": sums / mask.sum(-1, keepdim=True)}[
        level
    ].expand_as(log_ratio)
    weights = stat.clamp(-20, 20).exp() * mask
    if kind == "truncate":
        return weights.clamp(max=high), mask
    if kind == "icepop":
        return torch.where((weights >= low) & (weights <= high), weights, torch.zeros(())), mask
    k1 = -stat
    keep = (k1 >= np.log(1 / high)) & (k1 <= (np.log(1 / low) if low else np.inf))
    return mask, mask * keep


@pytest.mark.parametrize(("kind", "level"), [c for c in VALID if c[0] != "none"])
@pytest.mark.parametrize("seed", range(5))
def test_verl_closed_forms(kind, level, seed):
    rng = np.random.default_rng(seed)
    mask = (rng.random((6, 9)) < 0.7).astype(float)
    mask[:, 0] = 1
    shared = rng.normal(0, 0.075 if level == "sequence" else 0.6, (6, 1))
    gap = rng.normal(0, 0.5, (6, 9)) + shared
    low, high = (0.0, 1.6) if kind == "truncate" else (0.6, 1.6)
    expected_weights, expected_mask = verl(gap, mask, kind, level, low, high)
    weights, kept, metrics = apply_correction(
        list(gap), list(mask != 0), list(range(6)), ImportanceCorrection(kind, level, low, high)
    )
    result = np.stack(weights) * mask
    np.testing.assert_allclose(result, expected_weights.numpy(), rtol=1e-12)
    np.testing.assert_array_equal(np.stack(kept), expected_mask.numpy() != 0)
    applied = (result * np.stack(kept))[mask != 0]
    assert metrics["optim/correction_weight"] == pytest.approx(applied.mean())
    squares = (applied**2).sum()
    assert metrics["optim/correction_ess"] == pytest.approx(
        applied.sum() ** 2 / squares / len(applied) if squares else 0.0
    )
    ratio = np.stack(compute_ratios(list(gap), list(mask != 0), list(range(6)), level))[mask != 0]
    assert metrics["optim/correction_high"] == (ratio > high).mean()
    assert metrics["optim/correction_low"] == (ratio < low).mean()


def test_verl_mask_case():
    """Values of verl's test: ratios 0.368 in one answer and 1.649 in the other; bounds 0.5 to 2."""
    gaps, masks = [np.full(5, -1.0), np.full(5, 0.5)], [np.ones(5, bool)] * 2
    for level in CORRECTION_LEVELS[:1] + CORRECTION_LEVELS[2:]:
        weights, kept, metrics = apply_correction(
            gaps, masks, [0, 1], ImportanceCorrection("mask", level, 0.5, 2.0)
        )
        assert not kept[0].any() and kept[1].all() and metrics["optim/correction_low"] == 0.5
        assert all((w == 1).all() for w in weights)
    assert compute_ratios(gaps, masks, [0, 1], "token")[0][0] == pytest.approx(0.368, abs=1e-3)
    assert compute_ratios(gaps, masks, [0, 1], "token")[1][0] == pytest.approx(1.649, abs=1e-3)


def test_a_catastrophic_token_overflows_nothing():
    """verl's veto case is e^-15. This test adds e^800, which overflows float64."""
    gaps, masks = [np.array([0.0, -15.0, 800.0])], [np.ones(3, bool)]

    def apply(*options):
        return apply_correction(gaps, masks, [0], ImportanceCorrection(*options))

    (w,), (kept,), _ = apply("truncate", "token", 0.0, 2.0)
    assert w.tolist() == pytest.approx([1.0, np.exp(-15.0), 2.0]) and kept.all()
    (w,), _, _ = apply("icepop", "token", 0.5, 2.0)
    assert w.tolist() == [1.0, 0.0, 0.0]
    _, (kept,), metrics = apply("mask", "sequence", 0.5, 2.0)
    assert not kept.any()
    assert metrics["optim/correction_ess"] == 0.0
    assert np.isfinite(list(metrics.values())).all()


def test_an_episode_of_several_datums_is_one_sequence():
    """test_setting_pairs compares the weights and kept tokens of such episodes with float64."""
    shares, fields = [1.0, 0.25, 0.5, 0.25, 1.0, 1 / 3, 1 / 3, 1 / 3, 1.0], {"target_tokens": [1]}
    datums = [Datum(ModelInput.from_ints([1]), fields, episode_share=share) for share in shares]
    assert index_episodes(datums) == [0, 1, 1, 1, 2, 3, 3, 3, 4]


@pytest.mark.parametrize("loss", ["ppo", "cispo", "importance_sampling", "gspo"])
def test_a_kl_beside_an_interpolated_proximal_policy_is_weighted_by_what_drew(loss):
    """The KL is weighted by the sampling policy. test_setting_pairs checks the loss without the KL,
    AReaL's log-linear approximation, in float64.
    """
    rng = np.random.default_rng(3)
    ages, mask = np.array([0, 0, 1, 2, 5, 0, 3]), np.array([0.0, 1, 1, 1, 1, 0, 1])
    q, lp, advantages = (rng.normal(size=7) * scale for scale in (0.5, 0.5, 1.0))
    versions = np.where(mask != 0, 10 - ages, -1).astype(np.float32)
    fields = {"target_tokens": np.arange(7), "logprobs": q, "advantages": advantages, "mask": mask}
    several = Datum(ModelInput.from_ints(range(7)), {**fields, "versions": versions})
    new = add_proximal_weight([several], 10)[0].loss_fn_inputs
    share = np.where(mask != 0, ages / (ages + 1), 0)
    np.testing.assert_allclose(new["proximal_share"].array, share, rtol=1e-6)
    exact = {"logprobs": q, "advantages": advantages * mask, "mask": mask}
    plain = {name: torch.from_numpy(values) for name, values in exact.items()}
    shared = plain | {"proximal_share": torch.from_numpy(share)}
    drew = {"ref_logprobs": torch.from_numpy(q - 0.3), "behavior_logprobs": torch.from_numpy(q)}

    def compute(inputs, **config):
        live, whole = torch.from_numpy(lp), torch.tensor([0, 7])
        return get_loss(loss).compute(live, torch.zeros(7), inputs, whole, config)

    kl = {"ref_logprobs": drew["ref_logprobs"]}
    added = float(compute(shared | kl, kl_coef=0.5)[0] - compute(shared)[0])
    single = float(compute(plain | drew, kl_coef=0.5)[1]["kl_ref:sum"])
    assert added == pytest.approx(0.5 * single, rel=1e-12)


@pytest.mark.parametrize(("words", "so"), [
    ("--max-steps-off-policy 2", True),
    ("", False),
    ("--max-steps-off-policy 2 --proximal sampler", False),
    ("--max-steps-off-policy 2 --proximal learner", False),
    ("--max-steps-off-policy 2 --correction truncate", False),
    ("--max-steps-off-policy 2 --truncated-is 2", False),
    ("--max-steps-off-policy 2 --loss importance_sampling", False),
    ("--max-steps-off-policy 2 --loss cispo", False),
    ("--max-steps-off-policy 2 --loss cispo --proximal interpolated", True),
])  # fmt: skip
def test_it_is_the_default_for_the_loss_that_was_measured(words, so):
    run = read_run(f"grpo --dataset addition {words}".split(), METHODS, RECIPE, RunSettings)
    assert run.stages[-1].settings.interpolates_proximal == so


def test_what_one_version_drew_is_of_one_age():
    fields = {
        "target_tokens": np.arange(3),
        "logprobs": np.zeros(3),
        "advantages": np.ones(3),
        "mask": np.array([0.0, 1, 1]),
    }
    datums = [Datum(ModelInput.from_ints(range(3)), fields, version=v) for v in (4, 3, 1)]
    weighted = add_proximal_weight(datums, 4)
    shares = [item.loss_fn_inputs["proximal_share"].array.tolist() for item in weighted]
    assert shares == [[0, 0, 0], [0, 0.5, 0.5], [0, 0.75, 0.75]]
    assert datums[2].with_inputs(fields).version == 1


REFUSED = [
    ("--correction-high 3", "correction is none"),
    ("--correction truncate --correction-level geometric", "not an importance weight"),
    ("--correction icepop --proximal sampler",
     "a factor that ratios against the sampler contain already"),
    ("--correction mask --correction-low 1.5", "correction_low"),
    ("--correction mask --correction-high 0.5", "correction_high"),
    ("--correction rejection", "mask"),
    ("--correction truncate --proximal interpolated", "set proximal to learner"),
    ("--proximal interpolated", "uses the age of tokens"),
]  # fmt: skip
ONE_THING = (
    "--correction mask", "--proximal learner", "--max-steps-off-policy 1 --proximal interpolated",
)  # fmt: skip


@pytest.mark.parametrize(("method", "words", "message"), [
    *((method, *case) for method in ("grpo", "reinforce", "ppo", "rlhf") for case in REFUSED),
    *(("grpo", f"--truncated-is 2 {other}", "set either of the two") for other in ONE_THING),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(method, words, message):
    with pytest.raises(SettingsError) as error:
        read_run([method, *words.split()], METHODS, RECIPE, RunSettings)
    text = " ".join(error.value.problems).replace("-", "_")
    assert message in text.replace("correction_is", "correction is")


@pytest.mark.parametrize("values", [
    ("truncate", "geometric", 0.0, 2.0), ("icepop", "token", 2.0, 1.0), ("tis", "token", 0.0, 2.0),
    ("mask", "word", 0.0, 2.0),
])  # fmt: skip
def test_a_correction_that_is_none(values):
    with pytest.raises(ValueError):
        ImportanceCorrection(*values)
