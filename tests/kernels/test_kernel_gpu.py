"""Test the Triton kernels on a CUDA device. test_kernel_interpreter.py and test_kernel_compile.py
test the same kernels without a GPU.
"""

import pytest
import torch
from kernel_references import linear_logprob_reference

from kernels import linear_logprob, policy_loss, token_logprob

pytestmark = pytest.mark.gpu


def make_problem(T, D, V, dtype, scale=1.0):
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(T, D, generator=g, device="cuda").to(dtype)
    w = (scale * torch.randn(V, D, generator=g, device="cuda") / D**0.5).to(dtype)
    upstream = torch.randn(2, T, generator=g, device="cuda")
    upstream[:, torch.rand(T, generator=g, device="cuda") < 0.3] = 0.0
    return x, w, torch.randint(0, V, (T,), generator=g, device="cuda"), upstream


def run(function, dtype, x, w, y, upstream, frozen=False, bent=True, **settings):
    """Return outputs and gradients. With `bent` the entropy has an upstream gradient too; without
    one the kept and gathered values are used.
    """
    x, w = (
        x.to(dtype, copy=True).requires_grad_(),
        w.to(dtype, copy=True).requires_grad_(not frozen),
    )
    settings = {key: value.to(dtype) if key == "bias" else value for key, value in settings.items()}
    logp, entropy, *_ = function(x, w, y, **settings)
    if bent:
        torch.autograd.backward((logp, entropy), tuple(upstream.to(logp.dtype)))
    else:
        logp.backward(upstream[0].to(logp.dtype))
    return [t.detach().double() for t in (logp, entropy, x.grad, *(() if frozen else (w.grad,)))]


