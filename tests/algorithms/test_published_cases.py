"""Test numbers and formulas published by other projects against ours. docs/published_cases.md lists
what agrees, and what differs and why.

Every literal is an expected value from the tests of the named project. The formulas are written out
from the references of those tests.
    rlax 0.1.9, trfl 1.2.0       literal cases (deepmind)
    verl 0.9.1                   tests/trainer/ppo: test_core_algos_on_cpu,
                                 test_loss_aggregation_on_cpu, test_rollout_corr
    Liger-Kernel                 test/chunked_loss: the plain torch references of its kernels
    AReaL                        packed GAE over sequences with and without an end
Discounts that differ from step to step (in those projects) equal a constant discount of 1 (ours) in
other units: with P_t the product of the discounts before step t, rewards P_t r_t and values P_t v_t
have the advantages P_t A_t. A discount of 0 ends a sequence.
"""

import math

import numpy as np
import pytest
import torch
from algorithm_helpers import FixedScores

from kernels.token_logprob import token_logprob
from rl.algorithms import ADVANTAGES, compute_gae, compute_returns_to_go
from rl.algorithms.update import apply_truncated_is, compute_divisor, weight_by_sequence
from rl.losses import LOSSES
from rl.types import Datum, ModelInput, TensorData

F64 = torch.float64


def advantages(rewards, discounts, values, bootstrap, lam):
    """Return advantages under a separate discount for each step."""
    rewards, discounts, values = (np.asarray(x, np.float64) for x in (rewards, discounts, values))
    ends = [0, *(int(t) + 1 for t in np.flatnonzero(discounts[:-1] == 0)), len(rewards)]
    results = []
    for start, end in zip(ends, ends[1:], strict=False):
        d = discounts[start:end]
        units = np.concatenate([[1.0], np.cumprod(d)])
        last = values[end] if end < len(rewards) else bootstrap
        r, v = units[:-1] * rewards[start:end], units[:-1] * values[start:end]
        after = float(units[-1] * last)
        results.append(compute_gae(r, v, gamma=1.0, lam=lam, bootstrap=after) / units[:-1])
    return np.concatenate(results)


# --------------------------------------------------------------------------------------- rlax, trfl


# (rewards, discounts, values before each step, bootstrap, lambda, advantages or returns, tolerance);
# a return is advantage + value
ONE = ([0, 0, 1, 0, -0.5], [0.99] * 5, [1, 4, -3, -2, -1], -1)
ENDS_INSIDE = ([0, 0, 0, 0, 1], [0.9, 0.9, 0.9, 0.0, 0.9], [-3, -2, -1, 0, 5], -1)
FIRST = ([1.0, 0.0, -1.0, 0.0, 1.0], [0.5, 0.9, 1.0, 0.5, 0.8], [7.0, 3.0, 1.0, 5.0, -5.0], 3.0)
OTHER = ([0.5, 0.8, -0.7, 0.0, 2.1], [0.9, 0.5, 0.3, 0.8, 0.7], [7.0, -1.7, 1.2, 2.3, 2.2], 2.7)
ADVANTAGE_CASES = [
    # rlax multistep_test, TruncatedGeneralizedAdvantageEstimation: literals of four or five digits
    (*ONE, 1.0, [-1.45118, -4.4557, 2.5396, 0.5249, -0.49], {"atol": 1e-3}),
    (*ONE, 0.7, [-0.676979, -5.248167, 2.4846, 0.6704, -0.49], {"atol": 1e-3}),
    (*ONE, 0.4, [0.56731, -6.042, 2.3431, 0.815, -0.49], {"atol": 1e-3}),
    (*ENDS_INSIDE, 1.0, [3.0, 2.0, 1.0, 0.0, -4.9], {"atol": 1e-3}),
    (*ENDS_INSIDE, 0.7, [2.2899, 1.73, 1.0, 0.0, -4.9], {"atol": 1e-3}),
    (*ENDS_INSIDE, 0.4, [1.725, 1.46, 1.0, 0.0, -4.9], {"atol": 1e-3}),
    # rlax value_learning_test, TDLambda; the first value of the second row is a difference of 2.1s
    ([-1.3, -1.3, 2.3], [0.0, 0.89, 0.85], [1.1, -1.1, 3.1], 2.2, 0.75,
     [-2.4, 3.2732253, 1.0700002], {"rtol": 2e-5}),
    ([1.3, 5.3, -3.3], [0.88, 1.0, 0.83], [2.1, -1.1, -2.1], -1.2, 0.75,
     [-0.01701999, 2.6529999, -2.196], {"rtol": 2e-5}),
]  # fmt: skip
RETURN_CASES = [
    # rlax multistep_test, lambda, discounted and (lambda 1) n-step returns of n >= 5; the value
    # before the first step cancels
    (*FIRST, 0.75, [1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4], {"rtol": 2e-6}),
    (*OTHER, 0.75, [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99], {"rtol": 2e-6}),
    (*FIRST, 1.0, [1.315, 0.63000005, 0.70000005, 1.7, 3.4], {"rtol": 2e-6}),
    (*OTHER, 1.0, [1.33592, 0.9288, 0.2576, 3.192, 3.9899998], {"rtol": 2e-6}),
    # trfl, generalised lambda returns
    *(([0.4, 0.5], [0.9, 0.8], [0.2, 0.3], 0.1, lam,
       [0.4 + 0.9 * (lam * 0.58 + (1 - lam) * 0.3), 0.58], {"rtol": 1e-6})
      for lam in (0.25, 0.5, 1.0)),
]  # fmt: skip
CASES = [(False, *case) for case in ADVANTAGE_CASES] + [(True, *case) for case in RETURN_CASES]


