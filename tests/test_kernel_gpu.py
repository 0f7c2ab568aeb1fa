"""The Triton kernels on a CUDA device. Each has a twin without one: test_kernel_interpreter.py and test_kernel_compile.py."""

import pytest
import torch

from kernels import discounted_scan, distill_kl, gae, linear_logprob, linear_logprob_reference, policy_loss, token_logprob

pytestmark = pytest.mark.gpu


def problem(T, D, V, dtype, scale=1.0):
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(T, D, generator=g, device="cuda").to(dtype)
    w = (scale * torch.randn(V, D, generator=g, device="cuda") / D**0.5).to(dtype)
    upstream = torch.randn(2, T, generator=g, device="cuda")
    upstream[:, torch.rand(T, generator=g, device="cuda") < 0.3] = 0.0
    return x, w, torch.randint(0, V, (T,), generator=g, device="cuda"), upstream


def run(function, dtype, x, w, y, upstream, frozen=False, **settings):
    x, w = x.to(dtype, copy=True).requires_grad_(), w.to(dtype, copy=True).requires_grad_(not frozen)
    logp, entropy, *_ = function(x, w, y, **settings)
    torch.autograd.backward((logp, entropy), tuple(upstream.to(logp.dtype)))
    return [t.detach().double() for t in (logp, entropy, x.grad, *(() if frozen else (w.grad,)))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("T", "D", "V"), [(1, 1000, 1000), (257, 896, 50257), (300, 2048, 32000), (64, 100, 1001)])
@pytest.mark.parametrize("path", [{"saved_bytes": 0}, {"saved_bytes": 1 << 40}, {"saved_bytes": 0, "frozen": True}])
def test_error_rule(dtype, T, D, V, path):
    x, w, y, upstream = problem(T, D, V, dtype)
    frozen = bool(path.get("frozen"))
    exact = run(linear_logprob_reference, torch.float64, x, w, y, upstream, frozen, temperature=0.7)
    plain = run(linear_logprob_reference, dtype, x, w, y, upstream, frozen, temperature=0.7)
    ours = run(linear_logprob, dtype, x, w, y, upstream, temperature=0.7, **path)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert (mine - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-4 * max(1.0, float(truth.abs().max()))


def test_logprobs_are_bitwise_independent_of_the_batch_and_the_run():
    x, w, y, _ = problem(1000, 896, 50257, torch.bfloat16)
    whole = linear_logprob(x, w, y)[0]
    assert all(torch.equal(whole, linear_logprob(x, w, y)[0]) for _ in range(4))
    for rows in (slice(0, 1), slice(100, 357), slice(999, 1000)):
        assert torch.equal(linear_logprob(x[rows], w, y[rows])[0], whole[rows])


def test_extra_memory_is_flat_in_v():
    extra = []
    for V in (64_000, 256_000):
        x, w, y, upstream = problem(4096, 256, V, torch.bfloat16)
        x.requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_logprob(x, w, y, entropy=False, saved_bytes=0)[0].backward(upstream[0])
        extra.append(torch.cuda.max_memory_allocated() - before)
    assert extra[1] <= 1.1 * extra[0]


def test_more_than_two_to_the_31_scores():
    x, w, y, upstream = problem(20_000, 64, 128_256, torch.bfloat16)
    ours = linear_logprob(x, w, y, saved_bytes=1 << 40)[0]
    last = linear_logprob_reference(x[-8:].double(), w.double(), y[-8:])[0]
    assert (ours[-8:].double() - last).abs().max() < 1e-3


def test_unaligned_targets_and_inplace_logits():
    x, w, y, upstream = problem(33, 64, 1001, torch.bfloat16)
    shifted = torch.cat((y[:1], y))[1:]
    assert torch.equal(linear_logprob(x, w, shifted)[0], linear_logprob(x, w, y)[0])
    logits = (x @ w.t()).requires_grad_()
    activations = logits * 1.0
    version = activations._version
    token_logprob(activations, y, inplace_backward=True)[0].backward(upstream[0])
    assert activations._version > version
    exact = logits.detach().double().requires_grad_()
    exact.log_softmax(-1).gather(-1, y[:, None]).squeeze(-1).backward(upstream[0].double())
    assert (logits.grad.double() - exact.grad).abs().max() < 2e-2


def test_losses_scans_and_distillation_equal_the_cpu():
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(5000, generator=g) * 0.3 for _ in range(4)]
    cu, mask = torch.tensor([0, 7, 7, 3000, 5000]), torch.rand(5000, generator=g) < 0.6
    for kind in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        losses = []
        for device in ("cpu", "cuda"):
            lp, old, adv, ref = (t.to(device) for t in tensors)
            leaf = lp.clone().requires_grad_()
            settings = {"kind": kind, "mask_T": mask.to(device), "ref_T": ref, "kl_coef": 0.1, "cu_seqlens": cu.to(device)}
            loss, _ = policy_loss(leaf, old, adv, **settings)
            loss.backward()
            losses.append((loss.cpu().detach(), leaf.grad.cpu()))
        torch.testing.assert_close(losses[0], losses[1], atol=1e-3, rtol=1e-4)
    cpu = gae(tensors[0], tensors[1], cu, 0.99, 0.95, mask)[0], discounted_scan(tensors[0], cu, 0.9)
    reward, value, cu, mask = tensors[0].cuda(), tensors[1].cuda(), cu.cuda(), mask.cuda()
    gpu = gae(reward, value, cu, 0.99, 0.95, mask)[0], discounted_scan(reward, cu, 0.9)
    for a, b in zip(cpu, gpu, strict=True):
        torch.testing.assert_close(a, b.cpu(), atol=1e-4, rtol=1e-4)
    heads = [torch.randn(shape, generator=g) * 0.3 for shape in ((65, 64), (1001, 64), (65, 48), (1001, 48))]
    for kind in ("forward", "reverse", "mixture"):
        ours = distill_kl(*(t.cuda() for t in heads), kind=kind)
        torch.testing.assert_close(ours.cpu(), distill_kl(*heads, kind=kind), atol=1e-4, rtol=1e-3)
