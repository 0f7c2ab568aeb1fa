"""Implement `decode_ops` in Triton: the operations between the matrix products of a decode step,
with a single read and write of each number.

Computation is float32, rounded where torch rounds: the residual sum before the norm, the norm
before its weight, the two products of the rotation together. Casts between bfloat16 and float32
cost no waiting instruction, so memory or the launch bounds every kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024  # columns of a program of silu_mul


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    E: tl.constexpr,
    HAS_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute residual += x and out = residual / rms(residual) * weight, a program for each row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < E
    kind = residual_ptr.dtype.element_ty
    value = tl.load(residual_ptr + row * E + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_X:
        value = (
            (value + tl.load(x_ptr + row * E + cols, mask=mask, other=0.0).to(tl.float32))
            .to(kind)
            .to(tl.float32)
        )
        tl.store(residual_ptr + row * E + cols, value.to(kind), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / E + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + cols, (value * scale * weight).to(kind), mask=mask)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(gate) * up of rows [gate, up], a program for each row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    kind = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * F + cols, (gate * up).to(kind), mask=mask)


@triton.jit
def _weight_norm(x, scale, weight, mask, kind: tl.constexpr):
    """Return x times `scale` and its weights, both products rounded as in torch."""
    x = (x * scale).to(kind).to(tl.float32)
    return (x * tl.load(weight, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _rotate(x, y, rope_ptr, position, positions, cols, mask, D: tl.constexpr, kind: tl.constexpr):
    """Return the channels x, rotated together with the channels y."""
    cos = tl.load(rope_ptr + position * D + cols, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(rope_ptr + (positions + position) * D + cols, mask=mask, other=0.0).to(tl.float32)
    return (x * cos).to(kind).to(tl.float32) + y * sin


@triton.jit
def _rope_to_cache_kernel(
    qkv_ptr,
    norm_ptr,
    rope_ptr,
    position_ptr,
    page_ptr,
    place_ptr,
    q_ptr,
    kv_ptr,
    eps,
    positions,
    plane,
    stride_page,
    stride_place,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process a single head of a single row: normalize and rotate queries and keys, write keys and
    values to the cache and queries to q.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = D // 2
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    # the channel that is rotated together with this channel
    other = tl.where(cols < half, cols + half, cols - half)
    at = qkv_ptr + (row * (H + 2 * K) + head) * D
    kind = qkv_ptr.dtype.element_ty
    x = tl.load(at + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(at + other, mask=mask, other=0.0).to(tl.float32)
    if head < H + K:
        if HAS_NORM:
            weight = norm_ptr + tl.where(head < H, 0, D)
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
            x = _weight_norm(x, scale, weight + cols, mask, kind)
            y = _weight_norm(y, scale, weight + other, mask, kind)
        position = tl.load(position_ptr + row)
        x = _rotate(x, y, rope_ptr, position, positions, cols, mask, D, kind)
    if head < H:
        tl.store(q_ptr + (row * H + head) * D + cols, x.to(kind), mask=mask)
    else:
        is_value = (head >= H + K).to(tl.int64)
        key_head = head - H - is_value * K
        to = (
            tl.load(page_ptr + row).to(tl.int64) * stride_page
            + tl.load(place_ptr + row).to(tl.int64) * stride_place
        )
        tl.store(kv_ptr + is_value * plane + to + key_head * D + cols, x.to(kind), mask=mask)


@triton.jit
def _copy_heads(
    x_ptr, out_ptr, stride_head, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the heads of a token, WIDTH numbers in heads of D, to contiguous memory."""
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    x = tl.load(x_ptr + (cols // D) * stride_head + cols % D, mask=mask, other=0.0)
    tl.store(out_ptr + cols, x, mask=mask)


# they depend on the length of the prompts
PROMPT_STRIDES = [
    f"stride_{tensor}_{axis}" for tensor in "kv" for axis in ("prompt", "token", "head")
]


@triton.jit(do_not_specialize=["T", "stride_slot", *PROMPT_STRIDES])
def _append_to_cache_kernel(
    k_ptr, v_ptr, slot_ptr, kv_ptr, T, stride_slot,
    stride_k_prompt, stride_k_token, stride_k_head, stride_v_prompt, stride_v_token, stride_v_head,
    plane, stride_page, stride_place,
    S: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the key and the value of a token to its slot; a program for each token."""
    token = tl.program_id(0).to(tl.int64)
    prompt, t = token // T, token % T
    slot = tl.load(slot_ptr + prompt * stride_slot + t)
    if slot >= 0:
        to = kv_ptr + (slot // S) * stride_page + (slot % S) * stride_place
        _copy_heads(
            k_ptr + prompt * stride_k_prompt + t * stride_k_token,
            to,
            stride_k_head,
            K * D,
            D,
            BLOCK,
        )
        _copy_heads(
            v_ptr + prompt * stride_v_prompt + t * stride_v_token,
            to + plane,
            stride_v_head,
            K * D,
            D,
            BLOCK,
        )


# ------------------------------------------------------------------------------------------- launch


def fused_add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the kernel of kernels.decode_ops.fused_add_rms_norm."""
    rows, width = residual.numel() // residual.shape[-1], residual.shape[-1]
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _fused_add_rms_norm_kernel[(rows,)](
        residual if x is None else x.contiguous(),
        residual,
        weight,
        out,
        eps,
        E=width,
        HAS_X=x is not None,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Launch the kernel of kernels.decode_ops.silu_mul."""
    rows, width = gate_up.numel() // gate_up.shape[-1], gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    _silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        gate_up.contiguous(), out, F=width, BLOCK=SILU_BLOCK, num_warps=4
    )
    return out


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
    """Launch the kernel of kernels.decode_ops.rope_to_cache."""
    rows, all_heads, width = qkv.shape
    key_heads = (all_heads - heads) // 2
    q = qkv.new_empty((rows, heads, width))
    _rope_to_cache_kernel[(rows, all_heads)](
        qkv.contiguous(),
        qkv if norm_qk is None else norm_qk.contiguous(),
        rope.contiguous(),
        position_N,
        page_N,
        place_N,
        q,
        kv,
        eps,
        rope.shape[1],
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        H=heads,
        K=key_heads,
        D=width,
        HAS_NORM=norm_qk is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return q


def append_to_cache(k: Tensor, v: Tensor, kv: Tensor, slot_BT: Tensor) -> None:
    """Launch the kernel of kernels.decode_ops.append_to_cache."""
    _, tokens, heads, width = k.shape
    _append_to_cache_kernel[(slot_BT.numel(),)](
        k, v, slot_BT, kv, tokens, slot_BT.stride(0), *k.stride()[:3], *v.stride()[:3],
        *kv.stride()[:3],
        S=kv.shape[2], K=heads, D=width, BLOCK=triton.next_power_of_2(heads * width), num_warps=4,
    )  # fmt: skip