@pytest.mark.parametrize("case", CASES)
def test_advantages_and_returns_of_rlax_and_trfl(case):
    is_return, rewards, discounts, values, after, lam, expected, close = case
    result = advantages(rewards, discounts, values, after, lam) + np.multiply(values, is_return)
    np.testing.assert_allclose(result, expected, **close)


# rlax and trfl, TDLearning: v_tm1 1, r -1
TD = [(d, v) for v in (0.0, 1.0, 2.0) for d in (0.0, 0.5, 1.0)]


TD_ERRORS = [-2.0, -2.0, -2.0, -2.0, -1.5, -1.0, -2.0, -1.0, 0.0]


@pytest.mark.parametrize(("case", "expected"), zip(TD, TD_ERRORS, strict=True))
def test_td_learning(case, expected):
    discount, after = case
    result = compute_gae(np.array([-1.0]), np.ones(1), gamma=discount, lam=0.3, bootstrap=after)
    assert result == pytest.approx([expected])
    value = torch.ones(1, requires_grad=True)
    inputs = {"values": value, "returns": torch.tensor([1.0 + expected]), "mask": torch.ones(1)}
    loss, _ = LOSSES["value"].fn(value.detach(), value.detach(), inputs, torch.tensor([0, 1]), {})
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5 * expected**2)  # the same for trfl
    assert float(value.grad) == pytest.approx(-expected)


# trfl sequence_ops_test, scan_discounted_sum with reverse: sequence, decays, bootstrap, expected
SCANS = [
    ([3, 1, 5], [0.5, 0.9, 1.0], 0.0, [(5 * 0.9 + 1) * 0.5 + 3, 5 * 0.9 + 1, 5]),
    ([-1.7, 1.2, 2.3], [0.9, 0.5, 0.3], 1.5,
     [((2.3 + 0.45) * 0.5 + 1.2) * 0.9 - 1.7, (2.3 + 0.45) * 0.5 + 1.2, 2.75]),
    ([3, 1], [0.5, 0.9], 2.5, [(0.9 * 2.5 + 1) * 0.5 + 3, 0.9 * 2.5 + 1]),
    ([33, 11, 55], [5, 9, 10], 0.0, [(55 * 9 + 11) * 5 + 33, 55 * 9 + 11, 55]),
    ([-17, 12, 23], [9, 5, 3], 15.0, [((23 + 45) * 5 + 12) * 9 - 17, (23 + 45) * 5 + 12, 68]),
]  # fmt: skip


