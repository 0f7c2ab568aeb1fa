"""Test dro, gspo and the terms of policy losses: by hand, sequence by sequence, and enumerated on a
tiny vocabulary.
"""

import math

import pytest
import torch

from rl.losses import KL_KINDS, LOSSES, get_loss
from rl.losses.loss_terms import estimate_kl

CU = torch.tensor([0, 3, 3, 8])  # the second datum is empty
MASK = torch.tensor([0.0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.float64)
POLICY_LOSSES = [name for name, spec in LOSSES.items() if spec.terms]


def inputs_of(seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(8, generator=g, dtype=torch.float64)  # noqa: E731
    inputs = {"advantages": draw() * MASK, "logprobs": -draw().abs(), "mask": MASK}
    inputs |= {"ref_logprobs": -draw().abs(), "returns": draw(), "values_old": draw()}
    return inputs | {"values": draw().requires_grad_(True)}


def logp_of(seed=0):
    g = torch.Generator().manual_seed(seed + 100)
    return (-torch.rand(8, generator=g, dtype=torch.float64) * 3).requires_grad_(True)


def compute(name, logp, inputs, config=None, entropy=None):
    entropy = torch.zeros_like(logp) if entropy is None else entropy
    return get_loss(name).compute(logp, entropy, inputs, CU, config or {})


def test_dro_and_gspo_by_hand():
    lp, q = torch.tensor([-9.0, -1.0, -2.0]), torch.tensor([-1.0, -1.5, -1.0])
    inputs = {
        "advantages": torch.tensor([0.0, 2.0, 0.0]),
        "logprobs": q,
        "mask": torch.tensor([0.0, 1.0, 1.0]),
    }
    cu = torch.tensor([0, 3])
    # The first token is no action, so its gap of 8 does not count. The third is an action, though
    # its advantage is 0.
    dro = get_loss("dro").fn(lp, lp, inputs, cu, {"beta": 0.1})[0]
    assert dro.item() == pytest.approx(-(-1.0 * 2.0 - 0.05 * (0.5**2 + 1.0**2)))
    inputs["advantages"] = torch.tensor([0.0, 2.0, 1.0])
    s = math.exp((0.5 - 1.0) / 2)
    gspo = get_loss("gspo").fn(lp, lp, inputs, cu, {})[0]
    # The ratio is below the range, but it is not clipped for a positive advantage.
    assert s < 0.8 and gspo.item() == pytest.approx(-3 * s)
    inputs["advantages"] = -inputs["advantages"]
    assert get_loss("gspo").fn(lp, lp, inputs, cu, {})[0].item() == pytest.approx(3 * 0.8)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_expected_gradient_of_each_kl_estimator_by_enumeration(kind, on_policy):
    """Over every token of a vocabulary of 5, sampled from the policy or from another, the loss's term
    has the gradient of KL(policy || reference); that of k3_pathwise on policy is the gradient of
    KL(reference || policy).
    """
    torch.manual_seed(1)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref, q = (torch.log_softmax(torch.randn(5, dtype=torch.float64), 0) for _ in range(2))
    logp = torch.log_softmax(logits, 0)
    q = logp.detach() if on_policy else q
    kl = (logp.exp() * (logp - ref)).sum()
    measure = kl
    if kind == "k3_pathwise":  # off policy as in the GRPO paper: not weighted
        measure = (q.exp() * (torch.exp(ref - logp) - 1 + logp - ref)).sum()
        measure = (ref.exp() * (ref - logp)).sum() if on_policy else measure
    truth = torch.autograd.grad(measure, logits, retain_graph=True)[0]
    assert (truth.abs() > 0.05).any()
    # Each token is a separate datum with its logprob under q. The mask carries the probability that
    # q samples it.
    inputs = {"advantages": torch.zeros(5), "logprobs": q, "ref_logprobs": ref, "mask": q.exp()}
    loss, _ = get_loss("ppo").compute(
        logp, torch.zeros(5), inputs, torch.arange(6), {"kl_coef": 1.0, "kl_kind": kind}
    )
    result = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-12)
    # the values of k1 and k3 are unbiased as well
    if kind in ("k1", "k3") or (kind == "k3_pathwise" and on_policy):
        assert loss.item() == pytest.approx(kl.item(), rel=1e-12)


@pytest.mark.parametrize("gap", [-20.0, -25.0, -100.0, -1000.0])
def test_k3_pathwise_stays_finite_and_pulls_to_the_reference(gap):
    """Below a gap of -20 it is the tangent there."""
    logp = torch.tensor([gap], requires_grad=True)
    value = estimate_kl(logp, torch.zeros(1), "k3_pathwise")
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    slope = 1 - math.exp(20)
    assert gradient.item() == pytest.approx(slope, rel=1e-6)
    tangent = math.expm1(20) - 20 + slope * (gap + 20)
    assert value.item() == pytest.approx(tangent, rel=1e-6)
    inside = torch.tensor([-19.0], requires_grad=True)
    value = estimate_kl(inside, torch.zeros(1), "k3_pathwise")
    assert value.item() == pytest.approx(math.expm1(19) - 19, rel=1e-6)


def test_the_value_of_k3_does_not_overflow():
    logp = torch.tensor([-1.0], requires_grad=True)
    estimate = estimate_kl(logp, torch.tensor([99.0]), "k3").sum()  # e^100 is beyond float32
    assert math.isfinite(estimate.item())
    assert torch.autograd.grad(estimate, logp)[0].item() == -100.0  # g grad lp


def test_the_kl_term_over_stale_samples_is_deepseeks_unbiased_estimate():
    """The term has the gradient of r k3, differentiated with its ratio r (arXiv 2512.02556), sample
    by sample. On policy it is k3 without the ratio.
    """
    logp, inputs = logp_of(4), inputs_of(4)
    ref, q = inputs["ref_logprobs"], inputs["logprobs"]
    published = (MASK * (logp - q).exp() * (torch.exp(ref - logp) - 1 + logp - ref)).sum()
    config = {"kl_coef": 1.0, "kl_kind": "k3"}
    bare = inputs | {"advantages": torch.zeros(8, dtype=torch.float64)}
    on_policy = bare | {"logprobs": logp.detach()}
    unweighted = (MASK * estimate_kl(logp, ref, "k3")).sum()
    for fields, expected, atol in ((bare, published, 1e-12), (on_policy, unweighted, 0)):
        loss = compute("ppo", logp, fields, config)[0]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        (result,), (truth,) = (torch.autograd.grad(each, logp) for each in (loss, expected))
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_terms_heed_the_masks_weights_and_what_drew_the_tokens(kind):
    """Mask values other than 0 and 1 are weights. `behavior_logprobs` take precedence over `logprobs`,
    which another version may have set.
    """
    inputs = inputs_of(4)
    logp = logp_of(4)
    config = {"entropy_coef": 0.3, "kl_coef": 0.2, "kl_kind": kind}
    weights = MASK * torch.tensor([9.0, 0.5, 2.0, 1.0, 9.0, 9.0, 0.25, 3.0], dtype=torch.float64)
    drawn = logp.detach() - torch.linspace(-1, 1, 8, dtype=torch.float64)
    entropy = torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs |= {"mask": weights, "behavior_logprobs": drawn}
    bare = compute("importance_sampling", logp, inputs)[0].item()
    total = compute("importance_sampling", logp, inputs, config, entropy)[0].item()
    expected = 0.0
    for t in torch.nonzero(MASK)[:, 0].tolist():
        g = (logp[t] - inputs["ref_logprobs"][t]).item()
        estimate = {"k1": g, "k2": g * g / 2, "k3": math.exp(-g) - 1 + g}[kind]
        ratio = math.exp((logp[t] - drawn[t]).item())
        expected += weights[t].item() * (0.2 * ratio * estimate - 0.3 * entropy[t].item())
    assert total - bare == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_terms_are_sums_over_actions_added_to_the_loss(name):
    inputs, logp = inputs_of(2), logp_of(2)
    entropy = torch.rand(8, dtype=torch.float64, requires_grad=True)
    config = {"entropy_coef": 0.3, "kl_coef": 0.2, "kl_kind": "k2"}
    config |= {"value_coef": 0.5, "value_clip": 0.4}
    total, metrics = compute(name, logp, inputs, config, entropy)
    bare = compute(name, logp, inputs)[0]
    expected = bare.item()
    for t in torch.nonzero(MASK)[:, 0].tolist():
        expected -= 0.3 * entropy[t].item()
        ratio = math.exp((logp[t] - inputs["logprobs"][t]).item())
        expected += 0.2 * ratio * 0.5 * (logp[t] - inputs["ref_logprobs"][t]).item() ** 2
        old = inputs["values_old"][t].item()
        value, target = inputs["values"][t].item(), inputs["returns"][t].item()
        held = min(max(value, old - 0.4), old + 0.4)
        expected += 0.25 * max((held - target) ** 2, (value - target) ** 2)
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert metrics["policy_loss:sum"].item() == bare.item() and metrics["action_tokens:sum"] == 5
    grads = torch.autograd.grad(total, [logp, entropy, inputs["values"]])
    torch.testing.assert_close(grads[1], -0.3 * MASK)
    off = MASK == 0
    assert not grads[0][off].any() and not grads[2][off].any() and grads[2].any()
    # Values at tokens that are no action do not count.
    read_at_actions = ("ref_logprobs", "returns", "values_old", "values")
    spoiled = {k: torch.where(off, float("nan"), inputs[k]) for k in read_at_actions}
    entropy = torch.where(off, float("nan"), entropy)
    assert compute(name, logp, inputs | spoiled, config, entropy)[0].item() == total.item()


def test_no_terms_change_no_bit():
    inputs, logp = inputs_of(1), logp_of(1)
    off = {"entropy_coef": 0.0, "kl_coef": 0.0, "value_coef": 0.0}
    bare = get_loss("ppo").fn(logp, logp, inputs, CU, {})[0]
    assert compute("ppo", logp, inputs, off)[0].item() == bare.item()


def test_a_value_clip_of_none_is_no_clip():
    fields = {"target_tokens": None, "mask": None, "returns": None}
    for name, config in (("value", {}), ("ppo", {"value_coef": 0.5})):
        get_loss(name).check_terms(0, fields, {**config, "value_clip": None})
        with pytest.raises(ValueError, match="lacks loss_fn_inputs..values_old"):
            get_loss(name).check_terms(0, fields, {**config, "value_clip": 0.2})
