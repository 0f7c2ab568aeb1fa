"""Test what is allocated and how many operations run, counted at every torch operation and every
kernel launch.

On a CPU the custom ops are entered, so that their inner operations are counted. For CUDA, fake
tensors run through the launch code, with kernels replaced by counters of the products they would
compute.
"""

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear_logprob
from kernels.common import HeadConfig
from kernels.linear_logprob_torch import GradientCoefficients
from kernels.tile_config import HOPPER_TILES

T, D, V = 1024, 32, 65536
NEED = {"need_x": True, "need_w": True, "need_bias": False}
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class LargestTensorMode(TorchDispatchMode):
    """Record the elements of the largest tensor made, the floating-point operations of matrix
    products, and the host reads.
    """

    def __init__(self):
        super().__init__()
        self.largest, self.flops, self.reads = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "whetstone":
            with self:  # re-enter the mode to count the op's inner operations
                out = func.redispatch(CPU_KEYS, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "matmul"):
            a, b = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        self.reads += name == "_local_scalar_dense"
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def count(frozen=False, active=T, ignored=0, entropy=False, saved=0):
    x, w = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=not frozen)
    y, upstream = torch.randint(0, V, (T,)), torch.randn(T)
    y[:ignored] = -100
    upstream[active:] = 0.0
    with LargestTensorMode() as wire:
        logp, ent, _ = linear_logprob(x, w, y, saved_bytes=saved)
        outputs = (logp, ent) if entropy else (logp,)
        torch.autograd.backward(outputs, (upstream,) * len(outputs))
    return wire


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_recomputing_path_holds_no_logits_and_a_frozen_head_recomputes_nothing(frozen, entropy):
    wire = count(frozen, entropy=entropy)
    assert entropy or wire.largest <= T * V // 8
    assert wire.flops <= (4.01 if frozen and not entropy else 8) * T * D * V
    assert frozen or wire.flops >= 7.9 * T * D * V


def test_the_wire_sees_a_whole_logits_tensor():
    """The saved path holds [T, V]. If the tripwire missed operations inside the ops, this would
    fail.
    """
    wire = count(saved=1 << 30)
    assert wire.largest >= T * V
    assert wire.flops <= 6.01 * T * D * V


