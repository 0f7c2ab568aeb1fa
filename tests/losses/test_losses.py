"""Test the losses: by hand, and expectations enumerated on a tiny vocabulary."""

import itertools
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import call, make_worker, random_datums

from kernels.policy_loss_kinds import KINDS
from rl.algorithms.grpo import COEFFICIENT_KEYS, POLICY_LOSSES, find_loss_coefficients
from rl.algorithms.update import add_loss_inputs, has_gradient
from rl.losses import LOSSES, LossSpec, get_loss

CU = torch.tensor([0, 3, 6])
RL_LOSSES = ["importance_sampling", "ppo", "cispo"]


def inputs_of(seed: int = 0, n: int = 6) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    advantages = torch.randn(n, generator=g, dtype=torch.float64)
    advantages[::3] = 0.0
    return {
        "advantages": advantages,
        "logprobs": -torch.rand(n, generator=g, dtype=torch.float64) * 3,
    }


def value(name, logp, inputs, config=None):
    return get_loss(name).fn(logp, torch.zeros_like(logp), inputs, CU, config or {})[0]


def test_by_hand():
    lp = torch.tensor([-1.0, -2.0, -0.5])
    q = torch.tensor([-1.0, -1.0, -1.5])
    a = torch.tensor([1.0, 2.0, 3.0])
    r = (lp - q).exp()  # 1, 0.3679, 2.7183
    inputs = {"advantages": a, "logprobs": q}
    assert value("importance_sampling", lp, inputs) == pytest.approx(
        -(1 + 2 * r[1] + 3 * r[2]).item()
    )
    # Only the high ratio is clipped.
    assert value("ppo", lp, inputs) == pytest.approx(-(1 + 2 * r[1] + 3 * 1.2).item())
    negative = {"advantages": -a, "logprobs": q}
    # The loss is pessimistic: min of the two.
    assert value("ppo", lp, negative) == pytest.approx((1 + 2 * 0.8 + 3 * r[2]).item())
    by_cispo = -(1 * -1.0 + 0.8 * -2.0 * 2 + 1.2 * -0.5 * 3)
    assert value("cispo", lp, inputs) == pytest.approx(by_cispo)
    assert value("cross_entropy", lp, {"target_tokens": a.long()}) == pytest.approx(3.5)


def test_cross_entropy_of_single_and_soft_targets_by_hand():
    for weights in (torch.tensor([0.5, -1.0, 0.0]), torch.tensor([[0.5, 0.5], [1, 0], [0, 0]])):
        lp = -torch.arange(1.0, weights.numel() + 1).reshape(weights.shape).requires_grad_(True)
        loss = value("cross_entropy", lp, {"weights": weights})
        assert loss.item() == pytest.approx(-(lp * weights).sum().item())
        assert torch.equal(torch.autograd.grad(loss, lp)[0], -weights)


def test_thresholds_from_config_and_per_token():
    lp, q = torch.tensor([0.0, 0.0, 0.0]), torch.log(torch.tensor([0.25, 0.25, 0.25]))  # ratio 4
    a = torch.ones(3)
    inputs = {"advantages": a, "logprobs": q}
    assert value("ppo", lp, inputs, {"clip_high_threshold": 3.0}) == pytest.approx(-9.0)
    per_token = {**inputs, "clip_high_threshold": torch.tensor([1.0, 2.0, 5.0])}
    assert value("ppo", lp, per_token) == pytest.approx(-(1 + 2 + 4))
    # The datum's thresholds take precedence over the call's.
    assert value("ppo", lp, per_token, {"clip_high_threshold": 1.5}) == pytest.approx(-(1 + 2 + 4))
    # The ratio is 1/4.
    low = {"advantages": -a, "logprobs": -q, "clip_low_threshold": torch.tensor([0.5, 0.3, 0.2])}
    assert value("ppo", lp, low, {"clip_low_threshold": 0.9}) == pytest.approx(0.5 + 0.3 + 0.25)


@pytest.mark.parametrize("name", [*RL_LOSSES, "dro", "gspo"])
def test_expected_gradient_is_that_of_the_expected_reward(name):
    """On policy, the mean gradient over every sequence of 2 tokens from 3 equals minus the gradient
    of E[reward] exactly. gspo's ratio is 1 there, as for the other losses.
    """
    torch.manual_seed(0)
    # Row 0 is the first token; rows 1-3 are the second, conditional on the first.
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(3, 3, dtype=torch.float64)
    logp = torch.log_softmax(logits, -1)
    expected = sum(
        logp[0, a].exp() * logp[1 + a, b].exp() * rewards[a, b]
        for a, b in itertools.product(range(3), range(3))
    )
    (truth,) = torch.autograd.grad(-expected, logits, retain_graph=True)
    total = torch.zeros_like(logits)
    for a, b in itertools.product(range(3), range(3)):
        chosen = torch.stack([logp[0, a], logp[1 + a, b]])
        probability = chosen.detach().sum().exp()
        inputs = {"advantages": rewards[a, b].repeat(2), "logprobs": chosen.detach()}
        inputs["mask"] = torch.ones(2)
        loss = get_loss(name).fn(chosen, torch.zeros(2), inputs, torch.tensor([0, 2]), {})[0]
        total += probability * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(total, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RL_LOSSES)
