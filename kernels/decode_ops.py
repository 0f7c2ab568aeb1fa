"""Compute the operations between the matrix products of a decode step: residual and norm, rotary
embedding and KV cache write, gated activation. Write the keys and values of prompts to the cache.

Each operation is a single kernel on CUDA (kernels/decode_ops_triton.py) and plain torch elsewhere,
which is its reference. No gradients. Shapes: N rows, E hidden size, F MLP size, H query heads, K
key heads, D head size, S positions of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.common import can_run_triton, device_context


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x, in float32 if its weight is of another dtype."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate_heads(
    qkv: Tensor, norm_qk: Tensor | None, eps: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [.., H + 2 K, D] into queries [.., H, D], keys and values [.., K, D]. Normalize
    (None: no norm) and rotate each head of queries and keys.

    The halves (a, b) of a head become (a cos - b sin, b cos + a sin). cos and sin: [.., 1, D], the
    first half of sin negated.
    """
    key_heads = (qkv.shape[-2] - heads) // 2
    qk, v = qkv.split([heads + key_heads, key_heads], dim=-2)
    if norm_qk is not None:  # a joint norm of both kinds of heads, then the weight of each kind
        norm_q, norm_k = norm_qk.view(2, -1).unbind(0)
        weight = torch.cat([norm_q.expand(heads, -1), norm_k.expand(key_heads, -1)])
        qk = (F.rms_norm(qk, qk.shape[-1:], None, eps) * weight).to(v.dtype)
    qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, dims=-1), sin)
    q, k = qk.split([heads, key_heads], dim=-2)
    return q, k, v


def fused_add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the contiguous residual in place (None: add nothing); return the RMS norm of the sum
    times `weight`.
    """
    if can_run_triton(residual):
        from kernels.decode_ops_triton import fused_add_rms_norm as fused

        with device_context(residual):
            return fused(x, residual, weight, eps)
    if x is not None:
        residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [.., 2 F], gates first."""
    if can_run_triton(gate_up):
        from kernels.decode_ops_triton import silu_mul as fused

        with device_context(gate_up):
            return fused(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_to_cache(
    qkv: Tensor,
    norm_qk: Tensor | None,
    eps: float,
    rope: Tensor,
    position_N: Tensor,
    kv: Tensor,
    page_N: Tensor,
    place_N: Tensor,
    heads: int,
) -> Tensor:
    """Return queries [N, H, D], normalized and rotated; write keys (normalized and rotated) and
    values to the cache at each row's page and place.

    Args: qkv [N, H + 2 K, D]; norm_qk weights [2, D] of queries and keys, None for no norm; rope
    [2, positions, D] cosines and signed sines; kv [2, pages, S, K, D], the last two dimensions
    contiguous.
    """
    if can_run_triton(qkv):
        from kernels.decode_ops_triton import rope_to_cache as fused

        with device_context(qkv):
            return fused(qkv, norm_qk, eps, rope, position_N, kv, page_N, place_N, heads)
    cos, sin = rope[:, position_N].unsqueeze(2).unbind(0)
    q, k, v = rotate_heads(qkv, norm_qk, eps, cos, sin, heads)
    kv[0, page_N, place_N] = k
    kv[1, page_N, place_N] = v
    return q


def append_to_cache(k: Tensor, v: Tensor, kv: Tensor, slot_BT: Tensor) -> None:
    """Write keys and values of prompts to the cache.

    Args: k and v [B, T, K, D], the last dimension contiguous; kv [2, pages, S, K, D], the last two
    dimensions contiguous; slot_BT [B, T] int64, the last dimension contiguous, the page times S
    plus the place in it, -1 for padding.
    """
    if can_run_triton(k):
        from kernels.decode_ops_triton import append_to_cache as fused

        with device_context(k):
            fused(k, v, kv, slot_BT)
        return
    slots = slot_BT.flatten()
    written = slots >= 0
    pages, places = slots[written] // kv.shape[2], slots[written] % kv.shape[2]
    for which, x in enumerate((k, v)):
        kv[which, pages, places] = x.flatten(0, 1)[written]