@pytest.mark.parametrize(("sequence", "decays", "after", "expected"), SCANS)
def test_trfl_scan_discounted_sum(sequence, decays, after, expected):
    units = np.concatenate([[1.0], np.cumprod(decays)])
    items = units * np.array([*sequence, after], dtype=np.float64)
    result = np.array(compute_returns_to_go(items, 1.0))[:-1] / units[:-1]
    assert result == pytest.approx(expected, rel=1e-12)


ENTROPY = [  # trfl discrete_policy_gradient_ops_test: logits, entropy, its gradient
    ([0, 1], 0.58220309, 0.1966119),
    ([1, 2], 0.58220309, 0.1966119),
    ([0, 2], 0.36533386, 0.2099872),
    ([1, 1], 0.69314718, 0.0),
    ([0, -1000], 0.0, 0.0),
    ([0, 1000], 0.0, 0.0),
]


@pytest.mark.parametrize(("logits", "expected", "slope"), ENTROPY)
def test_trfl_entropy(logits, expected, slope):
    leaf = torch.tensor([logits], dtype=torch.float32, requires_grad=True)
    _, entropy, _ = token_logprob(leaf, torch.tensor([0]))
    entropy.sum().backward()
    assert float(entropy) == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(leaf.grad[0].numpy(), [slope, -slope], atol=1e-6)


def log_softmax(logits):
    return torch.tensor(logits, dtype=F64).log_softmax(-1).numpy()


def loss_of(name, lp, cu_seqlens, config=None, **inputs):
    lp = torch.tensor(lp, dtype=F64, requires_grad=True)
    inputs = {field: torch.as_tensor(np.asarray(v), dtype=F64) for field, v in inputs.items()}
    cu = torch.as_tensor(cu_seqlens)
    loss, _ = LOSSES[name].compute(lp, torch.zeros_like(lp), inputs, cu, config or {})
    (slope,) = torch.autograd.grad(loss, lp)
    return float(loss.detach()), slope.numpy()


TRFL_PG = [
    ([0, 1], 0, 0.0, 0.0),
    ([0, 1], 0, 1.0, 1.313262),
    ([1, 1], 1, 2.0, 1.386294),
    ([0, 100], 1, 1.0, 0.0),
]


@pytest.mark.parametrize(("logits", "action", "value", "expected"), TRFL_PG)
def test_trfl_discrete_policy_gradient(logits, action, value, expected):
    """Loss -A log pi: cross_entropy weighted by A, and cispo without clipping."""
    lp, fields = [log_softmax(logits)[action]], {"advantages": [value], "mask": [1.0]}
    loss, _ = loss_of("cross_entropy", lp, [0, 1], weights=[value])
    assert loss == pytest.approx(expected, abs=1e-6)
    loss, _ = loss_of("cispo", lp, [0, 1], **fields, logprobs=lp)
    assert loss == pytest.approx(expected, abs=1e-6)
    _, gradient = loss_of("importance_sampling", lp, [0, 1], **fields)
    assert gradient == pytest.approx([-value])


LOGITS = np.array([[1.0, 1, 1], [2, 0, 0], [-1, -2, -3]])
RLAX_PG = [
    (LOGITS, [0, 1, 2], [0.3, 0.2, 0.1], [-2.0, 2.0, 0.0], 0.0788835088),
    (LOGITS + 1, [0, 0, 0], [-0.3, -0.2, -0.1], [-3.0, 1.0, -1.0], 0.327200909),
]


