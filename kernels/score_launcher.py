"""Launch the kernels over the scores of a head: each method of `ScoreLauncher` is a launch.

The warp-specialized kernels of linear_logprob_hopper.py are used where a trial on the device gives
the numbers of the kernels of linear_logprob_triton.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.common import LARGE_NEGATIVE, LOG2E, HeadConfig
from kernels.device_checks import check_kernels_agree
from kernels.linear_logprob_hopper import _dlogits_ws_kernel, _forward_ws_kernel
from kernels.linear_logprob_torch import ForwardOutput, GradientCoefficients
from kernels.linear_logprob_triton import (
    CHUNK_SPLITS,
    GROUP,
    SPLITS,
    _align_kernel,
    _combine_kernel,
    _dlogits_kernel,
    _forward_kernel,
    _saved_dlogits_kernel,
)
from kernels.matmul_operands import (
    align_operand,
    build_matmul_options,
    is_interpreting,
    narrow_rows,
)
from kernels.tile_config import (
    HOPPER_TILES,
    TileConfig,
    get_gpu_info,
    select_tile_sizes,
)
from kernels.vocab_chunks import align_columns, rows_per_chunk


def select_hopper_tiles(x: Tensor) -> TileConfig | None:
    """Return the tiles of the warp-specialized kernels for these hidden states.

    Returns None if the kernels do not support the dtype or GPU, or give wrong numbers on this
    device.
    """
    if not (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and 90 <= get_gpu_info(x).capability < 100
    ):
        return None
    return HOPPER_TILES if check_kernels_agree(run_trial, x.device.index or 0, x.dtype) else None


def _make_trial_head(
    device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random hidden states, weight, targets and coefficients of a small head."""
    options: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(0),
        "device": device,
    }
    x = torch.randn(300, 328, **options).to(dtype)
    w = (torch.randn(5001, 328, **options) / 8).to(dtype)
    return x, w, torch.randint(0, 5001, (300,), **options), torch.randn(300, **options)


