"""Test the kernels between the products of a decoding step: torch's path against formulas in
float64, the kernels in Triton's interpreter.
"""

import numpy as np
import pytest
import torch
from interpreting import INTERPRETED, SLOW_INTERPRETED

from kernels import decode_ops

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = SLOW_INTERPRETED
ROUNDING = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def get_implementations():
    if not INTERPRETED:
        return decode_ops
    from interpreting import patch_once

    from kernels import decode_ops_triton

    patch_once()
    return decode_ops_triton


def iterate_cases(count: int = 100):
    rng = np.random.default_rng(0)
    for _ in range(count):
        dtype = [torch.float32, torch.float16, torch.bfloat16][int(rng.integers(3))]
        yield rng, torch.Generator().manual_seed(int(rng.integers(1 << 30))), dtype


def check_close(result, exact, dtype):
    assert result.dtype == dtype
    scale = 1.0 + float(exact.abs().max())
    assert float((result.double() - exact).abs().max()) <= ROUNDING[dtype] * scale


def test_residual_and_norm():
    for rng, g, dtype in iterate_cases():
        rows, width = int(rng.integers(1, 4)), int(rng.integers(1, 70))
        x, residual = (torch.randn(rows, width, generator=g).to(dtype) for _ in range(2))
        weight = torch.rand(width, generator=g).to(dtype)
        inputs = None if rng.random() < 0.2 else x
        total = residual.double() if inputs is None else residual.double() + x.double()
        exact = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        check_close(
            get_implementations().fused_add_rms_norm(inputs, residual, weight, 1e-5), exact, dtype
        )
        check_close(residual, total, dtype)


def test_gated_activation():
    for rng, g, dtype in iterate_cases():
        gate_up = (
            2 * torch.randn(int(rng.integers(1, 4)), 2 * int(rng.integers(1, 50)), generator=g)
        ).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        check_close(get_implementations().silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


def test_rotation_and_cache():
    """Each row's keys and values are written at its page and slot; the rest of the cache is
    unchanged.
    """
    for rng, g, dtype in iterate_cases():
        rows, key_heads, repeat, half = (int(rng.integers(1, n)) for n in (4, 3, 3, 9))
        heads, width = key_heads * repeat, 2 * half
        qkv = torch.randn(rows, heads + 2 * key_heads, width, generator=g).to(dtype)
        norm = torch.rand(2, width, generator=g).to(dtype) + 0.5 if rng.random() < 0.5 else None
        angles = torch.outer(torch.arange(12).double(), torch.rand(half, generator=g).double())
        cos, sin = angles.cos().to(dtype).double(), angles.sin().to(dtype).double()
        rope = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).to(dtype)
        position = torch.randint(0, 12, (rows,), generator=g)
        page = torch.randperm(5, generator=g)[:rows]
        place = torch.randint(0, 4, (rows,), generator=g)
        kv = torch.full((2, 5, 4, key_heads, width), 7.0).to(dtype)
        x = qkv.double()
        qk, v = x[:, : heads + key_heads], x[:, heads + key_heads :]
        if norm is not None:
            kinds = [0] * heads + [1] * key_heads
            qk = qk / (qk.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()[kinds]
        a, b = qk.chunk(2, dim=-1)
        c, s = cos[position][:, None], sin[position][:, None]
        turned = torch.cat([a * c - b * s, b * c + a * s], -1)
        result = get_implementations().rope_to_cache(
            qkv, norm, 1e-5, rope, position, kv, page, place, heads
        )
        check_close(result, turned[:, :heads], dtype)
        check_close(kv[0, page, place], turned[:, heads:], dtype)
        assert torch.equal(kv[1, page, place], v.to(dtype))
        kv[:, page, place] = 7.0
        assert (kv == 7.0).all()


def test_keys_and_values_of_prompts_into_the_cache():
    """Prompts of several lengths, padded on the right, are copied from slices of a larger tensor.
    The rest of the cache is unchanged.
    """
    for rng, g, dtype in iterate_cases(40):
        prompts, key_heads, width, size = (int(rng.integers(1, n)) for n in (5, 4, 9, 6))
        lengths = rng.integers(1, 14, prompts)
        longest = int(lengths.max())
        qkv = torch.randn(prompts, longest, 3 * key_heads, width, generator=g).to(dtype)
        _, k, v = qkv.split(key_heads, dim=2)
        per_prompt = -(-longest // size)
        tables = rng.permutation(prompts * per_prompt + 3)[: prompts * per_prompt]
        tables = tables.reshape(prompts, per_prompt)
        kv = torch.full((2, prompts * per_prompt + 3, size, key_heads, width), 7.0).to(dtype)
        expected, slots = kv.clone(), torch.full((prompts, longest + 2), -1)[:, :longest]
        for i, length in enumerate(lengths.tolist()):
            for t in range(length):
                page = int(tables[i, t // size])
                slots[i, t] = page * size + t % size
                expected[0, page, t % size], expected[1, page, t % size] = k[i, t], v[i, t]
        get_implementations().append_to_cache(k, v, kv, slots)
        assert torch.equal(kv, expected)