@pytest.mark.parametrize(("logits", "actions", "advantages_T", "weights", "expected"), RLAX_PG)
def test_rlax_policy_gradient_loss(logits, actions, advantages_T, weights, expected):
    lp = log_softmax(logits)[np.arange(3), actions]
    credit = np.array(advantages_T) * weights / 3  # a mean over the three tokens
    loss, _ = loss_of("cross_entropy", lp, [0, 3], weights=credit)
    assert loss == pytest.approx(expected, rel=1e-6)
    loss, _ = loss_of("cispo", lp, [0, 3], advantages=credit, logprobs=lp, mask=np.ones(3))
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("sign", "expected"), [(1, -0.17117467), (-1, 0.19333333)])
def test_rlax_clipped_surrogate(sign, expected):
    old = log_softmax([[1.0, 1, 1], [2, 0, 0], [-3, -2, -1]])[np.arange(3), [0, 1, 2]]
    lp = log_softmax(LOGITS)[np.arange(3), [0, 1, 2]]
    credit = sign * np.array([0.3, 0.2, 0.1])
    result, _ = loss_of("ppo", lp, [0, 3], advantages=credit, logprobs=old, mask=np.ones(3))
    # rlax's literal is in float32 and checked to 1e-4
    assert result / 3 == pytest.approx(expected, abs=1e-5)


RLAX_ENTROPY = [(LOGITS, [-2.0, 2.0, 0.0], 0.288693), (LOGITS + 1, [-3.0, 1.0, -1.0], 1.15422)]


@pytest.mark.parametrize(("logits", "weights", "expected"), RLAX_ENTROPY)
def test_rlax_entropy_loss(logits, weights, expected):
    """In rlax's sign convention the loss is minus the weighted mean of the entropies."""
    logits = torch.tensor(logits, dtype=torch.float32)
    _, entropy, _ = token_logprob(logits, torch.tensor([0, 0, 0]))
    loss = -(entropy.double() * torch.tensor(weights)).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------------------- verl


def test_verl_gae_steps_over_observations():
    rewards = np.array([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1.0, 0, 0])
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], dtype=bool)
    noise = 100 * np.random.default_rng(0).standard_normal(11)
    values = np.where(mask, [0.0, 0, 4, 5, 6, 0, 0, 7, 9, 0, 0], noise)
    after, running, expected = 0.0, 0.0, np.zeros(11)
    for t in reversed(range(11)):
        total = rewards[t] + 0.9 * after - values[t] + 0.9 * 0.7 * running
        after, running = (values[t], total) if mask[t] else (after, running)
        expected[t] = running
    result = compute_gae(rewards[mask], values[mask], gamma=0.9, lam=0.7)
    np.testing.assert_allclose(result, expected[mask], rtol=1e-12)


def test_verl_group_advantages():
    """GRPO without the std, and RLOO, with verl's index loops."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 8, 17):
        scores = rng.normal(size=size)
        ours = ADVANTAGES["leave_one_out"].fn(scores.tolist())
        expected = [s - np.delete(scores, i).mean() for i, s in enumerate(scores)]
        assert ours == pytest.approx(expected, rel=1e-12)
        ours = ADVANTAGES["mean"].fn(scores.tolist())
        assert ours == pytest.approx(scores - scores.mean(), abs=1e-15)


def test_verl_divides_by_the_sample_deviation():
    rewards = np.array([1.0, 1.00001])
    verl = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    ours = ADVANTAGES["mean_std"].fn(rewards.tolist())
    assert ours == pytest.approx(verl * (rewards.std(ddof=1) + 1e-6) / (rewards.std() + 1e-6))
    assert not np.allclose(ours, verl, rtol=0.1)


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_verl_token_sum(cuts):
    """Masked sums add up for any split."""
    rows, mask = np.array([[1.0, 2, 30], [4, 50, 6]]), np.array([[1.0, 1, 0], [1, 0, 1]])
    result, _ = loss_of("cross_entropy", -rows.ravel(), [0, 3, 6], weights=mask.ravel())
    assert result == 13.0
    rows, mask = np.arange(1.0, 25).reshape(8, 3), np.tile([1.0, 1, 0], (8, 1))
    total = 0.0
    for part, weights in zip(np.split(rows, cuts), np.split(mask, cuts), strict=True):
        cu = np.arange(0, part.size + 1, 3)
        total += loss_of("cross_entropy", -part.ravel(), cu, weights=weights.ravel())[0]
    assert total == (rows * mask).sum()


def test_verl_truncated_importance_weights():
    """verl's mask case (ratios e^-1 and e^0.5 below the cap of 2) and a ratio above the cap."""
    lp, q = [-2.0] * 3, [-1.0, -2.5, -4.0]
    fields = {"target_tokens": [1] * 3, "advantages": [1.0] * 3, "logprobs": q, "mask": [1.0] * 3}
    datums = [Datum(ModelInput.from_ints([1, 2, 3]), fields)]
    weighted, metrics = apply_truncated_is(FixedScores([lp]), datums, 2.0, 1.0)
    weights = weighted[0].loss_fn_inputs["advantages"].tolist()
    assert weights == pytest.approx([0.36788, 1.64872, 2.0], abs=1e-5)
    assert metrics["optim/tis_frac_capped"] == pytest.approx(1 / 3)


