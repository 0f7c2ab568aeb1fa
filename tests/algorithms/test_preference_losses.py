"""Test KTO, ORPO and SimPO: losses and gradients in float64, and learning."""

import math

import numpy as np
import pytest
import torch
from test_dpo import pairs
from whole_runs import train

from rl.algorithms.kto import list_labeled_answers
from rl.losses import get_loss
from rl.types import Problem, TensorData


def flat(datums, logprobs):
    """Return the inputs of a loss for these datums, in float64."""
    logp = torch.tensor(np.concatenate(logprobs), requires_grad=True)
    names = [name for name in datums[0].loss_fn_inputs if name != "target_tokens"]
    arrays = {k: np.concatenate([d.loss_fn_inputs[k].array for d in datums]) for k in names}
    inputs = {k: torch.from_numpy(array.astype(np.float64)) for k, array in arrays.items()}
    return logp, inputs, torch.tensor(np.cumsum([0, *(len(lp) for lp in logprobs)]))


def answers_of(datums, logprobs):
    """Return the logprobs of each answer's tokens."""
    return [lp[d.loss_fn_inputs["mask"].array != 0] for d, lp in zip(datums, logprobs, strict=True)]


def compute_sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def orpo_by_hand(datums, logprobs, beta: float) -> float:
    total = 0.0
    means = [float(np.mean(lp)) for lp in answers_of(datums, logprobs)]
    for chosen, rejected in zip(means[0::2], means[1::2], strict=True):
        odds = [math.exp(m) / (1 - math.exp(m)) for m in (chosen, rejected)]
        total += -chosen - beta * math.log(compute_sigmoid(math.log(odds[0] / odds[1])))
    return total


def simpo_by_hand(datums, logprobs, beta: float, gamma: float) -> float:
    means = [float(np.mean(lp)) for lp in answers_of(datums, logprobs)]
    return sum(
        -math.log(compute_sigmoid(beta * w - beta * r - gamma))
        for w, r in zip(means[0::2], means[1::2], strict=True)
    )


def kto_by_hand(datums, logprobs, beta: float, kl: float, good: float, bad: float) -> float:
    total = 0.0
    for i, (datum, reference) in enumerate(zip(datums, answers_of(datums, logprobs), strict=True)):
        fields = datum.loss_fn_inputs
        mask = fields["mask"].array != 0
        ref = fields["ref_logprobs"].array.astype(np.float64)[mask]
        gap = beta * (float(reference.sum() - ref.sum()) - kl)
        weight = good if i % 2 == 0 else bad
        total += weight - weight * compute_sigmoid(gap if i % 2 == 0 else -gap)
    return total


CASES = [
    ("orpo", {"beta": 0.1}, lambda d, lp: orpo_by_hand(d, lp, 0.1)),
    ("orpo", {"beta": 2.0}, lambda d, lp: orpo_by_hand(d, lp, 2.0)),
    ("simpo", {"beta": 2.0, "gamma": 1.0}, lambda d, lp: simpo_by_hand(d, lp, 2.0, 1.0)),
    ("simpo", {"beta": 0.7, "gamma": 0.0}, lambda d, lp: simpo_by_hand(d, lp, 0.7, 0.0)),
    ("kto", {"beta": 0.3, "kl": 0.4}, lambda d, lp: kto_by_hand(d, lp, 0.3, 0.4, 1.0, 1.0)),
    ("kto", {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5},
     lambda d, lp: kto_by_hand(d, lp, 0.1, 0.0, 1.5, 0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "formula"), CASES)
def test_value_and_gradient_are_those_of_the_formula(name, config, formula):
    datums = pairs(reference=name == "kto")
    rng = np.random.default_rng(1)
    logprobs = [-1.6 + 0.4 * rng.random(d.model_input.length) for d in datums]
    for i, datum in enumerate(datums):
        if name == "kto":
            labels = np.full(datum.model_input.length, 1.0 if i % 2 == 0 else -1.0, np.float32)
            datum.loss_fn_inputs["labels"] = TensorData(labels, "float32")
    logp, inputs, cu = flat(datums, logprobs)
    value, metrics = get_loss(name).fn(logp, torch.zeros_like(logp), inputs, cu, config)
    assert value.item() == pytest.approx(formula(datums, logprobs), rel=1e-12)
    (result,) = torch.autograd.grad(value, logp)
    step, place = 1e-6, 0
    # central differences of the formula at every position; the gradient of masked ones is 0
    for lp in logprobs:
        for t in range(len(lp)):
            before = lp[t]
            ends = []
            for sign in (1, -1):
                lp[t] = before + sign * step
                ends.append(formula(datums, logprobs))
            lp[t] = before
            assert result[place].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-8)
            place += 1
    if name == "kto":
        assert (int(metrics["answers:sum"]), int(metrics["good:sum"])) == (12, 6)
    else:
        assert int(metrics["pairs:sum"]) == 6


def test_odds_without_end_stay_finite():
    datums = pairs(1)
    for datum in datums:
        datum.loss_fn_inputs.pop("ref_logprobs")
    logp, inputs, cu = flat(datums, [np.full(d.model_input.length, -1e-9) for d in datums])
    loss = get_loss("orpo").fn(logp, torch.zeros_like(logp), inputs, cu, {"beta": 1.0})[0]
    assert math.isfinite(loss.item())


def test_a_row_has_a_label_or_is_a_pair():
    request = ({"role": "user", "content": "a"},)
    assert list_labeled_answers(Problem(request, {"label": False}, "x")) == [("x", False)]
    assert list_labeled_answers(Problem(request, {}, "x", rejected="y")) == [
        ("x", True),
        ("y", False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["orpo", "simpo", "kto"])
def test_each_learns_which_sums_are_right(tmp_path, method):
    data = "--data-format preferences" if method == "kto" else ""
    rate = {"orpo": "3e-3", "simpo": "1e-3", "kto": "1e-3"}[method]
    words = (
        f"{method} --dataset addition --steps 40 --batch-size 64 --learning-rate {rate} "
        f"--eval-every 40 --eval-limit 64 {data}"
    )
    rows = train(words, tmp_path / "run")
    held_out = [row for row in rows if "test/loss" in row]
    assert held_out[-1]["test/loss"] < held_out[0]["test/loss"]
    assert held_out[-1]["test/rewards/margins"] > held_out[0]["test/rewards/margins"] + 0.01
