"""Hold the inputs and outputs of a step of the device at fixed addresses (cuda_graphs.py).

Shapes: R rows (of a bucket), B blocks of a table, G groups, V vocabulary, M rows with logits
processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl.sampler.token_counts import PENALTIES
from rl.sampler.token_sampling import MAX_BIASES
from rl.types import TRUNCATION_DEFAULTS


class ProcessedRows(NamedTuple):
    """Describe the rows with logits processing: those whose next token is sampled from adjusted or
    truncated logits. `bucket`: their number, rounded up (`processed_bucket`). `truncates`,
    `penalizes`: whether some of them are truncated, or have penalties.
    """

    bucket: int = 0
    truncates: bool = False
    penalizes: bool = False


NO_PROCESSING = ProcessedRows()


def _buffer(dims: str, dtype: torch.dtype = torch.int64) -> Any:
    """Describe a buffer: its dimensions, as `StepBuffers.allocate` names them, and its dtype."""
    return field(metadata={"dims": dims, "dtype": dtype})


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Hold the inputs and outputs of a step, for the largest number of rows; `allocate` sets the
    sizes.

    By row: the `token` to feed, its `position`, the number of `remaining` tokens to sample (0:
    finished), `skip` positions that are in shared blocks, `table` of the other blocks, `stop_row`
    of `stops`. `shares` to `shared_length` are `kernels.SharedPages`. `at`: the step since the last
    host synchronization; it selects the row of `uniform`, `tokens` and `logprobs`. `packed`: the
    memory of the buffers with an entry for each row or group, a line each, so that a single copy
    fills them (`pack`).

    By row with logits processing: its `processed_row`, with repeated rows up to a bucket, its
    `limits` (`find_limits`), whether its logprob is `untruncated`, its set of `biases` of
    `bias_tokens` (after the last, biases of 0 for different tokens: many additions to one address
    are slow), the `stop_limit`: while more tokens remain, it may not sample its stop ids; its
    `penalties` (`token_counts.PENALTIES`), its row of the table `counts`, whose last row is of
    rows without penalties, and whether its tokens are `counted` there (1, else 0).
    """

    token: Tensor = _buffer("R")
    position: Tensor = _buffer("R")
    remaining: Tensor = _buffer("R")
    skip: Tensor = _buffer("R")
    table: Tensor = _buffer("RB", torch.int32)
    stop_row: Tensor = _buffer("R")
    temperature: Tensor = _buffer("R", torch.float32)  # above 0; 1 for greedy rows
    greedy: Tensor = _buffer("R", torch.bool)
    processed_row: Tensor = _buffer("R")
    limits: Tensor = _buffer("LR", torch.float64)
    untruncated: Tensor = _buffer("R", torch.bool)
    stop_limit: Tensor = _buffer("R")
    bias_set: Tensor = _buffer("R")
    penalties: Tensor = _buffer("QR", torch.float32)
    count_row: Tensor = _buffer("R")
    counted: Tensor = _buffer("R", torch.int16)
    counts: Tensor = _buffer("PV", torch.int16)
    bias_tokens: Tensor = _buffer("TE")
    biases: Tensor = _buffer("TE", torch.float32)
    shares: Tensor = _buffer("R", torch.bool)  # whether the row is in a group
    order: Tensor = _buffer("R")
    place: Tensor = _buffer("R")
    group: Tensor = _buffer("R")
    starts: Tensor = _buffer("+", torch.int32)  # start of each group's rows in `order`
    shared_table: Tensor = _buffer("GB", torch.int32)
    shared_length: Tensor = _buffer("G", torch.int32)  # positions
    stops: Tensor = _buffer("CV", torch.bool)
    at: Tensor = _buffer("1")
    uniform: Tensor = _buffer("SR", torch.float64)
    tokens: Tensor = _buffer("SR")
    logprobs: Tensor = _buffer("SR", torch.float32)
    experts: Tensor = _buffer("SRK", torch.int16)  # of the fed tokens
    packed: Tensor = _buffer("NY", torch.uint8)

    @classmethod
    def allocate(
        cls,
        rows: int,
        blocks: int,
        steps: int,
        conditions: int,
        vocab: int,
        device: torch.device,
        choices: int = 0,
        counted: int = 0,
    ) -> StepBuffers:
        """Allocate the buffers: zeros, and temperature 1. `choices`: recorded experts per token.
        `counted`: rows with penalties.

        Dimensions: R rows, G groups, + groups and 1 more, B blocks of a table, S steps, C stop
        conditions, V vocabulary, K choices, L parameters that truncate, T sets of biases (of each
        row, and an empty one), E biases of a set, Q penalties, P rows of counts, N packed buffers,
        Y bytes.
        """
        packed = _find_packed_buffers()
        groups = max(rows // 2, 1)
        sizes = {"R": rows, "G": groups, "+": groups + 1, "B": blocks, "S": steps, "1": 1}
        sizes |= {"C": conditions, "V": vocab, "K": choices, "L": len(TRUNCATION_DEFAULTS)}
        sizes |= {"T": rows + 1, "E": min(MAX_BIASES, vocab), "N": len(packed), "Y": 8 * rows}
        sizes |= {"Q": len(PENALTIES), "P": counted + 1}
        buffers = {
            buffer.name: torch.zeros(
                [sizes[dim] for dim in buffer.metadata["dims"]],
                dtype=buffer.metadata["dtype"],
                device=device,
            )
            for buffer in fields(cls)
        }
        for line, name in zip(buffers["packed"].unbind(), packed, strict=True):
            buffers[name] = line.view(buffers[name].dtype).narrow(0, 0, len(buffers[name]))
        buffers["temperature"].fill_(1.0)
        return cls(**buffers)

    @staticmethod
    def pack(rows: int, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the first bytes of `packed`, for `rows` rows: these values, then zeros. Values of
        other names are ignored.
        """
        dtypes = _find_packed_buffers()
        packed = np.zeros((len(dtypes), 8 * rows), np.uint8)
        for line, (name, dtype) in zip(packed, dtypes.items(), strict=True):
            if name in values:
                line.view(dtype)[: len(values[name])] = values[name]
        return packed

    def first_rows(self, rows: int) -> StepBuffers:
        """Return views of the first `rows` rows.

        `narrow` is used because Python's indexing queries the device even of fake tensors.
        """
        groups, views = max(rows // 2, 1), dict[str, Tensor]()
        counts = {"R": rows, "G": groups, "+": groups + 1}
        for buffer in fields(self):
            view = getattr(self, buffer.name)
            for dim, name in enumerate(buffer.metadata["dims"]):
                if name in counts:
                    view = view.narrow(dim, 0, counts[name])
            views[buffer.name] = view
        return StepBuffers(**views)


@cache
def _find_packed_buffers() -> dict[str, np.dtype]:
    """Return the numpy dtype of each buffer of `StepBuffers.packed`, in order."""
    return {
        buffer.name: np.dtype(str(buffer.metadata["dtype"]).removeprefix("torch."))
        for buffer in fields(StepBuffers)
        if buffer.metadata["dims"] in ("R", "G", "+")
    }
