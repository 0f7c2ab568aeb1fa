"""Test that every Triton kernel stays within its buffers: the interpreter runs each launch on
copies
of its tensors that are placed in poisoned memory.

After a launch, every byte outside the tensors is unchanged. A run with another poison and the
programs in reverse order gives the same bits: no result comes from outside a tensor, from
uninitialized memory, or from a race between programs.
"""

from contextlib import contextmanager

import pytest
import torch
from interpreting import INTERPRETED, SLOW_INTERPRETED, mark_interpreted

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = SLOW_INTERPRETED


if INTERPRETED:
    from importlib import import_module

    from interpreting import patch_once
    from test_kernel_compile import MODULES
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    from kernels import (
        UNBOUNDED,
        AttentionBounds,
        SharedPages,
        decode_ops_triton,
        lora_ops,
        lora_ops_triton,
        paged_attention_triton,
        policy_loss_triton,
        score_launcher,
        token_logprob_triton,
        vocab_chunks,
    )
    from kernels import linear_logprob_launch as launch
    from kernels import linear_logprob_torch as path
    from kernels.common import LOG2E, HeadConfig
    from kernels.device_checks import outputs_agree
    from kernels.paged_attention import make_trial_inputs
    from kernels.policy_loss_kinds import KINDS
    from kernels.sample_tokens_triton import sample_tokens
    from kernels.tile_config import GpuInfo, TileConfig

    patch_once()
    # Slabs are cut at multiples of 16 columns; the warp-specialized kernels write 32 at a time.
    TILES, WIDE_TILES = TileConfig(16, 16, 16, 4, 1), TileConfig(16, 32, 16, 4, 1)
GUARD_BYTES = 1 << 16