def test_an_all_masked_batch_gives_zero_with_a_graph(name):
    logp = torch.full((6,), -1.0, requires_grad=True)
    loss = value(name, logp, {"advantages": torch.zeros(6), "logprobs": torch.zeros(6)})
    (gradient,) = torch.autograd.grad(loss, logp)
    assert loss.item() == 0.0 and not gradient.any()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", [*RL_LOSSES, "gspo"])
def test_a_ratio_that_overflows_changes_nothing_without_an_advantage(name, fused):
    spec, results = get_loss(name), []
    for q in (-1.0, -200.0):  # the ratio e^200 is beyond float32
        logp = torch.tensor([-1.0, -1.0, -2.0, -0.5], requires_grad=True)
        inputs = {
            "advantages": torch.tensor([0.0, 0.0, 1.0, -2.0]),
            "logprobs": torch.tensor([q, -1.0, -1.5, -1.0]),
            "mask": torch.ones(4),
        }
        config = {"clip_high_threshold": math.inf} if spec.config else {}
        function = spec.fused_function if fused else spec.fn
        loss, _ = function(logp, logp, inputs, torch.tensor([0, 2, 4]), config)
        results.append((loss.item(), torch.autograd.grad(loss, logp)[0].tolist()))
    assert results[0] == results[1] and math.isfinite(results[0][0])


def test_clip_metrics_count_by_hand():
    lp = torch.log(torch.tensor([0.5, 1.0, 1.5, 1.0]))
    inputs = {"advantages": torch.tensor([1.0, 1.0, 1.0, 0.0]), "logprobs": torch.zeros(4)}
    _, metrics = get_loss("ppo").fn(lp, lp, inputs, torch.tensor([0, 4]), {})
    counts = {k: int(v) for k, v in metrics.items()}
    assert counts == {"clipped_low:sum": 1, "clipped_high:sum": 1, "active_tokens:sum": 3}


@pytest.mark.parametrize("name", RL_LOSSES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "case", ["plain", "config", "per token", "no logprobs", "nan where masked"]
)
def test_the_fused_form_has_the_same_value_gradient_and_metrics(name, seed, case):
    """kernels.policy_loss (its path on this device) agrees with the plain formula, called as the
    learner calls it.
    """
    spec, inputs = get_loss(name), {k: v.float() for k, v in inputs_of(seed).items()}
    logp, config = -torch.rand(6, generator=torch.Generator().manual_seed(seed + 50)) * 3, {}
    if case == "config" and spec.config:
        config = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
    if case == "per token" and spec.config:
        inputs |= {"clip_low_threshold": torch.rand(6), "clip_high_threshold": 1 + torch.rand(6)}
    if case == "no logprobs" and name == "importance_sampling":
        del inputs["logprobs"]
    if case == "nan where masked":
        inputs["logprobs"][inputs["advantages"] == 0] = float("nan")
    results = []
    for function in (spec.fn, spec.fused_function):
        leaf = logp.clone().requires_grad_(True)
        value, metrics = function(leaf, torch.zeros(6), inputs, CU, config)
        results.append(
            (value, torch.autograd.grad(value, leaf)[0], {k: float(v) for k, v in metrics.items()})
        )
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-6)
    assert results[1][2] == results[0][2]


GPU = torch.device("cuda")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_a_kernel_where_its_entry_names_one(name):
    spec = LOSSES[name]
    assert spec.fused_kind is None or spec.fused_kind in KINDS
    assert (spec.select_function(GPU, fused=True) is spec.fn) == (spec.fused_kind is None)
    assert spec.select_function(GPU, fused=False) is spec.fn
    assert spec.select_function(torch.device("cpu"), fused=True) is spec.fn


