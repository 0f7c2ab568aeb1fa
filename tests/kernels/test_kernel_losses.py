"""Test policy_loss off CUDA: against formulas differentiated by autograd, and against numbers
computed by hand.
"""

import math

import pytest
import torch
from kernel_references import policy_loss_reference

from kernels import policy_loss
from kernels.policy_loss import KINDS, METRICS, forward_op

CU = torch.tensor([0, 5, 5, 20, 37])
T = 37


def case(seed, per_token_clip=False, masked=True):
    g = torch.Generator().manual_seed(seed)

    def randn():
        return torch.randn(T, generator=g, dtype=torch.float64)

    logp = -randn().abs()
    tensors = {"old_T": logp + 0.3 * randn(), "advantage_T": randn(), "mask_T": None}
    if masked:
        tensors["mask_T"] = torch.rand(T, generator=g) < 0.6
        tensors["mask_T"][5:20] = False  # a whole sequence without an action
    low = torch.rand(T, generator=g, dtype=torch.float64) * 0.3 + 0.6 if per_token_clip else 0.8
    return logp, tensors | {"clip_low": low, "clip_high": 1.3, "cu_seqlens": CU}


def low_precision(value):
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_equal_the_formula(kind):
    for seed in range(6):
        logp, settings = case(seed, per_token_clip=seed % 2 == 1)
        settings |= {"kind": kind}
        exact, ours = logp.clone().requires_grad_(), logp.float().requires_grad_()
        expected = policy_loss_reference(exact, **settings)
        expected.backward()
        loss, metrics = policy_loss(
            ours, **{key: low_precision(value) for key, value in settings.items()}
        )
        (3.0 * loss).backward()  # an upstream gradient that is not 1
        torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.grad.double(), 3.0 * exact.grad, atol=1e-5, rtol=1e-5)
        assert set(metrics) == set(METRICS)
        assert float(metrics["tokens"]) == float(settings["mask_T"].sum())


def test_ppo_by_hand():
    """r = 2 and 0.5 with A = +1 and -1: clipped at 1.2 from above for A > 0, not clipped for A < 0;
    and the mirror image.
    """
    two = math.log(2.0)
    logp = torch.tensor([two, two, -two, -two], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, metrics = policy_loss(logp, torch.zeros(4), advantage, kind="ppo")
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-1.2 + 2.0 - 0.5 + 0.8)
    assert logp.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])
    assert (float(metrics["clipped_low"]), float(metrics["clipped_high"])) == (2.0, 2.0)


def test_gspo_by_hand():
    """Sequence means of d are 0.1 and 0. All tokens of a sequence share one ratio, and each
    gradient uses that sequence's advantage.
    """
    logp = torch.tensor([0.3, -0.1, 0.0], requires_grad=True)
    cu, mask = torch.tensor([0, 2, 3]), torch.ones(3)
    loss, _ = policy_loss(
        logp, torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), kind="gspo", cu_seqlens=cu, mask_T=mask
    )
    loss.backward()
    s = math.exp(0.1)
    assert float(loss.detach()) == pytest.approx(-(s * 1 + s * 2 + 3))
    assert logp.grad.tolist() == pytest.approx([-s, -2 * s, -3.0])


def test_defect_13_nothing_behind_the_mask_matters():
    for kind in KINDS:
        logp, settings = case(3)
        settings = {key: low_precision(value) for key, value in settings.items()} | {"kind": kind}
        results = []
        for garbage in (0.0, float("nan"), float("inf")):
            off = ~settings["mask_T"]
            poisoned = dict(settings)
            for name in ("old_T", "advantage_T"):
                poisoned[name] = settings[name].masked_fill(off, garbage)
            leaf = logp.float().masked_fill(off, garbage).requires_grad_()
            loss, _ = policy_loss(leaf, **poisoned)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
        for other in results[1:]:
            assert torch.equal(results[0][0], other[0]) and torch.equal(results[0][1], other[1])


def test_all_masked_is_a_zero_loss_on_the_graph():
    leaf = torch.randn(4, requires_grad=True)
    loss, _ = policy_loss(leaf, torch.randn(4), torch.randn(4), mask_T=torch.zeros(4))
    loss.backward()
    assert float(loss.detach()) == 0.0 and (leaf.grad == 0).all()


def test_opcheck_and_compile():
    logp, settings = case(5)
    lp = logp.float().requires_grad_()
    old = settings["old_T"].float()
    adv = settings["advantage_T"].float()
    torch.library.opcheck(
        forward_op, (lp, old, adv, settings["mask_T"], None, None, CU, "gspo", 0.8, 1.2, 0.05)
    )
    compiled = torch.compile(
        lambda x: policy_loss(x, old, adv)[0], fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(lp), policy_loss(lp, old, adv)[0])


def test_missing_masks_and_wrong_inputs_are_named():
    x = torch.zeros(4)
    cases = [
        ({"kind": "dro"}, "torch.ones_like"),
        ({"kind": "gspo", "mask_T": x}, "cu_seqlens"),
        ({"kind": "trpo"}, "kind is 'trpo'; expected importance_sampling"),
        ({"mask_T": torch.ones(3)}, r"mask_T has shape \(3,\)"),
        ({"kind": "gspo", "mask_T": x, "cu_seqlens": torch.tensor([0, 3])}, r"\[0, 3\]; expected"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            policy_loss(x, x, x, **settings)