class PoisonedMemory:
    """Hold copies of a launch's tensors, each within a buffer full of `poison`."""

    def __init__(self, poison: int) -> None:
        self.poison = poison
        self.copies: dict = {}

    def place(self, value):
        """Return the copy of a tensor or of a descriptor's tensor; other values unchanged."""
        if isinstance(value, TensorDescriptor):
            base = self.place(value.base)
            return TensorDescriptor(
                base, value.shape, value.strides, value.block_shape, value.padding
            )
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in self.copies:
            sizes = zip(value.shape, value.stride(), strict=True)
            span = (1 + sum((n - 1) * step for n, step in sizes)) if value.numel() else 0
            owned = torch.zeros(span, dtype=torch.bool)
            owned.as_strided(value.shape, value.stride()).fill_(True)
            size = span * value.element_size()
            # Leave room for what a tile could reach, and keep the same alignment.
            start = -(-(GUARD_BYTES + size) // 64) * 64 + value.data_ptr() % 64
            buffer = torch.full((start + 2 * size + GUARD_BYTES,), self.poison, dtype=torch.uint8)
            outside = torch.ones(len(buffer), dtype=torch.bool)
            outside[start : start + size] = ~owned.repeat_interleave(value.element_size())
            copy = buffer[start : start + size].view(value.dtype)
            copy = copy.as_strided(value.shape, value.stride(), copy.storage_offset())
            self.copies[key] = (value, copy.copy_(value), buffer, outside)
        return self.copies[key][1]

    def check(self, kernel: str) -> None:
        """Assert that all bytes outside of the tensors are unchanged, and copy the results back."""
        for value, copy, buffer, outside in self.copies.values():
            changed = int((buffer[outside] != self.poison).sum())
            assert changed == 0, (
                f"{kernel} wrote {changed} bytes outside of a tensor {tuple(value.shape)} with "
                f"strides {value.stride()}"
            )
            if not torch.equal(_bits(copy), _bits(value)):
                value.copy_(copy)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@contextmanager
def poison_launches(poison: int, launched: set[str], reverse: bool = False):
    """Run every launch on copies in poisoned memory; `reverse`: the last program first."""
    execute = interpreter.GridExecutor.__call__
    set_index = interpreter.interpreter_builder.set_grid_idx

    def guarded(self, *args, **kwargs):
        memory = PoisonedMemory(poison)
        launched.add(self.fn.__name__)
        execute(
            self,
            *map(memory.place, args),
            **{name: memory.place(value) for name, value in kwargs.items()},
        )
        memory.check(self.fn.__name__)

    def reversed_index(*index):
        sizes = interpreter.interpreter_builder.grid_dim
        set_index(*(size - 1 - at for size, at in zip(sizes, index, strict=True)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", guarded)
        if reverse:
            patch.setattr(interpreter.interpreter_builder, "set_grid_idx", reversed_index)
        # Uninitialized memory is filled with NaN.
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def run_twice(compute, launched: set[str]) -> list[torch.Tensor]:
    """Return the results of `compute`, after checking that they have the same bits for two poisons
    and orders and are finite.
    """
    with poison_launches(0xFF, launched):  # NaN in every floating dtype
        results = compute()
    with poison_launches(0x3F, launched, reverse=True):
        again = compute()
    for tensor, other in zip(results, again, strict=True):
        assert torch.equal(_bits(tensor), _bits(other))
        assert tensor.isfinite().all()
    return results


def head_results(g, N, D, V, dtype, bias, softcap, curved) -> list[torch.Tensor]:
    """Compute all plans of a head, as linear_logprob.py launches them."""
    x = torch.randn(N, D, generator=g).to(dtype)
    w = torch.randn(V, D, generator=g).to(dtype)
    y = torch.randint(0, V, (N,), generator=g)
    b = torch.randn(V, generator=g).to(dtype) if bias else None
    upstream, head = torch.randn(2, N, generator=g), HeadConfig(0.7, softcap)
    kept = x.new_empty(N, -(-V // 16) * 16).narrow(1, 0, V)
    exponents = torch.empty(-(-V // TILES.columns), N)
    out = launch.forward(x, w, y, b, head)
    expected = launch.forward(x, w, y, b, head, expected=True)
    saved = launch.saved_forward(x, w, y, b, head, kept, exponents, entropy=True)
    need = {"need_x": True, "need_w": True, "need_bias": bias}
    co = path.compute_coefficients(upstream[0], upstream[1] if curved else None, None, out.entropy)
    grads = [launch.backward(x, w, y, b, head, co, out.lse, **need)]
    truth = path.backward(x, w, y, b, head, co, out.lse, **need)
    if not curved:
        rows = torch.arange(0, N, 2)
        few = path.GradientCoefficients(co.a[rows], co.b[rows], None)
        for whole in (False, True):
            grads.append(
                launch.saved_backward(
                    x, w, y, b, head, co, out.lse, kept, exponents, saved.logp, None,
                    whole=whole, **need,
                )
            )  # fmt: skip
        part = launch.saved_backward(
            x[rows], w, y[rows], b, head, few, out.lse[rows], kept, exponents, saved.logp[rows],
            rows, frozen_columns=8, **need,
        )  # fmt: skip
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for gradients in grads:
        for mine, exact in zip(gradients, truth, strict=True):
            if exact is not None:
                largest = 1.0 + float(exact.abs().max())
                assert float((mine.float() - exact.float()).abs().max()) <= bound * largest
    tensors = [*out, *expected, *saved, kept, exponents, *(t for grad in grads for t in grad)]
    return [t for t in [*tensors, *([] if curved else part)] if t is not None]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(score_launcher, "SPLITS", 3)
    for module in (launch, score_launcher):
        monkeypatch.setattr(module, "CHUNK_SPLITS", 2)
    monkeypatch.setattr(score_launcher, "get_gpu_info", lambda tensor: GpuInfo(90, 5))
    monkeypatch.setattr(score_launcher, "select_tile_sizes", lambda *_: TILES)
    monkeypatch.setattr(paged_attention_triton, "MIN_PROGRAMS", 12)
    # several programs or blocks in a row
    monkeypatch.setattr(token_logprob_triton, "BLOCK", 64)
    monkeypatch.setattr(policy_loss_triton, "BLOCK", 16)
    monkeypatch.setattr(decode_ops_triton, "SILU_BLOCK", 16)


# Values of V: slabs of one unit of 16 columns, of three units with and without a remainder, and of
# two units.
HEADS = [
    (torch.bfloat16, 19, 24, 131, False, None, False, True),
    (torch.float32, 17, 24, 389, False, None, False, True),
    (torch.float16, 16, 16, 384, False, None, True, True),
    (torch.float32, 19, 23, 261, True, 3.0, True, False),
    (torch.bfloat16, 17, 24, 131, True, None, False, False),
]


def _check_heads(cases, launched, monkeypatch):
    for dtype, N, D, V, bias, softcap, curved, wide in cases:
        monkeypatch.setattr(
            score_launcher, "select_hopper_tiles", lambda x, w=wide: WIDE_TILES if w else None
        )

        def compute(case=(N, D, V, dtype, bias, softcap, curved)):
            return head_results(torch.Generator().manual_seed(0), *case)

        run_twice(compute, launched)


@mark_interpreted
def test_the_head_and_all_other_kernels(small, monkeypatch):
    launched: set[str] = set()
    _check_heads(HEADS, launched, monkeypatch)
    # Rows go through a slab in chunks of 16.
    monkeypatch.setattr(vocab_chunks, "CHUNK_ELEMENTS", 16 * 16)
    _check_heads([HEADS[0], HEADS[4]], launched, monkeypatch)
    for compute in (
        token_results, loss_results, decoding_results, lora_results, attention_results, draw_results
    ):  # fmt: skip
        run_twice(lambda compute=compute: compute(torch.Generator().manual_seed(0)), launched)
    kernels = {
        name
        for module in MODULES.split()
        for name, value in vars(import_module(f"kernels.{module}")).items()
        if isinstance(value, interpreter.InterpretedFunction) and name.endswith("_kernel")
    }
    assert launched == kernels


def token_results(g) -> list[torch.Tensor]:
    results = []
    for dtype, V in ((torch.float32, 150), (torch.bfloat16, 129)):
        logits = torch.randn(9, V + 10, generator=g).to(dtype)[:, :V]
        y, used = torch.randint(0, V, (9,), generator=g), torch.arange(9) != 3
        out = token_logprob_triton.forward(logits, y, 0.7)
        a = torch.randn(9, generator=g) * used
        for c in (None, a.flip(0) * used):
            grad = torch.empty(9, V, dtype=dtype)
            co = path.GradientCoefficients(a, -a, c)
            token_logprob_triton.backward(logits, y, 0.7, co, out[2], grad)
            results.append(grad)
        results += out
    return results


def loss_results(g) -> list[torch.Tensor]:
    results = []
    for T in (37, 16):
        lp, old, adv, low = (torch.randn(T, generator=g) for _ in range(4))
        cu, mask = torch.tensor([0, 5, 5, T]), torch.rand(T, generator=g) < 0.6
        for kind in KINDS:
            for fields in ((None, None, None), (mask, low, low)):
                results += policy_loss_triton.launch_policy_loss(
                    lp, old, adv, *fields, cu, kind, 0.8, 1.2, 0.05
                )
    return results


def decoding_results(g) -> list[torch.Tensor]:
    results = []
    for rows, width, heads, key_heads in ((3, 10, 4, 2), (1, 16, 3, 1), (2, 6, 2, 2)):
        x, residual = (torch.randn(rows, 5 * width, generator=g) for _ in range(2))
        weight = torch.rand(5 * width, generator=g)
        for term in (x, None):
            results.append(decode_ops_triton.fused_add_rms_norm(term, residual, weight, 1e-5))
        results += [residual, decode_ops_triton.silu_mul(x[:, : 4 * width])]
        qkv = torch.randn(rows, heads + 2 * key_heads, width, generator=g).bfloat16()
        rope = torch.randn(2, 12, width, generator=g).bfloat16()
        kv = torch.zeros(2, 5, 4, key_heads, width).bfloat16()
        position, page = torch.arange(rows) + 9, torch.arange(rows) + 2
        for norm in (None, torch.rand(2, width, generator=g).bfloat16()):
            results.append(
                decode_ops_triton.rope_to_cache(
                    qkv, norm, 1e-5, rope, position, kv, page, torch.full((rows,), 3), heads
                )
            )
        k, v = qkv.unsqueeze(1)[:, :, :key_heads], qkv.unsqueeze(1)[:, :, -key_heads:]
        slots = torch.tensor([[4], [-1], [18]][:rows])
        decode_ops_triton.append_to_cache(k, v, kv, slots)
        results.append(kv)
    return results


def lora_results(g) -> list[torch.Tensor]:
    results = []
    for rows, inputs, ranks in ((3, 70, (5, 16, 2)), (19, 1100, (33,))):
        x, a = torch.randn(rows, inputs, generator=g), torch.randn(sum(ranks), inputs, generator=g)
        y, parts, first = torch.zeros(rows, 30 * len(ranks)), [], 0
        for i, rank in enumerate(ranks):
            columns, part = slice(30 * i, 30 * i + 27), slice(first, first + rank)
            parts.append((torch.randn(27, rank, generator=g), 0.5, columns, part))
            first += rank
        lora_ops_triton.add_lora_(y, x, a, parts)
        results.append(y)
    # The kernels read the adapters of rows through addresses, so those stay where they are.
    return [*results, *lora_ops.run_row_lora_trial(True, x.device, x.dtype)]


def attention_results(g) -> list[torch.Tensor]:
    results = []
    for dtype, repeat, size, width in ((torch.float32, 3, 8, 20), (torch.bfloat16, 1, 64, 16)):
        q, kv, table, length, shared = make_trial_inputs(
            torch.device("cpu"), dtype, 2 * repeat, 2, width, size
        )
        assert isinstance(shared, SharedPages)
        for group, bounds in (
            (shared, UNBOUNDED),
            (None, UNBOUNDED),
            (shared, AttentionBounds(size + 1, 5.0)),
        ):
            results.append(
                paged_attention_triton.compute_paged_attention(q, kv, table, length, group, bounds)
            )
    return results


def draw_results(g) -> list[torch.Tensor]:
    results = []
    for N, D, V in ((19, 24, 131), (16, 23, 64), (1, 8, 9)):
        x, w = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
        temperature, uniform = torch.rand(N, generator=g) + 0.5, torch.rand(N, generator=g).double()
        for greedy in (None, torch.arange(N) % 3 == 0):
            results += sample_tokens(
                x, w, temperature, uniform, greedy, tiles=TileConfig(16, 32, 16, 4, 1), splits=2,
                pick=(8, 4), search=(8, 16),
            )  # fmt: skip
    return results


@mark_interpreted
def test_a_write_past_the_end_is_noticed(small):
    """A gradient of 32 columns written into a buffer of 16 is detected."""
    x, w, y = torch.randn(5, 16), torch.randn(64, 16), torch.zeros(5, dtype=torch.long)
    scores = score_launcher.ScoreLauncher(x, w, y, None, HeadConfig(), TILES, WIDE_TILES)
    a, dz = torch.randn(5), torch.zeros(5, 16)
    with poison_launches(0xFF, set()), pytest.raises(AssertionError, match="outside"):
        scores.dlogits(
            dz, 0, 32, torch.full((5,), 9 * LOG2E), path.GradientCoefficients(a, -a, None)
        )


class UnboundedKernel:
    """Replace the kernel of a slab's gradient: this one writes all columns of its tiles below V."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        end, vocab = (self.kernel.arg_names.index(name) for name in ("col_end", "V"))

        def launch(*args, **options):
            self.kernel[grid](*args[:end], args[vocab], *args[end + 1 :], **options)

        return launch


@mark_interpreted
def test_the_trial_on_a_device_notices_writes_outside_of_a_slab(monkeypatch):
    """The trial that chooses the warp-specialized kernels, with a Hopper's tiles, detects writes
    outside of a slab.
    """
    device, dtype = torch.device("cpu"), torch.bfloat16
    older, newer = (score_launcher.run_trial(hopper, device, dtype) for hopper in (False, True))
    assert outputs_agree(newer, older)
    kernel = UnboundedKernel(score_launcher._dlogits_ws_kernel)
    monkeypatch.setattr(score_launcher, "_dlogits_ws_kernel", kernel)
    assert not outputs_agree(score_launcher.run_trial(True, device, dtype), older)
