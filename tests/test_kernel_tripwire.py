"""What is allocated and how many operations are done, counted at every torch operation and every kernel launch.

On a CPU the custom ops are entered, so that what they do inside is counted. For CUDA fake tensors run through the launch code,
with kernels replaced by counters of the products they would do.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear_logprob
from kernels.common import Head
from kernels.linear_logprob_torch import Coefficients

T, D, V = 1024, 32, 65536
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Tripwire(TorchDispatchMode):
    """Elements of the largest tensor made, and floating-point operations of matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.flops, self.reads = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "whetstone":
            with self:  # back inside: what the op does is to be seen
                out = func.redispatch(CPU_KEYS, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm"):
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
    with Tripwire() as wire:
        logp, ent, _ = linear_logprob(x, w, y, saved_bytes=saved)
        torch.autograd.backward((logp, ent), (upstream, upstream)) if entropy else logp.backward(upstream)
    return wire


def test_recompute_path():
    wire = count()
    assert wire.largest <= T * V // 8
    assert 7.9 * T * D * V <= wire.flops <= 8 * T * D * V


def test_the_wire_sees_a_whole_logits_tensor():
    """The saved path holds [T, V]; were the wire blind inside the ops, this would fail."""
    wire = count(saved=1 << 30)
    assert wire.largest >= T * V
    assert wire.flops <= 6.01 * T * D * V


def test_frozen_head_recomputes_nothing():
    wire = count(frozen=True)
    assert wire.largest <= T * V // 8
    assert wire.flops <= 4.01 * T * D * V


def test_half_of_the_rows_active_is_half_of_the_work():
    assert count(ignored=T // 2).flops <= 4.01 * T * D * V
    backward = count(active=T // 2).flops - 2 * T * D * V
    assert backward <= 3.01 * T * D * V


def test_entropy_gradient_stays_within_the_bounds():
    assert count(entropy=True).flops <= 8 * T * D * V
    assert count(entropy=True, frozen=True).flops <= 8 * T * D * V


def test_defect_15_at_most_one_wait_for_numbers_each_way():
    assert count(ignored=3).reads <= 4  # on a CPU: two bounds, then nothing from the counts, which come as one list


# --------------------------------------------------------------------------------------------------------------- fake CUDA


class Counter:
    """Stands in for a kernel: notes grids and the products it would do."""

    def __init__(self, log, flops):
        self.log, self.flops_of = log, flops

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.log.append((grid, self.flops_of(args, options)))

        return launch


@pytest.fixture
def launches(monkeypatch):
    launch = pytest.importorskip("kernels.linear_logprob_launch", reason="triton is not installed")
    log = []

    def forward_flops(args, options):
        n, v, lo, tiles = args[9:13]
        return 2 * n * options["D"] * (min(v, lo + tiles * options["BN"]) - lo)

    def dlogits_flops(args, options):
        n, v, lo, tiles = args[9:13]
        return 2 * n * options["D"] * (min(v, lo + tiles * options["BN"]) - lo)

    monkeypatch.setattr(launch, "_forward_kernel", Counter(log, forward_flops))
    monkeypatch.setattr(launch, "_dlogits_kernel", Counter(log, dlogits_flops))
    for name in ("_combine_kernel", "_align_kernel", "_saved_dlogits_kernel"):
        monkeypatch.setattr(launch, name, Counter(log, lambda args, options: 0))
    monkeypatch.setattr(launch, "descriptors_fit", lambda *tensors: False)  # no addresses to look at
    return launch, log


def fake_run(launch, log, tokens, vocab, frozen=False, saved=False, hidden=896):
    head = Head()
    with FakeTensorMode(), Tripwire() as wire:
        x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(vocab, hidden, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(tokens, device="cuda", dtype=torch.int64)
        row = torch.empty(tokens, device="cuda")
        co = Coefficients(row, row, None)
        wire.largest = 0
        if saved:
            kept = torch.empty(tokens, vocab, device="cuda", dtype=torch.bfloat16)
            exponents = torch.empty(-(-vocab // 128), tokens, device="cuda")
            launch.saved_forward(x, w, y, None, head, kept, exponents, entropy=True)
            launch.saved_backward(x, w, y, None, head, co, row, kept, exponents, None, need_x=True, need_w=True, need_bias=False)
        else:
            launch.forward(x, w, y, None, head, expected=frozen)
            if not frozen:
                wire.largest_forward = wire.largest
                launch.backward(x, w, y, None, head, co, row, need_x=True, need_w=True, need_bias=False)
    return wire, wire.flops + sum(flops for _, flops in log)


@pytest.mark.parametrize(("tokens", "vocab"), [(8192, 151_936), (1024, 128_256), (32768, 256_000)])
def test_fake_cuda_recompute(launches, tokens, vocab):
    """dW is [V, D] and no larger than the bound here, so that the bound speaks of scores."""
    launch, log = launches
    wire, flops = fake_run(launch, log, tokens, vocab)
    assert wire.largest <= max(tokens * vocab // 8, vocab * 896)
    assert flops <= 8.01 * tokens * 896 * vocab


def test_fake_cuda_frozen_and_saved(launches):
    launch, log = launches
    wire, flops = fake_run(launch, log, 8192, 151_936, frozen=True)
    assert wire.largest <= 8192 * 151_936 // 8
    assert flops <= 2 * 2.01 * 8192 * 896 * 151_936  # the backward needs no product at all
    log.clear()
    _, flops = fake_run(launch, log, 8192, 151_936, saved=True)
    assert flops <= 6.01 * 8192 * 896 * 151_936


def test_fake_cuda_extra_memory_is_flat_in_v(launches):
    launch, log = launches
    sizes = [fake_run(launch, log, 8192, vocab, frozen=True)[0].largest for vocab in (151_936, 303_872, 607_744)]
    assert max(sizes) <= 1.01 * sizes[0]


def test_defect_9_grids_are_one_dimensional_at_any_length(launches):
    launch, log = launches
    fake_run(launch, log, 131_072, 151_936)
    assert log and all(len(grid) == 1 and grid[0] < 2**31 for grid, _ in log)
