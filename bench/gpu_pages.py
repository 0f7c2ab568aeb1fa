"""Measure attention over KV cache pages for the GPU campaign (see gpu.py): every implementation,
with independent rows and with groups that share pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu_kernels import device_of, milliseconds
from bench.shapes import TB_PER_S

BYTES_A_MS = TB_PER_S * 1e9  # bytes per millisecond of a large copy
# Rows, query heads, key heads, head width; maximum positions of a row; rows of a group, its shared
# pages.
CASES = [
    (1, 14, 2, 64, 8192, 1, 0),
    (64, 14, 2, 64, 1500, 1, 0),
    (3, 16, 8, 128, 2560, 1, 0),
    (256, 32, 8, 128, 1500, 1, 0),
    (1024, 14, 2, 64, 700, 8, 1),
    (16, 14, 2, 64, 700, 16, 16),
    (256, 32, 8, 128, 700, 16, 4),
]
DRY = [(4, 4, 2, 16, 40, 1, 0), (4, 4, 2, 16, 40, 2, 1)]


def part_pages(table: Any, dry: bool) -> None:
    """Measure every case, and check for pytorch#194167: if torch splits the keys of a sequence over
    programs, it writes only the rows of the first sequence in some shapes.
    """
    for given in DRY if dry else CASES:
        rows, heads, key_heads, width, most, group, shared = given
        case = f"{rows} rows, {heads} heads over {key_heads}, width {width}, up to {most}"
        case += f", groups of {group} on {shared} pages" if shared else ""
        made = table.attempt(case, "tensors", lambda g=given: _make(g, dry))
        if made is not None:
            _ways(table, case, made, dry)
        del made


def _make(given: tuple[int, ...], dry: bool) -> tuple[Any, ...]:
    """Return (queries, pages, the other arguments of `attend_pages`, bytes that a step has to
    read).
    """
    from rl.sampler.block_manager import make_block_tables

    rows, heads, key_heads, width, most, group, shared = given
    device, size, rng = device_of(dry), 16 if dry else 256, np.random.default_rng(0)
    own = rng.integers(1, most + 1, rows)
    need = -(-own // size)
    count = int(need.sum()) + shared * (rows // group)
    order = iter(rng.permutation(count).tolist())
    first = [[next(order) for _ in range(shared)] for _ in range(rows // group)]
    tables = [first[i // group] + [next(order) for _ in range(need[i])] for i in range(rows)]
    groups = (
        [(list(range(i * group, (i + 1) * group)), pages) for i, pages in enumerate(first)]
        if shared
        else []
    )
    g = torch.Generator(device).manual_seed(0)
    kv = torch.randn(
        2, count, size, key_heads, width, generator=g, device=device, dtype=torch.bfloat16
    )
    q = torch.randn(rows, heads, width, generator=g, device=device, dtype=torch.bfloat16)
    read = 4.0 * key_heads * width * float(own.sum() + shared * size * (rows // group))
    return q, kv, *make_block_tables(tables, own + shared * size, groups, size, kv.device), read


def _ways(table: Any, case: str, made: tuple[Any, ...], dry: bool) -> None:
    from kernels import paged_attention as module

    *given, read = made
    table.attempt(
        case,
        "chosen",
        lambda: table.row(
            case, "chosen", "way", "gathered" if dry else module._select_backend(given[0], given[1])
        ),
    )
    exact = table.attempt(case, "float64", lambda: _exact(*given))
    ways: dict[str, Callable[[], Tensor]] = {"ours": lambda: module._run_backend("triton", *given)}
    ways |= {
        f"varlen, num_splits={n}": lambda n=n: module.attend_and_merge(_varlen(n), *given)
        for n in (1, None)
    }  # type: ignore[misc]
    ways["gathered"] = lambda: module.attend_and_merge(module.attend_gathered, *given)
    for name, way in ways.items():

        def measure(name: str = name, way: Callable[[], Tensor] = way) -> None:
            if "varlen" in name and not module.varlen_supports_pages():
                raise NotImplementedError(
                    f"torch {torch.__version__} has no varlen attention over pages"
                )
            worst = (way().double() - exact).abs().amax((1, 2))
            table.row(
                case,
                name,
                "largest_error",
                float(worst.max()),
                note=f"{int((~(worst < 0.05)).sum())} rows wrong",
            )
            ms = milliseconds(way, given[0].device.type)
            table.row(
                case,
                name,
                "time",
                ms,
                "ms",
                read / BYTES_A_MS,
                f"{read / BYTES_A_MS / ms:.0%} of bandwidth",
            )

        table.attempt(case, name, measure)


def _varlen(splits: int | None) -> Callable[..., tuple[Tensor, Tensor]]:
    from kernels import paged_attention as module

    return lambda *given: module.attend_varlen(*given, splits=splits)


def _exact(q: Tensor, kv: Tensor, table: Tensor, length: Tensor, shared: Any) -> Tensor:
    """Compute the attention row by row in float64: [rows, heads, width]."""
    found, size, repeat = [], kv.shape[2], q.shape[1] // kv.shape[3]
    for i in range(len(q)):
        first, positions = q.new_empty(0, dtype=torch.int32), 0
        if shared is not None:
            group = shared.group[shared.place[i]]
            positions = int(shared.length[group])
            first = shared.table[group, : positions // size]
        pages = torch.cat([first, table[i, : -(-int(length[i]) // size)]]).long()
        keys, values = (
            t[pages]
            .flatten(0, 1)[: positions + int(length[i])]
            .double()
            .repeat_interleave(repeat, 1)
            for t in kv
        )
        score = torch.einsum("hd,lhd->hl", q[i].double(), keys) * q.shape[2] ** -0.5
        found.append(torch.einsum("hl,lhd->hd", score.softmax(-1), values))
    return torch.stack(found)
