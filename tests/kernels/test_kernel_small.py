"""Test parts of the kernels package that need no kernel: the references, device checks, and which
attention torch may pick.
"""

import pytest
import torch


def test_attention_never_goes_through_cudnn():
    """cuDNN builds a graph for every key length, 23 to 37 ms each on Hopper, and a sampler's key
    length grows with every token.
    """
    from helpers import make_worker

    from rl.models import load_model
    from rl.sampler import make_decoder

    for start in (make_worker, lambda: make_decoder(load_model("tiny:addition", seed=0).model)):
        torch.backends.cuda.enable_cudnn_sdp(True)
        start()
        assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_logprobs_of_several_tokens_without_logits(softcap, frozen):
    """K targets per position, some of them equal, agree with whole logits in float64: values and
    every gradient. No [T, V] is made.
    """
    from test_kernel_tripwire import LargestTensorMode

    from kernels import topk_target_logprob

    g = torch.Generator().manual_seed(0)
    T, D, V, K = 40, 12, 30_000, 5
    x, w, bias = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((T, D), (V, D), (V,))
    )
    y = torch.randint(0, 50, (T, K), generator=g)
    upstream = torch.randn(T, K + 1, generator=g, dtype=torch.float64)
    exact = [t.clone().requires_grad_(not frozen or t is x) for t in (x, w, bias)]
    logits = exact[0] @ exact[1].t() + exact[2]
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    every = logits.log_softmax(-1)
    truth = torch.cat([every.gather(1, y), -(every.exp() * every).sum(-1, keepdim=True)], 1)
    truth.backward(upstream)
    ours = [t.float().requires_grad_(not frozen or t is x) for t in (x, w, bias)]
    with LargestTensorMode() as wire:
        logp, entropy = topk_target_logprob(
            ours[0], ours[1], y, ours[2], 0.7, softcap, saved_bytes=0
        )
        result = torch.cat([logp, entropy[:, None]], 1)
        result.backward(upstream.float())
    assert wire.largest < T * V
    torch.testing.assert_close(result.double(), truth, atol=1e-4, rtol=1e-4)
    for mine, other in zip(ours, exact, strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad.double(), other.grad, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("wrong", [-100, -1, 50])
def test_a_target_outside_the_vocabulary_is_named_in_every_column(column, wrong):
    """Invalid targets after the first of K were used as indices without a check."""
    from kernels import topk_target_logprob

    targets = torch.randint(0, 50, (6, 4))
    targets[3, column] = wrong
    with pytest.raises(ValueError, match=rf"target\[3, {column}\] is {wrong}, outside \[0, 50\)"):
        topk_target_logprob(torch.randn(6, 8), torch.randn(50, 8), targets)
    assert topk_target_logprob(torch.randn(0, 8), torch.randn(50, 8), targets[:0])[0].shape == (
        0,
        4,
    )


@pytest.mark.parametrize(("hidden", "target"), [((5,), (5, 0)), ((5,), (5,)), ((2, 5), (2, 5, 2))])
def test_other_shapes_of_targets_are_named(hidden, target):
    from kernels import topk_target_logprob

    with pytest.raises(ValueError, match=rf"target \({target[0]}.*expected \[T, D\] and \[T, K\]"):
        topk_target_logprob(
            torch.randn(*hidden, 8), torch.randn(50, 8), torch.zeros(target, dtype=torch.int64)
        )


def test_the_setting_reaches_the_head(monkeypatch):
    """A LoRA head is padded to rows of 16 bytes, and its base gets no gradient."""
    from helpers import call, make_worker, random_datums

    import kernels
    from rl.types import LoraConfig

    seen = []
    original = kernels.linear_logprob
    monkeypatch.setattr(
        kernels,
        "linear_logprob",
        lambda *args, **options: seen.append((args, options)) or original(*args, **options),
    )
    worker = make_worker(lora=LoraConfig(3, train_unembed=True), kept_bytes=12_345)
    call(worker, "forward_backward", 0, random_datums(3), "importance_sampling", {}, 1.0, True)
    args, options = seen[-1]
    assert options["saved_bytes"] == 12_345
    assert args[1].shape[1] % 16 == 0 and options["frozen_columns"] == args[1].shape[1] - 16


@pytest.mark.parametrize("entropy", [True, False])
def test_logprobs_from_logits_on_a_gpu_are_the_plain_ones(entropy):
    """A head that cannot be fused uses this function on CUDA; here its torch path is compared:
    values and gradients.
    """
    from rl.learner.logprob_head import compute_logprobs, compute_logprobs_with_kernel

    g = torch.Generator().manual_seed(0)
    targets, results = torch.randint(0, 50, (9,), generator=g), []
    logits, upstream = 3 * torch.randn(9, 50, generator=g), torch.randn(2, 9, generator=g)
    for way in (compute_logprobs_with_kernel, compute_logprobs):
        leaf = logits.clone().requires_grad_()
        logp, ent = way(leaf, targets, 0.7, entropy)
        torch.autograd.backward((logp, ent), tuple(upstream)) if entropy else logp.backward(
            upstream[0]
        )
        results.append((logp, ent, leaf.grad))
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)


def test_a_branch_that_fails_or_differs_is_not_taken(monkeypatch):
    """The check is tested with trials that agree, differ by more than rounding, raise, or give
    NaN.
    """
    from contextlib import nullcontext

    from kernels.device_checks import check_kernels_agree

    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def giving(value):
        return lambda newer, index, dtype: (
            torch.ones(3),
            torch.full((3,), value if newer else 1.0),
        )

    def raising(kind):
        def trial(newer, index, dtype):
            raise kind("PassManager::run failed\nand much more")

        return trial

    assert check_kernels_agree(giving(1.001), 0, torch.bfloat16)
    for trial in (giving(1.1), giving(float("nan"))):
        with pytest.warns(UserWarning, match="gives other numbers than the older kernel"):
            assert not check_kernels_agree(trial, 0, torch.bfloat16)
    for kind in (RuntimeError, AttributeError, TypeError):
        with pytest.warns(
            UserWarning,
            match=r"does not run on this GPU, using the older kernel "
            rf"\({kind.__name__}: PassManager::run failed\)",
        ):
            assert not check_kernels_agree(raising(kind), 0, torch.bfloat16)
    # says nothing about the kernel: a cached False would turn it off for the whole process
    with pytest.raises(torch.OutOfMemoryError):
        check_kernels_agree(raising(torch.OutOfMemoryError), 0, torch.bfloat16)


def test_a_torch_without_the_product_into_float32_is_reported(monkeypatch):
    """torch 2.7 lacks one overload of torch.mm; on CUDA the product would raise a TypeError. Each
    function that needs it checks first, here on fake CUDA tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kernels.device_checks import check_mm_to_fp32
    from kernels.matmul_operands import matmul_fp32
    from rl.sampler.precision import linear_fp32
    from rl.sampler.prefix_attention import compute_scores_fp32

    check_mm_to_fp32.cache_clear()
    check_mm_to_fp32()
    check_mm_to_fp32.cache_clear()
    monkeypatch.setattr(torch.ops.aten.mm, "overloads", lambda: ["default", "out"])
    with FakeTensorMode():
        half = {"device": "cuda", "dtype": torch.bfloat16}
        matrix, batch = torch.empty(16, 16, **half), torch.empty(1, 16, 16, **half)
    products = ((matmul_fp32, matrix), (linear_fp32, matrix), (compute_scores_fp32, batch))
    for product, operand in products:
        with pytest.raises(RuntimeError, match="expected torch 2.8 or newer: upgrade torch"):
            product(operand, operand)
