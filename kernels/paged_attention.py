"""`attend_pages`: attention of one query a row over keys and values in pages; pages that a group of
rows shares are read once for it.

Three ways of one function. Gathered: pages side by side, in float32: the definition, and what runs
off CUDA. Ours: kernels in paged_attention_triton.py. Torch's own varlen attention over block tables
(not before torch 2.13), with one split: with more, only some rows are written (pytorch#194167). On
CUDA the first of the last two that gives the gathered numbers in a trial on the device. Shapes: R
rows, H query heads, K key heads, D head width, B pages of a table, S positions of a page, G groups.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kernels.common import on_device, triton_works
from kernels.shared_pages import SharedPages

WAYS = ("triton", "varlen", "gathered")


def attend_pages(
    q: Tensor, kv: Tensor, table: Tensor, length: Tensor, shared: SharedPages | None = None
) -> Tensor:
    """Attention output [R, H, D], scores scaled by D ** -0.5; no row sees another. No gradient;
    nothing waits for the device.

    Args: q [R, H, D]; kv [2, pages, S, K, D], keys and values, the last two dimensions contiguous;
    table int32 [R, B] of the pages that are a row's own; length int32 [R] of its positions there, 1
    at least; `shared`: the pages before those.
    """
    way = "gathered" if not q.is_cuda else _way(q, kv)
    return _by(way, q, kv, table, length, shared)


# ------------------------------------------------------------------------------------- torch's ways


def merged(
    read: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    length: Tensor,
    shared: SharedPages | None,
) -> Tensor:
    """Own pages and the group's by themselves, then by their log-sum-exp."""
    rows = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    out, lse = read(q, kv, rows, None, table, length, 1)
    if shared is None:
        return out
    more, more_lse = read(
        q.index_select(0, shared.order),
        kv,
        shared.starts,
        shared.group,
        shared.table,
        shared.length,
        len(q),
    )
    more, more_lse = more.index_select(0, shared.place), more_lse.index_select(0, shared.place)
    weight = torch.sigmoid(more_lse - lse).unsqueeze(-1)  # e^a / (e^a + e^b)
    both = torch.lerp(out.float(), more.float(), weight).to(out.dtype)
    # what was read for rows of no group says nothing
    return torch.where(shared.shares.view(-1, 1, 1), both, out)


def read_gathered(
    q: Tensor,
    kv: Tensor,
    starts: Tensor,
    group: Tensor | None,
    table: Tensor,
    length: Tensor,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Outputs [R, H, D] and log-sum-exps [R, H] (float32) of queries over their sequences' pages.
    No numbers where a length is 0.

    `group`: the sequence of each query (None: its own number), which `starts`, where each
    sequence's queries begin, and `most`, how many queries a sequence has, say in another way.
    """
    table, length = (table, length) if group is None else (table[group], length[group])
    k, v = kv[:, table.long()].flatten(2, 3).float().unbind(0)  # [R, B S, K, D]
    score = (
        torch.einsum("rkhd,rlkd->rkhl", q.float().unflatten(1, (k.shape[2], -1)), k)
        * q.shape[-1] ** -0.5
    )
    hidden = torch.arange(k.shape[1], device=q.device) >= length[:, None]
    score = score.masked_fill(hidden[:, None, None], -torch.inf)
    lse = score.logsumexp(-1)
    v = v.masked_fill(hidden[:, :, None, None], 0.0)  # whatever lies there, which 0 would not end
    out = torch.einsum("rkhl,rlkd->rkhd", (score - lse.unsqueeze(-1)).exp(), v)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1)


def read_varlen(
    q: Tensor,
    kv: Tensor,
    starts: Tensor,
    group: Tensor | None,
    table: Tensor,
    length: Tensor,
    most: int,
    splits: int | None = 1,
) -> tuple[Tensor, Tensor]:
    """As `read_gathered`, by torch's varlen attention. `splits`: None is torch's own choice, for
    benches.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    keys, values = kv.unbind(0)
    out, lse = varlen_attn(
        q, keys, values, starts, None, most, table.shape[1] * kv.shape[2], enable_gqa=True, seqused_k=length, block_table=table,
        num_splits=splits, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, lse.transpose(0, 1)


@cache
def varlen_has_pages() -> bool:
    """Whether this torch's varlen attention knows block tables and one split."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"block_table", "num_splits", "seqused_k", "enable_gqa"} <= set(
        inspect.signature(varlen_attn).parameters
    )


# ------------------------------------------------------------------------------------ which of them


def _way(q: Tensor, kv: Tensor) -> str:
    # no device to ask: tensors without memory go the way of kernels
    if not triton_works(q) or not torch.cuda.is_available():
        return "triton"
    return _tried(q.device.index or 0, q.dtype, q.shape[1], kv.shape[3], q.shape[2], kv.shape[2])


@cache
def _tried(
    index: int, dtype: torch.dtype, heads: int, key_heads: int, width: int, size: int
) -> str:
    """The first way that gives the gathered numbers on this GPU; a way that fails says so once. Of
    sizes as they will be asked for.
    """
    q, kv, table, length, shared = trial_inputs(
        torch.device("cuda", index), dtype, heads, key_heads, width, size
    )
    exact = merged(read_gathered, q.float(), kv.float(), table, length, shared)
    for way in WAYS[:-1] if varlen_has_pages() else WAYS[:1]:
        try:
            found = _by(way, q, kv, table, length, shared)
            apart = float((found.float() - exact).abs().max())
            said = (
                f"outputs are {apart:.2g} apart"
                if not apart <= (1e-4 if dtype == torch.float32 else 2e-2)
                else None
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # noqa: BLE001  (a compiler, a driver: whatever it is, another way is there)
            said = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"
        if said is None:
            return way
        warnings.warn(
            f"attention over pages by {way} is not right on this device ({said}); another way is taken",
            stacklevel=2,
        )
    return "gathered"


def _by(
    way: str, q: Tensor, kv: Tensor, table: Tensor, length: Tensor, shared: SharedPages | None
) -> Tensor:
    if way == "triton":
        from kernels.paged_attention_triton import attend_pages as work

        with on_device(q):
            return work(q, kv, table, length, shared)
    return merged(read_varlen if way == "varlen" else read_gathered, q, kv, table, length, shared)


def trial_inputs(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, SharedPages]:
    """Two groups and two rows of none, whose own lengths end before, at and behind the end of a
    page.
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
