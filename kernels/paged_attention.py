"""Compute attention of a single query per row over keys and values in pages; pages shared by a
group of rows are read once for the group.

Three backends implement the function:
- gathered: pages gathered into a dense tensor, in float32. It is the definition, and runs without
  CUDA.
- triton: the kernels in paged_attention_triton.py.
- varlen: torch's varlen attention over block tables (torch 2.13 or newer), with a single split:
  with more splits, only some rows are written (pytorch#194167).
On CUDA the function uses the first of triton and varlen that gives the gathered numbers in a trial
on the device.

Shapes: R rows, H query heads, K key heads, D head size, B pages of a block table, S positions of a
page, G groups.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from kernels.attention_inputs import UNBOUNDED, AttentionBounds, SharedPages
from kernels.common import can_run_triton, device_context

BACKENDS = ("triton", "varlen", "gathered")


def compute_paged_attention(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    length: Tensor,
    shared: SharedPages | None = None,
    bounds: AttentionBounds = UNBOUNDED,
) -> Tensor:
    """Return the attention output [R, H, D], with scores scaled by D ** -0.5; no row sees another
    row.

    No gradient. Nothing waits for the device.

    Args: q [R, H, D]; kv [2, pages, S, K, D], keys and values, the last two dimensions contiguous;
    table int32 [R, B], the block table of each row's private pages; length int32 [R], the number of
    positions in these pages, at least 1; `shared`: the pages before them. A query stands at the
    last position of its row.
    """
    backend = "gathered" if not q.is_cuda else _select_backend(q, kv, bounds)
    return _run_backend(backend, q, kv, table, length, shared, bounds)


# ------------------------------------------------------------------------------------- torch's ways


def attend_and_merge(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    length: Tensor,
    shared: SharedPages | None,
    bounds: AttentionBounds = UNBOUNDED,
) -> Tensor:
    """Attend to the private pages and to the group's pages separately, then merge both by their
    log-sum-exp. `attend` must take bounds if there are any (`attend_gathered` does).
    """
    rows = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    attend_shared = attend
    if bounds != UNBOUNDED:
        attend = partial(attend, first=length - bounds.window, bounds=bounds)
    out, lse = attend(q, kv, rows, None, table, length, 1)
    if shared is None:
        return out
    shares = shared.shares
    if bounds != UNBOUNDED:
        shared_length = shared.length[shared.group[shared.place]]
        first = shared_length + length - bounds.window
        attend_shared = partial(attend_shared, first=first[shared.order], bounds=bounds)
        shares = shares & (first < shared_length) if bounds.window else shares
    shared_out, shared_lse = attend_shared(
        q.index_select(0, shared.order),
        kv,
        shared.starts,
        shared.group,
        shared.table,
        shared.length,
        len(q),
    )
    shared_out, shared_lse = (
        shared_out.index_select(0, shared.place),
        shared_lse.index_select(0, shared.place),
    )
    weight = torch.sigmoid(shared_lse - lse).unsqueeze(-1)  # e^a / (e^a + e^b)
    combined = torch.lerp(out.float(), shared_out.float(), weight).to(out.dtype)
    # the shared output of rows that see no shared position is meaningless
    return torch.where(shares.view(-1, 1, 1), combined, out)


def attend_gathered(
    q: Tensor,
    kv: Tensor,
    starts: Tensor,
    group: Tensor | None,
    table: Tensor,
    length: Tensor,
    max_queries: int,
    first: Tensor | None = None,
    bounds: AttentionBounds = UNBOUNDED,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [R, H, D] and log-sum-exps [R, H] (float32) of queries over their
    sequences' pages. `first` [R]: the first position in each query's window.

    The numbers are undefined where a query sees no position. `group`: the sequence of each
    query (None: the query's index). `starts`, the start of each sequence's queries, and
    `max_queries`, the most queries of a sequence, hold the same information for other backends.
    """
    table, length = (table, length) if group is None else (table[group], length[group])
    k, v = kv[:, table.long()].flatten(2, 3).float().unbind(0)  # [R, B S, K, D]
    score = (
        torch.einsum("rkhd,rlkd->rkhl", q.float().unflatten(1, (k.shape[2], -1)), k)
        * q.shape[-1] ** -0.5
    )
    if bounds.softcap:
        score = bounds.softcap * torch.tanh(score / bounds.softcap)
    place = torch.arange(k.shape[1], device=q.device)
    hidden = place >= length[:, None]
    if first is not None and bounds.window:
        hidden = hidden | (place < first[:, None])
    score = score.masked_fill(hidden[:, None, None], -torch.inf)
    lse = score.logsumexp(-1)
    # the memory may hold NaN, which a weight of 0 would not remove
    v = v.masked_fill(hidden[:, :, None, None], 0.0)
    out = torch.einsum("rkhl,rlkd->rkhd", (score - lse.unsqueeze(-1)).exp(), v)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1)


