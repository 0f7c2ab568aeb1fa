"""Test token_logprob off CUDA against whole logits in float64."""

import itertools

import pytest
import torch
from kernel_references import linear_logprob_reference

from kernels import token_logprob
from kernels.token_logprob import backward_op, forward_op

T, V = 9, 50


def logits_case(seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(T, V, generator=g, dtype=torch.float64)
    y = torch.randint(0, V, (T,), generator=g)
    upstream = torch.randn(3, T, generator=g, dtype=torch.float64)
    upstream[:, 2] = 0.0
    return logits, y, upstream


def test_token_logprob_equals_the_definition():
    for temperature, used in itertools.product((1.0, 0.6), ((0,), (0, 1), (0, 1, 2))):
        logits, y, upstream = logits_case()
        exact, leaf = logits.clone().requires_grad_(), logits.float().requires_grad_()
        expected = linear_logprob_reference(
            exact, torch.eye(V, dtype=torch.float64), y, None, temperature
        )
        sum((expected[i] * upstream[i]).sum() for i in used).backward()
        outputs = token_logprob(leaf, y, temperature)
        for mine, truth in zip(outputs, expected, strict=True):
            torch.testing.assert_close(mine.double(), truth, atol=1e-5, rtol=1e-5)
        sum((outputs[i] * upstream[i].float()).sum() for i in used).backward()
        torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


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
    torch.library.opcheck(forward_op, (logits.clone().requires_grad_(), y, 0.7))
    _, entropy, lse = token_logprob(logits, y)
    torch.library.opcheck(backward_op, (*upstream, logits, y, entropy, lse, 1.0))
    compiled = torch.compile(token_logprob, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, y)[0], token_logprob(logits, y)[0])