def test_half_of_the_rows_active_is_half_of_the_work():
    assert count(ignored=T // 2).flops <= 4.01 * T * D * V
    backward = count(active=T // 2).flops - 2 * T * D * V
    assert backward <= 3.01 * T * D * V


def test_defect_15_at_most_one_wait_for_numbers_each_way():
    # On a CPU: two bounds, then no wait for the counts, which come as one list.
    assert count(ignored=3).reads <= 4


# ---------------------------------------------------------------------------------------- fake CUDA


class Counter:
    """Stand in for a kernel: record grids and the products that it would compute."""

    def __init__(self, log, flops):
        self.log, self.flops_of = log, flops

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.log.append((grid, self.flops_of(args, options)))

        return launch


@pytest.fixture
def launches(monkeypatch):
    launch = pytest.importorskip("kernels.linear_logprob_launch", reason="triton is not installed")
    from kernels import matmul_operands, score_launcher
    from kernels.tile_config import GpuInfo, select_tile_sizes

    log = []

    def product_flops(args, options):
        n, _, lo, hi = args[9:13]
        return 2 * n * options["D"] * (hi - lo)

    for name in ("_forward_kernel", "_dlogits_kernel"):
        monkeypatch.setattr(score_launcher, name, Counter(log, product_flops))
    for name in ("_combine_kernel", "_align_kernel", "_saved_dlogits_kernel"):
        monkeypatch.setattr(score_launcher, name, Counter(log, lambda args, options: 0))
    # Use pointers, because descriptors read addresses.
    for module in (matmul_operands, score_launcher):
        monkeypatch.setattr(module, "get_gpu_info", lambda tensor: GpuInfo(80))
    monkeypatch.setattr(
        score_launcher, "select_tile_sizes", lambda D, dtype, device: select_tile_sizes(D, dtype)
    )
    return launch, log


def fake_inputs(tokens, vocab, hidden=896, dtype=torch.bfloat16):
    """Return hidden states, weights, targets and a row of numbers on fake CUDA."""
    x = torch.empty(tokens, hidden, device="cuda", dtype=dtype)
    w = torch.empty(vocab, hidden, device="cuda", dtype=dtype)
    y = torch.empty(tokens, device="cuda", dtype=torch.int64)
    return x, w, y, torch.empty(tokens, device="cuda")


def fake_run(launch, log, tokens, vocab, frozen=False, saved=False, hidden=896):
    head = HeadConfig()
    with FakeTensorMode(), LargestTensorMode() as wire:
        x, w, y, row = fake_inputs(tokens, vocab, hidden)
        co = GradientCoefficients(row, row, None)
        wire.largest = 0
        if saved:
            kept = torch.empty(tokens, vocab, device="cuda", dtype=torch.bfloat16)
            exponents = torch.empty(-(-vocab // 128), tokens, device="cuda")
            launch.saved_forward(x, w, y, None, head, kept, exponents, entropy=True)
            launch.saved_backward(x, w, y, None, head, co, row, kept, exponents, row, None, **NEED)
        else:
            launch.forward(x, w, y, None, head, expected=frozen)
            if not frozen:
                launch.backward(x, w, y, None, head, co, row, **NEED)
    return wire, wire.flops + sum(flops for _, flops in log)


@pytest.mark.parametrize(("tokens", "vocab"), [(8192, 151_936), (1024, 128_256), (32768, 256_000)])
def test_fake_cuda_recompute(launches, tokens, vocab):
    """dW is [V, D] and no larger than the bound here, so that the bound applies to scores."""
    launch, log = launches
    wire, flops = fake_run(launch, log, tokens, vocab)
    assert wire.largest <= max(tokens * vocab // 8, vocab * 896)
    assert flops <= 8.01 * tokens * 896 * vocab


def test_fake_cuda_frozen_and_saved(launches):
    launch, log = launches
    wire, flops = fake_run(launch, log, 8192, 151_936, frozen=True)
    assert wire.largest <= 8192 * 151_936 // 8
    assert flops <= 2 * 2.01 * 8192 * 896 * 151_936  # the backward needs no product
    log.clear()
    _, flops = fake_run(launch, log, 8192, 151_936, saved=True)
    assert flops <= 6.01 * 8192 * 896 * 151_936


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_every_thread_that_launches_gives_descriptors_their_memory(launches, monkeypatch, where):
    """Triton keeps the allocator per thread, and autograd runs a backward in a separate thread.
    (Hopper's kernels make descriptors.)
    """
    from kernels import score_launcher

    launch, _ = launches
    allocation = pytest.importorskip("triton.runtime._allocation")
    requests = []

    class AllocatorRecordingKernel:
        def __getitem__(self, grid):
            return lambda *args, **options: requests.append(allocation._allocator.get())

    for name in ("_forward_ws_kernel", "_dlogits_ws_kernel"):
        monkeypatch.setattr(score_launcher, name, AllocatorRecordingKernel())
    monkeypatch.setattr(score_launcher, "select_hopper_tiles", lambda x: HOPPER_TILES)

    def run():
        with FakeTensorMode():
            x, w, y, row = fake_inputs(512, 40_000)
            if where == "forward":
                launch.forward(x, w, y, None, HeadConfig(), expected=False)
            else:
                co = GradientCoefficients(row, row, None)
                launch.backward(x, w, y, None, HeadConfig(), co, row, **NEED)

    run()  # first in this thread, then in a new thread
    here = len(requests)
    with ThreadPoolExecutor(1) as other:
        other.submit(run).result()
    assert here > 0
    assert len(requests) == 2 * here
    assert set(requests) == {score_launcher._allocate_scratch}


def test_fake_cuda_extra_memory_is_flat_in_v(launches):
    launch, log = launches
    sizes = [
        fake_run(launch, log, 8192, vocab, frozen=True)[0].largest
        for vocab in (151_936, 303_872, 607_744)
    ]
    assert max(sizes) <= 1.01 * sizes[0]


def test_defect_9_grids_are_one_dimensional_at_any_length(launches):
    launch, log = launches
    fake_run(launch, log, 131_072, 151_936)
    assert log and all(len(grid) == 1 and grid[0] < 2**31 for grid, _ in log)


# --------------------------------------------------------------------------------- bytes, and waits


class Peak(TorchDispatchMode):
    """Record the peak bytes of the tensors made inside that are alive at the same time."""

    def __init__(self, *inputs):
        super().__init__()
        self.live, self.sizes, self.peak = {t.untyped_storage()._cdata: None for t in inputs}, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        key = storage._cdata
        if key not in self.live:
            self.sizes[key] = storage.nbytes()
            self.live[key] = weakref.ref(
                storage, lambda _: (self.live.pop(key), self.sizes.pop(key))
            )
            self.peak = max(self.peak, sum(self.sizes.values()))


def peak_bytes(launch, tokens, vocab, hidden, frozen):
    """Return the peak bytes, without the inputs and dW."""
    head = HeadConfig()
    with FakeTensorMode():
        x, w, y, row = fake_inputs(tokens, vocab, hidden)
        with Peak(x, w, y, row) as forward:
            launch.forward(x, w, y, None, head, expected=frozen)
        if frozen:
            return forward.peak
        co = GradientCoefficients(row, row, None)
        with Peak(x, w, y, row) as backward:
            launch.backward(x, w, y, None, head, co, row, **NEED)
        return max(forward.peak, backward.peak - w.nbytes)


def test_the_frozen_paths_memory_grows_with_the_tokens_and_no_faster(launches):
    """Memory grew with the square of the tokens: 347 MiB at 8k tokens, 8.5 GiB at 131k."""
    launch, _ = launches
    peaks = [
        peak_bytes(launch, tokens, 151_936, 896, True)
        for tokens in (8_192, 32_768, 65_536, 131_072)
    ]
    assert peaks[0] < 400 << 20 and peaks[3] < 1300 << 20
    assert all(b <= 2.1 * a for a, b in zip(peaks[1:], peaks[2:], strict=False))


SIZES = [
    (8_192, 896, 151_936),
    (8_192, 4096, 128_256),
    (32_768, 4096, 128_256),
    (512, 2048, 32_000),
]


@pytest.mark.parametrize(("tokens", "D", "V"), SIZES)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_memory_plan_counts_what_the_kernels_hold(launches, tokens, D, V, frozen):
    from kernels import estimate_workspace_bytes

    launch, _ = launches
    held = peak_bytes(launch, tokens, V, D, frozen)
    assert 0.9 * held <= estimate_workspace_bytes(tokens, D, V, 2, frozen=frozen) <= 1.15 * held


@pytest.mark.parametrize(
    ("capability", "widths"),
    [(80, {896: 896, 900: 912, 904: 912}), (90, {896: 896, 900: 904, 904: 904})],
)
def test_operands_rows_are_what_copies_and_loads_take_for_aligned(monkeypatch, capability, widths):
    """Rows are multiples of 16 bytes for the copy engine, and of 16 elements for loads whose stride
    Triton has to know to be aligned.
    """
    matmul_operands = pytest.importorskip(
        "kernels.matmul_operands", reason="triton is not installed"
    )
    from kernels.tile_config import GpuInfo

    monkeypatch.setattr(matmul_operands, "get_gpu_info", lambda tensor: GpuInfo(capability))
    for width, whole in widths.items():
        x = torch.randn(5, width).bfloat16()
        result = matmul_operands.align_operand(x)
        assert result.shape == (5, whole)
        assert torch.equal(result[:, :width], x)
        assert (result[:, width:] == 0).all()
        assert whole != width or result is x


def test_every_row_of_scores_begins_at_16_elements(launches, monkeypatch):
    """Rows of kept scores, of a slab's gradient and of the frozen head's scores are aligned for any
    vocabulary. Unaligned rows spilled 1.4 KB a thread on Hopper, and Triton treats a row as aligned
    only if its stride is a multiple of 16.
    """
    from kernels import score_launcher

    launch, _ = launches
    strides = []

    class StrideRecordingKernel:
        def __init__(self, at):
            self.at = at

        def __getitem__(self, grid):
            return lambda *args, **options: strides.append(args[self.at].stride(0))

    for name, at in (
        ("_forward_kernel", 6),
        ("_dlogits_kernel", 8),
        ("_saved_dlogits_kernel", 8),
        ("_align_kernel", 0),
    ):
        monkeypatch.setattr(score_launcher, name, StrideRecordingKernel(at))
    head = sys.modules["kernels.linear_logprob"]
    monkeypatch.setattr(head, "can_run_triton", lambda tensor: True)
    with FakeTensorMode():
        x, w, y, row = fake_inputs(512, 50_257)
        co = GradientCoefficients(row, row, None)
        launch.forward(x, w, y, None, HeadConfig(), expected=True)
        launch.backward(x, w, y, None, HeadConfig(), co, row, **NEED)
        kept = head._empty_saved_tensors(x, 50_257, "saved")
        assert kept[0].shape == (512, 50_257)
        launch.saved_forward(x, w, y, None, HeadConfig(), *kept, entropy=True)
        for whole in (False, True):
            launch.saved_backward(
                x, w, y, None, HeadConfig(), co, row, *kept, row, None, whole=whole, **NEED
            )
    assert len(strides) > 30 and not [stride for stride in strides if stride % 16]


@pytest.mark.parametrize(("tokens", "D", "V"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("whole", [False, True])
def test_the_memory_plan_counts_what_is_kept(launches, monkeypatch, tokens, D, V, dtype, whole):
    """Kept are [T, V] and its exponents. The backward from them needs no more additional memory
    than the recomputing backward, plus a second [T, V] if the plan allows one.
    """
    from kernels import estimate_saved_bytes, estimate_workspace_bytes

    launch, _ = launches
    head, size = sys.modules["kernels.linear_logprob"], dtype.itemsize
    scores = tokens * V * size
    monkeypatch.setattr(head, "can_run_triton", lambda tensor: True)
    with FakeTensorMode():
        x, w, y, row = fake_inputs(tokens, V, D, dtype)
        kept = head._empty_saved_tensors(x, V, "whole" if whole else "saved")
        held = sum(tensor.nbytes for tensor in kept)
        co = GradientCoefficients(row, row, None)
        inputs = (x, w, y, None, HeadConfig(), co, row, *kept, row, None)
        with Peak(x, w, y, row, *kept) as wire:
            launch.saved_backward(*inputs, **NEED, whole=whole)
    assert held <= estimate_saved_bytes(tokens, V, size, 2 * scores - 1) <= 1.02 * held
    workspace, extra = 1.15 * estimate_workspace_bytes(tokens, D, V, size), wire.peak - w.nbytes
    assert extra <= workspace + scores * whole
    if whole:
        assert scores <= extra
        assert held + extra <= estimate_saved_bytes(tokens, V, size, 2 * scores) + workspace
    assert estimate_saved_bytes(tokens, V, size, scores - 1) == 0


def test_few_rows_fill_the_gpu(launches):
    """128 rows were 33 programs for 132 SMs, in forward and backward."""
    launch, log = launches
    for tokens in (1, 128, 512, 640, 1024, 8192):
        log.clear()
        fake_run(launch, log, tokens, 151_936, hidden=2048)
        assert all(grid[0] >= 132 * min(-(-tokens // 128), 4) for grid, flops in log if flops), (
            tokens
        )


def test_a_checked_call_does_not_wait_before_the_backward():
    x, w, y = torch.randn(T, D, requires_grad=True), torch.randn(V, D), torch.randint(0, V, (T,))
    with LargestTensorMode() as wire:
        result = linear_logprob(x, w, y, saved_bytes=0, checked=True)
    assert wire.reads == 0
    for mine, plain in zip(result, linear_logprob(x, w, y, saved_bytes=0), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("frozen", "saved"), [(True, 0), (False, 0), (False, 1 << 30)])
def test_a_backward_with_known_rows_reads_nothing(frozen, saved, entropy, monkeypatch):
    """The rows include one without a gradient. Nothing is computed for the others."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(T, D, generator=generator, requires_grad=True)
    w = torch.randn(8192, D, generator=generator, requires_grad=not frozen)
    y = torch.randint(0, 8192, (T,), generator=generator)
    upstream = torch.randn(T, generator=generator)
    upstream[::2] = 0.0
    rows = torch.cat([torch.tensor([0]), torch.arange(1, T, 2)])
    reads, results = [], []
    read = torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda t: reads.append(t) or read(t))
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t) or tolist(t))
    for active_rows in (None, rows, torch.arange(T), rows[:0]):
        x.grad = w.grad = None
        reads.clear()
        logp, entropies, _ = linear_logprob(
            x, w, y, saved_bytes=saved, checked=True, active_rows=active_rows
        )
        (logp * upstream + (entropies * upstream if entropy else 0.0)).sum().backward()
        assert bool(reads) == (active_rows is None)
        results.append([t.grad for t in (x, w) if t.grad is not None])
    for mine in results[1:3]:
        for a, b in zip(mine, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not any(g.any() for g in results[3])


def test_ops_that_wait_are_left_out_of_captured_graphs():
    """torch.compile's reduce-overhead mode reads the tag; without it a wait inside a capture is an
    error.
    """
    for name in ("linear_logprob", "linear_logprob_backward", "token_logprob"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.whetstone, name).default.tags, name


def test_a_check_of_targets_sorts_nothing(monkeypatch):
    """token_logprob needs no positions. Its forward sorted all tokens and discarded the order."""
    from kernels import token_logprob

    with LargestTensorMode() as wire:
        token_logprob(torch.randn(50, 30), torch.randint(0, 30, (50,)))
    assert wire.reads <= 1
    reads, read = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda t: reads.append(t) or read(t))
    token_logprob(torch.randn(2, 30), torch.tensor([3, 29]), checked=True)
    assert not reads
    with pytest.raises(ValueError, match=r"target\[1\] is 30"):
        token_logprob(torch.randn(2, 30), torch.tensor([3, 30]))


@pytest.mark.parametrize("saved", [0, 1 << 30])
def test_columns_without_a_gradient_cost_none(saved):
    """A LoRA head is [W, s B] with W frozen: the unused dW of W was a quarter of all products."""
    x = torch.randn(T, D, requires_grad=True)
    y = torch.randint(0, 8192, (T,))
    upstream = torch.randn(T)
    w = torch.randn(8192, D, requires_grad=True)
    results = []
    for frozen in (0, D - 4):
        x.grad = w.grad = None
        with LargestTensorMode() as wire:
            linear_logprob(x, w, y, saved_bytes=saved, frozen_columns=frozen)[0].backward(upstream)
        results.append((wire.flops, x.grad, w.grad))
    (all_flops, dx, dw), (flops, dx2, dw2) = results
    assert all_flops - flops == 2 * T * (D - 4) * 8192
    torch.testing.assert_close(dx2, dx)
    torch.testing.assert_close(dw2[:, -4:], dw[:, -4:])
    assert (dw2[:, :-4] == 0).all()