def run_trial(use_hopper: bool, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Run forward and dlogits of a small head by either branch, at sizes that end within a tile.

    Returns the statistics of each row, what the launches wrote outside of their slabs (zeros if
    nothing), and the slabs.
    """
    x, w, y, a = _make_trial_head(device, dtype)
    rows, vocab = len(x), len(w)
    tiles = select_tile_sizes(328, dtype, get_gpu_info(x))
    scores = ScoreLauncher(
        x, w, y, None, HeadConfig(0.8), tiles, HOPPER_TILES if use_hopper else None
    )
    out = scores.combine(scores.statistics(True))
    kept, exponents = (
        x.new_zeros(rows, align_columns(vocab)).narrow(1, 0, vocab),
        a.new_zeros(triton.cdiv(vocab, tiles.columns), rows),
    )
    resaved = scores.combine(scores.statistics(True, (kept, exponents)))
    # a slab of an odd number of narrow tiles, as slabs are cut, and the vocabulary's last columns
    slabs, outside, zeros = [], [], torch.zeros_like(a)
    for lo, hi in ((4096 - 3 * tiles.columns, 4096), (4096, vocab)):
        # a row after the last one shows a write past the end
        line = align_columns(hi - lo)
        buffers = [x.new_zeros(rows + 1, line) for _ in range(2)]
        dz, p = (buffer.narrow(0, 0, rows).narrow(1, 0, hi - lo) for buffer in buffers)
        co = GradientCoefficients(a, -a, a.flip(0))
        scores.dlogits(dz, lo, hi, out.lse * LOG2E, co)
        logp2, lse2 = resaved.logp * LOG2E, resaved.lse * LOG2E
        scores.saved_dlogits(p, lo, hi, kept, exponents, None, logp2, lse2, zeros, zeros + 1)
        for buffer, slab in zip(buffers, (dz, p), strict=True):
            slabs.append(slab.flatten().float())
            slab.zero_()
            outside.append(buffer.flatten().float())
    statistics = (out.logp, out.entropy, out.lse, resaved.logp, resaved.entropy)
    return *statistics, torch.cat(outside), torch.cat(slabs)


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the scratch memory that a launch requests: it holds descriptors that are made in a
    kernel.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


class ScoreLauncher:
    """Hold the operands, tiles and options that all launches over the scores of a head share."""

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        head: HeadConfig,
        tiles: TileConfig | None,
        hopper_tiles: TileConfig | None = None,
    ) -> None:
        """Prepare the operands and options.

        `hopper_tiles`: tiles for the kernels of kernels/linear_logprob_hopper.py, used by the
        launches that these kernels support; None: the result of `select_hopper_tiles`.
        """
        self.tiles = tiles or select_tile_sizes(x.shape[1], x.dtype, get_gpu_info(x))
        self.D = x.shape[1]  # before `align_operand`, which may pad with zeros
        self.x, self.w, self.y, self.bias, self.head = (
            align_operand(x),
            align_operand(w),
            y.contiguous(),
            bias,
            head,
        )
        self.N, self.V = x.shape[0], w.shape[0]
        self.x_arg, self.w_arg, self.options = build_matmul_options(self.x, self.w, self.tiles)
        self.options |= {
            "GROUP": GROUP,
            "HAS_BIAS": bias is not None,
            "SOFTCAP": head.softcap is not None,
        }
        self.bias_arg = self.y if bias is None else bias.contiguous()
        self.at_target = torch.empty(self.N, dtype=torch.float32, device=x.device)
        plain = bias is None and head.softcap is None and tiles is None
        self.hopper_tiles = hopper_tiles or (select_hopper_tiles(self.x) if plain else None)

    def row_chunks(self, width: int) -> list[tuple[slice, ScoreLauncher]]:
        """Return (rows, scores) pairs that cover all rows.

        This is `self` for all rows, unless a slab of `width` columns would be too large for them;
        then each pair covers a chunk of rows.
        """
        step = rows_per_chunk(self.N, width, self.tiles.rows)
        if step >= self.N:
            return [(slice(0, self.N), self)]
        pieces = [slice(at, min(at + step, self.N)) for at in range(0, self.N, step)]
        cut = [(rows, narrow_rows(self.x, rows), narrow_rows(self.y, rows)) for rows in pieces]
        return [
            (rows, ScoreLauncher(x, self.w, y, self.bias, self.head, self.tiles, self.hopper_tiles))
            for rows, x, y in cut
        ]

    def num_row_blocks(self) -> int:
        """Return the number of row blocks."""
        return triton.cdiv(self.N, self.tiles.rows)

    def empty_partials(self, splits: int, count: int) -> Tensor:
        """Return an empty tensor for the partial statistics of `count` launches over some columns:
        [3, splits * count, N].
        """
        return torch.empty((3, splits * count, self.N), dtype=torch.float32, device=self.x.device)

    def hopper_options(self, tiles: TileConfig) -> dict[str, Any]:
        """Return the options of a warp-specialized launch, which must follow at once.

        The function also sets Triton's allocator: the allocator is local to the thread, and
        autograd launches from its worker threads.
        """
        triton.set_allocator(_allocate_scratch)
        sizes = {
            "D": self.x.shape[1],
            "BM": tiles.rows,
            "BN": tiles.columns,
            "BK": tiles.depth,
            "GROUP": GROUP,
            "WS": not is_interpreting(),
        }
        sizes |= {"num_warps": tiles.warps, "num_stages": tiles.stages}
        return sizes | {name: self.options[name] for name in ("UPCAST", "PRECISION")}

    def statistics(self, entropy: bool, saved: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Launch over all scores; return the partial statistics of every row and fill `at_target`.

        `saved`: the tensors (2^(z-k), k) that the saved plan fills.
        """
        tiles, x = self.hopper_tiles, self.x
        # at most a split per tile
        splits = min(SPLITS, triton.cdiv(self.V, (tiles or self.tiles).columns))
        part = self.empty_partials(splits, 1)
        kept, exponents = saved or (part, part)
        if tiles is None:
            reference = (
                None
                if saved is None
                else torch.full((self.N,), LARGE_NEGATIVE, dtype=torch.float32, device=x.device)
            )
            kwargs: dict[str, Any] = (
                {} if saved is None else {"kept": kept, "exponents": exponents, "ref": reference}
            )
            self.forward(part, 0, self.V, 0, splits, entropy=entropy, **kwargs)
        else:
            _forward_ws_kernel[(triton.cdiv(self.N, tiles.rows) * splits,)](
                x,
                self.w,
                self.y,
                part,
                self.at_target,
                kept,
                exponents,
                self.N,
                self.V,
                triton.cdiv(self.V, tiles.columns),
                splits,
                exponents.shape[0],
                x.stride(0),
                self.w.stride(0),
                kept.stride(0),
                exponents.stride(0),
                self.head.in_scale,
                SPLITS=splits,
                ENTROPY=entropy,
                KEEP=saved is not None,
                HALVES=tiles.columns // self.tiles.columns,
                **self.hopper_options(tiles),
            )
        return part

    def forward(
        self,
        part: Tensor,
        lo: int,
        hi: int,
        index: int,
        splits: int,
        *,
        entropy: bool,
        kept: Tensor | None = None,
        exponents: Tensor | None = None,
        ref: Tensor | None = None,
        headroom: float = 0.0,
        keep_slope: bool = False,
    ) -> None:
        """Launch the forward kernel over columns [lo, hi) and write the partial statistics from
        index * splits on.
        """
        keep = kept is not None and exponents is not None
        _forward_kernel[(self.num_row_blocks() * splits,)](
            self.x_arg,
            self.w_arg,
            self.bias_arg,
            self.y,
            part,
            self.at_target,
            kept if keep else part,
            exponents if keep else part,
            ref if keep else part,
            self.N,
            self.V,
            lo,
            hi,
            triton.cdiv(hi - lo, self.tiles.columns),
            index * splits,
            part.shape[1],
            self.x.stride(0),
            self.w.stride(0),
            kept.stride(0) if kept is not None else 0,
            exponents.stride(0) if exponents is not None else 0,
            self.head.in_scale,
            self.head.out_scale,
            headroom,
            ENTROPY=entropy,
            KEEP=keep,
            KEEP_SLOPE=keep_slope,
            SPLITS=splits,
            **self.options,
        )

    def combine(self, part: Tensor) -> ForwardOutput:
        """Combine the partial statistics to logp, entropy and lse, float32 [N]."""
        logp, entropy, lse = (
            torch.empty(self.N, dtype=torch.float32, device=self.x.device) for _ in range(3)
        )
        _combine_kernel[(triton.cdiv(self.N, 32),)](
            part,
            self.at_target,
            logp,
            entropy,
            lse,
            self.N,
            part.shape[1],
            PARTS=32,
            BLOCK=32,
            num_warps=4,
        )
        return ForwardOutput(logp, entropy, lse, None)

    def dlogits(
        self, out: Tensor, lo: int, hi: int, lse2: Tensor, co: GradientCoefficients
    ) -> None:
        """Launch the kernel that recomputes the scores of columns [lo, hi) and writes their
        gradient to `out`.
        """
        tiles, c = self.hopper_tiles, co.b if co.c is None else co.c
        if tiles is not None:
            count = triton.cdiv(hi - lo, tiles.columns)
            _dlogits_ws_kernel[
                (
                    min(
                        get_gpu_info(self.x).multiprocessors,
                        triton.cdiv(self.N, tiles.rows) * count,
                    ),
                )
            ](
                self.x,
                self.w,
                self.y,
                lse2,
                co.a,
                co.b,
                c,
                out,
                self.N,
                self.V,
                lo,
                hi,
                count,
                self.x.stride(0),
                self.w.stride(0),
                out.stride(0),
                self.head.in_scale,
                HAS_C=co.c is not None,
                **self.hopper_options(tiles),
            )
            return
        # for few rows, a program for each tile
        splits = CHUNK_SPLITS if self.num_row_blocks() >= GROUP else SPLITS
        _dlogits_kernel[(self.num_row_blocks() * splits,)](
            self.x_arg,
            self.w_arg,
            self.bias_arg,
            self.y,
            lse2,
            co.a,
            co.b,
            c,
            out,
            self.N,
            self.V,
            lo,
            hi,
            triton.cdiv(hi - lo, self.tiles.columns),
            self.x.stride(0),
            self.w.stride(0),
            out.stride(0),
            self.head.in_scale,
            self.head.out_scale,
            HAS_C=co.c is not None,
            SPLITS=splits,
            **self.options,
        )

    def saved_dlogits(
        self,
        out: Tensor,
        lo: int,
        hi: int,
        kept: Tensor,
        exponents: Tensor,
        at: Tensor | None,
        logp2: Tensor,
        lse2: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> None:
        """Write the gradient of columns [lo, hi) to `out`, from what `statistics` saved.

        Row i is row at[i] of the saved tensors (None: row i).
        """
        BM, BN = 32, self.tiles.columns
        count = triton.cdiv(hi - lo, BN)
        _saved_dlogits_kernel[(triton.cdiv(self.N, BM) * count,)](
            kept,
            exponents,
            self.y if at is None else at,
            self.y,
            logp2,
            lse2,
            a,
            b,
            out,
            self.N,
            lo,
            hi,
            lo // BN,
            count,
            kept.stride(0),
            exponents.stride(0),
            out.stride(0),
            self.head.out_scale,
            BM=BM,
            BN=BN,
            SOFTCAP=self.head.softcap is not None,
            HAS_AT=at is not None,
            num_warps=8,
        )

    def align(self, kept: Tensor, exponents: Tensor, common: Tensor) -> None:
        """Convert the saved values of a slab from each tile's exponents to common exponents [N]."""
        tiles = exponents.shape[0]
        _align_kernel[(triton.cdiv(self.N, 32) * tiles,)](
            kept,
            exponents,
            common,
            self.N,
            kept.shape[1],
            tiles,
            kept.stride(0),
            exponents.stride(0),
            BM=32,
            BN=self.tiles.columns,
            num_warps=8,
        )
