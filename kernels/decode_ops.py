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
    if weight.dtype != residual.dtype:
        return F.rms_norm(residual.float(), weight.shape, weight, eps).to(residual.dtype)
    return F.rms_norm(residual, weight.shape, weight, eps)


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
    key_heads = (qkv.shape[1] - heads) // 2
    qk, v = qkv.split([heads + key_heads, key_heads], dim=1)
    if norm_qk is not None:
        kinds = torch.tensor([0] * heads + [1] * key_heads, device=qkv.device)
        qk = (F.rms_norm(qk, qk.shape[-1:], None, eps) * norm_qk.view(2, -1)[kinds]).to(v.dtype)
    cos, sin = rope[:, position_N].unsqueeze(2).unbind(0)
    q, k = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, dims=-1), sin).split(
        [heads, key_heads], dim=1
    )
    kv[0, page_N, place_N] = k
    kv[1, page_N, place_N] = v
    return q


def append_to_cache(k: Tensor, v: Tensor, kv: Tensor, slot_BT: Tensor) -> None:
    """Write keys and values of prompts to the cache.

    Args: k and v [B, T, K, D], the last dimension contiguous; kv [2, pages, S, K, D], the last two
    dimensions contiguous; slot_BT [B, T] int64, the page times S plus the place in it, -1 for
    padding.
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
