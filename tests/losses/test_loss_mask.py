"""Test the mask of a datum, which tells every policy loss which tokens are actions: value, gradient
and metrics, plain and fused.
"""

import numpy as np
import pytest
import torch
from helpers import compute_relative_difference, gradient, make_worker, random_datums

from rl.losses import LOSSES, get_loss
from rl.types import Datum

POLICY = [name for name, spec in LOSSES.items() if spec.fused_function is not None]
CU = [0, 4, 5, 11]
CLIPPED = ("ppo", "cispo", "gspo")
CONFIGS = {"dro": {"beta": 0.5}} | {
    name: {"clip_low_threshold": 0.1, "clip_high_threshold": 5.0} for name in CLIPPED
}


def make_inputs(seed: int, mask_name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logprobs and loss fields. Advantages are nonzero outside the mask and 0 at some
    actions.
    """
    rng = np.random.default_rng(seed)
    mask = (rng.random(11) < 0.6).astype(float)
    mask[4] = 0.0  # a datum without an action
    mask[[0, 10]] = 1.0
    advantages = rng.standard_normal(11)
    advantages[[0, 6]] = 0.0
    logp = -3 * rng.random(11)
    fields = {
        "advantages": advantages,
        "logprobs": logp + 0.4 * rng.standard_normal(11),
        mask_name: mask,
    }
    return torch.tensor(logp), {name: torch.tensor(value) for name, value in fields.items()}


def reference(name, logp, inputs, mask_name, config) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the formulas of the table in design and docs in float64, token by token over the
    actions only.
    """
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    total = torch.zeros((), dtype=torch.float64)
    seen = {"active_tokens:sum": 0, "clipped_low:sum": 0, "clipped_high:sum": 0}
    for start, end in zip(CU[:-1], CU[1:], strict=True):
        here = [t for t in range(start, end) if inputs[mask_name][t] != 0]
        mean = sum((logp[t] - inputs["logprobs"][t]).detach() for t in here) / max(1, len(here))
        for t in here:
            lp, gap, a = logp[t], logp[t] - inputs["logprobs"][t], inputs["advantages"][t]
            ratio = torch.exp(mean + lp - lp.detach()) if name == "gspo" else torch.exp(gap)
            clipped = torch.clamp(ratio, low, high)
            objectives = {
                "importance_sampling": ratio * a,
                "ppo": torch.minimum(ratio * a, clipped * a),
                "gspo": torch.minimum(ratio * a, clipped * a),
                "cispo": clipped.detach() * lp * a,
                "dro": lp * a - config.get("beta", 0.05) / 2 * gap**2,
            }
            total = total - objectives[name]
            seen["active_tokens:sum"] += 1
            seen["clipped_low:sum"] += int(ratio < low)
            seen["clipped_high:sum"] += int(ratio > high)
    return total, seen if name in CLIPPED else {"active_tokens:sum": seen["active_tokens:sum"]}


@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize("mask_name", ["mask", "sequence_ratio_mask"])
@pytest.mark.parametrize("name", POLICY)
def test_the_mask_decides_what_is_trained_and_counted(name, mask_name, form):
    for seed in range(6):
        logp, inputs = make_inputs(seed, mask_name)
        leaf, config = logp.clone().requires_grad_(True), CONFIGS.get(name, {}) if seed % 2 else {}
        expected, counted = reference(name, leaf, inputs, mask_name, config)
        (expected_gradient,) = torch.autograd.grad(expected, leaf)
        spec, dtype = get_loss(name), torch.float64 if form == "plain" else torch.float32
        leaf = logp.to(dtype).requires_grad_(True)
        fields = {field: value.to(dtype) for field, value in inputs.items()}
        value, metrics = (spec.fn if form == "plain" else spec.fused_function)(
            leaf, torch.zeros(11), fields, torch.tensor(CU), config
        )
        (result,) = torch.autograd.grad(value, leaf)
        tolerance = (
            {"rtol": 1e-12, "atol": 1e-12} if form == "plain" else {"rtol": 1e-5, "atol": 1e-5}
        )
        torch.testing.assert_close(value.double(), expected, **tolerance)
        torch.testing.assert_close(result.double(), expected_gradient, **tolerance)
        assert {k: int(v) for k, v in metrics.items()} == counted


@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", POLICY)
def test_what_stands_outside_the_mask_changes_nothing(name, masked, form):
    """A NaN, an infinite logprob or an enormous advantage outside the mask changes nothing. Without
    a mask, the tokens with an advantage are the actions.
    """
    logp, inputs = make_inputs(3, "mask")
    out = inputs["mask"] == 0 if masked else inputs["advantages"] == 0
    if not masked:
        del inputs["mask"]
    results = []
    for spoil in (False, True):
        fields = {field: value.clone().float() for field, value in inputs.items()}
        leaf = logp.clone().float()
        if spoil:
            fields["logprobs"][out] = float("inf")
            leaf[out] = float("nan")
            if masked:
                fields["advantages"][out] = 1e30
        leaf.requires_grad_(True)
        spec = get_loss(name)
        value, metrics = (spec.fn if form == "plain" else spec.fused_function)(
            leaf, torch.zeros(11), fields, torch.tensor(CU), {}
        )
        results.append((value, torch.autograd.grad(value, leaf)[0], metrics))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert not results[1][1][out].any()


@pytest.mark.parametrize("name", POLICY)
def test_a_model_is_trained_as_if_advantages_outside_the_mask_were_zero(name):
    """The batches go through the learner, over micro-batches of every layout that it may choose."""
    datums = random_datums(8, seed=4)
    spoiled = []
    for datum in datums:
        inputs = {field: value.array.copy() for field, value in datum.loss_fn_inputs.items()}
        inputs["advantages"][inputs["mask"] == 0] = 3.0
        inputs["logprobs"][inputs["mask"] == 0] = -5.0
        spoiled.append(Datum(datum.model_input, inputs))
    results = []
    for batch in (datums, spoiled):
        worker = make_worker(token_budget=24)
        worker.learners[0].run(
            batch, get_loss(name), {}, temperature=1.0, divisor=1.0, backward=True
        )
        results.append(gradient(worker))
    assert compute_relative_difference(results[1], results[0]) < 1e-6