def attend_varlen(
    q: Tensor,
    kv: Tensor,
    starts: Tensor,
    group: Tensor | None,
    table: Tensor,
    length: Tensor,
    max_queries: int,
    splits: int | None = 1,
) -> tuple[Tensor, Tensor]:
    """Compute `attend_gathered` by torch's varlen attention. `splits`: None selects torch's choice,
    for benchmarks.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    keys, values = kv.unbind(0)
    out, lse = varlen_attn(
        q,
        keys,
        values,
        starts,
        None,
        max_queries,
        table.shape[1] * kv.shape[2],
        enable_gqa=True,
        seqused_k=length,
        block_table=table,
        num_splits=splits,
        return_aux=AuxRequest(lse=True),
    )
    return out, lse.transpose(0, 1)


@cache
def varlen_supports_pages() -> bool:
    """Return whether this torch's varlen attention supports block tables and a single split."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"block_table", "num_splits", "seqused_k", "enable_gqa"} <= set(
        inspect.signature(varlen_attn).parameters
    )


# ------------------------------------------------------------------------------------ which of them


def _select_backend(q: Tensor, kv: Tensor, bounds: AttentionBounds) -> str:
    """Return the backend for tensors on CUDA."""
    # without a device (fake tensors) choose the kernels
    if not can_run_triton(q) or not torch.cuda.is_available():
        return "triton"
    return _first_correct_backend(
        q.device.index or 0, q.dtype, q.shape[1], kv.shape[3], q.shape[2], kv.shape[2], bounds
    )


@cache
def _first_correct_backend(
    index: int,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    width: int,
    size: int,
    bounds: AttentionBounds = UNBOUNDED,
) -> str:
    """Return the first backend that gives the gathered numbers on this GPU, tried at the sizes of
    the call. Only some take bounds; a window is shortened, so that the trial's rows cross it.

    Warns once for each backend that fails.
    """
    q, kv, table, length, shared = make_trial_inputs(
        torch.device("cuda", index), dtype, heads, key_heads, width, size
    )
    bounds = replace(bounds, window=min(bounds.window, size + 3))
    exact = attend_and_merge(attend_gathered, q.float(), kv.float(), table, length, shared, bounds)
    has_varlen = bounds == UNBOUNDED and varlen_supports_pages()
    for backend in BACKENDS[:-1] if has_varlen else BACKENDS[:1]:
        try:
            output = _run_backend(backend, q, kv, table, length, shared, bounds)
            difference = float((output.float() - exact).abs().max())
            problem = (
                f"outputs are {difference:.2g} apart"
                if not difference <= (1e-4 if dtype == torch.float32 else 2e-2)
                else None
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # noqa: BLE001  (compiler or driver failure)
            problem = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"
        if problem is None:
            return backend
        warnings.warn(
            f"paged attention by {backend} gives wrong results on this device ({problem}); using "
            "another backend",
            stacklevel=2,
        )
    return "gathered"


def _run_backend(
    backend: str,
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    length: Tensor,
    shared: SharedPages | None,
    bounds: AttentionBounds = UNBOUNDED,
) -> Tensor:
    """Compute the attention with the backend of that name."""
    if backend == "triton":
        from kernels.paged_attention_triton import compute_paged_attention as attend

        with device_context(q):
            return attend(q, kv, table, length, shared, bounds)
    backend_attend = attend_varlen if backend == "varlen" else attend_gathered
    return attend_and_merge(backend_attend, q, kv, table, length, shared, bounds)


def make_trial_inputs(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, SharedPages]:
    """Return random queries, KV pages, page table, row lengths and shared pages for a trial of the
    attention kernel.

    Five of the seven rows share pages in two groups; the other two rows belong to no group. Rows
    end before, at and after the end of a page.
    """
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn(7, heads, width, generator=g, device=device).to(dtype)
    kv = torch.randn(2, 24, size, key_heads, width, generator=g, device=device).to(dtype)
    pages = torch.randperm(24, generator=g, device=device).int()
    table, shared_table = pages[:14].view(7, 2), pages[14:18].view(2, 2)
    length = torch.tensor(
        [1, size, size + 1, 2 * size, size - 1, 2, size], dtype=torch.int32, device=device
    )
    order, group = (
        torch.tensor([2, 5, 6, 0, 3, 1, 4], device=device),
        torch.tensor([0, 0, 0, 1, 1, 0, 0], device=device),
    )
    shares = torch.ones(7, dtype=torch.bool, device=device).index_fill(0, order[5:], False)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    lengths = torch.tensor([2 * size, size], dtype=torch.int32, device=device)
    return (
        q,
        kv,
        table,
        length,
        SharedPages(order, order.argsort(), group, shares, starts, shared_table, lengths),
    )