ONE = "one"  # one [T, V] fits in memory, but not a second
PATHS = [
    {"saved_bytes": 0},
    {"saved_bytes": ONE},
    {"saved_bytes": 1 << 40},
    {"saved_bytes": 0, "frozen": True},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("T", "D", "V"), [(1, 1000, 1000), (257, 896, 50257), (300, 2048, 32000), (64, 100, 1001)]
)
@pytest.mark.parametrize("bent", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_error_rule(dtype, T, D, V, path, bent):
    check_error(make_problem(T, D, V, dtype), dtype, path, bent, temperature=0.7)


def resolved(path, x, w, dtype):
    return (
        path | {"saved_bytes": len(x) * len(w) * dtype.itemsize}
        if path["saved_bytes"] == ONE
        else path
    )


def check_error(inputs, dtype, path, bent, **settings):
    """Check that our error against float64 is at most twice that of plain torch in the same
    precision.
    """
    path = resolved(path, inputs[0], inputs[1], dtype)
    frozen = bool(path.get("frozen"))
    exact = run(linear_logprob_reference, torch.float64, *inputs, frozen, bent, **settings)
    plain = run(linear_logprob_reference, dtype, *inputs, frozen, bent, **settings)
    ours = run(linear_logprob, dtype, *inputs, bent=bent, **settings, **path)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert mine.isfinite().all()
        assert (mine - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-4 * max(
            1.0, float(truth.abs().max())
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bent", [True, False])
@pytest.mark.parametrize("D", [2304, 900])
def test_softcap_bias_and_a_width_of_no_multiple_of_16_bytes(path, bent, D):
    x, w, y, upstream = make_problem(300, D, 32_001, torch.bfloat16)
    bias = torch.randn(
        32_001, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
    ).bfloat16()
    check_error(
        (x, w, y, upstream), torch.bfloat16, path, bent, temperature=0.6, softcap=30.0, bias=bias
    )


@pytest.mark.parametrize("path", PATHS)
def test_ignored_rows_and_strides(path):
    x, w, y, upstream = make_problem(513, 896, 50_257, torch.bfloat16)
    y[::3] = -100
    # Take every second row in memory.
    strided = torch.stack((x, torch.full_like(x, float("nan"))), 1)[:, 0]
    for bent in (True, False):
        check_error((strided, w, y, upstream), torch.bfloat16, path, bent)


@pytest.mark.parametrize("path", PATHS)
def test_more_tokens_than_go_through_a_slab_at_once(path):
    """9000 tokens make two chunks. The first and last rows, the rows at the chunk boundary and a
    sample of dW are checked.
    """
    T, D, V = 9000, 256, 131_072
    x, w, y, upstream = make_problem(T, D, V, torch.bfloat16)
    path = resolved(path, x, w, torch.bfloat16)
    x.requires_grad_()
    w.requires_grad_(not path.get("frozen"))
    linear_logprob(x, w, y, saved_bytes=path["saved_bytes"], entropy=False)[0].backward(upstream[0])
    for rows in (slice(0, 8), slice(8188, 8196), slice(T - 8, T)):
        leaf = x.detach()[rows].double().requires_grad_()
        linear_logprob_reference(leaf, w.detach().double(), y[rows])[0].backward(
            upstream[0, rows].double()
        )
        assert (x.grad[rows].double() - leaf.grad).abs().max() <= 2e-2 * (
            1.0 + leaf.grad.abs().max()
        )
    if w.requires_grad:
        some = torch.randint(0, V, (64,), device="cuda")
        lse = torch.cat(
            [(part @ w.detach().t()).float().logsumexp(-1) for part in x.detach().split(512)]
        ).double()
        p = (x.detach().double() @ w.detach()[some].double().t() - lse[:, None]).exp()
        a = upstream[0].double()
        exact = ((y[:, None] == some) * a[:, None] - p * a[:, None]).t() @ x.detach().double()
        assert (w.grad[some].double() - exact).abs().max() <= 2e-2 * (1.0 + exact.abs().max())


def test_logprobs_are_bitwise_independent_of_the_batch_and_the_run():
    x, w, y, _ = make_problem(1000, 896, 50257, torch.bfloat16)
    whole = linear_logprob(x, w, y)[0]
    assert all(torch.equal(whole, linear_logprob(x, w, y)[0]) for _ in range(4))
    for rows in (slice(0, 1), slice(100, 357), slice(999, 1000)):
        assert torch.equal(linear_logprob(x[rows], w, y[rows])[0], whole[rows])
    frozen = linear_logprob(x.requires_grad_(), w, y, saved_bytes=0)[0]
    assert torch.equal(linear_logprob(x[:300], w, y[:300], saved_bytes=0)[0], frozen[:300])


def test_logprobs_have_the_same_bits_whatever_is_kept():
    """Logprobs are equal without a gradient, with recomputed scores and with [T, V] kept: all three
    use the same kernel (the older kernel if that is the fallback).
    """
    x, w, y, _ = make_problem(700, 896, 50_256, torch.bfloat16)
    plain = linear_logprob(x, w, y)
    for saved in (0, len(x) * len(w) * 2, 1 << 40):
        kept = linear_logprob(x.requires_grad_(), w.requires_grad_(), y, saved_bytes=saved)
        assert all(torch.equal(mine, other) for mine, other in zip(kept, plain, strict=True)), saved


@pytest.mark.parametrize("frozen", [False, True])
def test_extra_memory_is_flat_in_v(frozen):
    """From V = 131,072 on a slab is 16,384 wide. dW, which must be as large as W, is not
    counted.
    """
    extra = []
    for V in (256_000, 512_000):
        x, w, y, upstream = make_problem(4096, 256, V, torch.bfloat16)
        x.requires_grad_()
        w.requires_grad_(not frozen)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_logprob(x, w, y, entropy=False, saved_bytes=0)[0].backward(upstream[0])
        extra.append(
            torch.cuda.max_memory_allocated()
            - before
            - (0 if frozen else w.numel() * w.element_size())
        )
        del x, w, y, upstream
    assert extra[1] <= 1.1 * extra[0]


def test_extra_memory_grows_with_the_tokens_and_no_faster():
    extra = []
    for T in (32_768, 65_536):
        x, w, y, upstream = make_problem(T, 128, 151_936, torch.bfloat16)
        x.requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_logprob(x, w, y, saved_bytes=0)[0].backward(upstream[0])
        extra.append(torch.cuda.max_memory_allocated() - before)
        del x, w, y, upstream
    assert extra[1] <= 2.05 * extra[0]


def test_more_than_two_to_the_31_scores():
    """[T, V] is kept between forward and backward, so that offsets exceed 2^31. The last rows have
    the largest offsets.
    """
    x, w, y, upstream = make_problem(20_000, 64, 128_256, torch.bfloat16)
    x.requires_grad_()
    ours = linear_logprob(x, w, y, saved_bytes=1 << 40, entropy=False)[0]
    ours.backward(upstream[0])
    leaf = x.detach()[-8:].double().requires_grad_()
    exact = linear_logprob_reference(leaf, w.double(), y[-8:])[0]
    exact.backward(upstream[0, -8:].double())
    assert (ours[-8:].double() - exact).abs().max() < 1e-3
    assert (x.grad[-8:].double() - leaf.grad).abs().max() < 2e-2


def test_token_logprob_of_many_rows():
    x, w, y, upstream = make_problem(1500, 64, 50_257, torch.bfloat16)
    upstream[0, ::7] = 0.0
    logits = (x @ w.t()).requires_grad_()
    logp, entropy, lse = token_logprob(logits, y, temperature=0.8)
    logp.backward(upstream[0])
    exact = logits.detach().double().requires_grad_()
    truth = (exact / 0.8).log_softmax(-1).gather(-1, y[:, None])[:, 0]
    truth.backward(upstream[0].double())
    assert (logp.double() - truth).abs().max() < 1e-4
    assert (logits.grad.double() - exact.grad).abs().max() < 2e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_second_device_that_is_not_the_current_one():
    inputs = [t.to("cuda:1") for t in make_problem(257, 896, 32_000, torch.bfloat16)]
    assert torch.cuda.current_device() == 0
    check_error(inputs, torch.bfloat16, {"saved_bytes": 0}, True)


def test_unaligned_targets():
    x, w, y, upstream = make_problem(33, 64, 1001, torch.bfloat16)
    shifted = torch.cat((y[:1], y))[1:]
    assert torch.equal(linear_logprob(x, w, shifted)[0], linear_logprob(x, w, y)[0])


def test_losses_equal_the_cpu():
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(5000, generator=g) * 0.3 for _ in range(3)]
    cu, mask = torch.tensor([0, 7, 7, 3000, 5000]), torch.rand(5000, generator=g) < 0.6
    for kind in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        losses = []
        for device in ("cpu", "cuda"):
            lp, old, adv = (t.to(device) for t in tensors)
            leaf = lp.clone().requires_grad_()
            settings = {"kind": kind, "mask_T": mask.to(device), "cu_seqlens": cu.to(device)}
            loss, _ = policy_loss(leaf, old, adv, **settings)
            loss.backward()
            losses.append((loss.cpu().detach(), leaf.grad.cpu()))
        torch.testing.assert_close(losses[0], losses[1], atol=1e-3, rtol=1e-4)