# values, and gradients by the policy's logprob, of verl's kl_penalty (Schulman's k1, k2, k3); "+"
# is its straight-through variant
KL = {
    "k1": (lambda lp, ref: lp - ref, lambda lp, ref: lp - ref),
    "k2": (lambda lp, ref: (lp - ref) ** 2 / 2, lambda lp, ref: lp - ref),
    "k3": (lambda lp, ref: math.exp(ref - lp) - (ref - lp) - 1, lambda lp, ref: lp - ref),
    "k3_pathwise": (lambda lp, ref: math.exp(ref - lp) - (ref - lp) - 1,
                    lambda lp, ref: 1 - math.exp(ref - lp)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KL)
def test_verl_kl_penalties(kind):
    """Ours are verl's "k1+", "k2", "k3+" (the gradient of k2) and, pathwise, "k3"."""
    rng = np.random.default_rng(1)
    lp, ref = rng.normal(size=6), rng.normal(size=6)
    fields = {"advantages": np.zeros(6), "logprobs": lp, "ref_logprobs": ref, "mask": np.ones(6)}
    config = {"kl_coef": 1.0, "kl_kind": kind}
    result, slope = loss_of("importance_sampling", lp, [0, 6], config, **fields)
    value, gradient = KL[kind]
    assert result == pytest.approx(sum(map(value, lp, ref)), rel=1e-12)
    assert slope == pytest.approx(list(map(gradient, lp, ref)), rel=1e-12)


# -------------------------------------------------------------------------------------------- Liger


def batch(seed=0):
    rng = np.random.default_rng(seed)
    lengths = [5, 2, 9]
    total = sum(lengths)
    lp = -rng.exponential(size=total)
    credit = np.repeat(rng.normal(size=3), lengths)
    mask = (rng.random(total) < 0.7).astype(float)
    mask[[0, 5, 7]] = 1.0
    return (
        lengths, lp, lp + 0.3 * rng.normal(size=total), lp + 0.3 * rng.normal(size=total), credit,
        mask,
    )  # fmt: skip


def as_datums(lengths, credit, mask):
    ends = np.cumsum([0, *lengths])
    parts = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    datums = []
    for n, s in zip(lengths, parts, strict=True):
        fields = {"advantages": credit[s], "mask": mask[s], "logprobs": mask[s]}
        datums.append(Datum(ModelInput.from_ints([0] * n), {"target_tokens": [0] * n, **fields}))
    return datums, parts


def gather_fields(datums, *names):
    return {name: np.concatenate([d.loss_fn_inputs[name].array for d in datums]) for name in names}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    "normalise", ["tokens", "sequence_means", "constant"], ids=["bnpo/dapo", "grpo", "dr_grpo"]
)
def test_liger_grpo(normalise, beta):
    """Liger's plain torch loss with its three means, and the gradient."""
    lengths, lp, old, ref, credit, mask = batch()
    datums, parts = as_datums(lengths, credit, mask)

    def liger(logps):
        ratio = torch.exp(logps - torch.tensor(old))
        a = torch.tensor(credit)
        per_token = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
        gap = torch.tensor(ref) - logps
        per_token = (per_token + beta * (gap.exp() - gap - 1)) * torch.tensor(mask)
        match normalise:
            case "tokens":
                return per_token.sum() / mask.sum()
            case "sequence_means":
                return sum(per_token[s].sum() / mask[s].sum() for s in parts) / len(parts)
            case "constant":
                return per_token.sum() / (len(parts) * 16)

    leaf = torch.tensor(lp, requires_grad=True)
    expected = liger(leaf)
    (slope,) = torch.autograd.grad(expected, leaf)
    fields = {"advantages": credit, "mask": mask}  # float64, without conversion to float32
    if normalise == "sequence_means":
        fields = gather_fields(weight_by_sequence(datums), "advantages", "mask")
    config = {"kl_coef": beta, "kl_kind": "k3_pathwise"} if beta else {}
    fields |= {"logprobs": old, "ref_logprobs": ref}
    result, ours = loss_of("ppo", lp, np.cumsum([0, *lengths]), config, **fields)
    size = compute_divisor(datums, normalise, 16)
    # a datum's fields are float32: an error of 2^-24 each, for sixteen fields
    rounding = 4e-7 if normalise == "sequence_means" else 1e-12
    assert result / size == pytest.approx(float(expected), rel=rounding)
    np.testing.assert_allclose(ours / size, slope.numpy(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_liger_dpo(beta, eps):
    """Check -mean log sigmoid(beta ((w - l) - (w_ref - l_ref))), sums over each answer's tokens."""
    rng = np.random.default_rng(2)
    lengths = [4, 3, 6, 2]
    lp, ref = -rng.exponential(size=15), -rng.exponential(size=15)
    mask = (rng.random(15) < 0.8).astype(float)
    ends = np.cumsum([0, *lengths])
    gaps = np.add.reduceat((lp - ref) * mask, ends[:-1])
    deltas = beta * (gaps[::2] - gaps[1::2])
    expected = ((1 - eps) * np.log1p(np.exp(-deltas)) + eps * np.log1p(np.exp(deltas))).sum()
    config = {"beta": beta, "label_smoothing": eps}
    result, _ = loss_of("dpo", lp, ends, config, mask=mask, ref_logprobs=ref)
    assert result == pytest.approx(expected, rel=1e-12)


# -------------------------------------------------------------------------------------------- AReaL


def test_areal_packed_gae():
    """Each sequence has one more value than rewards; `bootstrap`: whether that value is used."""
    rng = np.random.default_rng(4)
    lengths, counts = [1, 4, 7, 2, 32], [True, False, True, True, False]
    gamma, lam = 0.97, 0.9
    for length, bootstrap in zip(lengths, counts, strict=True):
        r, v = rng.normal(size=length), rng.normal(size=length + 1)
        running, expected = 0.0, []
        for t in reversed(range(length)):
            ahead = v[t + 1] * (bootstrap if t == length - 1 else 1)
            running = r[t] + gamma * ahead - v[t] + gamma * lam * running
            expected.append(running)
        result = compute_gae(r, v[:-1], gamma=gamma, lam=lam, bootstrap=v[-1] * bootstrap)
        np.testing.assert_allclose(result, expected[::-1], rtol=1e-12, atol=1e-12)


def test_areal_decoupled_policy_loss():
    """Ratios against the proximal policy, with each token weighted by proximal / behaviour."""
    lengths, lp, behaviour, proximal, credit, mask = batch(5)
    weight = np.exp(proximal - behaviour)
    ratio = np.exp(lp - proximal)
    expected = (np.maximum(-credit * ratio, -credit * ratio.clip(0.8, 1.2)) * weight * mask).sum()
    datums, parts = as_datums(lengths, credit, mask)
    for datum, s in zip(datums, parts, strict=True):
        datum.loss_fn_inputs["logprobs"] = TensorData(behaviour[s], "float32")
    weighted, _ = apply_truncated_is(FixedScores([proximal[s] for s in parts]), datums, 1e9, 1.0)
    fields = gather_fields(weighted, "advantages", "logprobs", "mask")
    fields["advantages"] = np.where(mask != 0, fields["advantages"], 0.0)
    result, _ = loss_of("ppo", lp, np.cumsum([0, *lengths]), **fields)
    assert result == pytest.approx(expected, rel=1e-5)