@pytest.mark.parametrize(
    "name", [name for name, spec in LOSSES.items() if "advantages" in spec.required]
)
def test_what_has_no_gradient_without_advantages_is_declared(name):
    """Compare the declaration with the gradient off policy, with every other field present."""
    generator, spec = torch.Generator().manual_seed(3), LOSSES[name]
    leaf = (-torch.rand(6, generator=generator)).requires_grad_(True)
    logprobs = -torch.rand(6, generator=generator)
    inputs = {"advantages": torch.zeros(6), "mask": torch.ones(6), "logprobs": logprobs}
    inputs |= {"values": leaf + 1, "returns": torch.ones(6)}
    config = {"tau": 1.0, "cql_coef": 0.1, "value_coef": 1.0, "expectile": 0.7}
    total, _ = spec.fn(leaf, torch.zeros(6), inputs, CU, config)
    (slope,) = torch.autograd.grad(total, leaf)
    assert spec.needs_advantages == (not slope.any())


def soft_gate(logp_T, entropy_T, inputs, cu_seqlens, config):
    """Return -4 sum sigmoid(r - 1) A over actions: a new loss without a kernel."""
    active_T = inputs["mask"] != 0
    ratio_T = torch.where(active_T, logp_T - inputs["logprobs"], 0.0).exp()
    advantages_T = torch.where(active_T, inputs["advantages"], 0.0)
    loss = -4 * (torch.sigmoid(ratio_T - 1) * advantages_T).sum()
    return loss, {"active_tokens:sum": active_T.sum()}


def test_a_loss_without_a_kernel_is_one_entry_and_runs_where_a_gpu_would_choose_kernels(
    monkeypatch,
):
    """The selection of a GPU runs on this device: the new loss uses its plain formula, and the
    learner's gradient is that of the formula.
    """
    required = ("target_tokens", "advantages", "logprobs")
    flags = ("needs_advantages", "at_sampling_temperature", "terms", "needs_mask")
    spec = LossSpec(soft_gate, required, **dict.fromkeys(flags, True))
    monkeypatch.setitem(LOSSES, "soft_gate", spec)
    choose = LossSpec.select_function
    monkeypatch.setattr(
        LossSpec, "select_function", lambda self, device, *, fused: choose(self, GPU, fused=True)
    )
    datums, worker = random_datums(3), make_worker()
    arguments = (0, datums, get_loss("soft_gate"), {"temperature": 1.0}, 1.0, True)
    outputs, metrics = call(worker, "forward_backward", *arguments)
    expected = 0.0
    for datum, output in zip(datums, outputs, strict=True):
        inputs = datum.loss_fn_inputs
        q, a, mask = (inputs[k].array.astype(float) for k in ("logprobs", "advantages", "mask"))
        ratio = np.exp(output["logprobs"].astype(np.float64) - q)
        expected -= 4 * ((a / (1 + np.exp(1 - ratio)))[mask != 0]).sum()
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert any(p.grad is not None and p.grad.any() for p in worker.learners[0].trainable.values())
    silent = [add_loss_inputs(d, advantages=np.zeros(d.model_input.length)) for d in datums]
    assert has_gradient(datums, "soft_gate", {}) and not has_gradient(silent, "soft_gate", {})
    unknown = replace(spec, fused_kind="soft_gate")  # every entry was assumed to have a kernel
    ones = {"advantages": torch.ones(2), "mask": torch.ones(2)}
    with pytest.raises(ValueError, match="soft_gate"):
        unknown.select_function(GPU, fused=True)(torch.zeros(2), torch.zeros(2), ones, CU[:2], {})


def test_a_loss_declares_that_its_gradient_needs_weights(monkeypatch):
    spec = replace(LOSSES["cross_entropy"], fn=soft_gate)
    monkeypatch.setitem(LOSSES, "weighed", spec)
    (datum,) = random_datums(1)
    targets = {"target_tokens": datum.loss_fn_inputs["target_tokens"]}
    plain = datum.with_inputs(targets)
    for name in ("cross_entropy", "weighed"):
        assert has_gradient([plain], name, {})
        shape = datum.model_input.length
        ones, zeros = (add_loss_inputs(plain, weights=w(shape)) for w in (np.ones, np.zeros))
        assert has_gradient([zeros, ones], name, {})
        assert not has_gradient([zeros, zeros], name, {})


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_what_settings_know_of_a_loss_is_what_it_reads(name):
    keys = find_loss_coefficients(name)
    assert set(keys.values()) == set(COEFFICIENT_KEYS.values()) & set(get_loss(name).known_config)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_travels_to_other_ranks(name):
    assert pickle.loads(pickle.dumps(LOSSES[name])).fn is LOSSES[name].fn


def test_unknown_losses_are_named():
    with pytest.raises(ValueError, match="importance_sampling"):
        get_loss("stable_reinforce")
    with pytest.raises(ValueError, match="cross_entropy, importance_sampling, ppo, cispo"):
        get_loss("ppoo")
    assert set(LOSSES) >= {"cross_entropy", *RL_LOSSES}
