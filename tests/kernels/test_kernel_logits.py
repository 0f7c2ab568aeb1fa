"""Test token_logprob off CUDA against whole logits in float64."""

import itertools

import pytest
import torch

from kernels import linear_logprob_reference, token_logprob
from kernels.token_logprob import backward_inplace_op, backward_op, forward_op

T, V = 9, 50


def logits_case(seed=0):
    g = torch.Generator().manual_seed(seed)
    logits, y = (
        3 * torch.randn(T, V, generator=g, dtype=torch.float64),
        torch.randint(0, V, (T,), generator=g),
    )
    upstream = torch.randn(3, T, generator=g, dtype=torch.float64)
    upstream[:, 2] = 0.0
    y[4] = -100
    return logits, y, upstream


@pytest.mark.parametrize("inplace", [False, True])
def test_token_logprob_equals_the_definition(inplace):
    for temperature, softcap, used in itertools.product(
        (1.0, 0.6), (None, 3.0), ((0,), (0, 1), (0, 1, 2))
    ):
        logits, y, upstream = logits_case()
        exact, leaf = logits.clone().requires_grad_(), logits.float().requires_grad_()
        expected = linear_logprob_reference(
            exact, torch.eye(V, dtype=torch.float64), y, None, temperature, softcap
        )
        sum((expected[i] * upstream[i]).sum() for i in used).backward()
        activations = leaf * 1.0
        outputs = token_logprob(activations, y, temperature, softcap, inplace_backward=inplace)
        for mine, truth in zip(outputs, expected, strict=True):
            torch.testing.assert_close(mine.double(), truth, atol=1e-5, rtol=1e-5)
        sum((outputs[i] * upstream[i].float()).sum() for i in used).backward()
        torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_defect_8_the_inplace_backward_reuses_the_memory_and_bumps_the_version():
    logits, y, upstream = logits_case()
    activations = logits.float().requires_grad_() * 1.0
    # exp keeps its output and log keeps exp's output, which is fine. sin keeps the logits
    # themselves.
    also_needed = activations.exp().log()
    conflict = activations.sin()
    version, address = activations._version, activations.data_ptr()
    logp, _, _ = token_logprob(activations, y, inplace_backward=True)
    (grad,) = torch.autograd.grad(logp, activations, upstream[0].float(), retain_graph=True)
    assert grad.data_ptr() == address and activations._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        conflict.sum().backward()
    assert also_needed.shape == activations.shape
    # On CUDA a kernel writes, which bumps no version: the op has to be declared as mutating.
    schema = str(torch.ops.whetstone.token_logprob_backward_.default._schema)
    assert "Tensor(a3!) logits" in schema


def test_rows_in_many_chunks(monkeypatch):
    import sys

    logits, y, upstream = logits_case()
    whole = token_logprob(logits.float(), y)
    monkeypatch.setattr(sys.modules["kernels.token_logprob"], "BLOCK", 2 * V)
    for a, b in zip(whole, token_logprob(logits.float(), y), strict=True):
        torch.testing.assert_close(a, b)


def test_token_logprob_checks_and_opcheck():
    logits, y, upstream = logits_case()
    logits, upstream = logits.float(), upstream.float()
    bad = y.clone()
    bad[1] = V
    for target, message in (
        (bad, rf"target\[1\] is {V}"),
        (y[:3], "target has shape"),
        (y.float(), "target is torch.float32"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            token_logprob(logits, target)
    torch.library.opcheck(forward_op, (logits.clone().requires_grad_(), y, 0.7, 3.0, -100, False))
    _, entropy, lse = token_logprob(logits, y)
    torch.library.opcheck(backward_op, (*upstream, logits, y, entropy, lse, 1.0, None, -100))
    torch.library.opcheck(
        backward_inplace_op, (*upstream, logits.clone(), y, entropy, lse, 1.0, None, -100)
    )
    compiled = torch.compile(token_logprob, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, y)[0], token_logprob(logits, y)[0])
